"""What a view can show: a study's records, or what this GPU measures; and how a case is chosen.

A model is the attention that one GPU has of it. What its name leaves open, `variant` says in words
of `core.call_text`: dtypes of query and cache and a window (`dtype=bfloat16 window=4096`), or for
MLA query heads, attended tokens and cache format (`heads=128/1 top_k=2048`); then, where a call has
them, `q_len` and `context`.
"""

import math
import os
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from packaging.version import Version

from ..core.backends.table import BACKENDS, COMPARED, compared_package
from ..core.call_text import CallText, Lens, shortened_lens
from ..core.layer import MODELS, name_of, parse_layer
from ..core.spec import LENGTHS, MLA, require_int, require_word
from ..measure.calls.cases import read_case
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.form import Item, NamedCase
from ..measure.calls.lengths import explicit_lengths
from ..measure.calls.mla.case import MlaCase
from ..measure.machine import has_driver
from ..run import store
from ..run.frame import item_of
from ..run.jobs import Job
from ..run.look_up import calls_on_record, look_up
from ..run.missing import NoGpuError
from ..run.rows import machine_slug
from ..run.study import Sweep, describe, mode
from ..studies import STUDIES

OFFERED_MODELS = (*MODELS, MLA)
"""The models that a view offers; it takes any layer (`core.layer`)."""
AXES = ("release", "timer", "variant", "page_size", "lengths", "batch", "kv_len")
"""What makes a case of a model, in the order in which each narrows the next."""
MOVING = ("batch", "kv_len")
"""The axes that are sliders of the explorer."""
LIVE = "live"
"""The name of the source that measures here."""
EXPLORER = "explorer"
"""The study that keeps its records."""
DEVICE = "cuda"
CEILINGS = ("copy", "matmul")
ROUNDS = 3
"""Measured by default."""
FLASHINFER_PACKAGE = COMPARED["flashinfer"]
Wishes = Mapping[str, Any]
"""Arguments of a view -> what was asked for; None or none at all is no wish."""
Place = tuple[str, str]
"""A study, and a machine that has records of it."""
NO_WISHES: Wishes = {}
TEXT_WISHES = ("model", "heads", "records", "machine", "release", "timer", "variant", "lengths")
SIZE_WISHES = ("tp", "page_size", "batch", "kv_len", "rounds")
USUAL = {
    "timer": "graph",
    "variant": "dtype=bfloat16",
    "page_size": 16,
    "lengths": "fixed",
    "batch": 16,
    "kv_len": 8192,
}
"""What is preferred on each axis but the release, of which it is the newest."""
BASELINES = (
    "flashinfer-fa2",
    "flashinfer-mla-fa2",
    "sglang-flash-attn-3",
    "sglang-flash-attn-3-mla",
)
"""The backends that others are compared with, where they are on record."""
LIVE_BACKENDS = ["flashinfer-fa2", "flashinfer-fa3"]
"""Measured by default."""
LIVE_OPTIONS: dict[str, list[Any]] = {
    "release": [""],
    "timer": ["graph", "graph-cold", "eager", "profiler"],
    "variant": [
        "dtype=bfloat16",
        "dtype=float16",
        "dtype=bfloat16 kv_dtype=float8_e4m3fn",
        "dtype=float8_e4m3fn",
    ],
    "page_size": [1, 16, 32, 64, 128],
    "lengths": [*LENGTHS],
    "batch": [2**n for n in range(10)],
    "kv_len": [2**n for n in range(7, 18)],
}
VARIANT = (
    "q_len",
    "kv_dtype",
    "window",
    "top_k",
    "kv_format",
    "context",
)
"""Words of a call that a variant has where they are said, after dtype, or the heads of MLA."""
SAID_BY_TEXT = (
    "model",
    "tp",
    "heads",
    "head_dim",
    "variant",
    "page_size",
    "lengths",
    "batch",
    "kv_len",
)
"""Arguments of a view that the text of a call says."""


@dataclass(frozen=True, eq=False)
class Source:
    """Who serves a view: a study's records of one machine, or this GPU; a row per record."""

    records: str
    machine: str
    frame: pd.DataFrame

    @property
    def is_live(self) -> bool:
        """Whether it can measure what is missing."""
        return self.records == LIVE


