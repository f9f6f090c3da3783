"""Two releases, measured round by round until a verdict: shared by `bisect` and `compare_releases`.

Even rounds run the base first, odd ones the new release (A B B A), each in a fresh process. A round
has a number of its own, so it belongs to one pair of releases; one that was cut short, failed or
was throttled belongs to none. That is how a search resumes after it was stopped.

Rounds are judged at `looks` alone, such as after 4, 8, 16 and 24 of them, and the looks share the
chance of a wrong verdict (Bonferroni, `stats.judge_ratios`). Rounds between two looks, as a search
that was stopped leaves them, are not judged before the next one. The rounds of a study are one
look: nobody looked between them. Those of a search were looked at; they are judged as at `looks`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from ..measure.calls.form import Item
from ..measure.stats import INCONCLUSIVE, Ratio, judge_ratios
from . import store
from .frame import item_of
from .jobs import Job
from .study import Sweep

PREFIX = "bisect_"
"""Of the study of a search's records: `bisect_<study>`."""
TIMER = "graph"
"""How engines run decode, and what the headline numbers of the studies are taken with."""
SPARE_ROUNDS = 12
"""How many rounds a look may take beyond its number, because some are throttled."""
Row = Any
"""A row of a frame of records, as `DataFrame.itertuples` gives it."""
RowPair = tuple[Row, Row]
Sides = dict[str, dict[int, Row]]
"""Release -> its rows by the number of the round."""


@dataclass
class Comparison:
    """The whole rounds of each item (less its release) that `both` releases ran: base, then new.

    `pairs` has the items that are compared, from the start. `study` is that of the rounds that were
    judged at `looks`. `failed` has a record of each item that one of them could not run.
    """

    study: str
    both: tuple[str, str]
    looks: Sequence[int]
    not_slower: float = 0.0
    pairs: dict[Item, list[RowPair]] = field(default_factory=dict)
    failed: dict[Item, Row] = field(default_factory=dict)

    def take(self, frame: pd.DataFrame) -> None:
        """Take the rounds of items that both releases tried, unless there were more before.

        Of an item that failed on both, the base's record is kept.
        """
        base, new = self.both
        tried: dict[Item, Sides] = {}
        mine = frame[frame.release.isin(self.both)]
        for row in mine.itertuples():
            item = replace(item_of(row), release="")
            if item in self.pairs:
                sides = tried.setdefault(item, {base: {}, new: {}})
                sides[row.release][row.round] = row
        for item, sides in tried.items():
            of_base = sides[base]
            of_new = sides[new]
            good = []
            for number in sorted(of_base.keys() & of_new.keys()):
                base_row = of_base[number]
                new_row = of_new[number]
                if _is_good(base_row) and _is_good(new_row):
                    good.append((base_row, new_row))
            were_more = len(self.pairs[item]) > len(good)
            if of_base and of_new and not were_more:
                self.pairs[item] = good
            for rows in (of_new, of_base):
                for row in rows.values():
                    if row.status != "ok":
                        self.failed[item] = row

    def verdicts(self) -> dict[Item, Ratio]:
        """New over base, all items as one table; an item before its first look has none."""
        table = {}
        looks = 1
        for item, pairs in self.pairs.items():
            count = len(pairs)
            study = ""
            if pairs:
                study = pairs[0][0].study
            if study == self.study:
                looks = len(self.looks)
                passed = [look for look in self.looks if look <= count]
                count = max(passed, default=0)
            elif study.startswith(PREFIX):
                looks = len(self.looks)
            if count:
                judged = pairs[:count]
                base_us = [base.run_us for base, _ in judged]
                new_us = [new.run_us for _, new in judged]
                table[item] = (new_us, base_us)
        ratios = judge_ratios(
            list(table.values()),
            not_slower=self.not_slower,
            widened=True,
            looks=looks,
        )
        return dict(zip(table, ratios, strict=True))

    def undecided(self) -> list[Item]:
        """The items that neither failed nor have a verdict."""
        done = set(self.failed)
        for item, ratio in self.verdicts().items():
            if ratio.verdict != INCONCLUSIVE:
                done.add(item)
        return [item for item in self.pairs if item not in done]

    def measure(
        self,
        sweep: Sweep,
        records: Callable[[], pd.DataFrame],
        *,
        device: str,
        command: str,
        number: int,
    ) -> None:
        """Measure rounds of the items of `pairs`, look by look, until none is undecided.

        `records` gives those that count; `number` is that of the next round. A throttled round is
        measured again, up to `SPARE_ROUNDS` a look, after which its item is given up.
        """
        self.take(records())
        given_up: set[Item] = set()
        for look in self.looks:
            wanted = [item for item in self.undecided() if item not in given_up]
            for _ in range(look + SPARE_ROUNDS):
                going = [item for item in wanted if item not in self.failed]
                short = self._short_of(look, going)
                if not short:
                    break
                step = -1 if number % 2 else 1
                in_turn = short[::step]
                for release in self.both[::step]:
                    items = [replace(item, release=release) for item in in_turn]
                    job = Job(
                        study=self.study,
                        round=number,
                        device=device,
                        release=release,
                        items=tuple(items),
                        command=command,
                    )
                    sweep.run([job])
                number += 1
                self.take(records())
            given_up.update(self._short_of(look, wanted))

    def _short_of(
        self,
        look: int,
        items: Iterable[Item],
    ) -> list[Item]:
        """Those of the items that have fewer rounds than the look asks for."""
        return [item for item in items if len(self.pairs[item]) < look]


def next_round(study: str, machine: str) -> int:
    """The number of the next round of a study on a machine, which is about to be measured."""
    rounds = store.find(study, machine)["round"]
    return 1 + max(rounds, default=-1)


def families_of(rows: Iterable[Row]) -> str:
    """The kernel families that ran."""
    families = {row.kernel_family for row in rows}
    families.discard("")
    return ", ".join(sorted(families)) or "unknown"


def _is_good(row: Row) -> bool:
    return row.status == "ok" and not row.throttled
