"""What a view can show: a study's records, or what this GPU measures; and how a case is chosen.

A model is the attention that one GPU has of it. What its name leaves open, `variant` says: dtypes
of query and cache, window (`bfloat16/float8_e4m3fn, window 4096`), or for MLA
query heads, attended tokens and cache format (`128 heads, dense, bfloat16`).
"""

import math
import os
import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pandas as pd
from packaging.version import Version

from ..core.backends.table import BACKENDS, compared_package
from ..core.layer import MODELS, name_of, parse_layer
from ..core.spec import LENGTHS, MLA, AttnSpec, MlaSpec, require_int, require_word
from ..kinds.decode.case import DecodeCase
from ..kinds.item import Item
from ..kinds.mla.case import MlaCase
from ..run import store
from ..run.frame import item_of
from ..run.jobs import Job
from ..run.rows import machine_slug
from ..run.study import Sweep, describe, mode
from ..studies import STUDIES

NAMES = (*MODELS, MLA)
"""The models that a view offers; it takes any layer (`core.layer`)."""
AXES = ("release", "timer", "variant", "page_size", "lengths", "batch", "kv_len")
"""What makes a case of a model, in the order in which each narrows the next."""
LIVE, EXPLORER = "live", "explorer"
"""The name of the source that measures here, and the study that keeps its records."""
DEVICE, CEILINGS = "cuda", ("copy", "matmul")
ROUNDS = 3
"""Measured by default."""
NO_WISHES: Mapping[str, Any] = {}
WORDS = ("model", "heads", "records", "machine", "release", "timer", "variant", "lengths")
SIZES = ("tp", "page_size", "batch", "kv_len", "rounds")
PREFERRED = {
    "timer": "graph",
    "variant": "bfloat16",
    "page_size": 16,
    "lengths": "fixed",
    "batch": 16,
    "kv_len": 8192,
}
BASELINES = ("flashinfer-fa2", "flashinfer-mla-fa2")
"""The backends that others are compared with, where they are on record."""
LIVE_OPTIONS: dict[str, list[Any]] = {
    "release": [""],
    "timer": ["graph", "graph-cold", "eager", "profiler"],
    "variant": ["bfloat16", "float16", "bfloat16/float8_e4m3fn", "float8_e4m3fn"],
    "page_size": [1, 16, 32, 64, 128],
    "lengths": [*LENGTHS],
    "batch": [2**n for n in range(10)],
    "kv_len": [2**n for n in range(7, 18)],
}


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
class Choice:
    """A case, and how it was chosen.

    `arguments` are all arguments of `attnlib.view` that give it again, `options` what each could be
    instead, `notes` say of each wish that was not met what it must be. `rows` are the records of
    the case, release and timer, of all backends.
    """

    arguments: dict[str, Any]
    options: dict[str, list[Any]]
    notes: dict[str, str]
    case: DecodeCase | MlaCase
    rows: pd.DataFrame

    @property
    def call(self) -> str:
        """The Python call that gives the view again."""
        named = [f"    {name}={value!r},\n" for name, value in self.arguments.items()]
        return f"attnlib.view(\n{''.join(named)})"


def layer_named(model: str, tp: int = 1, heads: str = "", head_dim: int = 0) -> str:
    """How a view calls a layer: the model as given, or its heads; the first of `NAMES` if nothing
    is given. ValueError for more than `MLA`, and what `core.layer.parse_layer` raises."""
    if model == MLA:
        if heads or head_dim or tp != 1:
            raise ValueError(f"tp, heads and head_dim must be left out with {MLA}")
        return MLA
    given = model or ("" if heads else NAMES[0])
    layer = parse_layer(heads, model=given, tp=tp, head_dim=head_dim)
    if heads or head_dim:
        return name_of(layer)
    return f"{given} at TP {tp}" if tp > 1 else given


def require_kinds(wishes: Mapping[str, Any]) -> None:
    """ValueError for a wish of another kind: words, sizes of 1 or more, a list of backends."""
    for name in WORDS:
        if not isinstance(wishes.get(name), str | None):
            raise ValueError(f"{name} must be text, got {wishes[name]!r}")
    for name in SIZES:
        if wishes.get(name) is not None:
            require_int(name, wishes[name])
    backends = wishes.get("backends") or ()
    if not isinstance(backends, list | tuple) or {*map(type, backends)} - {str}:
        raise ValueError(f"backends must be a list of names, got {backends!r}")


def sources_of(model: str) -> list[tuple[str, str]]:
    """Study and machine of all published records of calls of `model`, reference machines first.

    The environment variable ATTNLIB_MACHINE leaves only the machines that it names, as the
    argument `machine` of a view does; ValueError lists them if there is none.
    """
    pairs = []
    for study in STUDIES.values():
        machines = store.machines(study.name)
        machines.sort(key=lambda machine: machine != study.reference_machine)
        pairs += [(study.name, machine) for machine in machines]
    layer = _recorded_as(model)
    pairs = [pair for pair in pairs if layer in _models(*pair, store.stamp(*pair))]
    return store.on_machine("ATTNLIB_MACHINE", os.environ.get("ATTNLIB_MACHINE", ""), pairs)


