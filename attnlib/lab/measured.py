"""Is the newest release of a kernel package slower than the one before? `watch --measure`.

Every call of `studies.releases` that the package has a kernel for runs on both releases in turns,
on all GPUs of the machine. A slower call is searched for its release where others lie between, and
becomes a known problem in draft (`data/known`), whose records are those of the study `suite`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from ..core.backends.table import COMPARED
from ..core.spec import require_word
from ..measure.calls.form import Item
from ..measure.stats import FASTER, LEAST_ROUNDS, NOT_SLOWER, SAME, SLOWER, tally
from ..run import store
from ..run.cluster import asked_gpus, local_cluster, measure_on_gpus
from ..run.releases import index_releases, overlay_for, releases_between
from ..run.rows import machine_slug
from ..run.study import Study, Sweep, describe, in_about, mode
from ..studies import PACE
from ..studies.releases import suite
from ..studies.releases.calls import BACKENDS, items_of
from .bisect import bisect
from .known_calls import mode_of

NOT_DECIDED = "not decided"
ROUNDS = 4
"""Of each release, in turns: A B B A."""
PREFIX_OF = {package: library for library, package in COMPARED.items()}
"""Package -> its key in `releases` of a known problem: the prefix of its backends."""
Overlays = dict[str, Path]


@dataclass(frozen=True, eq=False)
class Measured:
    """Release `new` of a package over `base`: a row of `suite.judged` per call and GPU.

    `changed` is the release that made a slower call slower, or why the search found none.
    """

    package: str
    base: str
    new: str
    rows: pd.DataFrame
    changed: Mapping[str, str] = field(default_factory=dict)

    @property
    def slower(self) -> pd.DataFrame:
        """The rows of calls that became slower."""
        return self.rows[self.rows.verdict == SLOWER]

    @property
    def outcome(self) -> str:
        """`slower` if a call is, `not slower` if that is proved of each, else `not decided`."""
        if len(self.slower):
            return SLOWER
        proved = self.rows.verdict.isin((SAME, FASTER))
        return NOT_SLOWER if len(proved) and proved.all() else NOT_DECIDED

    def __str__(self) -> str:
        verdicts = tally(self.rows.verdict, self.rows["rounds"]) or "nothing ran"
        parts = [f"# {self.package} {self.base} to {self.new}: {verdicts}"]
        slowest_first = self.rows.sort_values("ratio", ascending=False)
        for row in slowest_first.itertuples():
            parts.append(
                f"- {row.call}: {row.ratio:.3f} ({row.low:.3f} to {row.high:.3f}), "
                f"{row.verdict}, {row.rounds} rounds, {row.gpu}"
            )
        if len(self.slower):
            title = "## Known problems in draft: check says, when and do before you keep one"
            parts += ["", title, ""]
            parts += ["````yaml", *self.drafts(), "````"]
        return "\n".join(parts)

    def drafts(self) -> list[str]:
        """A known problem for each mode and release with slower calls, as YAML."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for row in self.slower.itertuples():
            since = self.changed.get(row.call, self.new)
            key = (mode_of(row.case), row.backend, since)
            calls = groups.setdefault(key, [])
            calls.append(row.call)
        drafts = []
        for (call_mode, backend, since), calls in groups.items():
            draft = self._draft(call_mode, backend, since, calls)
            drafts.append(draft)
        return drafts

    def _draft(
        self,
        call_mode: str,
        backend: str,
        since: str,
        calls: list[str],
    ) -> str:
        library = PREFIX_OF[self.package]
        key = "sglang-kernel" if self.package == "sglang-kernel" else library
        if since[:1].isdigit():
            first = since
        else:
            first = self.new
        gpu = self.slower.gpu.iloc[0].split("-")[1]
        named = "; ".join(dict.fromkeys(calls))
        return f"""\
{key}-{first.replace(".", "-")}-{call_mode.replace("_", "-")}:
  what: slower
  says: "{call_mode} takes longer than in {self.base}: {named}"
  releases:
    {key}: {{since: {first}, until: {self.new}}}
  when: [mode is {call_mode}, gpu is sm90]
  record:
    study: suite
    gpu: {gpu}
    pair: [{backend}=={self.new}, {backend}=={self.base}]
  do: pin {self.base}
  links: []
  example: {{stack: {key}=={self.new}, mode: {call_mode}, gpu: sm90}}
  silent: {{stack: {key}=={self.base}, gpu: sm80}}
"""