@dataclass(frozen=True, eq=False)
class ChosenCase:
    """A case, the source that it was chosen from, and how.

    `arguments` are all arguments of `attnlib.view` that give it again, `options` what each could be
    instead, `notes` say of each wish that was not met what it must be. `rows` are the records of
    the case, release and timer, of all backends.
    """

    source: Source
    arguments: dict[str, Any]
    options: dict[str, list[Any]]
    notes: dict[str, str]
    case: DecodeCase | MlaCase
    rows: pd.DataFrame

    @property
    def call(self) -> str:
        """The Python call that gives the view again."""
        named = [f"    {self.case.label!r},\n"]
        for name, value in self.arguments.items():
            if name not in SAID_BY_TEXT:
                named.append(f"    {name}={value!r},\n")
        return f"attnlib.view(\n{''.join(named)})"

    @property
    def package(self) -> str:
        """The distribution that `release` is a release of; FlashInfer's where none is named."""
        return package_of(self.arguments["release"], self.rows)


def layer_named(
    model: str,
    tp: int = 1,
    heads: str = "",
    head_dim: int = 0,
) -> str:
    """How a view calls a layer: the model as given, or its heads; if nothing is given, the first of
    `OFFERED_MODELS`. ValueError for more than `MLA`, and what `core.layer.parse_layer` raises."""
    if model == MLA:
        if heads or head_dim or tp != 1:
            raise ValueError(f"tp, heads and head_dim must be left out with {MLA}")
        return MLA
    if not model and not heads:
        model = OFFERED_MODELS[0]
    layer = parse_layer(heads, model=model, tp=tp, head_dim=head_dim)
    if heads or head_dim:
        return name_of(layer)
    return f"{model} at TP {tp}" if tp > 1 else model


def require_kinds(wishes: Wishes) -> None:
    """ValueError for a wish of another kind: words, sizes of 1 or more, a list of backends."""
    for name in TEXT_WISHES:
        if not isinstance(wishes.get(name), str | None):
            raise ValueError(f"{name} must be text, got {wishes[name]!r}")
    for name in SIZE_WISHES:
        if wishes.get(name) is not None:
            require_int(name, wishes[name])
    backends = wishes.get("backends") or ()
    is_list = isinstance(backends, list | tuple)
    if not is_list or not all(isinstance(name, str) for name in backends):
        raise ValueError(f"backends must be a list of names, got {backends!r}")


def sources_of(model: str) -> list[Place]:
    """Where there are published records of calls of `model`, reference machines first.

    The environment variable ATTNLIB_MACHINE leaves only the machines that it names, as the
    argument `machine` of a view does; ValueError lists them if there is none.
    """
    layer = _recorded_as(model)
    places = []
    for study in STUDIES.values():
        machines = store.machines(study.name)
        machines.sort(key=lambda machine: machine != study.reference_machine)
        for machine in machines:
            if layer in _layers(study.name, machine):
                places.append((study.name, machine))
    wish = os.environ.get("ATTNLIB_MACHINE", "")
    return store.on_machine("ATTNLIB_MACHINE", wish, places)


def _recorded_as(model: str) -> str:
    """The name of a layer with the heads of `model`, by which its records are looked up."""
    return MLA if model == MLA else name_of(parse_layer(model=model))


def _layers(study: str, machine: str) -> set[str]:
    """The layers that a study has calls of on a machine, less those of seeded lengths."""
    layers = set()
    for call in calls_on_record(study, machine):
        if not call.seed:
            layers.add(name_of(call.spec))
    return layers


def _layers_on_record() -> str:
    """The heads of all layers that have records, by head_dim, in words."""
    names: set[str] = set()
    for study in STUDIES:
        for machine in store.machines(study):
            names |= _layers(study, machine)
    heads = defaultdict(list)
    for name in names - {MLA}:
        layer = parse_layer(model=name)
        heads[layer.head_dim].append(layer.heads)
    words = []
    for head_dim in sorted(heads):
        listed = ", ".join(sorted(heads[head_dim]))
        words.append(f"head_dim {head_dim}: {listed}")
    return "; ".join(words)


