"""Cases as lines of text, in the words of three tools. Empty lines and those from `#` on say none.

| line | of |
|---|---|
| `32/8,d128,p16,b16,k8192` | us: the key of a decode, extend or MLA case |
| `2q2k_32q1s1k` | vLLM, attention_benchmarks/batch_spec.py: requests, queries, tokens |
| `--routine BatchDecode... ` | FlashInfer, flashinfer_benchmark.py --testlist |

vLLM's batches say no heads: each stands for a case of every model asked for. A part of a batch is a
case of its own, since FlashInfer takes decode and prefill in calls apart. No torch here.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from ..core.spec import LATENT_DIM, MODELS, ROPE_DIM, AttnSpec, MlaSpec, require_word
from .cases import Case
from .decode.case import DecodeCase
from .extend.case import MODES, ExtendCase
from .mla.case import MlaCase

PAGE = 16
"""Tokens of a page where a batch says none, as vLLM has them."""
MOST_DRAFTS = 8
"""More queries than that are a chunk of a prompt (`spec_decode_threshold` of vLLM's script)."""
LINES = "a key such as 32/8,d128,p16,b16,k8192, a batch such as 8q1s1k, or --routine ..."
_SAID = r"\d+(?:\+\d+)*"
_DECODE = re.compile(
    r"(\d+)/(\d+),d(\d+),p(\d+),b(\d+),k(\d+)(?:,w(\d+))?(,sinks)?"
    rf"(?:,((?:bfloat16|float)[\w/]*))?(?:,(?!seed)([a-z_]+|{_SAID}))?(?:,seed(\d+))?"
)
_EXTEND = re.compile(
    rf"({'|'.join(MODES)}),q(\d+),(?:(tree|chain|causal|full),)?(?:({_SAID}),)?(.+)"
)
_MLA = re.compile(
    r"mla,(\d+),heads,(?:dense|top,(\d+)),([\w-]+),page,(\d+),batch,(\d+),kv_len,(\d+)"
    r"(?:,(?!seed)([a-z_]+))?(?:,seed,(\d+))?"
)
_ROUTINES = tuple(
    f"Batch{name}Wrapper"
    for name in "DecodeWithPagedKVCache PrefillWithPagedKVCache "
    "PrefillWithRaggedKVCache MLAPagedAttention".split()
)
_OPTION = re.compile(r"--(\w+)(?:[ =]([^-\s]\S*))?")
_PART = re.compile(r"(\d*)q(\d+)(k?)(?:(?:s|kv)(\d+)(k?))?")


def parse_cases(
    lines: Iterable[str], models: Sequence[str] = ()
) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """The cases of `lines`, each once, and a note for each of FlashInfer's that is left out.

    `models` are names of `core.spec.MODELS`. ValueError names the line that nobody understands.
    """
    cases: list[Case] = []
    notes = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        try:
            if text.startswith("-"):
                cases.append(_of_flashinfer(text))
            elif text and not text.startswith("#"):
                parts = [found for part in text.split("_") if (found := _PART.fullmatch(part))]
                whole = len(parts) == len(text.split("_"))
                cases += _of_batch(parts, models) if whole else [_of_key(text)]
        except ValueError as error:
            if not text.startswith("-"):
                raise ValueError(f"line {number} of the cases: {error}") from error
            notes.append(f"line {number} is left out: {error}")
    return tuple(dict.fromkeys(cases)), tuple(notes)


def _of_key(text: str) -> Case:
    if found := _EXTEND.fullmatch(text):
        mode, q_len, mask, said, cached = found.groups()
        return ExtendCase(_decode(cached), mode, int(q_len), mask or "", q_lengths=said or "")
    if found := _MLA.fullmatch(text):
        heads, top_k, kv_format, page, batch, kv_len, lengths, seed = found.groups()
        spec = MlaSpec(int(heads), int(top_k or 0), int(page), kv_format)
        return MlaCase(spec, int(batch), int(kv_len), lengths or "fixed", int(seed or 0))
    return _decode(text)


def _decode(text: str) -> DecodeCase:
    found = _DECODE.fullmatch(text)
    if not found:
        raise ValueError(f"it must be {LINES}; got {text!r}")
    *sizes, window, sinks, dtypes, lengths, seed = found.groups()
    *layer, batch, kv_len = map(int, sizes)
    dtype, _, kv_dtype = (dtypes or "bfloat16").partition("/")
    heads, kv_heads, head_dim, page_size = layer
    spec = AttnSpec(
        heads, kv_heads, head_dim, page_size, dtype, kv_dtype, int(window or 0), bool(sinks)
    )
    return DecodeCase(spec, batch, kv_len, lengths or "fixed", int(seed or 0))


def _of_batch(parts: Sequence[re.Match[str]], models: Sequence[str]) -> Iterator[Case]:
    """Decode, verification or a (chunked) prefill of each model, part by part."""
    named = [name for name in models if name in MODELS]
    if not named:
        raise ValueError(f"a batch says no heads: name a model of {', '.join(MODELS)}")
    for name, part in product(named, parts):
        count, q, q_k, kv, kv_k = part.groups()
        q_len = int(q) * (1024 if q_k else 1)
        kv_len = int(kv) * (1024 if kv_k else 1) if kv else q_len
        cached = DecodeCase(AttnSpec(*MODELS[name], PAGE), int(count or 1), kv_len)
        mode = "target_verify" if q_len <= MOST_DRAFTS and q_len < kv_len else "prefill_paged"
        yield ExtendCase(cached, mode, q_len, "causal") if q_len > 1 else cached


def _of_flashinfer(text: str) -> Case:
    words = dict(_OPTION.findall(text))

    def number(name: str, default: str = "") -> int:
        value = words.get(name, default)
        if not value.isdigit():
            raise ValueError(f"--{name} must be a number, got {value!r}")
        return int(value)

    routine = words.get("routine", "")
    require_word("routine", routine, _ROUTINES)
    batch, q_len, kv_len = number("batch_size"), number("s_qo", "1"), number("s_kv")
    heads = number("num_qo_heads")
    lengths = "ragged" if "random_actual_seq_len" in words else "fixed"
    types = [words.get(f"{of}_dtype", "bfloat16") for of in ("q", "kv")]
    types = [name.replace("fp8_e4m3", "float8_e4m3fn") for name in types]
    if routine == "BatchMLAPagedAttentionWrapper":
        sizes = (number("head_dim_ckv"), number("head_dim_kpe"), q_len, *types)
        if sizes != (needed := (LATENT_DIM, ROPE_DIM, 1, "bfloat16", "bfloat16")):
            raise ValueError(f"dims, s_qo and dtypes must be {needed}, got {sizes}")
        return MlaCase(MlaSpec(heads, page_size=number("page_size")), batch, kv_len, lengths)
    dim, ragged = number("head_dim_qk"), "Ragged" in routine
    if (other := number("head_dim_vo")) != dim:
        raise ValueError(f"head_dim_vo must be head_dim_qk, {dim}, got {other}")
    page = 1 if ragged else number("page_size")
    spec = AttnSpec(heads, number("num_kv_heads"), dim, page, types[0], types[1])
    cached = DecodeCase(spec, batch, kv_len, lengths)
    if "Decode" in routine:
        if words.get("spec_dec_mask", "causal") != "causal":
            raise ValueError("spec_dec_mask must be causal")
        return ExtendCase(cached, "target_verify", q_len, "causal") if q_len > 1 else cached
    if "causal" not in words or (not ragged and lengths != "fixed"):
        raise ValueError("prefill must be --causal and, if paged, of fixed lengths")
    return ExtendCase(cached, "prefill_ragged" if ragged else "prefill_paged", q_len)
