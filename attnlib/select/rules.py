"""Rules as data: conditions on facts, rows of conditions, and the reason why each row fails.

data/rules/README.md describes how they are written.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from packaging.version import Version

from .facts import FLAGS, NUMBERS, WORDS, Facts

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
RELEASE_WORDS = {"since": ">=", "before": "<"}


@dataclass(frozen=True)
class Vocabulary:
    """The facts that conditions may test, of four kinds.

    `flags` are true or false: name -> how a reason names it. `words` have a fixed set of values:
    name -> values. `numbers` are integers, `versions` releases of a library.
    """

    flags: Mapping[str, str]
    words: Mapping[str, tuple[str, ...]]
    numbers: tuple[str, ...]
    versions: tuple[str, ...] = ()

    @property
    def compared(self) -> tuple[str, ...]:
        """Facts that are compared with values; flags stand alone."""
        return (*self.words, *self.numbers, "head_dims", *self.versions)


OF_CALLS = Vocabulary(FLAGS, WORDS, NUMBERS, versions=("flashinfer",))
"""The facts of one call, which rules of selection test; `flashinfer` is the release of FlashInfer
that an engine finds."""


@dataclass(frozen=True)
class Condition:
    """`fact` compared with `value`; `op` is a name of `COMPARISONS`.

    `words` is how a reason names a fact that is true or false; empty for others.
    """

    fact: str
    op: str
    value: Any
    words: str = field(default="", compare=False)

    @property
    def values(self) -> tuple[Any, ...]:
        """The value, or each of several."""
        if isinstance(self.value, tuple):
            return self.value
        return (self.value,)

    @cached_property
    def tests(self) -> set[str]:
        """The facts that it tests; of a model's names, each by itself."""
        if self.fact in ("model", "architecture"):
            return {f"{self.fact} {name}" for name in self.values}
        return {self.fact}

    def holds(self, facts: Facts) -> bool:
        """Whether it holds; raises ValueError for a fact that the call does not give."""
        return COMPARISONS[self.op](facts[self.fact], self.value)

    def __str__(self) -> str:
        if self.words:
            return f"{'with' if self.value else 'without'} {self.words}"
        values = ", ".join(map(str, self.values))
        return f"{self.fact.replace('_', ' ')} {self.op} {values}"

    def miss(self, facts: Facts) -> str:
        """Why it does not hold, in words."""
        if not self.words:
            return f"needs {self}; it is {facts[self.fact]}"
        if self.value:
            return f"only {self}; this call is without"
        return f"only {self}; this call has {_pronoun(self.words)}"


def _pronoun(thing: str) -> str:
    if thing.startswith(("a ", "an ")):
        return "one"
    return "them" if thing.endswith("s") else "it"


@dataclass(frozen=True)
class Group:
    """Conditions joined by `or` (any of them) or `and` (all); `of` may hold groups again."""

    joint: str
    of: "tuple[When, ...]"

    @cached_property
    def tests(self) -> set[str]:
        """The facts that they test."""
        return facts_tested(self.of)

    def holds(self, facts: Facts) -> bool:
        """Whether any (or), or all (and), of the conditions hold."""
        parts = (condition.holds(facts) for condition in self.of)
        if self.joint == "or":
            return any(parts)
        return all(parts)

    def __str__(self) -> str:
        words = f" {self.joint} ".join(map(str, self.of))
        return f"({words})"

    def miss(self, facts: Facts) -> str:
        """Why it does not hold, in words."""
        return f"needs {self}"


When = Condition | Group


@dataclass(frozen=True)
class Rule:
    """One row of a table: if all of `when` holds, `then` is chosen (best first).

    In a table of limits, `then` cannot run instead. `source` is the pull request, or the file of
    the release, that has the rule. `sets` are facts that the choice changes for the next table.
    `instead_of` is the choice in whose place `then` is taken.
    """

    when: tuple[When, ...]
    then: tuple[str, ...]
    why: str
    source: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    instead_of: str = ""

    @cached_property
    def tests(self) -> set[str]:
        """The facts that its conditions test."""
        return facts_tested(self.when)

    def may_match(self, known: Facts) -> bool:
        """Whether the row can match a call of which these facts alone are known."""
        decidable = []
        for when in self.when:
            if when.tests <= known.keys():
                decidable.append(when)
        return all(when.holds(known) for when in decidable)

    def failing(self, facts: Facts) -> When | None:
        """The first condition that does not hold, or None where the row matches."""
        for condition in self.when:
            if not condition.holds(facts):
                return condition
        return None


