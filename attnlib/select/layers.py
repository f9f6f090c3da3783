"""The kinds of layers of a model, and what an engine picks for each."""

from dataclasses import dataclass, replace
from typing import Any

from ..core.backends.limits import LATENT_MODES
from ..core.checkpoints import OWN, Kind, Served, served
from ..core.layer import NAMED
from ..core.spec import AttnSpec
from .explain import Choice, explain
from .facts import Call, facts_of_model
from .models import FAMILIES, LAYERS, OTHER

BESIDE = {"decode": "prefill_paged", "prefill_paged": "decode"}
CANNOT = " (cannot run)"
LATENT_PAGE = 64
PAGE = 16
"""Tokens of a page of MLA, and of other layers, unless told otherwise."""


@dataclass(frozen=True)
class Asked:
    """A kind of a model's layers as a selector is asked for it; no `spec` where none is."""

    kind: Kind
    mode: str
    call: Call
    spec: AttnSpec | None = None


@dataclass(frozen=True)
class LayerChoice:
    """What an engine runs for a kind of layers: a choice, or why there is none (`said`)."""

    layer: str
    spec: AttnSpec | None = None
    count: int = 0
    choice: Choice | None = None
    said: str = ""

    @property
    def chosen(self) -> str:
        """`trtllm_mha, which runs trtllm-gen`, or why there is none."""
        if self.choice is None:
            return self.said
        return f"{self.choice.picked}{CANNOT if self.choice.problem else ''}"

    @property
    def words(self) -> str:
        """`full (16/2 heads, head_dim 64, 18 layers)`."""
        sizes = []
        if self.spec is not None and self.count:
            sizes.append(f"{self.spec.heads} heads")
        if self.spec is not None:
            sizes.append(f"head_dim {self.spec.head_dim}")
        if self.count:
            sizes.append(f"{self.count} layers")
        return f"{self.layer} ({', '.join(sizes)})" if sizes else self.layer


def is_checkpoint(model: str) -> bool:
    """Whether a text is to name a model of data/checkpoints.yaml, not a layer by its heads."""
    return bool(model) and not NAMED.fullmatch(model)


def asked_kinds(
    model: str,
    mode: str,
    facts: dict[str, Any],
    *,
    tp: int = 1,
    dp: int = 1,
    page_size: int = 0,
    head_dim: int = 0,
    **dtypes: str,
) -> list[Asked]:
    """Each kind of a model's layers as it is asked for in a mode; a latent one's decode is mla.

    `facts` are fields of a call, `page_size` 0 is the usual one, `head_dim` 0 the kind's.
    ValueError for a model, a mode or a split that is not known of it.
    """
    of_model = served(model, tp, dp)
    facts = facts_of_model(model) | facts
    asked = []
    for kind in of_model.checkpoint.kinds:
        if kind.name in OWN:
            asked.append(Asked(kind, mode, Call(**facts)))
            continue
        spec = kind.spec(
            of_model.ranks, page_size or (LATENT_PAGE if kind.mode else PAGE), **dtypes
        )
        spec = replace(spec, head_dim=head_dim or spec.head_dim)
        call = Call(**(_facts_of_kind(kind) | facts))
        asked.append(Asked(kind, _mode_of(of_model, kind, mode), call, spec))
    return asked


def _facts_of_kind(kind: Kind) -> dict[str, Any]:
    facts: dict[str, Any] = {"window": True} if kind.window and not kind.mode else {}
    return facts | ({"topk": kind.topk} if kind.topk else {})


def _mode_of(of_model: Served, kind: Kind, mode: str) -> str:
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


def layers_of_model(
    model: str,
    mode: str,
    facts: dict[str, Any],
    sizes: dict[str, Any],
    **how: Any,
) -> list[LayerChoice]:
    """What an engine runs for each kind of a model's layers, and for prefill beside decode.

    `sizes` are arguments of `asked_kinds`, `how` those of `explain` beside layer, mode and call.
    """
    rows = []
    kinds = asked_kinds(model, mode, facts, **sizes)
    for asked in kinds:
        name, count = asked.kind.name, asked.kind.count
        if asked.spec is None:
            said = own_class(name, asked.call, how["library"])
            rows.append(LayerChoice(name, count=count, said=said))
        else:
            row = _chosen(name, asked.spec, asked.call, mode=asked.mode, **how)
            rows.append(replace(row, count=count))
    first = kinds[0]
    if first.call.model != OTHER and first.spec is not None and first.mode in BESIDE:
        beside = BESIDE[first.mode]
        rows.append(_chosen(beside, first.spec, first.call, mode=beside, **how))
    return rows


def layers_of_family(spec: AttnSpec, call: Call, *, mode: str, **how: Any) -> list[LayerChoice]:
    """The same of a family of models (`Call.model`) for the layer that is asked for; else none."""
    rows = []
    if call.model != OTHER and mode in BESIDE:
        beside = BESIDE[mode]
        rows.append(_chosen(beside, spec, call, mode=beside, **how))
    for kind, differs in LAYERS.get(FAMILIES[call.model], {}).items():
        if "own" in differs:
            rows.append(LayerChoice(kind, said=own_class(kind, call, how["library"])))
            continue
        facts = dict(differs)
        layer = replace(spec, head_dim=facts.pop("head_dim", spec.head_dim))
        rows.append(_chosen(kind, layer, replace(call, **facts), mode=mode, **how))
    return rows


def own_class(kind: str, call: Call, library: str) -> str:
    """The class that a kind of layers takes in an engine, where no selector is asked."""
    engine = library.partition("==")[0]
    own = LAYERS.get(FAMILIES[call.model], {}).get(kind, {}).get("own", {})
    return str(own.get(engine, f"its own class, which was not read of {engine}"))


def _chosen(name: str, spec: AttnSpec, call: Call, **how: Any) -> LayerChoice:
    try:
        return LayerChoice(name, spec, choice=explain(spec, call=call, **how))
    except (ValueError, RuntimeError) as error:
        return LayerChoice(name, spec, said=f"no answer: {error}")
