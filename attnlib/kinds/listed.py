"""Cases as lines of text: the keys of decode, extend and MLA cases. No torch here.

`32/8,d128,p16,b16,k8192` is a decode case, `prefill_paged,q512,` before it makes an extend case.
Empty lines and those from `#` on are skipped.
"""

import re
from collections.abc import Iterable

from ..core.spec import AttnSpec, MlaSpec
from .cases import Case
from .decode.case import DecodeCase
from .extend.case import MODES, ExtendCase
from .mla.case import MlaCase

_LENGTHS = r"\d+(?:\+\d+)*"
_DECODE = re.compile(
    r"(?P<heads>\d+)/(?P<kv_heads>\d+),d(?P<head_dim>\d+),p(?P<page>\d+),b(?P<batch>\d+)"
    r",k(?P<kv_len>\d+)(?:,w(?P<window>\d+))?(?P<sinks>,sinks)?"
    r"(?:,(?P<dtype>(?:bfloat16|float)\w*)(?:/(?P<kv_dtype>\w+))?)?"
    rf"(?:,(?!seed)(?P<lengths>[a-z_]+|{_LENGTHS}))?(?:,seed(?P<seed>\d+))?"
)
_EXTEND = re.compile(
    rf"(?P<mode>{'|'.join(MODES)}),q(?P<q_len>\d+),(?:(?P<mask>tree|chain|causal|full),)?"
    rf"(?:(?P<q_lengths>{_LENGTHS}),)?(?P<cached>.+)"
)
_MLA = re.compile(
    r"mla,(?P<heads>\d+),heads,(?:dense|top,(?P<top_k>\d+)),(?P<kv_format>[\w-]+)"
    r",page,(?P<page>\d+),batch,(?P<batch>\d+),kv_len,(?P<kv_len>\d+)"
    r"(?:,(?!seed)(?P<lengths>[a-z_]+))?(?:,seed,(?P<seed>\d+))?"
)


def parse_cases(lines: Iterable[str]) -> tuple[Case, ...]:
    """The cases of `lines`, each once. ValueError names the line that is no key."""
    cases: list[Case] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        try:
            if text and not text.startswith("#"):
                cases.append(_case(text))
        except ValueError as error:
            raise ValueError(f"line {number} of the cases: {error}") from error
    return tuple(dict.fromkeys(cases))


def _case(text: str) -> Case:
    if match := _EXTEND.fullmatch(text):
        part = match.groupdict(default="")
        cached, q_len = _decode_case(part["cached"]), int(part["q_len"])
        return ExtendCase(cached, part["mode"], q_len, part["mask"], part["q_lengths"])
    if match := _MLA.fullmatch(text):
        part = match.groupdict(default="")
        top_k, seed = int(part["top_k"] or 0), int(part["seed"] or 0)
        spec = MlaSpec(int(part["heads"]), top_k, int(part["page"]), part["kv_format"])
        lengths = part["lengths"] or "fixed"
        return MlaCase(spec, int(part["batch"]), int(part["kv_len"]), lengths, seed)
    return _decode_case(text)


def _decode_case(text: str) -> DecodeCase:
    match = _DECODE.fullmatch(text)
    if not match:
        raise ValueError(f"it must be a key such as 32/8,d128,p16,b16,k8192; got {text!r}")
    part = match.groupdict(default="")
    spec = AttnSpec(
        num_qo_heads=int(part["heads"]),
        num_kv_heads=int(part["kv_heads"]),
        head_dim=int(part["head_dim"]),
        page_size=int(part["page"]),
        dtype=part["dtype"] or "bfloat16",
        kv_dtype=part["kv_dtype"],
        window=int(part["window"] or 0),
        sinks=bool(part["sinks"]),
    )
    lengths, seed = part["lengths"] or "fixed", int(part["seed"] or 0)
    return DecodeCase(spec, int(part["batch"]), int(part["kv_len"]), lengths, seed)
