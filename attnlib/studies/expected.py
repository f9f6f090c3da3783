"""Checks that are data: what data/claims.yaml expects of records, and whether they show it.

| field | meaning |
|---|---|
| study, cases | whose records; `all` cases of the study, or a tuple of its `study.py` by name |
| least_kv_len | of these cases those with at least so many tokens (0) |
| backend, release | which backends, of which releases; each one name or a list |
| expect, over | `slower`, `faster`, `same` (or a list) than `over`; or `about`, the figure |
| somewhere | true: one case is enough |
| pinned | the kernel family that all records of `over` must have run |
| ran | release -> the kernel family that `backend` ran there, or several with ` or ` between |
| kernel | the name of a kernel that every trace of `backend` has |
| says | the reason in words, with the counts named in `{}` |

Each has one of `expect`, `ran` and `kernel`. A name with `==` has its own release.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from string import Formatter
from typing import Any

import pandas as pd

from ..kinds.cases import Case
from ..run.frame import good_rows, release_order
from . import STUDIES
from .evidence import (
    REFUTED,
    Finding,
    Judged,
    MissingRecordsError,
    figure_word,
    judge_cases,
    near,
    needed,
    of_sides,
    together,
    vote,
)

WORDS = ("slower", "faster", "same", "about")
COUNTS = ("figure", "where", "near", "count", "counts", "slower", "faster", "same", "held")
"""What `says` may name."""


@dataclass(frozen=True)
class Expected:
    """One such check; its fields are those of the table above."""

    study: str
    cases: str
    backend: tuple[str, ...]
    says: str
    release: tuple[str, ...] = ("",)
    least_kv_len: int = 0
    expect: tuple[str, ...] = ()
    over: str = ""
    somewhere: bool = False
    pinned: str = ""
    ran: dict[str, str] = field(default_factory=dict)
    kernel: str = ""

    @property
    def studies(self) -> tuple[str, ...]:
        """The study whose records it reads."""
        return (self.study,)

    @property
    def needs_figure(self) -> bool:
        """Whether it compares with the figure that its claim names."""
        return "about" in self.expect

    @property
    def sides(self) -> list[str]:
        """Every backend of every release, as `evidence` names them."""
        return [_side(name, release) for release in self.release for name in self.backend]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every backend and what it is compared with, release by release."""
        found = [(name, release) for release in self.release for name in self.backend]
        return [(_side(name, r), _side(self.over, r)) for name, r in found]

    def chosen(self) -> list[Case]:
        """The cases that decide."""
        found = _cases(self.study)[self.cases]
        return [c for c in found if not self.least_kv_len or c.kv_len >= self.least_kv_len]

    def find(self, frame: pd.DataFrame, figure: float | None) -> Finding:
        """What the study's records say; MissingRecordsError where one lacks."""
        if self.expect:
            return _find_times(self, frame, figure)
        return _find_families(self, frame) if self.ran else _find_kernel(self, frame)


def expected(named: str, entry: dict[str, Any]) -> Expected:
    """The check of `named` (a claim); ValueError with that name for whatever is not known."""
    known = {each.name: each for each in fields(Expected)}
    for name in entry:
        _require(f"check of {named}", name, known)
    for name, each in known.items():
        if each.default is each.default_factory is MISSING and name not in entry:
            raise ValueError(f"check of {named} must have {name}, it has {', '.join(entry)}")
    _require(f"study in the check of {named}", entry["study"], STUDIES)
    _require(f"cases in the check of {named}", entry["cases"], _cases(entry["study"]))
    if sum(name in entry for name in ("expect", "ran", "kernel")) != 1:
        raise ValueError(f"check of {named} must have one of expect, ran and kernel")
    lists = {n: _tuple(entry[n]) for n in ("backend", "release", "expect") if n in entry}
    found = Expected(**{**entry, **lists})
    for word in found.expect:
        _require(f"expect in the check of {named}", word, WORDS)
    if bool(found.over) != bool(found.expect):
        raise ValueError(f"check of {named} must have over if it has expect, and only then")
    _require_measured(named, found)
    for _, name, _, _ in Formatter().parse(found.says):
        if name is not None:
            _require(f"says in the check of {named}", name, COUNTS)
    return found


def _require_measured(named: str, found: Expected) -> None:
    grids = STUDIES[found.study].grids
    measured = {(name, release) for g in grids for name in g.backends for release in g.releases}
    wanted = [*found.sides, *(over for _, over in found.pairs if over)]
    wanted += [_side(name, release) for release in found.ran for name in found.backend]
    for side in wanted:
        backend, _, release = side.partition("==")
        _require(f"backend in the check of {named}", backend, [name for name, _ in measured])
        if release and (backend, release) not in measured:
            raise ValueError(f"release in the check of {named} must be measured, {side} is not")


