"""Rules as data: conditions on facts, rows made of them, and a walk that says why each row fails.

A `Facts` is one situation, flat: names to values. A `Condition` compares one fact with a constant;
a `Rule` is a row: all its conditions hold, and it names what is chosen (`then`, best first), or,
in a table of limits, what cannot run. `first_match` walks a table from the top and keeps a
`Reason` for every row it looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version


class UnknownFactError(ValueError):
    """A rule asked for a fact that the caller did not give."""


class Facts(Mapping[str, Any]):
    """What is known of one situation, by name.

    What follows from lengths is None without them; asking for it raises UnknownFactError.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = dict(known)

    def __getitem__(self, name: str) -> Any:
        value = self._known[name]
        if value is None:
            raise UnknownFactError(
                f"a rule asks for {name}: give call=Call(kv_lens=(...)), the tokens of each "
                "request (as an argument: --call kv_lens=8192x16)"
            )
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def but(self, **changed: Any) -> Facts:
        """The same facts with some of them changed."""
        return Facts(self._known | changed)


@dataclass(frozen=True)
class Condition:
    """`fact` compared with `value`; `op` is a name of `COMPARISONS`."""

    fact: str
    op: str
    value: Any

    def holds(self, facts: Facts) -> bool:
        """Does it hold? Raises UnknownFactError where the fact is not known."""
        return COMPARISONS[self.op](facts[self.fact], self.value)

    def __str__(self) -> str:
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        return f"{self.fact.replace('_', ' ')} {self.op} {', '.join(map(_word, values))}"

    def miss(self, facts: Facts) -> str:
        """Why it does not hold, in words."""
        return f"needs {self}; it is {_word(facts[self.fact])}"


@dataclass(frozen=True)
class Group:
    """Conditions joined by `or` (any of them) or `and` (all); `of` may hold groups again."""

    joint: str
    of: tuple[Condition | Group, ...]

    def holds(self, facts: Facts) -> bool:
        """Does any, or do all of them, hold?"""
        parts = (condition.holds(facts) for condition in self.of)
        return any(parts) if self.joint == "or" else all(parts)

    def __str__(self) -> str:
        return f"({f' {self.joint} '.join(map(str, self.of))})"

    def miss(self, facts: Facts) -> str:
        """Why it does not hold, in words."""
        return f"needs {self}"


@dataclass(frozen=True)
class Rule:
    """One row: where all of `when` holds, `then` is chosen, best first.

    `source` is where it is written: a pull request, or a file of the release that it was read in.
    `sets` are facts that the choice itself changes, for the tables that are asked next.
    """

    when: tuple[Condition | Group, ...]
    then: tuple[str, ...]
    why: str
    source: str
    sets: tuple[tuple[str, Any], ...] = ()

    def failing(self, facts: Facts) -> Condition | Group | None:
        """The first condition that does not hold, or None where the row matches."""
        return next((c for c in self.when if not c.holds(facts)), None)


@dataclass(frozen=True)
class Reason:
    """One row that was looked at: what it would choose, whether it `matched`, and why or why not.

    `kind` is rule, limit (a backend that cannot run the call), override or policy.
    """

    kind: str
    subject: str
    matched: bool
    why: str
    source: str


def first_match(rules: Iterable[Rule], facts: Facts) -> tuple[Rule | None, tuple[Reason, ...]]:
    """The first row that matches, and a reason for every row looked at on the way."""
    reasons = []
    for rule in rules:
        failing = rule.failing(facts)
        why = rule.why if failing is None else failing.miss(facts)
        reasons.append(Reason("rule", " > ".join(rule.then), failing is None, why, rule.source))
        if failing is None:
            return rule, tuple(reasons)
    return None, tuple(reasons)


def limits_of(limits: Iterable[Rule], backend: str, facts: Facts) -> tuple[Reason, ...]:
    """Every row of a table of limits that keeps `backend` from running this case."""
    rows = (limit for limit in limits if backend in limit.then)
    return tuple(
        Reason("limit", backend, True, row.why, row.source)
        for row in rows
        if row.failing(facts) is None
    )


def one_of(fact: str, *values: Any) -> Condition:
    """`fact` is one of `values`."""
    return Condition(fact, "in", values) if len(values) > 1 else Condition(fact, "is", values[0])


def none_of(fact: str, *values: Any) -> Condition:
    """`fact` is none of `values`."""
    single = len(values) == 1
    return Condition(fact, "is not", values[0]) if single else Condition(fact, "not in", values)


def at_least(fact: str, value: Any) -> Condition:
    """`fact` >= `value`."""
    return Condition(fact, ">=", value)


def at_most(fact: str, value: Any) -> Condition:
    """`fact` <= `value`."""
    return Condition(fact, "<=", value)


def below(fact: str, value: Any) -> Condition:
    """`fact` < `value`."""
    return Condition(fact, "<", value)


def above(fact: str, value: Any) -> Condition:
    """`fact` > `value`."""
    return Condition(fact, ">", value)


def since(release: str) -> Condition:
    """The library's release is `release` or newer."""
    return Condition("release", ">=", Version(release))


def before(release: str) -> Condition:
    """The library's release is older than `release`."""
    return Condition("release", "<", Version(release))


def yes(fact: str) -> Condition:
    """`fact` is true."""
    return Condition(fact, "is", True)


def no(fact: str) -> Condition:
    """`fact` is false."""
    return Condition(fact, "is", False)


def either(*conditions: Condition | Group) -> Group:
    """Any of the conditions holds."""
    return Group("or", conditions)


def both(*conditions: Condition | Group) -> Group:
    """All of the conditions hold."""
    return Group("and", conditions)


def _word(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "is": operator.eq,
    "is not": operator.ne,
    "in": lambda have, among: have in among,
    "not in": lambda have, among: have not in among,
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
    "a multiple of": lambda have, of: have % of == 0,
    "not a multiple of": lambda have, of: have % of != 0,
    "divides": lambda have, whole: whole % have == 0,
    "does not divide": lambda have, whole: whole % have != 0,
}
