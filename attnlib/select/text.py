"""A choice as text, and the answer of the command `explain`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..core.backends.limits import LATENT_MODES
from ..core.call_text import CallText, parse_lengths
from ..core.layer import MODELS, parse_layer
from ..core.spec import MLA, MLA_HEAD_DIM, AttnSpec
from .asked import (
    DECODE,
    LATENT_PAGE,
    PINS,
    asked_kinds,
    cache_of,
    facts_said,
    is_checkpoint,
    layer_said,
)
from .changes import TOPK, known_changes, markdown, table_of, tried_calls
from .explain import Choice, explain, settles
from .facts import GPUS, Call, decided, facts_of_model, gpu_named
from .known import Found, known_problems, report, report_in_brief, to_data
from .layers import (
    LayerChoice,
    kinds_left_out,
    layers_of_family,
    layers_of_model,
    tried_of_model,
)
from .lines import DETAILS, fitted, table_lines
from .models import FAMILIES, OTHER
from .rules import facts_tested
from .situation import card_named, parse_server, situation_of, with_dp_attention

RULE_COLUMNS = ("", "backend", "why, or why not")
SOURCE_COLUMN = "source"
SHOWN_RULES = 8
"""Rules of a short answer: those that chose, then the first of the others."""
FIELDS = ("head_dim", "page_size", "dtype", "kv_dtype")
LAYER_OPTIONS = ("heads", "model", "tp", "dp", *FIELDS)
"""The arguments of `parse_layer`."""
LENGTH_FIELDS = ("kv_lens", "q_lens")
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


@dataclass(frozen=True)
class Beside:
    """What an answer needs beside the call and the library.

    `facts` are those of a call that are known, `stated` the options that a user gave. `cards` says
    how each GPU was named, `server` how the server was started. `is_whole` asks for all details.
    """

    facts: Words
    stated: Sequence[str]
    cards: Mapping[str, str]
    server: Words
    as_json: bool
    is_whole: bool


def answer(
    options: Mapping[str, Any],
    as_json: bool = False,
    details: bool = False,
) -> str:
    """One choice, or what changes, as text or JSON; raises what `explain` and the parsers raise.

    `options` are those of the command that were given. The text is short without `details`.
    """
    given = dict(options)
    facts = parse_call(given.pop("call", []))
    layer = {name: given.pop(name) for name in LAYER_OPTIONS if name in given}
    text = " ".join(given.pop("words", []))
    _take_text(text, given, layer, facts)
    facts |= cache_of(layer)
    stated = list(facts)
    stated += [name for name in FIELDS if name in layer]
    if "heads" in layer and "model" in layer:
        words = f"{layer['heads']} and {layer['model']}"
        raise ValueError(f"pass either heads or model, got {words}")
    model = layer.get("model", "")
    facts = _with_model(facts, layer)
    server = parse_server(given.pop("server", []))
    cards = _cards_of(given)
    if "diff" not in given:
        _require_one_call(given, layer)
        given["gpu"] = given["gpu"][0]
        given.setdefault("mode", DECODE)
    is_one = is_checkpoint(model) and model not in _models_of_diff(given)
    if is_one:
        splits = {name: layer[name] for name in ("tp", "dp") if name in layer}
        server = with_dp_attention(server, model, **splits)
    if not is_one and given.get("mode") in LATENT_MODES:
        layer = {"head_dim": MLA_HEAD_DIM, "page_size": LATENT_PAGE} | layer
    if not is_one and given.get("mode") == "sparse_mla":
        facts.setdefault("topk", TOPK)
    beside = Beside(
        facts=facts,
        stated=stated,
        cards=cards,
        server=server,
        as_json=as_json,
        is_whole=details,
    )
    if "diff" in given:
        return _answer_diff(given, layer, beside, is_one)
    if is_one:
        return _answer_model(given, layer, beside)
    spec = parse_layer(**layer)
    call = Call(**facts)
    choice = explain(spec, call=call, **given)
    layers = layers_of_family(spec, call, **given)
    return _said(choice, spec, call, layers, beside)


def _cards_of(given: Words) -> dict[str, str]:
    """GPU -> how it was named; the option has the GPUs from here on."""
    if "gpu" not in given:
        return {}
    cards = {gpu_named(text): text for text in given["gpu"].split(",")}
    given["gpu"] = list(cards)
    return cards


def _models_of_diff(given: Words) -> Sequence[str]:
    """The models that `changes` knows by name."""
    if "diff" in given:
        return (*MODELS, MLA)
    return ()


def _answer_model(
    given: Words,
    layer: Words,
    beside: Beside,
) -> str:
    """The answer for a model of data/checkpoints.yaml: of its first kind, then a row for each."""
    sizes = dict(layer)
    model = sizes.pop("model")
    mode = given.pop("mode", DECODE)
    first = asked_kinds(model, mode, beside.facts, **sizes)[0]
    assert first.spec is not None
    choice = explain(
        first.spec,
        mode=first.mode,
        call=first.call,
        **given,
    )
    layers = layers_of_model(
        model=model,
        mode=mode,
        facts=beside.facts,
        sizes=sizes,
        **given,
    )
    return _said(
        choice=choice,
        spec=first.spec,
        call=first.call,
        layers=layers,
        beside=beside,
    )


def _said(
    choice: Choice,
    spec: AttnSpec,
    call: Call,
    layers: Sequence[LayerChoice],
    beside: Beside,
) -> str:
    _require_not_settled(choice, beside.facts)
    situation = situation_of(
        choice,
        spec,
        call,
        stated=beside.facts,
        gpu=beside.cards[choice.gpu],
        server=beside.server,
    )
    known = known_problems(situation)
    choice = _with_unused(
        choice=choice,
        call=call,
        stated=beside.stated,
        known=known,
    )
    if not beside.as_json and beside.is_whole:
        return render(choice, layers, known)
    if not beside.as_json:
        card = card_named(beside.cards[choice.gpu])
        return render_in_brief(choice, layers, known, card)
    data = to_dict(choice)
    data["layers"] = [to_row(layer) for layer in layers]
    data["known"] = to_data(known)
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
        if FAMILIES.get(given, given) != FAMILIES.get(value, value):
            raise ValueError(f"{name} must be left out, {layer['model']} says it")
    return pins | of_model | facts


def _require_one_call(given: Words, layer: Words) -> None:
    """ValueError unless the options name a library, a GPU and a layer."""
    missing = [f"--{name}" for name in ("library", "gpu") if name not in given]
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


def _with_unused(
    choice: Choice,
    call: Call,
    stated: Sequence[str],
    known: Sequence[Found],
) -> Choice:
    """The choice whose `unused` are the options, or the release beside it, that decide nothing:
    neither the choice, nor a known problem that is said, nor lengths, which many of them test."""
    tested = choice.tested | {*LENGTH_FIELDS}
    for answer in known:
        tested |= facts_tested(answer.problem.when)
    unused = []
    for name in sorted(stated):
        is_refused_page = name == "page_size" and choice.refused_page
        if not {name, *decided(name, call)} & tested and not is_refused_page:
            unused.append(name)
    beside = [name for name in choice.unused if name not in _FIELDS]
    return replace(choice, unused=(*unused, *beside))


def _answer_diff(
    given: Words,
    layer: Words,
    beside: Beside,
    is_one: bool,
) -> str:
    """What changes for a layer, for one model of data/checkpoints.yaml (`is_one`), or for the
    models of `changes`."""
    old, new = given["diff"]
    # Known problems ask for lengths, if no rule does.
    by_rules = [name for name in beside.stated if name not in LENGTH_FIELDS]
    gpus = given.get("gpu", tuple(GPUS))
    how: Words = {"stated": by_rules, "gpus": gpus}
    if "mode" in given:
        modes = given["mode"].split(",")
    else:
        modes = ()
    if "policy" in given:
        how["policy"] = given["policy"]
    if "library" in given:
        raise ValueError(f"--library must be left out with --diff, got {given['library']}")
    left_out = ""
    if is_one:
        model = layer.pop("model")
        how |= {"old": old, "new": new}
        tried = tried_of_model(
            model=model,
            modes=modes,
            facts=beside.facts,
            sizes=layer,
            **how,
        )
        left_out = kinds_left_out(model)
    else:
        how |= _layer_of_diff(layer, beside.facts)
        tried = tried_calls(
            old=old,
            new=new,
            modes=modes,
            facts=beside.facts,
            **how,
        )
    table = table_of(tried)
    if beside.as_json:
        return str(table.to_json(orient="records", indent=2))
    known = known_changes(tried, beside.cards, beside.server)
    return markdown(table, old, new, known, left_out)


def _layer_of_diff(layer: Words, facts: Words) -> Words:
    """The arguments of `tried_calls` that say which layers."""
    if "heads" in layer or layer.get("model", MLA) not in (*MODELS, MLA):
        is_any_dtype = "dtype" not in layer and "pinned_kv_dtype" not in facts
        return {"layer": parse_layer(**layer), "every_dtype": is_any_dtype}
    if "tp" in layer:
        raise ValueError(f"--tp must go with a model that is split, got {layer['tp']}")
    sizes = dict(layer)
    return {"model": sizes.pop("model", ""), "fields": sizes}


def render(
    choice: Choice,
    layers: Sequence[LayerChoice] = (),
    known: Sequence[Found] = (),
) -> str:
    """The choice and its known problems, then every row considered, without repeats, matches
    first."""
    head = [
        headline(choice),
        *_notes(choice),
        *report(known),
        *_layers_said(layers),
    ]
    rows = rules_of(choice)
    columns = (*RULE_COLUMNS, SOURCE_COLUMN)
    lines = [*head, "", *table_lines([columns, *rows])]
    folded = sum(reason.of_other_model for reason in choice.reasons)
    if folded:
        lines.append(f"{folded} rules of other models do not apply (--json lists them)")
    return fitted(lines)


def render_in_brief(
    choice: Choice,
    layers: Sequence[LayerChoice] = (),
    known: Sequence[Found] = (),
    card: str = "",
) -> str:
    """The choice, its known problems with their sizes on a card, and why not the next ones."""
    head = [headline(choice), *_notes(choice), *_layers_said(layers)]
    rows = []
    for taken, backend, why, _ in rules_of(choice):
        rows.append((taken, backend, why))
    rows = [*dict.fromkeys(rows)]
    lines = [*head, *report_in_brief(known, card), ""]
    lines += table_lines([RULE_COLUMNS, *rows[:SHOWN_RULES]])
    left_out = len(rows) - SHOWN_RULES
    more = f"{left_out} more rules, sources" if left_out > 0 else "Sources"
    return fitted([*lines, f"{more}: {DETAILS}"])


def _layers_said(layers: Sequence[LayerChoice]) -> list[str]:
    return [f"{layer.words}: {layer.chosen}" for layer in layers]


def rules_of(choice: Choice) -> list[tuple[str, str, str, str]]:
    """A row per rule, without repeats: whether it chose, its backend, why, and its source."""
    ours = [reason for reason in choice.reasons if not reason.of_other_model]
    rows: dict[tuple[str, str, str, str], None] = {}
    for reason in sorted(ours, key=lambda reason: not reason.matched):
        taken = "no"
        if reason.matched and reason.kind != "limit":
            taken = "yes"
        rows[taken, _short(reason.subject), reason.why, reason.source] = None
    return [*rows]


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
        notes.append(f"makes no difference to its choice: {', '.join(choice.unused)}")
    others = [reason for reason in choice.reasons if reason.of_other_model]
    if any(reason.why.endswith(OTHER) for reason in others):
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