def find_case(
    model: str,
    records: str = "",
    machine: str = "",
    wishes: Wishes = NO_WISHES,
) -> ChosenCase:
    """The case that meets the wishes, or the nearest one on record.

    By default `live` in live mode if no machine is named; else of the records that meet most
    wishes and, among them, compare several backends, and then of the newest release. `machine` is a
    folder of data/records, or a part of its name such as `h100`. ValueError lists what there is.
    RuntimeError says why nothing can be measured here.
    """
    if records == LIVE and machine:
        raise ValueError(f"machine must be left out with records='live', got {machine!r}")
    is_usual = not records and not machine and model != MLA
    is_live = records == LIVE or (is_usual and mode() == LIVE)
    if is_live:
        source = live_source(model)
        return choose(source, model, wishes)
    choices = []
    for study, folder in _places_named(model, records, machine):
        frame = store.load(study, folder)
        source = Source(study, folder, frame)
        choices.append(choose(source, model, wishes))
    choices.sort(key=_release_of_flashinfer, reverse=True)
    choices.sort(key=_has_one_backend)
    return min(choices, key=lambda choice: len(choice.notes))


def find_moving_case(model: str, wishes: Wishes) -> ChosenCase:
    """The case of the newest release whose sizes can be changed, so that `MOVING` offer several.

    It is that of `find_case` where a GPU measures, a release is wished, or no records have several.
    """
    usual = find_case(model, wishes=wishes)
    if usual.source.is_live or wishes.get("release"):
        return usual
    for source in _sources(usual.source, model):
        rows = rows_of_model(source.frame, model)
        releases = _on_record("release", rows)
        for release in reversed(releases):
            wanted = {**wishes, "release": release}
            choice = choose(source, model, wanted)
            meets_as_much = len(choice.notes) <= len(usual.notes)
            if meets_as_much and _moves(choice):
                return choice
    return usual


def _sources(first: Source, model: str) -> Iterator[Source]:
    """A source, then the others that have records of a model."""
    yield first
    for place in sources_of(model):
        if place != (first.records, first.machine):
            study, machine = place
            frame = store.load(study, machine)
            yield Source(study, machine, frame)


def _moves(choice: ChosenCase) -> bool:
    """Whether each of `MOVING` offers several values."""
    return all(len(choice.options[axis]) > 1 for axis in MOVING)


def live_source(model: str) -> Source:
    """What was measured on this GPU; RuntimeError where nothing can be."""
    if reason := why_not_live(model):
        raise NoGpuError(f"{model} must be measured on a CUDA GPU: {reason}")
    here = machine_slug(describe(DEVICE))
    frame = store.find(EXPLORER, here)
    return Source(LIVE, here, frame)


def _places_named(model: str, records: str, machine: str) -> list[Place]:
    """Those of `sources_of` that are named; ValueError lists what there is."""
    places = sources_of(model)
    if not places:
        raise ValueError(
            f"no records on {model} are published: measure it on a GPU (records='live'), or take a "
            f"layer on record: {_layers_on_record()}"
        )
    if records:
        studies = dict.fromkeys(study for study, _ in places)
        require_word("records", records, [LIVE, *studies])
        places = [place for place in places if place[0] == records]
    return store.on_machine("machine", machine, places)


def _has_one_backend(choice: ChosenCase) -> bool:
    """Whether there is nothing to compare."""
    return len(choice.options["backends"]) == 1


def _release_of_flashinfer(choice: ChosenCase) -> Version:
    """The release of a case; releases of other libraries are not compared with it."""
    release = choice.arguments["release"]
    if release and choice.package == FLASHINFER_PACKAGE:
        return Version(release)
    return Version("0")


def why_not_live(model: str) -> str:
    """Why `model` cannot be measured here, or the empty string."""
    if model == MLA:
        return f"{MLA} is measured by its study alone, sparse_mla"
    try:
        if mode() == LIVE:
            return ""
    except RuntimeError as error:
        return str(error)
    if os.environ.get("ATTNLIB_MODE") == "replay" and has_driver():
        return "ATTNLIB_MODE=replay asks for records; unset it to measure"
    return "no CUDA GPU is here"


