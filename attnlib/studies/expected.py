"""Checks that are data: what an entry of data/claims.yaml expects of records, and if they show it.

A check expects one of three things: a time (`expect`), which kernel family each release ran
(`ran`), or that every trace has a kernel of some name (`kernel`).
"""

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from string import Formatter
from typing import Any

import pandas as pd

from ..kinds.cases import Case
from ..run.frame import good_rows, release_order
from . import STUDIES
from .evidence import (
    CONFIRMED,
    NOT_HERE,
    REFUTED,
    Finding,
    Judged,
    MissingRecordsError,
    counted,
    judge_cases,
    near,
    needed,
    of_sides,
    together,
)

WORDS = ("slower", "faster", "same", "about", "any")
LISTS = ("cases", "backend", "release", "expect")
TOLD = ("figure", "where", "near", "count", "counts", "slower", "faster", "same", "held")
"""What `says` may name."""


@dataclass(frozen=True)
class Expected:
    """A check of one claim; the fields are those of data/README.md."""

    study: str
    cases: tuple[str, ...]
    backend: tuple[str, ...]
    says: str
    release: tuple[str, ...] = ("",)
    expect: tuple[str, ...] = ()
    over: str = ""
    somewhere: bool = False
    timer: str = "graph"
    pinned: dict[str, str] = field(default_factory=dict)
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
    def asked(self) -> list[Case]:
        """The cases that it names."""
        known = _cases(self.study)
        return [case for name in self.cases for case in known[name]]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every backend and what it is compared with, release by release."""
        asked = product(self.release or self.ran, self.backend)
        return [(_side(name, release), _side(self.over, release)) for release, name in asked]

    def find(self, frame: pd.DataFrame, figure: float | None) -> Finding:
        """What the study's records say; MissingRecordsError where one lacks."""
        cases = self.asked
        if self.expect:
            parts = (judge_cases(frame, cases, pair, timer=self.timer) for pair in self.pairs)
            return self._of_times(together(parts), frame, figure)
        if self.ran:
            rows = ran_rows(frame, cases, self.backend[0], [*self.ran])
            both = zip(rows["ran"], rows.release, strict=True)
            holds = [ran in self.ran[release].split(" or ") for ran, release in both]
            return counted(rows, holds, self.says, _families(rows))
        sides = [side for side, _ in self.pairs]
        rows = good_rows(needed(of_sides(frame, *sides), cases, sides))
        names = [{kernel.name for kernel in kernels} for kernels in rows.kernels]
        holds = [self.kernel in found for found in names]
        return counted(rows, holds, self.says, ", ".join(sorted(set().union(*names))))

    def _of_times(self, judged: Judged, frame: pd.DataFrame, figure: float | None) -> Finding:
        told: dict[str, Any] = {name: judged.count(name) for name in ("slower", "faster", "same")}
        told |= {"count": len(judged.verdicts), "counts": judged.counts}
        word = (judged.somewhere if self.somewhere else judged.vote)(*self.expect)
        word = CONFIRMED if self.expect == ("any",) else word
        if figure is not None:
            inside = judged.ratios.min() <= figure <= judged.ratios.max()
            told |= {"figure": f"{figure:g}", "where": "inside" if inside else "outside"}
            told["near"] = near(judged.ratios, figure)
            if self.needs_figure:  # It names no shape: a vote of ours would be of our own grid.
                word = NOT_HERE if inside else REFUTED
        if self.pinned:
            rows = frame[frame.id.isin(judged.records) & frame.backend.isin(self.pinned)]
            held = int((rows.kernel_family == rows.backend.map(self.pinned)).sum())
            told["held"] = f"{held} of {len(rows)}"
            word = word if held == len(rows) else REFUTED
        return judged.finding(word, self.says.format(**told))


def expected(named: str, entry: dict[str, Any]) -> Expected:
    """The check of `named` (a claim); ValueError with that name for whatever is not known."""
    for name in entry:
        require_known(f"check of {named}", name, [each.name for each in fields(Expected)])
    if lacks := [name for name in ("study", "cases", "backend", "says") if name not in entry]:
        raise ValueError(f"check of {named} must have {lacks[0]}, it has {', '.join(entry)}")
    if sum(name in entry for name in ("expect", "ran", "kernel")) != 1:
        raise ValueError(f"check of {named} must have one of expect, ran and kernel")
    if ("over" in entry) != ("expect" in entry):
        raise ValueError(f"check of {named} must have over if it has expect, and only then")
    require_known(f"study in the check of {named}", entry["study"], STUDIES)
    lists = {name: entry[name] for name in LISTS if name in entry}
    lists = {n: tuple(v) if isinstance(v, list) else (v,) for n, v in lists.items()}
    found = Expected(**{"release": () if "ran" in entry else ("",), **entry, **lists})
    for name in found.cases:
        require_known(f"cases in the check of {named}", name, _cases(found.study))
    for word in found.expect:
        require_known(f"expect in the check of {named}", word, WORDS)
    for _, told, _, _ in Formatter().parse(found.says):
        require_known(f"says in the check of {named}", told, (*TOLD, None))
    measured = {
        (name, release)
        for grid in STUDIES[found.study].grids
        for name, release in product(grid.backends, grid.releases)
    }
    for side in dict.fromkeys(side for pair in found.pairs for side in pair if side):
        backend, _, release = side.partition("==")
        require_known(f"backend in the check of {named}", backend, [name for name, _ in measured])
        if release and (backend, release) not in measured:
            raise ValueError(f"release in the check of {named} must be measured, {side} is not")
    return found


def require_known(what: str, name: Any, known: Collection[Any]) -> None:
    """ValueError, with those that are known, for another name."""
    if not isinstance(name, str | None) or name not in known:
        said = ", ".join(dict.fromkeys(str(each) for each in known if each))
        raise ValueError(f"{what} must be one of {said}, got {name!r}")


def _side(name: str, release: str) -> str:
    return f"{name}=={release}" if name and release and "==" not in name else name


def _cases(study: str) -> dict[str, Sequence[Case]]:
    """The cases of a study: all, and its module's tuples of cases by their names."""
    module = importlib.import_module(f"{__package__}.{study}.study")
    named = {
        name.lower(): value
        for name, value in vars(module).items()
        if isinstance(value, tuple) and value and all(isinstance(each, Case) for each in value)
    }
    return {"all": STUDIES[study].cases, **named}


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
    order = release_order(frame).index
    ran = rows.kernel_family.where(rows.status == "ok", rows.status)
    return rows.assign(ran=ran).sort_values("release", key=lambda r: r.map(order), kind="stable")


def _families(rows: pd.DataFrame) -> str:
    """Each family with the releases that ran it, or with the dtypes where there are several."""
    both = rows["dtype"] + "/" + rows.kv_dtype
    dtypes = both.where(rows["dtype"] != rows.kv_dtype, rows["dtype"])
    seen = (rows.release if dtypes.nunique() == 1 else dtypes).groupby(rows["ran"]).unique()
    return "; ".join(f"{name}: {', '.join(found)}" for name, found in seen.items())