def _require(what: str, name: Any, known: Any) -> None:
    if name not in known:
        raise ValueError(f"{what} must be one of {', '.join(dict.fromkeys(known))}, got {name!r}")


def _tuple(given: Any) -> tuple[str, ...]:
    return tuple(given) if isinstance(given, list) else (given,)


def _side(name: str, release: str) -> str:
    return f"{name}=={release}" if name and release and "==" not in name else name


def _cases(study: str) -> dict[str, Sequence[Case]]:
    """The cases of a study by the names that its module gives them, in small letters."""
    module = importlib.import_module(f"{__package__}.{study}.study")
    named = {
        name.lower(): value
        for name, value in vars(module).items()
        if isinstance(value, tuple) and value and all(isinstance(each, Case) for each in value)
    }
    return {"all": STUDIES[study].cases, **named}


def _find_times(asked: Expected, frame: pd.DataFrame, figure: float | None) -> Finding:
    judged = together(judge_cases(frame, asked.chosen(), pair) for pair in asked.pairs)
    pinned = frame[frame.id.isin(judged.records) & (frame.backend == asked.over)]
    held = int((pinned.kernel_family == asked.pinned).sum())
    reason = asked.says.format(
        **_told(judged, figure),
        counts=judged.counts,
        held=f"{held} of {len(pinned)}",
    )
    return judged.finding(_word(asked, judged, figure, as_pinned=held == len(pinned)), reason)


def _word(asked: Expected, judged: Judged, figure: float | None, *, as_pinned: bool) -> str:
    if asked.pinned and not as_pinned:
        return REFUTED
    if asked.needs_figure:
        assert figure is not None, "load_claims lets no such claim through"
        return figure_word(judged.ratios.tolist(), figure)
    return (judged.somewhere if asked.somewhere else judged.vote)(*asked.expect)


def _told(judged: Judged, figure: float | None) -> dict[str, object]:
    """What a reason may say of the cases, and of how they compare with a figure."""
    told: dict[str, object] = {name: judged.count(name) for name in ("slower", "faster", "same")}
    told["count"] = len(judged.verdicts)
    if figure is not None:
        inside = judged.ratios.min() <= figure <= judged.ratios.max()
        told |= {"figure": f"{figure:g}", "where": "inside" if inside else "outside"}
        told["near"] = near(judged.ratios, figure)
    return told


def _find_kernel(asked: Expected, frame: pd.DataFrame) -> Finding:
    rows = good_rows(needed(of_sides(frame, *asked.sides), asked.chosen(), asked.sides))
    kernels = [{kernel.name for kernel in ran} for ran in rows.kernels]
    held = sum(asked.kernel in names for names in kernels)
    reason = asked.says.format(held=f"{held} of {len(rows)}")
    seen = ", ".join(sorted(set().union(*kernels)))
    return Finding(vote(held, len(rows) - held), reason, seen, records=tuple(rows.id))


def _find_families(asked: Expected, frame: pd.DataFrame) -> Finding:
    rows = ran_rows(frame, asked.chosen(), asked.backend[0], list(asked.ran))
    families = {release: words.split(" or ") for release, words in asked.ran.items()}
    both = zip(rows["ran"], rows.release, strict=True)
    held = sum(ran in families[release] for ran, release in both)
    reason = asked.says.format(held=f"{held} of {len(rows)}")
    measured = _seen(rows)
    return Finding(vote(held, len(rows) - held), reason, measured, records=tuple(rows.id))


def ran_rows(
    frame: pd.DataFrame, cases: Sequence[Case], backend: str, releases: Sequence[str]
) -> pd.DataFrame:
    """Records of `backend`, oldest release first; `ran` is the traced family, or what went wrong.

    Raises MissingRecordsError unless every case is on record in every release.
    """
    rows = frame[(frame.backend == backend) & frame.release.isin(releases)]
    rows = rows[rows.case.isin(cases)]
    have, want = len(rows.drop_duplicates(["case", "release"])), len(cases) * len(releases)
    if have != want:
        raise MissingRecordsError(f"{backend}: {have} of {want} records in {', '.join(releases)}")
    order = {release: place for place, release in enumerate(release_order(frame))}
    ran = rows.kernel_family.where(rows.status == "ok", rows.status)
    return rows.assign(ran=ran).sort_values("release", key=lambda r: r.map(order), kind="stable")


def _seen(rows: pd.DataFrame) -> str:
    """Each family with the releases that ran it, or with the dtypes where there are several."""
    both = rows["dtype"] + "/" + rows.kv_dtype
    dtypes = both.where(rows["dtype"] != rows.kv_dtype, rows["dtype"])
    seen = (rows.release if dtypes.nunique() == 1 else dtypes).groupby(rows["ran"]).unique()
    return "; ".join(f"{name}: {', '.join(found)}" for name, found in seen.items())