def choose(source: Source, model: str, wishes: Wishes) -> ChosenCase:
    """Choose a value on each axis, backends, and whom they are compared with.

    A value is as wished (None is no wish) or what is usual; where a wish is not on record for the
    axes before it, the nearest size. An axis offers what is on record for the axes before it; this
    GPU takes any value.
    """
    rows = rows_of_model(source.frame, model)
    arguments: dict[str, Any] = {"model": model, "records": source.records}
    if source.is_live:
        values = _live_values(wishes)
    else:
        variant = _with_only_context(wishes.get("variant"), rows.variant)
        wishes = {**wishes, "variant": variant}
        values = _values_on_record(rows, wishes)
        arguments["machine"] = source.machine
    options: dict[str, list[Any]] = {}
    notes: dict[str, str] = {}
    for axis in AXES:
        wish = wishes.get(axis)
        value = values[axis]
        if source.is_live:
            offered = _live_options(axis, wish)
        else:
            offered = _on_record(axis, rows)
        if wish not in (None, value):
            notes[axis] = _refusal(axis, offered, wish)
        options[axis] = offered
        arguments[axis] = value
        rows = rows[_matches(rows, axis, value)]
    if source.is_live:
        known = [*BACKENDS]
        usual = [*LIVE_BACKENDS]
    else:
        known = sorted({*rows.backend})
        usual = known
    wished = wishes.get("backends") or ()
    unknown = [name for name in wished if name not in known]
    if unknown:
        notes["backends"] = _refusal("backends", known, *unknown)
    backends = [name for name in known if name in wished] or usual
    against = wishes.get("against")
    if against not in (None, *backends):
        notes["against"] = _refusal("against", backends, against)
    options["backends"] = known
    options["against"] = backends
    arguments["backends"] = backends
    arguments["against"] = against if against in backends else _baseline(backends)
    if source.is_live:
        rounds = wishes.get("rounds") or ROUNDS
        require_int("rounds", rounds)
        arguments["rounds"] = rounds
        case = _live_case(arguments)
    else:
        case = rows.case.iloc[0]
    return ChosenCase(
        source=source,
        arguments=arguments,
        options=options,
        notes=notes,
        case=case,
        rows=rows,
    )


def _with_only_context(wish: str | None, recorded: Iterable[str]) -> str | None:
    """The variant that is wished, with the context of its records where it says none and they have
    one alone."""
    if wish is None:
        return None
    variants = {*recorded}
    if wish in variants:
        return wish
    start = f"{wish} context="
    wider = [name for name in variants if name.startswith(start)]
    return wider[0] if len(wider) == 1 else wish


def _values_on_record(rows: pd.DataFrame, wishes: Wishes) -> dict[str, Any]:
    """The value on each axis that is wished or usual, else of the nearest record.

    The usual release is the newest that has the other wishes; then each axis in turn.
    """
    given = _given_axes(wishes)
    apart = []
    for axis, wish in given.items():
        apart.append(_far_from_wish(rows, axis, wish))
    wished_backends = wishes.get("backends")
    if wished_backends:
        has_none = ~rows.backend.isin(wished_backends)
        apart.append(has_none)
    newest_first = _far_from_usual(rows, "release")
    nearest = look_up(rows, *apart, newest_first)
    release = nearest.release.iloc[0]
    if release:
        rows = rows[rows.release == release]
    else:  # only libraries that go along with every release have the wishes
        release = _on_record("release", rows)[-1]
        rows = rows[_matches(rows, "release", release)]
    in_turn = []
    for axis in USUAL:
        if axis in given:
            far = _far_from_wish(rows, axis, given[axis])
            in_turn.append(far)
        in_turn.append(_far_from_usual(rows, axis))
    nearest = look_up(rows[[*AXES]], *in_turn)
    (values,) = nearest.head(1).to_dict("records")
    return values | {"release": release}


def _given_axes(wishes: Wishes) -> dict[str, Any]:
    """The wishes that name a value of an axis."""
    given = {}
    for axis in AXES:
        wish = wishes.get(axis)
        if wish is not None:
            given[axis] = wish
    return given


