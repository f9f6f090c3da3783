"""What the text of a call (`core.call_text`) says to `explain`: layer, mode and facts."""

from dataclasses import replace
from typing import Any

from ..core.backends.limits import LATENT_MODES
from ..core.call_text import CallText
from ..core.layer import parse_layer
from ..core.spec import CUSTOM_MASKS, EXTEND_MODES, MLA_HEAD_DIM, AttnSpec
from .facts import Call, facts_of_model

DECODE = "decode"
LATENT_PAGE = 64
DRAWN_QUERIES = "draft_extend"
"""The mode in which `q_len` is the most of what each request has."""
Words = dict[str, Any]
LAYER = {
    "heads": "heads",
    "model": "model",
    "tp": "tp",
    "head_dim": "head_dim",
    "page": "page_size",
    "dtype": "dtype",
    "kv_dtype": "kv_dtype",
    "window": "window",
}
"""Word of a call -> argument of `parse_layer`."""
PINS = {"page_size": "pinned_page", "kv_dtype": "pinned_kv_dtype"}
"""Argument of `parse_layer` -> the fact of a call that it states."""


def asked(call: object, mode: str, facts: Call) -> tuple[AttnSpec, str, Call]:
    """Layer, mode and facts of a text, or of a case, which has one; `facts` are stated beside it.

    TypeError for anything else, ValueError for a mode that is stated twice.
    """
    text = call if isinstance(call, str) else getattr(call, "label", None)
    if not isinstance(text, str):
        words = "call must be an AttnSpec, a case or the text of a call"
        raise TypeError(f"{words}, got {type(call).__name__}")
    said = CallText.read(text)
    if mode and said.mode:
        raise ValueError(f"mode must be left out with mode={said.mode}, got {mode!r}")
    mode = mode or said.mode or DECODE
    layer = layer_said(said)
    stated: Words = {fact: True for name, fact in PINS.items() if name in layer}
    stated |= facts_of_model(said.model or "")
    stated |= facts_said(said, mode)
    if mode in LATENT_MODES:
        layer = {"head_dim": MLA_HEAD_DIM, "page_size": LATENT_PAGE} | layer
    return parse_layer(**layer), mode, replace(facts, **stated)


def layer_said(said: CallText) -> Words:
    """The arguments of `parse_layer` that a text says."""
    layer = {LAYER[word]: value for word, value in said.given.items() if word in LAYER}
    if said.kv_format and said.kv_format != "bfloat16":
        layer["kv_dtype"] = "float8_e4m3fn"
    return layer


def facts_said(said: CallText, mode: str) -> Words:
    """The facts of `Call` that a text says beside its layer."""
    facts: Words = {}
    if said.lens:
        facts["kv_lens"] = said.lens.tokens
    if said.q_lens:
        facts["q_lens"] = said.q_lens.tokens
    if said.q_len:
        if mode == DRAWN_QUERIES:
            raise ValueError(f"q_lens must be given with mode={mode}, got q_len={said.q_len}")
        facts["q_lens"] = (said.q_len,) * said.required("lens").batch_size
    if said.top_k:
        facts["topk"] = said.top_k
    if mode in EXTEND_MODES:
        mask = said.mask or EXTEND_MODES[mode][0]
        facts["causal"] = mask != "full"
        facts["custom_mask"] = mask in CUSTOM_MASKS
    return facts
