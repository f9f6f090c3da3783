"""Keys and labels of calls that older releases printed. They are still read, nothing prints them.

| | decode | several queries | MLA |
|---|---|---|---|
| key | `32/8,d128,p16,b16,k8192` | `target_verify,q7,` and a key | the label, with commas |
| label | `32/8 d128 bfloat16 page 16 batch 16 kv_len 8192` | `target_verify q_len 7 ` and a label | `mla 16 heads top 2048 fp8-656 page 64 batch 8 kv_len 100` |

A label of decode has no seed.
"""  # noqa: E501

import re

from .spec import LENGTHS, MASKS, require_lengths

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
    r"(?P<mode>[a-z_]+),(?:q|q_len,)(?P<q_len>\d+)"
    rf",(?:(?P<mask>{'|'.join(MASKS)}),)?(?:(?P<q_lens>{_LISTED}),)?"
)
_MLA = (
    r"mla,(?P<latent>\d+),heads,(?:dense|top,(?P<top_k>\d+)),(?P<kv_format>[\w-]+)"
    r",page,(?P<page>\d+),batch,(?P<batch_size>\d+),kv_len,(?P<kv_len>\d+)"
    rf"(?:,{_LENGTHS})?(?:,seed,(?P<seed>\d+))?"
    r"(?:,q_len,(?P<q_len>\d+))?(?:,context,(?P<context>\d+))?"
)
NAMES = (_KEY, _LABEL, _QUERIES + _KEY, _QUERIES + _LABEL, _MLA)


def words_of_name(name: str) -> str:
    """The words of `core.call_text` for a key or a label; other text as it is."""
    joined = name.strip().replace(" ", ",")
    for pattern in NAMES:
        found = re.fullmatch(pattern, joined, re.ASCII)
        if found:
            groups = found.groupdict()
            given = {name: value for name, value in groups.items() if value is not None}
            return _text_of(given)
    return name


def _text_of(given: dict[str, str]) -> str:
    words = dict(given)
    batch_size = words.pop("batch_size")
    kv_len = words.pop("kv_len")
    lengths = words.pop("lengths", "fixed")
    if lengths == "fixed":
        words["lens"] = f"{kv_len}x{batch_size}"
    elif lengths[0].isdecimal():
        require_lengths("lengths", lengths, int(batch_size), int(kv_len), LENGTHS)
        words["lens"] = f"listed:{lengths}"
    else:
        words["lens"] = f"{lengths}:{kv_len}x{batch_size}"
    if "latent" in words:
        words["mode"] = "sparse_mla" if "top_k" in words else "mla"
        words["heads"] = f"{words.pop('latent')}/1"
    if "q_lens" in words:
        require_lengths("q_lengths", words["q_lens"], int(batch_size), int(words.pop("q_len")))
    return " ".join(f"{name}={value}" for name, value in words.items())