def _far_from_wish(rows: pd.DataFrame, axis: str, wish: Any) -> pd.Series:
    """How far the records are from a wish: factors of two of sizes; words are alike or not."""
    if not isinstance(wish, int):
        return ~_matches(rows, axis, wish)
    return rows[axis].map(lambda size: abs(math.log2(size / wish)))


def _far_from_usual(rows: pd.DataFrame, axis: str) -> pd.Series:
    """The place of each record's value among all of an axis, the most usual one first."""
    ordered = sorted({*rows[axis]})
    usual = USUAL.get(axis)
    if axis == "release":
        ordered.sort(
            key=lambda release: Version(release or "0"),
            reverse=True,
        )
    elif isinstance(usual, int):
        ordered.sort(key=lambda size: abs(math.log(size / usual)))
    else:
        ordered.sort(key=lambda word: word != usual)
    return rows[axis].map(ordered.index)


def _live_values(wishes: Wishes) -> dict[str, Any]:
    """The value on each axis of what is measured here: as wished, else usual."""
    return {"release": "", **USUAL, **_given_axes(wishes)}


def _live_options(axis: str, wish: Any) -> list[Any]:
    """What an axis offers on this GPU, and what is wished besides."""
    options = [*LIVE_OPTIONS[axis]]
    if wish is not None and wish not in options:
        options.append(wish)
    return options


def _live_case(arguments: Mapping[str, Any]) -> DecodeCase:
    """The call that is measured here."""
    layer = parse_layer(model=arguments["model"])
    variant = arguments["variant"]
    words = f"heads={layer.heads} head_dim={layer.head_dim} {variant}"
    said = CallText.read(words)
    spec = said.layer(page_size=arguments["page_size"])
    return DecodeCase(
        spec,
        batch_size=arguments["batch"],
        kv_len=arguments["kv_len"],
        lengths=arguments["lengths"],
        context=said.context or 0,
    )


def _baseline(backends: Sequence[str]) -> str:
    """The backend that others are compared with."""
    for name in BASELINES:
        if name in backends:
            return name
    return backends[0]


def _refusal(name: str, options: Sequence[Any], *wishes: Any) -> str:
    """That a wish is not on record, and what is."""
    have = ", ".join(repr(words_of(option)) for option in options)
    got = ", ".join(repr(words_of(wish)) for wish in wishes)
    return f"{name} must be one of {have} with the choices before it, got {got}"


def words_of(value: Any) -> Any:
    """A value of an axis, lengths that are given one by one in few words."""
    is_explicit = isinstance(value, str) and value.replace("+", "").isdecimal()
    if not is_explicit:
        return value
    tokens = explicit_lengths(value).tolist()
    lens = Lens.of(tokens)
    return shortened_lens(str(lens))


def width_of(case: DecodeCase | MlaCase) -> str:
    """The width of a page table that is wider than the longest request, else empty."""
    return f"context={case.context}" if case.context else ""


def variant_of(case: DecodeCase | MlaCase) -> str:
    """What the model's name leaves open of a call, less its page size and lengths."""
    said = case.said.given
    if isinstance(case, MlaCase):
        words = {"heads": case.spec.heads}
    else:
        words = {"dtype": case.spec.dtype}
    for name in VARIANT:
        if name in said:
            words[name] = said[name]
    return " ".join(f"{name}={value}" for name, value in words.items())


def wishes_said(call: object) -> dict[str, Any] | None:
    """The arguments of a view that a case, or a text, says; None for the name of a model."""
    text = call if isinstance(call, str) else getattr(call, "label", None)
    if not isinstance(text, str):
        words = "model must be a model, the text of a call or a case"
        raise ValueError(f"{words}, got {call!r}")
    if "=" not in text:
        return None
    said = CallText.read(text)
    if said.lens:
        return _wishes_of_case(read_case(text))
    said.require_only("a view without lens", ("heads", "model", "tp", "head_dim", "page"))
    wishes: dict[str, Any] = {"model": name_of(said.layer())}
    if said.page:
        wishes["page_size"] = said.page
    return wishes