def _recorded_as(model: str) -> str:
    """The name of a layer with the heads of `model`, by which its records are looked up."""
    return MLA if model == MLA else name_of(parse_layer(model=model))


def _layers_on_record() -> str:
    """The heads of all layers that have records, by head_dim, in words."""
    pairs = [(study, machine) for study in STUDIES for machine in store.machines(study)]
    names = {name for pair in pairs for name in _models(*pair, store.stamp(*pair))} - {MLA}
    heads = defaultdict(list)
    for layer in (parse_layer(model=name) for name in names):
        heads[layer.head_dim].append(layer.heads)
    return "; ".join(f"head_dim {dim}: {', '.join(sorted(heads[dim]))}" for dim in sorted(heads))


def find_source(
    model: str, records: str = "", machine: str = "", wishes: Mapping[str, Any] = NO_WISHES
) -> Source:
    """The records that serve `model`: by default `live` in live mode if no machine is named, else
    those that hold most of `wishes` and, among them, the newest release.

    `machine` is a folder of data/records, or a part of its name such as `h100`. ValueError lists
    what there is. RuntimeError says why nothing can be measured here.
    """
    if records == LIVE and machine:
        raise ValueError(f"machine must be left out with records='live', got {machine!r}")
    if records == LIVE or (not records and not machine and mode() == LIVE and model != MLA):
        if reason := why_not_live(model):
            raise RuntimeError(f"{model} must be measured on a CUDA GPU: {reason}")
        here = machine_slug(describe(DEVICE))
        return Source(LIVE, here, store.find(EXPLORER, here))
    pairs = sources_of(model)
    if not pairs:
        raise ValueError(
            f"no records on {model} are published: measure it on a GPU (records='live'), or take a "
            f"layer on record: {_layers_on_record()}"
        )
    if records:
        require_word("records", records, list(dict.fromkeys((LIVE, *(name for name, _ in pairs)))))
        pairs = [pair for pair in pairs if pair[0] == records]
    pairs = store.on_machine("machine", machine, pairs)
    best = max(pairs, key=lambda pair: _serves(pair, model, wishes))
    return Source(*best, store.load(*best))


def _serves(pair: tuple[str, str], model: str, wishes: Mapping[str, Any]) -> tuple[int, Version]:
    """How many wishes the records of a study and machine hold, and the newest release of those."""
    rows, held = _holding(wishes, calls_of(store.load(*pair), model))
    return held, Version(_on_record("release", rows)[-1] or "0")


