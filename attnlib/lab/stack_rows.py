"""Rows of `advise` for several models or two stacks: what is picked, known, and on record of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..run.releases import Version
from ..select.known import (
    HOLDS,
    SLOWER,
    Found,
    Problem,
    problem_lines,
    size_in_brief,
    size_on_record,
    sized_in_brief,
)
from ..select.lines import NO_VALUE, NOT_ON_RECORD
from ..select.situation import card_named
from .advise import CLOSE
from .expected import Expected

NOT_HERE = "not slower here"
"""Of a problem that costs the call nothing, by its own records."""
SAME_PICK = "same pick"
COMES, ENDS, STAYS = "comes", "ends", "stays"
MAY_COME, MAY_STAY = "may come", "may stay"
"""What becomes of a known problem from one stack to the other."""


@dataclass(frozen=True)
class Answer:
    """What a stack runs for a kind of layers: the pick, known problems, and what the records say of
    the pick beside the engine's other backends.

    `problem` says why the pick cannot run the call, `instead` what else can be set. `own` is the
    pick's build as records name it, `expected` what backends take against `timed`, which is another
    build where it is not on record. `unlike` is what the records lack of the call, `confidence` how
    far to trust them. `why` and `source` are of the pick.
    """

    picked: str
    known: Sequence[Found] = ()
    slower: str = ""
    problem: str = ""
    instead: Sequence[str] = ()
    own: str = ""
    timed: str = ""
    expected: Mapping[str, Expected] = field(default_factory=dict)
    unlike: Sequence[str] = ()
    confidence: str = ""
    why: str = ""
    source: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether `expected` is over the pick's own build."""
        is_own = self.own != "" and self.own == self.timed
        return is_own and not self.unlike

    @property
    def cannot_run(self) -> bool:
        """Whether the pick cannot run the call."""
        return bool(self.problem)

    @property
    def holding(self) -> list[Found]:
        """The known problems that hold."""
        return [answer for answer in self.known if answer.verdict == HOLDS]

    @property
    def ids_holding(self) -> dict[str, str]:
        """Id of each -> the id in words."""
        words = {}
        for answer in self.holding:
            name = answer.problem.id
            words[name] = f"{name} ({NOT_HERE})" if answer.is_harmless else name
        return words


class InRows(NamedTuple):
    """A known problem that holds in rows of a table: the name of each row -> its answer."""

    answers: Mapping[str, Found]

    @property
    def head(self) -> Found:
        """The answer of a row that it costs time; of a row that it does not only where it costs
        none."""
        return min(self.answers.values(), key=lambda answer: answer.is_harmless)

    @property
    def on_record(self) -> list[str]:
        """What the records say of the call of each row."""
        return [f"{name}: {answer.here}" for name, answer in self.answers.items() if answer.here]

    @property
    def fix_of(self) -> str:
        """The rows that the fix is for, where it is not for all."""
        costly = [name for name, answer in self.answers.items() if not answer.is_harmless]
        return "" if len(costly) == len(self.answers) else ", ".join(costly)

    def brief(self, card: str) -> list[str]:
        """What it is, its size, and what to do, as `advise` says it of one call."""
        size = "; ".join(self.on_record) or self._size(card)
        return sized_in_brief(self.head, size, self.fix_of)

    def _size(self, card: str) -> str:
        return size_in_brief(self.head.problem, card, self.head.requests)

    def in_a_line(self, card: str) -> str:
        """Its id and its size."""
        problem = self.head.problem
        sizes = [*self.on_record, self._size(card), size_on_record(problem)]
        size = next(filter(None, sizes), "its size is not on record")
        return f"{problem.id}: {size}"

    def lines(self) -> list[str]:
        """The same with all that is known."""
        return problem_lines(self.head, self.on_record, self.fix_of)


