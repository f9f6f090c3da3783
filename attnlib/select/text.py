"""A choice as text, and the answer of the command `explain`."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..core.backends.limits import LATENT_MODES
from ..core.layer import MODELS, parse_layer, parse_lengths
from ..core.spec import MLA, MLA_HEAD_DIM, AttnSpec
from .changes import LATENT_PAGE, TOPK, changes, markdown, padded
from .explain import Choice, explain, settles
from .facts import CACHES, GPUS, PLAIN_CACHE, Call, decided, facts_of_model, gpu_named
from .layers import (
    LayerChoice,
    asked_kinds,
    is_checkpoint,
    layers_of_family,
    layers_of_model,
)
from .models import FAMILIES, OTHER

COLUMNS = ("", "chosen", "why, or why not", "source")
FIELDS = ("head_dim", "page_size", "dtype", "kv_dtype")
LAYER = ("heads", "model", "tp", "dp", *FIELDS)
"""The arguments of `parse_layer`."""
PINS = {"page_size": "pinned_page", "kv_dtype": "pinned_kv_dtype"}
"""Option -> the fact of a call that it states."""
_FIELDS = {field.name: field.type for field in fields(Call)}
_EXPECTED: dict[Any, str] = {bool: "yes or no", int: "a number"}
_JSON = (
    "library",
    "mode",
    "gpu",
    "policy",
    "backend",
    "order",
    "problem",
    "kernel",
    "unused",
    "pages",
    "refused_page",
)
Words = dict[str, Any]
"""Options, facts or sizes by name."""


def answer(options: Mapping[str, Any], as_json: bool = False) -> str:
    """One choice, or what changes, as text or JSON; raises what `explain` and the parsers raise.

    `options` are those of the command that were given.
    """
    given = dict(options)
    facts = parse_call(given.pop("call", []))
    layer = {name: given.pop(name) for name in LAYER if name in given}
    facts |= _cache_of(layer)
    stated = list(facts)
    stated += [name for name in FIELDS if name in layer]
    if "heads" in layer and "model" in layer:
        words = f"{layer['heads']} and {layer['model']}"
        raise ValueError(f"pass either heads or model, got {words}")
    facts = _with_model(facts, layer)
    if "gpu" in given:
        given["gpu"] = [gpu_named(text) for text in given["gpu"].split(",")]
    if "diff" not in given:
        _require_one_call(given, layer)
        given["gpu"] = given["gpu"][0]
    if is_checkpoint(layer.get("model", "")) and layer["model"] not in _models_of_diff(given):
        return _answer_model(given, layer, facts, stated, as_json)
    mode = given.get("mode")
    if mode in LATENT_MODES:
        layer = {"head_dim": MLA_HEAD_DIM, "page_size": LATENT_PAGE} | layer
    if mode == "sparse_mla":
        facts.setdefault("topk", TOPK)
    if "diff" in given:
        return _answer_diff(given, layer, facts, stated, as_json)
    spec = parse_layer(**layer)
    call = Call(**facts)
    choice = explain(spec, call=call, **given)
    layers = layers_of_family(spec, call, **given)
    return _said(choice, call, facts, stated, layers, as_json)


def _cache_of(layer: Words) -> Words:
    """The fact of a cache in a format that is no dtype of a layer, whose option is taken away."""
    text = layer.get("kv_dtype", "").lower()
    format_ = "turboquant" if text.startswith("turboquant") else text
    format_ = "fp8_e5m2" if text in ("e5m2", "float8_e5m2") else format_
    if format_ not in CACHES or format_ == PLAIN_CACHE:
        return {}
    del layer["kv_dtype"]
    return {"cache": format_, "pinned_kv_dtype": True}


def _models_of_diff(given: Words) -> Sequence[str]:
    """The models that `changes` knows by name."""
    return (*MODELS, MLA) if "diff" in given else ()


def _answer_model(
    given: Words,
    layer: Words,
    facts: Words,
    stated: Sequence[str],
    as_json: bool,
) -> str:
    """The answer for a model of data/checkpoints.yaml: of its first kind, then a row for each."""
    sizes = dict(layer)
    model = sizes.pop("model")
    mode = given.pop("mode", "decode")
    first = asked_kinds(model, mode, facts, **sizes)[0]
    if "diff" in given:
        how = {**given, "mode": first.mode}
        facts = {"topk": first.call.topk} | facts
        return _answer_diff(how, {"model": model}, facts, stated, as_json, first.spec)
    assert first.spec is not None
    choice = explain(first.spec, mode=first.mode, call=first.call, **given)
    layers = layers_of_model(model, mode, facts, sizes, **given)
    return _said(choice, first.call, facts, stated, layers, as_json)


def _said(
    choice: Choice,
    call: Call,
    facts: Words,
    stated: Sequence[str],
    layers: Sequence[LayerChoice],
    as_json: bool,
) -> str:
    _require_not_settled(choice, facts)
    choice = _with_unused(choice, call, stated)
    if not as_json:
        return render(choice, layers)
    data = to_dict(choice)
    data["layers"] = [to_row(layer) for layer in layers]
    return json.dumps(data, indent=2)


def to_row(layer: LayerChoice) -> Words:
    """A kind of layers as JSON data."""
    return {
        "layer": layer.layer,
        "count": layer.count,
        "heads": layer.spec.heads if layer.spec else "",
        "head_dim": str(layer.spec.head_dim) if layer.spec else "",
        "chosen": layer.chosen,
    }


def _with_model(facts: Words, layer: Words) -> Words:
    """The facts of a call with those that its layer states: pinned options, and its model."""
    pins = {fact: True for option, fact in PINS.items() if option in layer}
    of_model = facts_of_model(layer.get("model", ""))
    for name, value in of_model.items():
        given = facts.get(name, value)
        if FAMILIES.get(given, given) != FAMILIES.get(value, value):
            raise ValueError(f"{name} must be left out, {layer['model']} says it")
    return pins | of_model | facts


def _require_one_call(given: Words, layer: Words) -> None:
    """ValueError unless the options name a library, a GPU, a mode and a layer."""
    needed = ["library", "gpu"]
    if not is_checkpoint(layer.get("model", "")):
        needed.append("mode")  # of a model it is decode
    missing = [f"--{name}" for name in needed if name not in given]
    if not ("heads" in layer or "model" in layer):
        missing.append("--heads")
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given, or --diff OLD NEW")
    if len(given["gpu"]) > 1:
        raise ValueError(f"--gpu must be one, but with --diff, got {', '.join(given['gpu'])}")


def _require_not_settled(choice: Choice, facts: Words) -> None:
    """ValueError for a fact that the library itself settles otherwise."""
    settled = {row.subject: row for row in choice.reasons if row.kind == "settled"}
    for name, value in facts.items():
        opposite = settles(name, not value)
        if opposite in settled:
            row = settled[opposite]
            raise ValueError(f"{name} must be left out: {row.why} ({row.source})")


def _with_unused(choice: Choice, call: Call, stated: Sequence[str]) -> Choice:
    """The choice whose `unused` are the options, or the release beside it, that decide nothing."""
    unused = []
    for name in sorted(stated):
        is_refused_page = name == "page_size" and choice.refused_page
        if not decided(name, call) & choice.tested and not is_refused_page:
            unused.append(name)
    beside = [name for name in choice.unused if name not in _FIELDS]
    return replace(choice, unused=(*unused, *beside))


def _answer_diff(
    given: Words,
    layer: Words,
    facts: Words,
    stated: Collection[str],
    as_json: bool,
    spec: AttnSpec | None = None,
) -> str:
    """What changes for a layer (`spec`, or of the options), or for the models of `changes`."""
    old, new = given["diff"]
    gpus = given.get("gpu", tuple(GPUS))
    how: Words = {"facts": facts, "stated": stated, "gpus": gpus}
    if "mode" in given:
        how["modes"] = given["mode"].split(",")
    if "policy" in given:
        how["policy"] = given["policy"]
    if "library" in given:
        raise ValueError(f"--library must be left out with --diff, got {given['library']}")
    if spec is not None:
        how["layer"] = spec
    elif "heads" in layer or layer.get("model", MLA) not in (*MODELS, MLA):
        how["layer"] = parse_layer(**layer)
    else:
        how["model"] = layer.pop("model", "")
        if "tp" in layer:
            raise ValueError(f"--tp must go with a model that is split, got {layer['tp']}")
        how["fields"] = layer
    table = changes(old, new, **how)
    if spec is not None:
        table["model"] = layer["model"]
    if as_json:
        return str(table.to_json(orient="records", indent=2))
    return markdown(table, old, new, gpus)


def render(
    choice: Choice,
    layers: Sequence[LayerChoice] = (),
) -> str:
    """The choice in a few lines, then every row considered, without repeats, matches first."""
    head = [headline(choice), *_notes(choice)]
    for layer in layers:
        head.append(f"{layer.words}: {layer.chosen}")
    rows = [COLUMNS]
    ours = [reason for reason in choice.reasons if not reason.of_other_model]
    for reason in sorted(ours, key=lambda reason: not reason.matched):
        taken = "yes" if reason.matched and reason.kind != "limit" else "no"
        subject = _short(reason.subject)
        rows.append((taken, subject, reason.why, reason.source))
    lines = ["  ".join(words).rstrip() for words in padded(rows)]
    folded = len(choice.reasons) - len(ours)
    if folded:
        lines.append(f"{folded} rules of other models do not apply (--json lists them)")
    return "\n".join([*head, "", *dict.fromkeys(lines)])


def _notes(choice: Choice) -> list[str]:
    """What there is to say of a choice beside its backend, a line each."""
    notes = []
    if len(choice.order) > 1:
        notes.append(f"can run it, best first: {', '.join(choice.order)}")
    if choice.problem:
        notes.append(f"but it cannot run: {choice.problem}")
    if choice.pages:
        refused = f"{choice.backend} takes no pages of {choice.refused_page}"
        why = refused if choice.refused_page else "no page size is given"
        notes.append(f"{why}: {choice.library} takes pages of {choice.pages}")
    if choice.unused:
        notes.append(f"not used by its rules: {', '.join(choice.unused)}")
    if any(reason.of_other_model and reason.why.endswith(OTHER) for reason in choice.reasons):
        notes.append("an engine has rules for some models: --model NAME, or --call model=NAME")
    return notes


def _short(order: str) -> str:
    """An order of candidates: both, or two of more."""
    names = order.split(" > ")
    if len(names) < 3:
        return order
    first, second, *others = names
    return f"{first} > {second} > {len(others)} more"


def headline(choice: Choice) -> str:
    """`vllm==0.33.0, decode on sm100, policy auto: FLASHINFER, which runs trtllm-gen`."""
    where = f"{choice.library}, {choice.mode} on {choice.gpu}, policy {choice.policy}"
    whose = f" ({choice.whose})" if choice.whose else ""
    return f"{where}: {choice.picked}{whose}"


def to_dict(choice: Choice) -> Words:
    """The choice as JSON data: its fields, its kernel, its reasons as objects."""
    data: Words = {name: getattr(choice, name) for name in _JSON}
    data["reasons"] = [vars(reason) for reason in choice.reasons]
    return data


def parse_call(settings: Sequence[str]) -> Words:
    """Fields of `Call`: `graph`, `topk=2048`, `model=gemma4`, `kv_lens=8192x16` (`parse_lengths`).

    Raises ValueError naming the fields there are.
    """
    facts = dict(map(_setting, settings))
    if len(facts) < len(settings):
        raise ValueError(f"a call's field must be given once, got {', '.join(settings)}")
    return facts


def _setting(text: str) -> tuple[str, Any]:
    name, given, value = text.partition("=")
    if name not in _FIELDS:
        raise ValueError(f"a call's field must be one of {', '.join(_FIELDS)}, got {name!r}")
    kind = _FIELDS[name]
    if kind is bool and (value in ("yes", "no") or not given):
        return name, value != "no"
    if kind is str:
        return name, value
    if kind is int and value.isdecimal():
        return name, int(value)
    if kind in _EXPECTED:
        raise ValueError(f"{name} must be {_EXPECTED[kind]}, got {value!r}")
    return name, parse_lengths(name, value)