def _holding(wishes: Mapping[str, Any], rows: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The rows that hold the wishes, each where any row left holds it, and how many these are."""
    held = 0
    for axis in AXES:
        wish = wishes.get(axis)
        if wish is not None and (rows[axis] == wish).any():
            rows, held = rows[_matches(rows, axis, wish)], held + 1
    backends = {*(wishes.get("backends") or ())} & {*rows.backend}
    return (rows[rows.backend.isin(backends)] if backends else rows), held + len(backends)


def why_not_live(model: str) -> str:
    """Why `model` cannot be measured here, or the empty string."""
    if model == MLA:
        return f"{MLA} is measured by its study alone, sparse_mla"
    try:
        if mode() == LIVE:
            return ""
    except RuntimeError as error:
        return str(error)
    if os.environ.get("ATTNLIB_MODE") == "replay":
        return "ATTNLIB_MODE=replay asks for records; unset it to measure"
    return "torch sees no CUDA GPU"


def choose(source: Source, model: str, wishes: Mapping[str, Any]) -> Choice:
    """Choose a value on each axis, backends, and whom they are compared with.

    A value is as wished (None is no wish) or what is usual; the usual release is the newest that
    holds the other wishes. An axis offers what is on record for the axes before it; this GPU takes
    any value.
    """
    rows = calls_of(source.frame, model)
    arguments: dict[str, Any] = {"model": model, "records": source.records}
    if not source.is_live:
        arguments["machine"] = source.machine
    options: dict[str, list[Any]] = {}
    notes: dict[str, str] = {}

    def refuse(name: str, *wishes: Any) -> None:
        have, got = (", ".join(map(repr, values)) for values in (options[name], wishes))
        notes[name] = f"{name} must be one of {have} with the choices before it, got {got}"

    for axis in AXES:
        options[axis] = [*LIVE_OPTIONS[axis]] if source.is_live else _on_record(axis, rows)
        wish = wishes.get(axis)
        if source.is_live and wish not in (None, *options[axis]):
            options[axis].append(wish)
        if wish not in (None, *options[axis]):
            refuse(axis, wish)
        usual = _usual(axis, options[axis])
        if axis == "release":
            newest = _on_record(axis, _holding(wishes, rows)[0])[-1]
            usual = newest if newest in options[axis] else usual
        arguments[axis] = wish if wish in options[axis] else usual
        rows = rows[_matches(rows, axis, arguments[axis])]
    options["backends"] = [*BACKENDS] if source.is_live else sorted(set(rows.backend))
    usual = ["flashinfer-fa2", "flashinfer-fa3"] if source.is_live else options["backends"]
    wished = wishes.get("backends") or ()
    if unknown := [name for name in wished if name not in options["backends"]]:
        refuse("backends", *unknown)
    backends = [name for name in options["backends"] if name in wished] or usual
    arguments["backends"] = options["against"] = backends
    against = wishes.get("against")
    if against not in (None, *backends):
        refuse("against", against)
    baseline = next((name for name in BASELINES if name in backends), backends[0])
    arguments["against"] = against if against in backends else baseline
    if source.is_live:
        arguments["rounds"] = wishes.get("rounds") or ROUNDS
        require_int("rounds", arguments["rounds"])
    if not source.is_live:
        return Choice(arguments, options, notes, rows.case.iloc[0], rows)
    dtype, _, kv_dtype = arguments["variant"].partition("/")
    sizes = {"page_size": arguments["page_size"], "dtype": dtype, "kv_dtype": kv_dtype}
    size = arguments["batch"], arguments["kv_len"], arguments["lengths"]
    case = DecodeCase(parse_layer(model=arguments["model"], **sizes), *size)
    return Choice(arguments, options, notes, case, rows)


def variant_of(spec: AttnSpec | MlaSpec) -> str:
    """What the model's name leaves open."""
    if isinstance(spec, MlaSpec):
        attended = f"top {spec.top_k}" if spec.top_k else "dense"
        return f"{spec.num_qo_heads} heads, {attended}, {spec.kv_format}"
    window = f", window {spec.window}" if spec.window else ""
    return spec.dtypes + window


def calls_of(frame: pd.DataFrame, model: str) -> pd.DataFrame:
    """The rows that are calls of `model`, without seeded lengths, with a column per axis."""
    layer = _recorded_as(model)
    wanted = [
        isinstance(case, DecodeCase | MlaCase) and not case.seed and name_of(case.spec) == layer
        for case in frame.case
    ]
    rows = frame[pd.Series(wanted, frame.index, dtype=bool) & ~frame.repeat.astype(bool)]
    return rows.assign(
        variant=[variant_of(case.spec) for case in rows.case],
        page_size=[case.spec.page_size for case in rows.case],
        lengths=[case.lengths for case in rows.case],
        batch=[case.batch_size for case in rows.case],
        kv_len=[case.kv_len for case in rows.case],
    )


def measure_missing(choice: Choice, **options: Any) -> int:
    """Measure the rounds that a live `choice` lacks; returns how many items were measured.

    A round is one process that measures all backends, odd rounds in reverse order. A round that was
    stopped is not filled up later. `options` and errors are those of `run.study.Sweep`.
    """
    release, backends = choice.arguments["release"], choice.arguments["backends"]
    calls = []
    for name in backends:
        own_release = release if _has_releases(name) else ""
        calls.append(Item(name, choice.arguments["timer"], choice.case, own_release))
    backends_of: defaultdict[int, set[str]] = defaultdict(set)
    for row in store.find(EXPLORER, machine_slug(describe(DEVICE))).itertuples():
        if item_of(row) in calls:
            backends_of[row.round].add(row.backend)
    complete = sum(set(backends) <= names for names in backends_of.values())
    first = 1 + max(backends_of, default=-1)
    items = [*(Item(name, "graph") for name in CEILINGS), *calls]
    call = " ".join(choice.call.split())
    command = f"python -c {shlex.quote(f'import attnlib; {call}')}"
    jobs = []
    for number in range(first, first + choice.arguments["rounds"] - complete):
        ordered = tuple(reversed(items) if number % 2 else items)
        jobs.append(Job(EXPLORER, number, DEVICE, release, ordered, command))
    return Sweep(**options).run(jobs)


@lru_cache(maxsize=64)
def _models(study: str, machine: str, stamp: object) -> frozenset[str]:
    """The models that records hold calls of; files that changed have another stamp."""
    frame = store.load(study, machine)
    cases = {case for case in frame.case if isinstance(case, DecodeCase | MlaCase)}
    return frozenset(name_of(case.spec) for case in cases if not case.seed)


def _has_releases(backend: str) -> bool:
    """Whether studies compare releases of the backend's library."""
    return bool(compared_package(backend))


def _on_record(axis: str, rows: pd.DataFrame) -> list[Any]:
    if axis == "release":
        # Rows without one are of libraries that belong to the view of every release.
        return sorted(set(rows.release) - {""}, key=Version) or [""]
    return sorted(set(rows[axis]))


def _usual(axis: str, options: list[Any]) -> Any:
    """The newest release, the preferred word, the size nearest to the preferred one, the first."""
    if axis == "release":
        return options[-1]
    preferred = PREFERRED[axis]
    if isinstance(preferred, int):
        return min(options, key=lambda size: abs(math.log(size / preferred)))
    return preferred if preferred in options else options[0]


def _matches(rows: pd.DataFrame, axis: str, value: Any) -> pd.Series:
    matches = rows[axis] == value
    if axis == "release":
        matches |= (rows.release == "") & ~rows.backend.map(_has_releases).astype(bool)
    return matches
