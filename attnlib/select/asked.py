"""What the text of a call (`core.call_text`) says to `explain`: layer, mode and facts."""

from dataclasses import dataclass, replace
from typing import Any

from ..core.backends.limits import LATENT_MODES
from ..core.call_text import CallText
from ..core.checkpoints import OWN, LayerKind, Served, served
from ..core.layer import heads_named, parse_layer
from ..core.spec import CUSTOM_MASKS, EXTEND_MODES, MLA_HEAD_DIM, AttnSpec
from .facts import CACHES, PLAIN_CACHE, Call, facts_of_model

DECODE = "decode"
LATENT_PAGE = 64
PAGE = 16
"""Tokens of a page of MLA, and of other layers, unless told otherwise."""
DRAWN_QUERIES = "draft_extend"
"""The mode in which `q_len` is the most of what each request has."""
Words = dict[str, Any]
LAYER_WORDS = {
    "heads": "heads",
    "model": "model",
    "tp": "tp",
    "dp": "dp",
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
    stated = cache_of(layer)
    stated |= {fact: True for name, fact in PINS.items() if name in layer}
    stated |= facts_said(said, mode)
    if is_checkpoint(layer.get("model", "")):
        first = asked_kinds(mode=mode, facts=facts_stated(facts) | stated, **layer)[0]
        assert first.spec is not None
        return first.spec, first.mode, first.call
    if mode in LATENT_MODES:
        layer = {"head_dim": MLA_HEAD_DIM, "page_size": LATENT_PAGE} | layer
    return parse_layer(**layer), mode, replace(facts, **stated)


def layer_said(said: CallText) -> Words:
    """The arguments of `parse_layer` that a text says."""
    if said.heads and said.model:
        raise ValueError(f"pass either heads or model, got {said.heads} and {said.model}")
    layer = {}
    for word, value in said.given.items():
        if word in LAYER_WORDS:
            layer[LAYER_WORDS[word]] = value
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


def facts_stated(call: Call) -> Words:
    """The fields in which a call is not a plain one."""
    plain = vars(Call())
    return {name: value for name, value in vars(call).items() if value != plain[name]}


def cache_of(layer: Words) -> Words:
    """The fact of a cache in a format that is no dtype of a layer, whose option is taken away."""
    text = layer.get("kv_dtype", "").lower()
    format_ = "turboquant" if text.startswith("turboquant") else text
    format_ = "fp8_e5m2" if text in ("e5m2", "float8_e5m2") else format_
    if format_ not in CACHES or format_ == PLAIN_CACHE:
        return {}
    del layer["kv_dtype"]
    return {"cache": format_, "pinned_kv_dtype": True}


@dataclass(frozen=True)
class Asked:
    """A kind of a model's layers as a selector is asked for it; no `spec` where none is."""

    kind: LayerKind
    mode: str
    call: Call
    spec: AttnSpec | None = None


def is_checkpoint(model: str) -> bool:
    """Whether a text is to name a model of data/checkpoints.yaml, not a layer by its heads."""
    return bool(model) and not heads_named(model)


def asked_kinds(
    model: str,
    mode: str,
    facts: dict[str, Any],
    *,
    tp: int = 1,
    dp: int = 1,
    page_size: int = 0,
    head_dim: int = 0,
    window: int = 0,
    **dtypes: str,
) -> list[Asked]:
    """Each kind of a model's layers as it is asked for in a mode; a latent one's decode is mla.

    `facts` are fields of a call, `page_size` 0 is the usual one, `head_dim` and `window` 0 are the
    kind's.
    ValueError for a model, a mode or a split that is not known of it.
    """
    of_model = served(model, tp, dp)
    facts = facts_of_model(model) | facts
    asked = []
    for kind in of_model.checkpoint.kinds:
        if kind.name in OWN:
            asked.append(Asked(kind, mode, Call(**facts)))
            continue
        usual_page = LATENT_PAGE if kind.mode else PAGE
        spec = kind.spec(of_model.ranks, page_size or usual_page, **dtypes)
        spec = replace(spec, head_dim=head_dim or spec.head_dim, window=window or spec.window)
        call = Call(**(facts_of_kind(kind) | facts))
        asked.append(Asked(kind, _mode_of(of_model, kind, mode), call, spec))
    return asked


def facts_of_kind(kind: LayerKind) -> dict[str, Any]:
    """The facts of a call that a kind of layers states."""
    facts: dict[str, Any] = {}
    if kind.window and not kind.mode:
        facts["window"] = True
    return facts | ({"topk": kind.topk} if kind.topk else {})


def _mode_of(of_model: Served, kind: LayerKind, mode: str) -> str:
    """The mode in which a kind is asked: decode of a latent one is mla, or sparse_mla."""
    if kind.mode and mode in ("decode", *LATENT_MODES):
        return kind.mode
    if kind.mode or mode in LATENT_MODES:
        name = of_model.checkpoint.name
        words = "decode" if kind.mode else f"none of {', '.join(LATENT_MODES)}"
        raise ValueError(
            f"mode must be {words} for {name}, whose layers are {kind.name}, got {mode!r}"
        )
    return mode
