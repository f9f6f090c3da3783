"""A choice as text, and the answer of the command `explain`."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..core.backends.limits import LATENT_MODES
from ..core.call_text import CallText, parse_lengths
from ..core.layer import MODELS, parse_layer
from ..core.spec import MLA, MLA_HEAD_DIM, AttnSpec
from .asked import LATENT_PAGE, PINS, facts_said, layer_said
from .changes import (
    FAILS,
    TOPK,
    known_changes,
    markdown,
    padded,
    table_of,
    tried_calls,
)
from .explain import Choice, explain, settles
from .facts import GPUS, Call, decided, facts_of_model, gpu_named
from .known import Found, known_problems, report, to_data
from .models import FAMILIES, LAYERS, OTHER
from .models import MODELS as RULED
from .situation import parse_server, situation_of

COLUMNS = ("", "chosen", "why, or why not", "source")
FIELDS = ("head_dim", "page_size", "dtype", "kv_dtype")
LAYER = ("heads", "model", "tp", *FIELDS)
"""The arguments of `parse_layer`."""
BESIDE = {"decode": "prefill_paged", "prefill_paged": "decode"}
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
    _take_text(" ".join(given.pop("words", [])), given, layer, facts)
    stated = list(facts)
    stated += [name for name in FIELDS if name in layer]
    facts = _with_model(facts, layer)
    mode = given.get("mode")
    if mode in LATENT_MODES:
        if "model" in layer and "diff" not in given:
            raise ValueError(f"heads must be given of MLA, as 16/1, got model {layer['model']!r}")
        layer = {"head_dim": MLA_HEAD_DIM, "page_size": LATENT_PAGE} | layer
    if mode == "sparse_mla":
        facts.setdefault("topk", TOPK)
    server = parse_server(given.pop("server", []))
    cards = {}
    for text in given.get("gpu", "").split(",") if "gpu" in given else ():
        cards[gpu_named(text)] = text
    if cards:
        given["gpu"] = list(cards)
    if "diff" in given:
        return _answer_diff(given, layer, facts, stated, cards, server, as_json)
    _require_one_call(given, layer)
    given["gpu"] = given["gpu"][0]
    spec = parse_layer(**layer)
    call = Call(**facts)
    choice = explain(spec, call=call, **given)
    _require_not_settled(choice, facts)
    choice = _with_unused(choice, call, stated)
    layers = layers_of(spec, call, **given)
    situation = situation_of(
        choice,
        spec,
        call,
        stated=facts,
        gpu=cards[given["gpu"]],
        server=server,
    )
    known = known_problems(situation)
    if not as_json:
        return render(choice, layers, known)
    data = to_dict(choice)
    data["layers"] = layers
    data["known"] = to_data(known)
    return json.dumps(data, indent=2)


def _take_text(
    text: str,
    given: Words,
    layer: Words,
    facts: Words,
) -> None:
    """Add what a call's text says; ValueError for what options say too."""
    if not text:
        return
    said = CallText.read(text)
    if said.mode:
        _add(given, {"mode": said.mode})
    _add(layer, layer_said(said))
    _add(facts, facts_said(said, given.get("mode", "")))
    if "diff" not in given:
        given.setdefault("mode", "decode")


def _add(options: Words, said: Words) -> None:
    twice = [name for name in said if name in options]
    if twice:
        raise ValueError(f"{twice[0]} must be given once, got {options[twice[0]]} as well")
    options.update(said)


def _with_model(facts: Words, layer: Words) -> Words:
    """The facts of a call with those that its layer states: pinned options, and its model."""
    pins = {fact: True for option, fact in PINS.items() if option in layer}
    of_model = facts_of_model(layer.get("model", ""))
    for name, value in of_model.items():
        given = facts.get(name, value)
        if FAMILIES.get(given, given) != value:
            raise ValueError(f"{name} must be left out, {layer['model']} says it")
    return pins | of_model | facts


def _require_one_call(given: Words, layer: Words) -> None:
    """ValueError unless the options name a library, a GPU, a mode and a layer."""
    missing = [f"--{name}" for name in ("library", "gpu", "mode") if name not in given]
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


def layers_of(
    spec: AttnSpec,
    call: Call,
    *,
    mode: str,
    **how: Any,
) -> list[dict[str, str]]:
    """The backend of each kind of layer of a model, and of prefill beside decode; else empty."""
    rows = []
    if call.model != OTHER and mode in BESIDE:
        beside = BESIDE[mode]
        rows.append(_layer_row(beside, spec, call, mode=beside, **how))
    kinds = LAYERS.get(FAMILIES[call.model], {})
    for kind, differs in kinds.items():
        facts = dict(differs)
        head_dim = facts.pop("head_dim", spec.head_dim)
        layer = replace(spec, head_dim=head_dim)
        of_layer = replace(call, **facts)
        rows.append(_layer_row(kind, layer, of_layer, mode=mode, **how))
    return rows


def _layer_row(
    name: str,
    spec: AttnSpec,
    call: Call,
    **how: Any,
) -> dict[str, str]:
    """A kind of layer, its backend and kernel, and whether it cannot run; or why there is none."""
    try:
        choice = explain(spec, call=call, **how)
    except (ValueError, RuntimeError) as error:
        chosen = f"no answer: {error}"
    else:
        chosen = f"{choice.picked}{FAILS if choice.problem else ''}"
    return {"layer": name, "head_dim": str(spec.head_dim), "chosen": chosen}


def _answer_diff(
    given: Words,
    layer: Words,
    facts: Words,
    stated: Collection[str],
    cards: Mapping[str, str],
    server: Words,
    as_json: bool,
) -> str:
    old, new = given["diff"]
    gpus = given.get("gpu", tuple(GPUS))
    # Known problems ask for lengths, if no rule does.
    by_rules = [name for name in stated if name not in ("kv_lens", "q_lens")]
    how: Words = {"facts": facts, "stated": by_rules, "gpus": gpus}
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
    tried = tried_calls(old, new, **how)
    table = table_of(tried)
    if as_json:
        return str(table.to_json(orient="records", indent=2))
    known = known_changes(tried, facts, cards, server)
    return markdown(table, old, new, known)


def render(
    choice: Choice,
    layers: Sequence[dict[str, str]] = (),
    known: Sequence[Found] = (),
) -> str:
    """The choice and its known problems, then every row considered, without repeats, matches
    first."""
    head = [headline(choice), *_notes(choice), *report(known)]
    for layer in layers:
        head.append(f"{layer['layer']} (head_dim {layer['head_dim']}): {layer['chosen']}")
    rows = [COLUMNS]
    for reason in sorted(choice.reasons, key=lambda reason: not reason.matched):
        taken = "yes" if reason.matched and reason.kind != "limit" else "no"
        subject = _short(reason.subject)
        rows.append((taken, subject, reason.why, reason.source))
    lines = ["  ".join(words).rstrip() for words in padded(rows)]
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
    if any(reason.why.endswith(f"it is {OTHER}") for reason in choice.reasons):
        names = [name for name in RULED if f"model {name}" in choice.tested]
        notes.append(f"rules for one model did not apply: --call model={'|'.join(names)}")
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
    whose = " (FlashAttention-3, the library)" if choice.ours == "flash-attn-3" else ""
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