def measure(
    package: str,
    base: str = "",
    new: str = "",
    *,
    overlays: Overlays | None = None,
) -> Measured:
    """Measure the newest release of a package beside the one before, and search what is slower.

    Without a GPU it takes what is on record of the study `suite`.

    Parameters
    ----------
    package : str
        `flashinfer-python` or `sglang-kernel`.
    base, new : str
        Releases; by default the last two that pip finds.
    overlays : dict of str to Path, optional
        `NAME==VERSION` -> a folder with that release.

    Returns
    -------
    Measured
        Printed, a page in Markdown.

    Raises
    ------
    ValueError
        For another package, and for one release without the other.
    RuntimeError
        Where pip finds no release; where a sweep holds the GPU.

    Examples
    --------
    >>> measure("flashinfer-python")  # doctest: +SKIP
    """
    require_package(package)
    if bool(base) != bool(new):
        raise ValueError(f"base and new must be given together, got {base!r} and {new!r}")
    known = [] if base else index_releases(package)
    if not base:
        base, new = known[-2:]
    sweep = Sweep(overlays=overlays or {})
    items = items_of(package)
    if mode() == "live":
        for release in (base, new):
            overlay_for(package, release, sweep.overlays)
        machines = _measure_all(study_of(items, base, new), sweep)
    else:
        machines = store.machines(suite.STUDY.name)
    rows = _judged(items, machines, base, new)
    found = Measured(package, base, new, rows)
    if mode() != "live" or not len(found.slower):
        return found
    between = releases_between(
        releases=known or index_releases(package),
        first=base,
        last=new,
    )
    return replace(found, changed=_searched(found, between, sweep))


def drafts_of_history(frame: pd.DataFrame, package: str) -> list[str]:
    """Known problems in draft, as YAML, of the releases that a history proves slower.

    Each release is judged beside the one before (`suite.steps`), so a row has three rounds at least
    or no verdict. A release between two that are on record may be the one that changed.

    Parameters
    ----------
    frame : pandas.DataFrame
        Records of `suite` on one GPU, as `load` gives them.
    package : str
        `flashinfer-python` or `sglang-kernel`.

    Raises
    ------
    ValueError
        For another package, and for records of several GPUs.

    Examples
    --------
    >>> drafts_of_history(frame, "flashinfer-python")  # doctest: +SKIP
    """
    require_package(package)
    rows = suite.steps(frame, package)
    if rows.empty:
        return []
    of_kind = BACKENDS[package]
    backends = [of_kind[case.kind] for case in rows.case]
    machine = machine_slug({"gpu": frame.gpu.iloc[0], "gpu_id": frame.gpu_id.iloc[0]})
    rows = rows.assign(gpu=machine, backend=backends)
    drafts = []
    for (base, new), of_step in rows.groupby(["base", "new"], sort=False):
        found = Measured(package, base, new, of_step)
        drafts += found.drafts()
    return drafts


def require_package(package: str) -> None:
    """ValueError that lists the packages whose releases can be compared."""
    known = [name for name in BACKENDS if name in PREFIX_OF]
    require_word("package", package, known)


def study_of(items: list[Item], base: str, new: str) -> Study:
    """`suite` over two releases."""
    grids = suite.grids_of(items, (base, new), ROUNDS)
    return replace(suite.STUDY, grids=tuple(grids))


def minutes(package: str) -> str:
    """How long it takes on one GPU, kernels built, in words; without one, that records are read."""
    count = len(items_of(package))
    processes = 2 * ROUNDS
    records = processes * count
    time = in_about((processes, records), pace=PACE)
    planned = f"{count} calls on two releases, {ROUNDS} rounds{time} on one GPU"
    if mode() == "live":
        return planned
    return f"no GPU here: what is on record is read, with its rounds; to measure are {planned}"


def _measure_all(study: Study, sweep: Sweep) -> list[str]:
    """Measure on all GPUs; the machines."""
    gpus = asked_gpus("all")
    if len(gpus) == 1:
        sweep.measure(study)
        return [machine_slug(describe(study.device))]
    environments = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    with local_cluster(environments) as client:
        _, machines = measure_on_gpus(study, sweep, client)
        return machines


def _judged(
    items: list[Item],
    machines: list[str],
    base: str,
    new: str,
) -> pd.DataFrame:
    """The rows of every machine, each judged as a table of its own."""
    backends = dict.fromkeys(item.backend for item in items)
    tables = []
    for machine in machines:
        frame = store.find(suite.STUDY.name, machine)
        for backend in backends:
            mine = frame[frame.backend == backend]
            rows = suite.named_rows(mine)
            table = suite.judged(rows, base, new)
            if len(table):
                tables.append(table.assign(gpu=machine, backend=backend))
    if not tables:
        return pd.DataFrame(columns=[*suite.STEP_COLUMNS, "gpu", "backend"])
    return pd.concat(tables, ignore_index=True)


def _searched(found: Measured, between: list[str], sweep: Sweep) -> dict[str, str]:
    """Name of a slower call -> the release that made it slower, or why that is not known."""
    if len(between) == 2:
        return dict.fromkeys(found.slower.call, found.new)
    changed = {}
    for row in found.slower.itertuples():
        item = Item(row.backend, row.timer, row.case)
        study = study_of(
            items=[item],
            base=found.base,
            new=found.new,
        )
        try:
            search = bisect(
                study,
                row.case,
                package=found.package,
                good=found.base,
                bad=found.new,
                backend=row.backend,
                rounds=LEAST_ROUNDS,
                releases=between,
                overlays=sweep.overlays,
            )
            changed[row.call] = search.changed
        except (ValueError, RuntimeError) as error:
            changed[row.call] = f"not found: {error}"
    return changed
