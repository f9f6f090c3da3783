"""A choice as text, and the answer of the command `explain`."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..core.backends.limits import LATENT_MODES
from ..core.layer import MODELS, parse_layer, parse_lengths
from ..core.spec import MLA, MLA_HEAD_DIM, AttnSpec
from .changes import FAILS, LATENT_PAGE, TOPK, changes, markdown
from .explain import Choice, explain
from .facts import GPUS, Call, decided, facts_of_model, gpu_named
from .models import FAMILIES, LAYERS, OTHER
from .models import MODELS as RULED

COLUMNS = ("", "chosen", "why, or why not", "source")
FIELDS = ("head_dim", "page_size", "dtype", "kv_dtype")
LAYER = ("heads", "model", "tp", *FIELDS)
"""The arguments of `parse_layer`."""
PINS = {"page_size": "pinned_page", "kv_dtype": "pinned_kv_dtype"}
"""Option -> the fact of a call that it states."""
BESIDE = {"decode": "prefill_paged", "prefill_paged": "decode"}
_FIELDS = {field.name: field.type for field in fields(Call)}
_EXPECTED: dict[Any, str] = {bool: "yes or no", int: "a number"}


def answer(options: Mapping[str, Any], as_json: bool = False) -> str:
    """One choice, or what changes, as text or JSON; raises what `explain` and the parsers raise.

    `options` are those of the command that were given.
    """
    given = dict(options)
    facts = parse_call(given.pop("call", []))
    layer = {name: given.pop(name) for name in LAYER if name in given}
    stated = {*facts, *(name for name in FIELDS if name in layer)}
    for option, fact in PINS.items():
        if option in layer:
            facts.setdefault(fact, True)
    of_model = facts_of_model(layer.get("model", ""))
    for name in {*of_model} & {*facts}:
        if FAMILIES.get(facts[name], facts[name]) != of_model[name]:
            raise ValueError(f"{name} must be left out, {layer['model']} says it")
    facts = of_model | facts
    if given.get("mode") in LATENT_MODES:
        if "model" in layer and "diff" not in given:
            raise ValueError(f"heads must be given of MLA, as 16/1, got model {layer['model']!r}")
        layer = {"head_dim": MLA_HEAD_DIM, "page_size": LATENT_PAGE} | layer
    if given.get("mode") == "sparse_mla":
        facts.setdefault("topk", TOPK)
    if "gpu" in given:
        given["gpu"] = [gpu_named(text) for text in given["gpu"].split(",")]
    if "diff" in given:
        return _answer_diff(given, layer, facts, stated, as_json)
    needed = {name: name in given for name in ("library", "gpu", "mode")}
    needed["heads"] = bool({"heads", "model"} & {*layer})
    if missing := [f"--{name}" for name, there in needed.items() if not there]:
        raise ValueError(f"{', '.join(missing)} must be given, or --diff OLD NEW")
    if len(given["gpu"]) > 1:
        raise ValueError(f"--gpu must be one, but with --diff, got {', '.join(given['gpu'])}")
    given["gpu"] = given["gpu"][0]
    spec, call = parse_layer(**layer), Call(**facts)
    choice = explain(spec, call=call, **given)
    settled = {row.subject: row for row in choice.reasons if row.kind == "settled"}
    for name, value in facts.items():
        if row := settled.get(f"{name.replace('_', ' ')}: {'no' if value else 'yes'}"):
            raise ValueError(f"{name} must be left out: {row.why} ({row.source})")
    unused = sorted(name for name in stated if not decided(name, call) & choice.tested)
    unused = [name for name in unused if name != "page_size" or not choice.refused_page]
    beside = [name for name in choice.unused if name not in _FIELDS]
    choice = replace(choice, unused=(*unused, *beside))
    layers = layers_of(spec, call, **given)
    if as_json:
        return json.dumps(to_dict(choice) | {"layers": layers}, indent=2)
    return render(choice, layers)


def layers_of(spec: AttnSpec, call: Call, **how: Any) -> list[dict[str, str]]:
    """The backend of each kind of layer of a model, and of prefill beside decode; else empty."""
    rows = []
    if call.model != OTHER and (mode := BESIDE.get(how["mode"])):
        backend = _backend(spec, call=call, **how | {"mode": mode})
        rows = [{"layer": mode, "head_dim": str(spec.head_dim), "chosen": backend}]
    for kind, differs in LAYERS.get(FAMILIES[call.model], {}).items():
        head_dim = differs.get("head_dim", spec.head_dim)
        facts = {name: value for name, value in differs.items() if name != "head_dim"}
        backend = _backend(replace(spec, head_dim=head_dim), call=replace(call, **facts), **how)
        rows.append({"layer": kind, "head_dim": str(head_dim), "chosen": backend})
    return rows


def _backend(spec: AttnSpec, **how: Any) -> str:
    """The backend, the kernel that it calls, and whether it cannot run; or why there is none."""
    try:
        choice = explain(spec, **how)
    except (ValueError, RuntimeError) as error:
        return f"no answer: {error}"
    return f"{choice.picked}{FAILS}" if choice.problem else choice.picked


def _answer_diff(
    given: dict[str, Any],
    layer: dict[str, Any],
    facts: dict[str, Any],
    stated: Collection[str],
    as_json: bool,
) -> str:
    old, new = given["diff"]
    how: dict[str, Any] = {"gpus": given.get("gpu", tuple(GPUS))}
    if "mode" in given:
        how["modes"] = given["mode"].split(",")
    if "policy" in given:
        how["policy"] = given["policy"]
    if "library" in given:
        raise ValueError(f"--library must be left out with --diff, got {given['library']}")
    if "heads" in layer or layer.get("model", MLA) not in (*MODELS, MLA):
        how["layer"] = parse_layer(**layer)
    else:
        how["model"] = layer.pop("model", "")
        if "tp" in layer:
            raise ValueError(f"--tp must go with a model that is split, got {layer['tp']}")
        how["fields"] = layer
    table = changes(old, new, facts=facts, stated=stated, **how)
    if as_json:
        return str(table.to_json(orient="records", indent=2))
    return markdown(table, old, new, how["gpus"])


def render(choice: Choice, layers: Sequence[Mapping[str, str]] = ()) -> str:
    """The choice in a few lines, then every row considered, without repeats, matches first."""
    rows = [COLUMNS]
    for reason in sorted(choice.reasons, key=lambda reason: not reason.matched):
        taken = "yes" if reason.matched and reason.kind != "limit" else "no"
        rows.append((taken, _short(reason.subject), reason.why, reason.source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = dict.fromkeys("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    head = [headline(choice)]
    if len(choice.order) > 1:
        head.append(f"can run it, best first: {', '.join(choice.order)}")
    if choice.problem:
        head.append(f"but it cannot run: {choice.problem}")
    if choice.pages:
        refused = f"{choice.backend} takes no pages of {choice.refused_page}"
        why = refused if choice.refused_page else "no page size is given"
        head.append(f"{why}: {choice.library} takes pages of {choice.pages}")
    if choice.unused:
        head.append(f"not used by its rules: {', '.join(choice.unused)}")
    if any(reason.why.endswith(f"it is {OTHER}") for reason in choice.reasons):
        names = [name for name in RULED if f"model {name}" in choice.tested]
        head.append(f"rules for one model did not apply: --call model={'|'.join(names)}")
    head += [f"{row['layer']} (head_dim {row['head_dim']}): {row['chosen']}" for row in layers]
    return "\n".join([*head, "", *lines])


def _short(order: str) -> str:
    names = order.split(" > ")
    return order if len(names) < 3 else f"{names[0]} > {names[1]} > {len(names) - 2} more"


def headline(choice: Choice) -> str:
    """`vllm==0.33.0, decode on sm100, policy auto: FLASHINFER, which runs trtllm-gen`."""
    where = f"{choice.library}, {choice.mode} on {choice.gpu}, policy {choice.policy}"
    whose = " (FlashAttention-3, the library)" if choice.ours == "flash-attn-3" else ""
    return f"{where}: {choice.picked}{whose}"


def to_dict(choice: Choice) -> dict[str, Any]:
    """The choice as JSON data: its fields, its kernel, its reasons as objects."""
    names = "library mode gpu policy backend order problem kernel unused pages refused_page".split()
    plain = {name: getattr(choice, name) for name in names}
    return {**plain, "reasons": [vars(reason) for reason in choice.reasons]}


def parse_call(settings: list[str]) -> dict[str, Any]:
    """Fields of `Call`: `graph`, `topk=2048`, `model=gemma4`, `kv_lens=8192x16` (`parse_lengths`).

    Raises ValueError naming the fields there are.
    """
    facts = dict(map(_setting, settings))
    if len(facts) < len(settings):
        raise ValueError(f"a call's field must be given once, got {', '.join(settings)}")
    return facts


def _setting(text: str) -> tuple[str, Any]:
    name, given, value = text.partition("=")
    kind = _FIELDS.get(name)
    if kind is None:
        raise ValueError(f"a call's field must be one of {', '.join(_FIELDS)}, got {name!r}")
    if kind is bool and (value in ("yes", "no") or not given):
        return name, value != "no"
    if kind is str:
        return name, value
    if kind is int and value.isdecimal():
        return name, int(value)
    if kind in _EXPECTED:
        raise ValueError(f"{name} must be {_EXPECTED[kind]}, got {value!r}")
    return name, parse_lengths(name, value)
