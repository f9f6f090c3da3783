"""Advice for several models, or for two stacks, in one table: picks, known problems, records.

A row is a kind of layers of a model. `advise` answers for one call in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from ..core.call_text import CallText
from ..core.spec import AttnSpec
from ..run.releases import Version
from ..select import Call, Choice, explain
from ..select.asked import (
    DECODE,
    PINS,
    asked,
    asked_kinds,
    facts_stated,
    is_checkpoint,
    layer_said,
)
from ..select.changes import (
    CANNOT_RUN,
    ProblemChange,
    ProblemChanges,
    add_changes,
    change_in_words,
)
from ..select.facts import gpu_named
from ..select.known import SLOWER, Found, how_much, known_problems, others_in_brief, to_data
from ..select.layers import LayerChoice, own_class
from ..select.libraries import AUTO, find
from ..select.lines import DETAILS, NOT_ON_RECORD
from ..select.situation import card_named, parse_stack, situation_of, with_dp_attention
from .advise import LATENT_DTYPE, MLA_MODE, advise_layer, known_facts, require_decode_text
from .advised_times import SPEEDUP, confidence_of_nearest, setting_of
from .cards import Brief, Card, in_columns
from .engine_builds import own_build
from .stack_rows import Answer, InRows, Row

NEAREST_RECORDS = "Nearest records: advise with one model and one engine."
SPARSE_MLA = "sparse_mla"
SPARSE_PAGE = "notebooks/10_sparse_mla.ipynb"


class Layer(NamedTuple):
    """A kind of layers in words, and how a selector is asked for it; no `spec` where none is."""

    words: str
    spec: AttnSpec | None
    mode: str
    call: Call

    @property
    def has_records(self) -> bool:
        """Whether `advise` has times of such layers: of decode, and of dense MLA of 16 bits."""
        if self.spec is None:
            return False
        return self.mode == DECODE or (self.mode == MLA_MODE and self.spec.dtypes == LATENT_DTYPE)


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
        return any(row.breaks for row in self.rows)

    @property
    def holding(self) -> list[Found]:
        """The known problems that hold, of two stacks those that come, and of which records or
        threads say by how much; without those that cost the call nothing by its own records, and
        those that the upgrade outweighs (`Row.outweighed_by`)."""
        return [found for _, found in self._costly]

    @property
    def _costly(self) -> list[tuple[Row, Found]]:
        """Each of them with its row."""
        costly = []
        for row in self.rows:
            found = row.counted if self.is_diff else row.answers[0].known
            costly += [(row, each) for each in found if each.costs]
        return costly

    @property
    def reason(self) -> str:
        """Why the exit status is what it is."""
        reasons = [f"{row.name}: {row.how_it_runs}" for row in self.rows if row.breaks]
        verb = "comes" if self.is_diff else "holds"
        said = [(f"{found.problem.id} {verb}", row.name) for row, found in self._costly]
        for words, names in _by_words(said).items():
            reasons.append(f"{words} ({', '.join(names)})")
        if reasons:
            return "; ".join(reasons)
        if not self.is_diff:
            return "no known problem that has a size costs these calls time"
        why: dict[str, None] = {}
        for row in self.rows:
            why |= dict.fromkeys(row.not_counted)
        return "; ".join(["all calls run that ran before", *(why or ["no known problem comes"])])

    def table(self) -> pd.DataFrame:
        """A row per kind of layers: model, layers, the pick of each library, of two the speedup of
        the newer, known problems."""
        lines = []
        for row in self.rows:
            picks = [answer.picked for answer in row.answers]
            if self.is_diff:
                picks.append(row.speedup_in_words)
            line = [row.model, row.layers, *picks, row.known]
            lines.append(line)
        speedup = [SPEEDUP] if self.is_diff else []
        columns = ["model", "layers", *self.libraries, *speedup, "known problems"]
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
        notes = [*self._of_running(), *self._changed(is_whole=True)]
        for problem in self._told:
            head, *more = problem.lines()
            notes += [f"- stays: {head}" if self.is_diff else head, *more]
        notes += self._on_record()
        if not self.is_diff:
            notes += self._open_facts()
        return notes

    def _of_running(self) -> list[str]:
        """The picks that cannot run the call, or could not before, why, and what to do."""
        rows = [row for row in self.rows if row.how_it_runs]
        rows.sort(key=lambda row: not row.breaks)
        lines: list[str] = []
        for how, names in _by_words((row.how_it_runs, row.name) for row in rows).items():
            lines.append(f"- {', '.join(names)}: {how}.")
            answer = next(row.answers[-1] for row in rows if row.name == names[0])
            if answer.cannot_run:
                lines.append(f"  - {self._way_out(answer)}")
        return lines

    def _way_out(self, answer: Answer) -> str:
        """What to do about a pick that cannot run the call."""
        *old, new = self.libraries
        ways = [*answer.instead]
        if old:
            ways.append(f"stay with {old[0]} where it runs")
        if not ways:
            return f"no other backend of {new} runs the call"
        return f"fix: {', or '.join(ways)}"

    def _changed(self, is_whole: bool = False) -> list[str]:
        """The new picks that are faster or slower, those of which no records are, then the problems
        that come or end; with the sizes of those that end where `is_whole`."""
        if not self.is_diff:
            return []
        lines = [row.changed_speed for row in self.rows if row.changed_speed]
        lines += self._unlike()
        for change in self.changes:
            lines += change_in_words(change)
            if is_whole and not change.comes:
                lines += [f"  - {line}" for line in how_much(change.answer.problem)]
        return lines

    def _unlike(self) -> list[str]:
        """The new picks whose speedup is not on record, and what the records lack."""
        said = []
        for row in self.rows:
            if row.speedup_in_words == NOT_ON_RECORD:
                lacked = row.answers[-1].unlike or ["No batch has both picks."]
                said.append((" ".join(lacked), row.name))
        lines = []
        for words, names in _by_words(said).items():
            lines.append(f"- speedup {NOT_ON_RECORD} ({', '.join(names)}): {words}")
        return lines

    def _on_record(self) -> list[str]:
        """What the records say of each row, without what stands below a problem that is told."""
        told = {line for problem in self._told for line in problem.on_record}
        lines: list[str] = []
        if not self.is_diff:
            lines += self._without_times()
        for row in self.rows:
            answer = row.answers[-1]
            if answer.slower:
                lines.append(f"{row.name}: {answer.slower}")
            for found in answer.holding:
                if found.here and f"{row.name}: {found.here}" not in told:
                    lines.append(f"{row.name}: {found.problem.id}, {found.here}")
        return lines

    def _without_times(self) -> list[str]:
        """The layers of which no times are on record at all."""
        lines = []
        for row in self.rows:
            answer = row.answers[-1]
            if not answer.confidence and answer.unlike:
                lines.append(f"{row.name}: {' '.join(answer.unlike)}")
        return lines

    def brief(self) -> list[str]:
        """What each layer runs, and the problems in short; of two stacks those that come or end,
        and those that stay in a line each."""
        lines = [self._title, *self._of_running(), *self._changed()]
        if self.is_diff:
            lines += self._stays_in_brief()
        else:
            lines += self._told_in_brief()
        table = in_columns(self._shown_table())
        return [*lines, *self._on_record(), "", *table, "", self._more]

    @property
    def _more(self) -> str:
        """What says more."""
        has_times = any(row.answers[-1].confidence for row in self.rows)
        nearest = f" {NEAREST_RECORDS}" if has_times else ""
        return f"Sources: {DETAILS}.{nearest}"

    def _stays_in_brief(self) -> list[str]:
        """The problems of both stacks with their sizes, a line each."""
        if not self._told:
            return []
        card = card_named(self.gpu)
        lines = [f"In both releases (fixes: {DETAILS}):"]
        return lines + [f"  {problem.in_a_line(card)}" for problem in self._told]

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
        """JSON form: the table, the known problems of each library, the reason of the exit status;
        of two stacks also which problems come, end, stay or may come."""
        known = {}
        for place, library in enumerate(self.libraries):
            answers = _distinct(row.answers[place].known for row in self.rows)
            known[library] = to_data(answers)
        rows = json.loads(self.table().to_json(orient="records"))
        groups: dict[str, list[str]] = {}
        for line, row in zip(rows, self.rows, strict=True):
            line["cannot_run"] = row.answers[-1].problem
            if self.is_diff:
                line |= _keys(row.problems)
                for key, ids in _keys(row.problems).items():
                    groups[key] = sorted({*groups.get(key, ()), *ids})
        return {
            "gpu": self.gpu,
            "lens": self.lens,
            "rows": rows,
            **groups,
            "reason": self.reason,
            "known": known,
            "notes": self.notes,
        }

    @property
    def _title(self) -> str:
        libraries = " to ".join(self.libraries)
        return f"{libraries} on {self.gpu}, decode, lens={self.lens}"

    def _shown_table(self) -> pd.DataFrame:
        """The table, without the models where none is named, and the speedup where no pick is new;
        two releases of one library are named by their numbers."""
        table = self.table()
        names = {stack.partition("==")[0] for stack in self.libraries}
        is_one = len(names) == 1 and not any("," in stack for stack in self.libraries)
        if self.is_diff and is_one:
            releases = {stack: stack.partition("==")[2] for stack in self.libraries}
            table = table.rename(columns=releases)
        if not table.model.any():
            table = table.drop(columns="model")
        if self.is_diff and all(row.is_same_pick for row in self.rows):
            table = table.drop(columns=SPEEDUP)
        return table

    def card(self) -> Card:
        """The table, and what its problems are."""
        return Card(
            title=self._title,
            notes=self.notes,
            facts=[],
            table=self._shown_table(),
            caption="what runs, by kind of layers",
            footer=NEAREST_RECORDS if NEAREST_RECORDS in self._more else "",
            more=[("why, and where that was read", self._sources())],
        )

    def _sources(self) -> pd.DataFrame:
        """A row per kind of layers and library: the pick, why, and where that was read."""
        lines = []
        for row in self.rows:
            for library, answer in zip(self.libraries, row.answers, strict=True):
                lines.append([row.name, library, answer.picked, answer.why, answer.source])
        return pd.DataFrame(lines, columns=["layers", "release", "pick", "why", "source"])


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
    _require_two_releases(libraries)
    require_decode_text(call)
    lengths = call.required("lens").tokens
    changes: ProblemChanges = {}
    stack = _versions(libraries[-1])
    rows = []
    asked_of = _asked_models(call, models, libraries, backend, facts or Call())
    for said, layers in asked_of:
        model = said.model or ""
        how = {"backend": backend, "gpu": gpu, "server": _started(said, server or {})}
        for layer in layers:
            with _naming(model, models):
                answers = [_answer(layer, lengths, library, how) for library in libraries]
            row = Row(model, layer.words, answers, stack)
            rows.append(row)
            if len(answers) > 1:
                _add_changes(changes, row)
    _mark_outweighed(changes, rows)
    return Stacks(
        libraries=libraries,
        lens=str(call.required("lens")),
        gpu=gpu,
        rows=rows,
        changes=sorted(changes.values(), key=lambda change: not change.comes),
    )


def _require_two_releases(libraries: Sequence[str]) -> None:
    """ValueError for releases of two libraries, or for one release twice."""
    if len(libraries) == 1:
        return
    old, new = libraries
    if find(old)[0].name != find(new)[0].name:
        raise ValueError(f"--diff must be of one library, got {old} and {new}")
    if old == new or _versions(old) == _versions(new) != {}:
        raise ValueError(f"OLD and NEW of --diff must be two releases, both are {new}")


def _asked_models(
    call: CallText,
    models: Sequence[str],
    libraries: Sequence[str],
    backend: str,
    facts: Call,
) -> list[tuple[CallText, list[Layer]]]:
    """The call of each model, and its kinds of layers; ValueError, before any is answered, for a
    model or a backend that is not known."""
    asked_of = []
    for model in models or [call.model or ""]:
        said = replace(call, model=model or None)
        with _naming(model, models):
            layers = layers_said(said, facts)
            for layer in layers:
                for library in libraries:
                    _require_backend(library, backend, layer)
        asked_of.append((said, layers))
    return asked_of


def _require_backend(library: str, backend: str, layer: Layer) -> None:
    """ValueError for a backend that a library does not have for a kind of layers."""
    if layer.spec is not None:
        rules, _ = find(library)
        policy = rules.policy_named(backend, layer.mode)
        rules.require_policy(policy, [layer.mode], "backend")


@contextmanager
def _naming(model: str, models: Sequence[str]) -> Iterator[None]:
    """A ValueError inside names the model, where there are several."""
    try:
        yield
    except ValueError as error:
        if len(models) > 1 and model not in str(error):
            raise ValueError(f"{model}: {error}") from error
        raise


def _started(said: CallText, server: Mapping[str, Any]) -> Mapping[str, Any]:
    """The facts of the server with what a model says of them."""
    model = said.model or ""
    if not is_checkpoint(model):
        return server
    return with_dp_attention(
        server,
        model,
        tp=said.tp or 1,
        dp=said.dp or 1,
    )


def _add_changes(changes: ProblemChanges, row: Row) -> None:
    """Add the known problems of a row that come or end."""
    before, after = row.compared
    came = add_changes(
        changes,
        before,
        after,
        stack=row.stack,
        where=row.name,
    )
    for change in came:
        change.new_pick |= row.answers[0].picked != row.answers[-1].picked


def _mark_outweighed(changes: ProblemChanges, rows: Sequence[Row]) -> None:
    """Mark the problems that come and are outweighed in every row."""
    for change in changes.values():
        problem = change.answer.problem
        told = [row for row in rows if row.name in change.where]
        change.outweighed = change.comes and all(row.outweighed_by(problem) for row in told)


def _versions(library: str) -> dict[str, Version]:
    """Package -> release of a library with its release; none of one that has no releases."""
    if "==" in library:
        return parse_stack(library)
    return {}


def layers_said(said: CallText, facts: Call) -> list[Layer]:
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
    if layer.spec is None:
        kind, _, _ = layer.words.partition(" (")
        said = own_class(kind, layer.call, library)
        return Answer(said, unlike=[f"No times are on record of {kind} layers."])
    try:
        if layer.has_records:
            return _by_records(layer, lengths, library, how)
        return _by_rules(layer, lengths, library, how)
    except RuntimeError as error:
        return Answer(
            picked=f"{how['backend']}{CANNOT_RUN}",
            problem=str(error),
            instead=_instead(layer, lengths, library, how),
        )


def _by_records(
    layer: Layer,
    lengths: tuple[int, ...],
    library: str,
    how: Mapping[str, Any],
) -> Answer:
    """The answer of `advise` for a kind of layers."""
    spec = layer.spec
    assert spec is not None
    advice = advise_layer(
        call=spec,
        kv_lens=lengths,
        given=layer.call,
        known=known_facts(layer.call, is_stated=True, has_model=True),
        library=library,
        **how,
    )
    choice = advice.choice
    known = advice.known
    unlike = advice.unlike
    slower = advice.slower_by_records
    if unlike and advice.same.empty:
        slower = ""
    if 0 < spec.window < max(lengths):  # what is on record reads every token
        known = [replace(found, here=None) for found in known]
    chosen = _by_choice(layer, lengths, library, how, choice)
    return replace(
        chosen,
        known=_of_what_runs(known, choice),
        slower=slower,
        own=own_build(choice),
        timed=advice.base,
        expected=advice.expected,
        unlike=unlike,
        confidence=confidence_of_nearest(advice.nearest.distance.iloc[0], not unlike),
    )


def _by_rules(
    layer: Layer,
    lengths: tuple[int, ...],
    library: str,
    how: Mapping[str, Any],
) -> Answer:
    """The answer for a kind of layers of which no times are on record."""
    spec = layer.spec
    assert spec is not None
    call = replace(layer.call, kv_lens=lengths, graph=True)
    choice = _chosen(layer, lengths, library, how)
    situation = situation_of(
        choice,
        spec,
        call,
        stated=known_facts(layer.call, is_stated=True, has_model=True),
        gpu=how["gpu"],
        server=how["server"],
    )
    chosen = _by_choice(layer, lengths, library, how, choice)
    return replace(
        chosen,
        known=_of_what_runs(known_problems(situation), choice),
        unlike=[_without_records(layer)],
    )


def _by_choice(
    layer: Layer,
    lengths: tuple[int, ...],
    library: str,
    how: Mapping[str, Any],
    choice: Choice,
) -> Answer:
    """The answer for a kind of layers by the choice alone."""
    return Answer(
        picked=LayerChoice("", choice=choice).chosen,
        problem=choice.problem,
        instead=_instead(layer, lengths, library, how) if choice.problem else (),
        why=choice.decided_by.why,
        source=choice.decided_by.source,
    )


def _chosen(
    layer: Layer,
    lengths: tuple[int, ...],
    library: str,
    how: Mapping[str, Any],
) -> Choice:
    """The choice of `explain`; RuntimeError for a backend by name that cannot run the call."""
    assert layer.spec is not None
    return explain(
        layer.spec,
        mode=layer.mode,
        call=replace(layer.call, kv_lens=lengths, graph=True),
        library=library,
        policy=how["backend"],
        gpu=gpu_named(how["gpu"]),
    )


def _instead(
    layer: Layer,
    lengths: tuple[int, ...],
    library: str,
    how: Mapping[str, Any],
) -> list[str]:
    """What a user sets for the backends of a library that can run the call."""
    rules, _ = find(library)
    words = []
    for policy in rules.policies_for(layer.mode):
        with suppress(RuntimeError):
            choice = _chosen(layer, lengths, library, {**how, "backend": policy})
            if choice.backend == policy and not choice.problem:
                word = setting_of(policy, rules.name)
                words.append(f"backend {word}" if word == policy else word)
    return words


def _of_what_runs(known: Sequence[Found], choice: Choice) -> Sequence[Found]:
    """The known problems; without those of speed where the pick cannot run the call."""
    if not choice.problem:
        return known
    return [found for found in known if found.problem.what != SLOWER]


def _without_records(layer: Layer) -> str:
    """That no times of a kind of layers are on record, and where other builds are compared."""
    assert layer.spec is not None
    words = f"No times of the engine's builds are on record of {layer.mode}, {layer.spec.dtypes}"
    if layer.mode == SPARSE_MLA:
        return f"{words} (other builds on an H200: {SPARSE_PAGE})."
    return f"{words}."


def _by_words(said: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """What is said -> the names of what it is said of."""
    names: dict[str, list[str]] = {}
    for words, name in said:
        names.setdefault(words, []).append(name)
    return names


def _keys(groups: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Groups of known problems by keys of JSON."""
    return {group.replace(" ", "_"): ids for group, ids in groups.items()}


def _distinct(groups: Iterable[Iterable[Found]]) -> list[Found]:
    """Each problem of several answers once, those that hold first."""
    found: dict[str, Found] = {}
    for answers in groups:
        for answer in answers:
            name = answer.problem.id
            if name not in found or found[name].missing:
                found[name] = answer
    return sorted(found.values(), key=lambda answer: bool(answer.missing))