def _wishes_of_case(case: NamedCase) -> dict[str, Any]:
    """The arguments of a view of a call; ValueError for one that no view shows."""
    if not isinstance(case, DecodeCase | MlaCase) or case.seed:
        raise ValueError(f"call must be of decode or MLA, and without seed, got {case.label!r}")
    return {
        "model": name_of(case.spec),
        "variant": variant_of(case),
        "page_size": case.spec.page_size,
        "lengths": case.lengths,
        "batch": case.batch_size,
        "kv_len": case.kv_len,
    }


def rows_of_model(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """The rows that are calls of `model`, without seeded lengths, with a column per axis."""
    layer = _recorded_as(model)
    wanted = []
    for case in frame.case:
        is_call = isinstance(case, DecodeCase | MlaCase) and not case.seed
        wanted.append(is_call and name_of(case.spec) == layer)
    is_wanted = pd.Series(wanted, frame.index, dtype=bool)
    is_again = frame.repeat.astype(bool)
    rows = frame[is_wanted & ~is_again]
    return rows.assign(
        variant=[variant_of(case) for case in rows.case],
        page_size=[case.spec.page_size for case in rows.case],
        lengths=[case.lengths for case in rows.case],
        batch=[case.batch_size for case in rows.case],
        kv_len=[case.kv_len for case in rows.case],
    )


def measure_missing(choice: ChosenCase, **options: Any) -> int:
    """Measure the rounds that a live `choice` lacks; returns how many items were measured.

    A round is one process that measures all backends, odd rounds in reverse order. A round that was
    stopped is not filled up later. `options` and errors are those of `run.study.Sweep`.
    """
    arguments = choice.arguments
    release = arguments["release"]
    calls = []
    for name in arguments["backends"]:
        # A release is FlashInfer's; of other libraries what is installed is measured.
        is_of_release = compared_package(name) == FLASHINFER_PACKAGE
        call = Item(
            backend=name,
            timer=arguments["timer"],
            case=choice.case,
            release=release if is_of_release else "",
        )
        calls.append(call)
    measured: defaultdict[int, set[str]] = defaultdict(set)
    here = machine_slug(describe(DEVICE))
    recorded = store.find(EXPLORER, here)
    for row in recorded.itertuples():
        if item_of(row) in calls:
            measured[row.round].add(row.backend)
    wanted = {*arguments["backends"]}
    complete = sum(wanted <= backends for backends in measured.values())
    first = 1 + max(measured, default=-1)
    ceilings: list[Item] = [Item(name, "graph") for name in CEILINGS]
    items = ceilings + calls
    one_line = " ".join(choice.call.split())
    program = shlex.quote(f"import attnlib; {one_line}")
    missing = arguments["rounds"] - complete
    jobs = []
    for number in range(first, first + missing):
        ordered = items[::-1] if number % 2 else items
        job = Job(
            study=EXPLORER,
            round=number,
            device=DEVICE,
            release=release,
            items=tuple(ordered),
            command=f"python -c {program}",
        )
        jobs.append(job)
    return Sweep(**options).run(jobs)


def package_of(release: str, rows: pd.DataFrame) -> str:
    """The distribution that the records with a release compare; FlashInfer's without any."""
    if not release:
        return FLASHINFER_PACKAGE
    backends = rows.backend[rows.release == release]
    packages = {compared_package(name) for name in backends}
    named = sorted(packages - {""})
    return named[0] if named else FLASHINFER_PACKAGE


def _on_record(axis: str, rows: pd.DataFrame) -> list[Any]:
    """The values of an axis, sorted."""
    values = {*rows[axis]}
    if axis != "release":
        return sorted(values)
    # Rows without one are of libraries that go along with every release.
    releases = values - {""}
    return sorted(releases, key=Version) or [""]


def _matches(rows: pd.DataFrame, axis: str, value: Any) -> pd.Series:
    """The rows with a value; of a release also those of libraries of which none is compared."""
    matches = rows[axis] == value
    if axis == "release":
        compared = package_of(value, rows)
        goes_along = rows.backend.map(lambda name: compared_package(name) != compared)
        matches |= (rows.release == "") & goes_along.astype(bool)
    return matches
