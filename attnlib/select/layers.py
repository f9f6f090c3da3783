"""The kinds of layers of a model, and what an engine picks for each."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.spec import AttnSpec
from .asked import DECODE, asked_kinds, facts_of_kind
from .changes import CANNOT_RUN, Tried, require_tested, tried_calls
from .explain import Choice, explain
from .facts import Call
from .libraries import find
from .models import FAMILIES, LAYERS, OTHER

BESIDE = {"decode": "prefill_paged", "prefill_paged": "decode"}


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
        return f"{self.choice.picked}{CANNOT_RUN if self.choice.problem else ''}"

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
            said = own_class(
                kind=name,
                call=asked.call,
                library=how["library"],
            )
            rows.append(LayerChoice(name, count=count, said=said))
        else:
            row = _chosen(
                name=name,
                spec=asked.spec,
                call=asked.call,
                mode=asked.mode,
                **how,
            )
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
            said = own_class(kind, call, how["library"])
            rows.append(LayerChoice(kind, said=said))
            continue
        facts = dict(differs)
        layer = replace(spec, head_dim=facts.pop("head_dim", spec.head_dim))
        differing = replace(call, **facts)
        rows.append(_chosen(kind, layer, differing, mode=mode, **how))
    return rows


def tried_of_model(
    model: str,
    modes: Sequence[str],
    facts: dict[str, Any],
    sizes: dict[str, Any],
    *,
    old: str,
    new: str,
    stated: Collection[str],
    **how: Any,
) -> list[Tried]:
    """What `changes` tries of each kind of a model's layers for which a selector is asked.

    Without `modes` it is every one that fits, without dtypes among `sizes` the usual ones. `how`
    are further arguments of `tried_calls`.
    """
    is_any_dtype = "dtype" not in sizes and "pinned_kv_dtype" not in facts
    tried = []
    for mode in modes or (DECODE,):
        kinds = asked_kinds(model, mode, facts, **sizes)
        for asked in kinds:
            if asked.spec is None:
                continue
            is_every_mode = not modes and not asked.kind.mode
            of_kind = tried_calls(
                old,
                new,
                layer=asked.spec,
                modes=() if is_every_mode else (asked.mode,),
                facts=facts_of_kind(asked.kind) | facts,
                stated=(),
                every_dtype=is_any_dtype,
                **how,
            )
            name = model if len(kinds) == 1 else f"{model} ({asked.kind.name} layers)"
            tried += [replace(each, model=name) for each in of_kind]
    require_tested(find(new)[0].name, stated, tried)
    return tried


def kinds_left_out(model: str) -> str:
    """The kinds of a model's layers for which no selector is asked, in words; of none, nothing."""
    names = []
    for asked in asked_kinds(model, DECODE, {}):
        if asked.spec is None:
            names.append(asked.kind.name)
    if not names:
        return ""
    return f"{' and '.join(names)} layers of {model}, which take a class of their own"


def own_class(kind: str, call: Call, library: str) -> str:
    """The class that a kind of layers takes in an engine, where no selector is asked."""
    engine = library.partition("==")[0]
    kinds = LAYERS.get(FAMILIES[call.model], {})
    own = kinds.get(kind, {}).get("own", {})
    return str(own.get(engine, f"its own class, which was not read of {engine}"))


def _chosen(name: str, spec: AttnSpec, call: Call, **how: Any) -> LayerChoice:
    try:
        return LayerChoice(
            layer=name,
            spec=spec,
            choice=explain(spec, call=call, **how),
        )
    except (ValueError, RuntimeError) as error:
        return LayerChoice(name, spec, said=f"no answer: {error}")