@dataclass(frozen=True)
class Row:
    """A kind of a model's layers, and the answer of each library; `stack` are the releases of the
    newer."""

    model: str
    layers: str
    answers: Sequence[Answer]
    stack: Mapping[str, Version] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`DeepSeek-V3 latent`, or a layer by its heads."""
        if not self.model:
            return self.layers
        return f"{self.model} {self.layers.partition(' (')[0]}"

    @property
    def known(self) -> str:
        """Ids of the known problems that hold; of two stacks which of them come, end, stay, or may
        come or stay. One that costs this call nothing is marked."""
        if len(self.answers) == 1:
            return listed(self.answers[0].ids_holding.values())
        words: dict[str, str] = {}
        for answer in self.answers:
            words |= answer.ids_holding
        groups = []
        for group, ids in self.problems.items():
            if ids:
                groups.append(f"{group}: {listed(words.get(name, name) for name in ids)}")
        return "; ".join(groups) or NO_VALUE

    @property
    def compared(self) -> tuple[Sequence[Found], Sequence[Found]]:
        """The known problems of two stacks. Where the newer pick cannot run the call none of the
        older stack's ends."""
        old, new = self.answers
        if not new.cannot_run:
            return old.known, new.known
        ids = {answer.problem.id for answer in new.known}
        return [answer for answer in old.known if answer.problem.id in ids], new.known

    @property
    def problems(self) -> dict[str, list[str]]:
        """Of two stacks: `COMES`, `ENDS`, `STAYS`, `MAY_COME`, `MAY_STAY` -> ids of known problems.
        One that may be in the newer stack does not end."""
        before, after = self.compared
        old = {answer.problem.id for answer in before if answer.verdict == HOLDS}
        new = {answer.problem.id for answer in after if answer.verdict == HOLDS}
        known = {answer.problem.id for answer in before}
        may_hold = {answer.problem.id for answer in after if answer.missing}
        may_stay = may_hold | {answer.problem.id for answer in before if self._is_open(answer)}
        return {
            COMES: sorted(new - old),
            ENDS: sorted(old - new - may_stay),
            STAYS: sorted(new & old),
            MAY_COME: sorted(may_hold - known),
            MAY_STAY: sorted((old - new) & may_stay),
        }

    def _is_open(self, answer: Found) -> bool:
        """Whether the newer stack is newer than what is known of a problem."""
        return answer.is_open_in(self.stack)

    @property
    def _coming(self) -> list[Found]:
        """The known problems of the newer stack that come or may come."""
        ids = {*self.problems[COMES], *self.problems[MAY_COME]}
        return [answer for answer in self.answers[-1].known if answer.problem.id in ids]

    @property
    def counted(self) -> list[Found]:
        """Those that count for the exit status."""
        return [answer for answer in self._coming if not self._why_not(answer)]

    @property
    def not_counted(self) -> list[str]:
        """The others, and why each does not count."""
        words = []
        for answer in self._coming:
            if why := self._why_not(answer):
                words.append(f"{answer.problem.id} {why}")
        return words

    def _why_not(self, answer: Found) -> str:
        """Why a problem that comes, or may come, does not count; or the empty string."""
        if answer.missing:
            return "may come"
        if answer.is_harmless:
            return f"comes, and is {NOT_HERE}"
        if not answer.problem.has_size:
            return "comes, and has no measured size"
        outweighed = self.outweighed_by(answer.problem)
        return f"comes, but {outweighed}" if outweighed else ""

    @property
    def breaks(self) -> bool:
        """Whether the older pick, if any, can run the call, and the newer one cannot."""
        *before, now = [answer.cannot_run for answer in self.answers]
        return now and not any(before)

    @property
    def how_it_runs(self) -> str:
        """Of a pick that cannot run the call: since when, and why; else the empty string."""
        *before, now = self.answers
        if not before:
            return f"the pick cannot run the call: {now.problem}" if now.cannot_run else ""
        (old,) = before
        if self.breaks:
            return f"the new pick cannot run the call, which ran before: {now.problem}"
        if now.cannot_run:
            return f"neither pick can run the call: {now.problem}"
        if old.cannot_run:
            return f"the old pick could not run the call, the new one can: {old.problem}"
        return ""

    @property
    def is_same_pick(self) -> bool:
        """Whether two stacks run the same."""
        old, new = self.answers
        is_same_build = bool(new.own) and old.own == new.own
        return is_same_build or old.picked == new.picked

    @property
    def expected(self) -> Expected | None:
        """What the older stack's pick takes against the newer's by all batches, if that is another
        build; None where no records are of such a call, or one of them cannot run it."""
        old, new = self.answers
        if self.is_same_pick or old.cannot_run or new.cannot_run:
            return None
        if new.is_timed and old.own in new.expected:
            return new.expected[old.own]
        if old.is_timed and new.own in old.expected:
            found = old.expected[new.own]
            return found._replace(ratio=1 / found.ratio)
        return None

    @property
    def speedup_in_words(self) -> str:
        """The speedup of the newer pick, or why there is none."""
        old, new = self.answers
        if old.cannot_run or new.cannot_run:
            return NO_VALUE
        if self.is_same_pick:
            return SAME_PICK
        if self.expected is None:
            return NOT_ON_RECORD
        ratio, _, gpu = self.expected
        return f"{ratio:.2f} ({card_named(gpu).upper() or gpu})"

    @property
    def changed_speed(self) -> str:
        """That the newer pick is faster, or slower, by more than batches alone may differ; or the
        empty string."""
        if self.expected is None or 1 / CLOSE <= self.expected.ratio <= CLOSE:
            return ""
        ratio, batches, gpu = self.expected
        old, new = self.answers
        confidence = old.confidence if new.unlike else new.confidence
        word = "faster" if ratio > 1 else "slower"
        effect = f"a speedup of {ratio:.2f} over"
        if ratio < 1:
            effect = f"a slowdown of {1 / ratio:.2f} against"
        return (
            f"- {word} by the new pick ({self.name}): by {batches} recorded batches ({gpu}) "
            f"{new.own} is expected to have {effect} {old.own}. {confidence}"
        )

    def outweighed_by(self, problem: Problem) -> str:
        """Why a problem that makes the newer pick slow is none of the upgrade, or the empty
        string."""
        old, new = self.answers
        if problem.what != SLOWER:
            return ""
        if old.cannot_run:
            return "the old pick could not run the call"
        slow_build, *_ = problem.record.get("pair", [""])
        is_faster = self.expected is not None and self.expected.ratio > CLOSE
        if is_faster and slow_build == new.own:
            return "the new pick is faster all the same"
        return ""


def listed(ids: Iterable[str]) -> str:
    """Ids in order, or that there are none."""
    return ", ".join(sorted(ids)) or NO_VALUE
