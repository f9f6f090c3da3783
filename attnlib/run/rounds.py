"""Paired rounds of two releases, A B B A: those on record and, on a GPU, new ones.

Even rounds run the reference first, odd ones the candidate, each release in a fresh process.
Rounds are numbered on through all pairs of a backend and case, so a round belongs to one pair of
releases; a round cut short or failed belongs to none. That is how a search resumes after it was
stopped, and how it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..kinds.decode.case import DecodeCase
from ..kinds.item import Item
from . import store
from .jobs import Job
from .record import Record
from .study import run_missing

TIMER = "graph"
"""How engines run decode, and what the headline numbers of the studies are taken with."""


@dataclass(frozen=True)
class Rounds:
    """The paired rounds of one backend and case: those on record and, if `live`, new ones."""

    study: str
    machine: str
    device: str
    backend: str
    case: DecodeCase
    command: str = ""
    live: bool = False
    overlays: dict[str, Path] = field(default_factory=dict)
    on_round: Callable[[str], object] | None = None

    def records(self) -> list[Record]:
        """The records of this backend and case, oldest first."""
        try:
            records = store.read(self.study, self.machine)
        except FileNotFoundError:
            return []
        mine = (self.backend, TIMER, self.case)
        return [r for r in records if (r.item.backend, r.item.timer, r.item.case) == mine]

    def pairs(self, reference: str, candidate: str) -> list[tuple[Record, Record]]:
        """(reference, candidate) of every whole round of the two in which both are ok."""
        rounds: dict[int, dict[str, Record]] = {}
        for record in self.records():
            rounds.setdefault(record.round, {})[record.item.release] = record
        whole = [seen for _, seen in sorted(rounds.items()) if set(seen) == {reference, candidate}]
        pairs = [(seen[reference], seen[candidate]) for seen in whole]
        good = [all(r.status == "ok" and not r.throttled for r in pair) for pair in pairs]
        return [pair for pair, kept in zip(pairs, good, strict=True) if kept]

    def at_least(self, count: int, reference: str, candidate: str) -> list[tuple[Record, Record]]:
        """`pairs`, of which there must be `count`: measured now where missing (live).

        Raises RuntimeError for a release that fails, FileNotFoundError in replay for records that
        are not there.
        """
        missing = count - len(self.pairs(reference, candidate))
        if missing > 0 and not self.live:
            raise FileNotFoundError(
                f"release {candidate} must have {count} rounds against {reference} on record to "
                f"be replayed, it has {count - missing} in {self.study!r} on {self.machine!r}"
            )
        for _ in range(missing):
            number = self.measure(reference, candidate)
            if self.on_round:
                self.on_round(f"round {number}: {candidate} against {reference}")
        return self.pairs(reference, candidate)

    def measure(self, reference: str, candidate: str) -> int:
        """One more round: two fresh processes, in the order its number asks for; the number."""
        number = 1 + max((record.round for record in self.records()), default=-1)
        order = (candidate, reference) if number % 2 else (reference, candidate)
        for release in order:
            item = Item(self.backend, TIMER, self.case, release)
            job = Job(self.study, number, self.device, release, (item,), self.command)
            run_missing([job], overlays=self.overlays)
            self._require_ok(number, release)
        return number

    def _require_ok(self, number: int, release: str) -> None:
        for record in self.records():
            mine = (record.round, record.item.release) == (number, release)
            if mine and record.status != "ok":
                words = " ".join(record.reason.split())
                raise RuntimeError(f"release {release} must run, it was {record.status}: {words}")