def facts_tested(parts: Iterable[When | Rule]) -> set[str]:
    """The facts that any of several conditions or rows tests."""
    facts: set[str] = set()
    for part in parts:
        facts |= part.tests
    return facts


@dataclass(frozen=True)
class Reason:
    """One row that was considered: what it would choose, whether it `matched`, and why (not).

    `kind` is rule, limit (a backend that cannot run the call), settled or policy;
    `of_other_model` says that the row is for models of which the call is none.
    """

    kind: str
    subject: str
    matched: bool = field(default=True, kw_only=True)
    why: str
    source: str
    of_other_model: bool = field(default=False, kw_only=True)


Reasons = tuple[Reason, ...]


def first_match(rules: Iterable[Rule], facts: Facts) -> tuple[Rule, Reasons]:
    """The first row that matches, and a reason for every row considered on the way.

    Raises LookupError if no row matches; a table whose last row has no condition always matches.
    """
    reasons = []
    for rule in rules:
        failing = rule.failing(facts)
        reason = Reason(
            kind="rule",
            subject=" > ".join(rule.then),
            matched=failing is None,
            why=failing.miss(facts) if failing else rule.why,
            source=rule.source,
            of_other_model=failing is not None and _asks_for_model(failing),
        )
        reasons.append(reason)
        if reason.matched:
            return rule, tuple(reasons)
    raise LookupError("no row of the table matches")


def _asks_for_model(when: When) -> bool:
    return all(name.startswith(("model ", "architecture ")) for name in when.tests)


def conditions(
    written: Any,
    vocabulary: Vocabulary = OF_CALLS,
) -> tuple[When, ...]:
    """The conditions of a row's `when`: all of a list, nested lists included.

    Raises ValueError for an unknown fact, comparison or value.
    """
    if isinstance(written, str):
        return (_condition(written, vocabulary),)
    if isinstance(written, list):
        whole: tuple[When, ...] = ()
        for part in written:
            whole += conditions(part, vocabulary)
        return whole
    if isinstance(written, dict) and list(written) == ["any"]:
        parts = [_all_of(conditions(part, vocabulary)) for part in written["any"]]
        return (Group("or", tuple(parts)),)
    raise ValueError(f"a condition must be text, a list or {{any: [...]}}, got {written!r}")


def _all_of(parts: tuple[When, ...]) -> When:
    if len(parts) == 1:
        return parts[0]
    return Group("and", parts)


def _condition(text: str, vocabulary: Vocabulary) -> Condition:
    flag = text.removeprefix("not ")
    if flag in vocabulary.flags:
        return Condition(
            fact=flag,
            op="is",
            value=flag == text,
            words=vocabulary.flags[flag],
        )
    fact, _, rest = text.partition(" ")
    if fact in RELEASE_WORDS:
        return Condition(
            fact="release",
            op=RELEASE_WORDS[fact],
            value=Version(rest),
        )
    if fact not in vocabulary.compared:
        known = ", ".join((*vocabulary.flags, *vocabulary.compared))
        raise ValueError(f"no such fact in {text!r}; there are {known}")
    named = [op for op in COMPARISONS if rest.startswith(f"{op} ")]
    if not named:
        raise ValueError(f"no such comparison in {text!r}; there are {', '.join(COMPARISONS)}")
    op = max(named, key=len)  # `is not` begins with `is`
    words = rest.removeprefix(op).split()
    values = tuple(_value(fact, word, vocabulary) for word in words)
    if op in ("in", "not in"):
        return Condition(fact, op, values)
    if len(values) != 1:
        raise ValueError(f"{op} takes one value, got {text!r}")
    return Condition(fact, op, values[0])


def _value(fact: str, word: str, vocabulary: Vocabulary) -> Any:
    if fact in vocabulary.versions:
        return Version(word)
    if fact == "head_dims" and word.replace("/", "", 1).isdigit():
        return word
    words = vocabulary.words.get(fact, ())
    if word in words:
        return word
    if fact in vocabulary.numbers and word.replace("_", "").isdigit():
        return int(word)
    known = ", ".join(words or ["a number"])
    raise ValueError(f"{fact} must be {known}, got {word!r}")
