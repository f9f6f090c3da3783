"""Advice for several models, or for two stacks, in one table: picks, known problems, records.

A row is a kind of layers of a model. `advise` answers for one call in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from ..core.call_text import CallText
from ..core.spec import AttnSpec
from ..measure.stats import SLOWER
from ..run.releases import Version
from ..select import Call, explain
from ..select.asked import (
    DECODE,
    PINS,
    asked,
    asked_kinds,
    facts_stated,
    is_checkpoint,
    layer_said,
)
from ..select.changes import ProblemChange, ProblemChanges, add_changes, change_in_words
from ..select.known import (
    HOLDS,
    Found,
    Problem,
    known_problems,
    others_in_brief,
    problem_lines,
    size_in_brief,
    sized_in_brief,
    to_data,
)
from ..select.layers import LayerChoice, own_class
from ..select.libraries import AUTO, find
from ..select.lines import DETAILS
from ..select.situation import card_named, parse_stack, situation_of, with_dp_attention
from .advise import CLOSE, LATENT_DTYPE, MLA_MODE, advise_layer, known_facts, require_decode_text
from .cards import NO_VALUE, Brief, Card, in_columns
from .engine_builds import own_build
from .expected import Expected

NOT_HERE = "not slower here"
"""Of a problem that costs the call nothing, by its own records."""


class Layer(NamedTuple):
    """A kind of layers in words, and how a selector is asked for it; no `spec` where none is."""

    words: str
    spec: AttnSpec | None
    mode: str
    call: Call


@dataclass(frozen=True)
class Answer:
    """What a stack runs for a kind of layers: the pick, known problems, and what the records say of
    the pick beside the engine's other backends.

    `own` is the pick's build as records name it, `expected` what backends take against it.
    """

    picked: str
    known: Sequence[Found] = ()
    slower: str = ""
    cannot_run: bool = False
    own: str = ""
    expected: Mapping[str, Expected] = field(default_factory=dict)

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

    @property
    def on_record(self) -> list[str]:
        """What the records say of the pick, and of each problem that holds."""
        lines = [self.slower] if self.slower else []
        for answer in self.holding:
            if answer.here:
                lines.append(f"{answer.problem.id}, {answer.here}")
        return lines


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
        size = "; ".join(self.on_record) or size_in_brief(self.head.problem, card)
        return sized_in_brief(self.head, size, self.fix_of)

    def lines(self) -> list[str]:
        """The same with all that is known."""
        return problem_lines(self.head, self.on_record, self.fix_of)


@dataclass(frozen=True)
class Row:
    """A kind of a model's layers, and the answer of each library."""

    model: str
    layers: str
    answers: Sequence[Answer]

    @property
    def name(self) -> str:
        """`DeepSeek-V3 latent`, or a layer by its heads."""
        if not self.model:
            return self.layers
        return f"{self.model} {self.layers.partition(' (')[0]}"

    @property
    def known(self) -> str:
        """Ids of the known problems that hold; of two stacks which of them come, end, stay, or may
        come. One that costs this call nothing is marked."""
        *before, now = [each.ids_holding for each in self.answers]
        if not before:
            return _listed(now.values())
        (old,) = before
        groups = {
            "comes": [now[name] for name in now.keys() - old],
            "ends": [old[name] for name in old.keys() - now],
            "stays": [now[name] for name in now.keys() & old],
            "may come": self._may_come,
        }
        words = [f"{word}: {_listed(ids)}" for word, ids in groups.items() if ids]
        return "; ".join(words) or NO_VALUE

    @property
    def speedup(self) -> Expected | None:
        """What the older stack's pick takes against the newer's by all batches, if that is another
        build and clearly slower; else None."""
        old, new = self.answers[0], self.answers[-1]
        if old.own == new.own or old.cannot_run or new.cannot_run:
            return None
        found = new.expected.get(old.own)
        return found if found and found.ratio > CLOSE else None

    @property
    def faster(self) -> str:
        """That the newer stack's pick is faster, or the empty string."""
        if self.speedup is None:
            return ""
        ratio, batches, _ = self.speedup
        old, new = self.answers[0], self.answers[-1]
        words = f"{new.own} is expected to have a speedup of {ratio:.2f} over {old.own}"
        return f"- faster by the new pick ({self.name}): by {batches} recorded batches {words}."

    def outweighs(self, problem: Problem) -> bool:
        """Whether the newer pick, which a problem makes slow, is faster than the older pick."""
        slow_build, *_ = problem.record.get("pair", [""])
        is_of_pick = problem.what == SLOWER and slow_build == self.answers[-1].own
        return is_of_pick and self.speedup is not None

    @property
    def _may_come(self) -> list[str]:
        """Ids of the problems that may hold in the newer stack, and do not in the older."""
        old, new = self.answers
        known = {answer.problem.id for answer in old.known}
        ids = []
        for answer in new.known:
            if answer.missing:
                ids.append(answer.problem.id)
        return [name for name in ids if name not in known]


