"""Keys and labels that older releases printed, which are still read. Nothing prints them.

| | decode | extend | MLA |
|---|---|---|---|
| key | `32/8,d128,p16,b16,k8192` | `target_verify,q7,` and a key | the label, with commas |
| label | `32/8 d128 bfloat16 page 16 batch 16 kv_len 8192` | `target_verify q_len 7 ` and a label | `mla 16 heads top 2048 fp8-656 page 64 batch 8 kv_len 100` |

A label of decode has no seed. No torch here.
"""  # noqa: E501

import re
from collections.abc import Mapping
from typing import Any

from ...core.call_text import CallText, Lens
from ...core.spec import MASKS
from .extend.case import MODES

_LISTED = r"\d+(?:\+\d+)*"
_DTYPES = r"(?P<dtype>(?:bfloat|float)\w*)(?:/(?P<kv_dtype>\w+))?"
_LENGTHS = rf"(?P<lengths>(?!seed|q_len|context)[a-z_]+|{_LISTED})"
_KEY = (
    r"(?P<heads>\d+/\d+),d(?P<head_dim>\d+),p(?P<page>\d+)"
    r",b(?P<batch_size>\d+),k(?P<kv_len>\d+)"
    rf"(?:,w(?P<window>\d+))?(?:,{_DTYPES})?(?:,{_LENGTHS})?"
    r"(?:,seed(?P<seed>\d+))?(?:,context(?P<context>\d+))?"
)
_LABEL = (
    rf"(?P<heads>\d+/\d+),d(?P<head_dim>\d+),{_DTYPES},page,(?P<page>\d+)"
    r"(?:,window,(?P<window>\d+))?,batch,(?P<batch_size>\d+),kv_len,(?P<kv_len>\d+)"
    rf"(?:,{_LENGTHS})?(?:,context,(?P<context>\d+))?"
)
_QUERIES = (
    rf"(?P<mode>{'|'.join(MODES)}),(?:q|q_len,)(?P<q_len>\d+)"
    rf",(?:(?P<mask>{'|'.join(MASKS)}),)?(?:(?P<q_lengths>{_LISTED}),)?"
)
_MLA = (
    r"mla,(?P<heads>\d+),heads,(?:dense|top,(?P<top_k>\d+)),(?P<kv_format>[\w-]+)"
    r",page,(?P<page>\d+),batch,(?P<batch_size>\d+),kv_len,(?P<kv_len>\d+)"
    rf"(?:,{_LENGTHS})?(?:,seed,(?P<seed>\d+))?"
    r"(?:,q_len,(?P<q_len>\d+))?(?:,context,(?P<context>\d+))?"
)
NAMES = (_KEY, _LABEL, _QUERIES + _KEY, _QUERIES + _LABEL, _MLA)
NUMBERS = (
    "head_dim",
    "page",
    "window",
    "seed",
    "context",
    "top_k",
    "q_len",
    "batch_size",
    "kv_len",
)


def read_old_name(text: str) -> CallText | None:
    """What a key or a label says; None for other text."""
    name = text.replace(" ", ",")
    for pattern in NAMES:
        found = re.fullmatch(pattern, name, re.ASCII)
        if found:
            groups = found.groupdict()
            given = {name: value for name, value in groups.items() if value is not None}
            return _said(given)
    return None


def _said(given: Mapping[str, str]) -> CallText:
    words: dict[str, Any] = dict(given)
    for name in NUMBERS:
        if name in words:
            words[name] = int(words[name])
    batch_size = words.pop("batch_size")
    words["lens"] = Lens(batch_size, words.pop("kv_len"), words.pop("lengths", "fixed"))
    if "kv_format" in words:
        words["mode"] = "sparse_mla" if "top_k" in words else "mla"
        words["heads"] = f"{words['heads']}/1"
    if "q_lengths" in words:
        words["q_lens"] = Lens(batch_size, words.pop("q_len"), words.pop("q_lengths"))
    return CallText(**words)
