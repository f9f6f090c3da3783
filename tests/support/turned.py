"""Which conditions of the rules no answer turns: where each would be left out, or never hold.

A condition is turned if some answer (a line of data/vectors, or of the files of `select`) becomes
wrong once it always holds, and some once it never holds. One that is not turned could be wrong and
no test would see it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from attnlib.select.libraries import PARTS, Library
from attnlib.select.rules import Condition, Group, Rule, When


@dataclass(frozen=True)
class Always(Condition):
    """A condition that holds, or does not, whatever the call is."""

    held: bool = True

    def holds(self, facts):
        return self.held

    def miss(self, facts):
        return "set by a test"


@dataclass(frozen=True)
class Mutant:
    """A row whose one condition always holds (`held`), or never does."""

    library: Library
    table: str
    """`auto decode`, or `limits`."""
    place: int
    row: Rule
    leaf: tuple[int, ...]
    held: bool

    @property
    def condition(self) -> Condition:
        return leaf_at(self.row.when, self.leaf)

    @property
    def mutated(self) -> Rule:
        fixed = Always(
            fact=self.condition.fact,
            op=self.condition.op,
            value=self.condition.value,
            held=self.held,
        )
        return replace(self.row, when=put(self.row.when, self.leaf, fixed))

    @property
    def words(self) -> str:
        """How a list of conditions that nothing turns names it."""
        held = "always" if self.held else "never"
        row = " > ".join(self.row.then) or ", ".join(self.row.sets)
        short = row if len(row) < 60 else f"{row[:57]}..."
        place = f"{self.library.name} | {self.table} | {short} | {self.row.why}"
        return f"{place} | {self.condition} | {held}"


def leaf_at(when: tuple[When, ...], leaf: tuple[int, ...]) -> Any:
    """The condition at a path of indices through groups."""
    part = when[leaf[0]]
    return leaf_at(part.of, leaf[1:]) if len(leaf) > 1 else part


def put(when: tuple[When, ...], leaf: tuple[int, ...], fixed: When) -> tuple[When, ...]:
    """The conditions with another one at a path."""
    first, *rest = leaf
    part = when[first]
    if rest:
        assert isinstance(part, Group)
        fixed = Group(part.joint, put(part.of, tuple(rest), fixed))
    return (*when[:first], fixed, *when[first + 1 :])


def leaves(when: tuple[When, ...]) -> Iterator[tuple[int, ...]]:
    """The paths of all conditions."""
    for index, part in enumerate(when):
        if isinstance(part, Group):
            for rest in leaves(part.of):
                yield (index, *rest)
        else:
            yield (index,)


def tables_of(library: Library) -> dict[str, tuple[Rule, ...]]:
    """Each table once, by the policies and modes that share it, and the rows without a policy."""
    shared: dict[int, tuple[list[str], tuple[Rule, ...]]] = {}
    for policy, modes in library.policies.items():
        for mode, table in modes.items():
            words, _ = shared.setdefault(id(table), ([], table))
            words.append(f"{policy} {mode}")
    tables = {", ".join(words): table for words, table in shared.values()}
    return tables | {part: getattr(library, part) for part in PARTS}


def mutants(library: Library) -> Iterator[Mutant]:
    """Both mutants of each condition of each row."""
    for table, rows in tables_of(library).items():
        for place, row in enumerate(rows):
            for leaf in leaves(row.when):
                for held in (True, False):
                    yield Mutant(library, table, place, row, leaf, held)


@contextmanager
def in_place(mutant: Mutant) -> Iterator[None]:
    """Within, the library has the mutant's row."""
    library = mutant.library
    rows = tables_of(library)[mutant.table]
    changed = (
        *rows[: mutant.place],
        mutant.mutated,
        *rows[mutant.place + 1 :],
    )
    policies = library.policies
    if mutant.table in PARTS:
        setattr(library, mutant.table, changed)
    else:
        swapped = {
            policy: {mode: changed if table is rows else table for mode, table in modes.items()}
            for policy, modes in policies.items()
        }
        library.policies = swapped
    try:
        yield
    finally:
        library.policies = policies
        if mutant.table in PARTS:
            setattr(library, mutant.table, rows)


@contextmanager
def asked_rows() -> Iterator[list[tuple[Rule, Any]]]:
    """Within, every row that is asked whether it matches is noted, with the facts."""
    noted = []
    failing = Rule.failing

    def note(row, facts):
        noted.append((row, facts))
        return failing(row, facts)

    Rule.failing = note
    try:
        yield noted
    finally:
        Rule.failing = failing


def not_turned(
    tried: Iterable[Mutant],
    answers: Iterable[Callable[[], bool]],
) -> list[Mutant]:
    """The mutants that survive every answer; each of `answers` says whether `explain` is right."""
    alive: dict[int, list[Mutant]] = {}
    for mutant in tried:
        alive.setdefault(id(mutant.row), []).append(mutant)
    for agrees in answers:
        with asked_rows() as noted:
            assert agrees()
        for row, facts in noted:
            suspects = alive.get(id(row), [])
            alive[id(row)] = [each for each in suspects if not _is_killed(each, facts, agrees)]
    return [mutant for mutants_of_row in alive.values() for mutant in mutants_of_row]


def _is_killed(mutant: Mutant, facts: Any, agrees: Callable[[], bool]) -> bool:
    """Whether the answer becomes wrong, or is none, with the mutant in place."""
    try:
        is_same = mutant.condition.holds(facts) == mutant.held
        if is_same or bool(mutant.mutated.failing(facts)) == bool(mutant.row.failing(facts)):
            return False
    except ValueError:  # it asks for lengths that this call does not give
        return False
    with in_place(mutant):
        try:
            return not agrees()
        except (AssertionError, LookupError, RuntimeError, ValueError):
            return True