@dataclass(frozen=True, eq=False, repr=False)
class Stacks(Brief):
    """The rows of one library, or of two stacks, OLD and NEW, with problems that come or end."""

    libraries: Sequence[str]
    lens: str
    gpu: str
    rows: Sequence[Row]
    changes: Sequence[ProblemChange] = ()

    @property
    def is_diff(self) -> bool:
        """Whether two stacks are compared."""
        return len(self.libraries) > 1

    @property
    def cannot_run(self) -> bool:
        """Whether a pick cannot run its call; of two stacks that of the newer, where the older's
        can."""
        for row in self.rows:
            *before, now = [answer.cannot_run for answer in row.answers]
            if now and not any(before):
                return True
        return False

    @property
    def holding(self) -> list[Found]:
        """The known problems that hold, of two stacks those that come, and of which records or
        threads say by how much; without those that cost the call nothing by its own records, and
        those of a new pick that is faster than the old one all the same."""
        found: list[Found] = []
        if self.is_diff:
            came = [change for change in self.changes if change.comes]
            found = [change.answer for change in came if not change.outweighed]
        else:
            for row in self.rows:
                found += row.answers[0].known
        return [each for each in found if each.costs]

    def table(self) -> pd.DataFrame:
        """A row per kind of layers: model, layers, the pick of each library, known problems."""
        lines = []
        for row in self.rows:
            picks = [answer.picked for answer in row.answers]
            line = [row.model, row.layers, *picks, row.known]
            lines.append(line)
        columns = ["model", "layers", *self.libraries, "known problems"]
        return pd.DataFrame(lines, columns=columns)

    @cached_property
    def _told(self) -> list[InRows]:
        """The problems of the newer stack that hold, each with its rows; of two stacks those that
        stay."""
        told: dict[str, dict[str, Found]] = {}
        for row in self.rows:
            *before, now = row.answers
            for answer in now.holding:
                name = answer.problem.id
                if all(name in old.ids_holding for old in before):
                    told.setdefault(name, {})[row.name] = answer
        return [InRows(answers) for answers in told.values()]

    @property
    def notes(self) -> list[str]:
        """The problems of the table's ids in full, then what the records say, then open facts."""
        notes = self._changed()
        for problem in self._told:
            head, *more = problem.lines()
            notes += [f"- stays: {head}" if self.is_diff else head, *more]
        notes += self._on_record()
        if not self.is_diff:
            notes += self._open_facts()
        return notes

    def _changed(self) -> list[str]:
        """The new picks that are faster, then the problems that come or end."""
        lines = [row.faster for row in self.rows if row.faster]
        for change in self.changes:
            lines += change_in_words(change)
        return lines

    def _on_record(self) -> list[str]:
        """What the records say of each row, without what stands below a problem that is told."""
        told = {line for problem in self._told for line in problem.on_record}
        lines: list[str] = []
        for row in self.rows:
            answer = row.answers[-1]
            if answer.slower:
                lines.append(f"{row.name}: {answer.slower}")
            for found in answer.holding:
                if found.here and f"{row.name}: {found.here}" not in told:
                    lines.append(f"{row.name}: {found.problem.id}, {found.here}")
        return lines

    def brief(self) -> list[str]:
        """What each layer runs, and the problems in short; of two stacks those that come or end,
        and the ids of those that stay."""
        lines = [self._title, *self._changed()]
        if self.is_diff:
            ids = [problem.head.problem.id for problem in self._told]
            if ids:
                lines.append(f"In both releases: {_listed(ids)}. Sizes and fixes: {DETAILS}")
        else:
            lines += self._told_in_brief()
        table = in_columns(self._shown_table())
        end = f"Sources: {DETAILS}. Nearest records: advise with one model and one engine."
        return [*lines, *self._on_record(), "", *table, "", end]

    def _told_in_brief(self) -> list[str]:
        """The problems that hold, as `advise` says them of one call."""
        card = card_named(self.gpu)
        lines: list[str] = []
        for problem in self._told:
            if problem.head.is_sized:
                lines += problem.brief(card)
        known = _distinct(row.answers[0].known for row in self.rows)
        return lines + others_in_brief(known, is_first=not lines)

    def _open_facts(self) -> list[str]:
        """In one line the problems that may hold, and what confirms each."""
        words = []
        first = [row.answers[0] for row in self.rows]
        for found in _distinct(answer.known for answer in first):
            if found.missing:
                words.append(f"{found.problem.id} ({found.confirmed_by})")
        if not words:
            return []
        listed = "; ".join(words)
        return [f"Possible, if you confirm it: {listed}."]

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the table, and the known problems of each library."""
        known = {}
        for place, library in enumerate(self.libraries):
            answers = _distinct(row.answers[place].known for row in self.rows)
            known[library] = to_data(answers)
        return {
            "gpu": self.gpu,
            "lens": self.lens,
            "rows": json.loads(self.table().to_json(orient="records")),
            "known": known,
            "notes": self.notes,
        }

    @property
    def _title(self) -> str:
        libraries = " to ".join(self.libraries)
        return f"{libraries} on {self.gpu}, decode, lens={self.lens}"

    def _shown_table(self) -> pd.DataFrame:
        """The table, without the models where none is named."""
        table = self.table()
        return table if table.model.any() else table.drop(columns="model")

    def card(self) -> Card:
        """The table, and what its problems are."""
        return Card(
            title=self._title,
            notes=self.notes,
            facts=[],
            table=self._shown_table(),
            caption="what runs, by kind of layers",
            footer="advise with one model and one engine shows the nearest records.",
        )


def advise_stacks(
    call: CallText,
    libraries: Sequence[str],
    *,
    models: Sequence[str] = (),
    backend: str = AUTO,
    gpu: str,
    facts: Call | None = None,
    server: Mapping[str, Any] | None = None,
) -> Stacks:
    """What one library, or two stacks, run for a decode call of each kind of layers of `models`.

    Arguments and errors are those of `advise`; `libraries` are one, or OLD and NEW of one engine,
    `models` stand in place of the model of `call`.
    """
    names = set()
    for library in libraries:
        found, *_ = find(library)
        names.add(found.name)
    if len(names) > 1:
        got = " and ".join(libraries)
        raise ValueError(f"--diff must be of one library, got {got}")
    changes: ProblemChanges = {}
    stack = _versions(libraries[-1])
    rows = []
    require_decode_text(call)
    lengths = call.required("lens").tokens
    for model in models or [call.model or ""]:
        said = replace(call, model=model or None)
        started: Mapping[str, Any] = server or {}
        if is_checkpoint(model):
            started = with_dp_attention(
                started,
                model,
                tp=said.tp or 1,
                dp=said.dp or 1,
            )
        how = {
            "backend": backend,
            "gpu": gpu,
            "server": started,
        }
        for layer in _layers_of(said, facts or Call()):
            answers = []
            for library in libraries:
                answer = _answer(layer, lengths, library, how)
                answers.append(answer)
            row = Row(model, layer.words, answers)
            rows.append(row)
            came = add_changes(
                changes,
                answers[0].known,
                answers[-1].known,
                stack=stack,
                where=row.name,
            )
            for change in came:
                change.new_pick |= answers[0].picked != answers[-1].picked
    for change in changes.values():
        problem = change.answer.problem
        told = [row for row in rows if row.name in change.where]
        change.outweighed = all(row.outweighs(problem) for row in told)
    return Stacks(
        libraries=libraries,
        lens=str(call.required("lens")),
        gpu=gpu,
        rows=rows,
        changes=sorted(changes.values(), key=lambda change: not change.comes),
    )


def _versions(library: str) -> dict[str, Version]:
    """Package -> release of a library with its release; none of one that has no releases."""
    if "==" in library:
        return parse_stack(library)
    return {}


def _layers_of(said: CallText, facts: Call) -> list[Layer]:
    """The kinds of layers of a model, or the layer that is said by its heads."""
    if not is_checkpoint(said.model or ""):
        spec, mode, call = asked(
            call=str(said),
            mode="",
            facts=facts,
        )
        words = f"{spec.heads} heads, head_dim {spec.head_dim}"
        return [Layer(words, spec, mode, call)]
    given = layer_said(said)
    stated = facts_stated(facts)
    pinned = {fact: True for name, fact in PINS.items() if name in given}
    layers = []
    for each in asked_kinds(mode=DECODE, facts=stated | pinned, **given):
        kind = each.kind
        choice = LayerChoice(kind.name, each.spec, kind.count)
        layer = Layer(
            words=choice.words,
            spec=each.spec,
            mode=each.mode,
            call=each.call,
        )
        layers.append(layer)
    return layers


def _answer(
    layer: Layer,
    lengths: tuple[int, ...],
    library: str,
    how: Mapping[str, Any],
) -> Answer:
    """What a library runs for a kind of layers; by the records too, where its mode has any."""
    spec = layer.spec
    if spec is None:
        kind, _, _ = layer.words.partition(" (")
        return Answer(own_class(kind, layer.call, library))
    known = known_facts(layer.call, is_stated=True, has_model=True)
    is_latent = layer.mode == MLA_MODE and spec.dtypes == LATENT_DTYPE
    call = replace(layer.call, kv_lens=lengths, graph=True)
    try:
        if layer.mode == DECODE or is_latent:
            advice = advise_layer(
                call=spec,
                kv_lens=lengths,
                given=layer.call,
                known=known,
                library=library,
                **how,
            )
            return Answer(
                picked=LayerChoice("", choice=advice.choice).chosen,
                known=advice.known,
                slower=advice.slower_by_records,
                cannot_run=advice.cannot_run,
                own=own_build(advice.choice),
                expected=advice.expected,
            )
        choice = explain(
            spec,
            mode=layer.mode,
            call=call,
            library=library,
            policy=how["backend"],
            gpu=how["gpu"],
        )
    except RuntimeError as error:
        return Answer(f"no answer: {error}")
    situation = situation_of(
        choice,
        spec,
        call,
        stated=known,
        gpu=how["gpu"],
        server=how["server"],
    )
    return Answer(
        picked=LayerChoice("", choice=choice).chosen,
        known=known_problems(situation),
        cannot_run=bool(choice.problem),
    )


def _distinct(groups: Iterable[Iterable[Found]]) -> list[Found]:
    """Each problem of several answers once, those that hold first."""
    found: dict[str, Found] = {}
    for answers in groups:
        for answer in answers:
            name = answer.problem.id
            if name not in found or found[name].missing:
                found[name] = answer
    return sorted(found.values(), key=lambda answer: bool(answer.missing))


def _listed(ids: Iterable[str]) -> str:
    return ", ".join(sorted(ids)) or NO_VALUE
