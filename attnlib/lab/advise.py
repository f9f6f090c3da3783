"""Advice for one decode call: the rule, known problems, and the nearest recorded batches.

A call on record has its own times. For another, `advise` shows times of the batches nearest to it,
how far they are, on which GPU and release, the line that measures the call itself, and what all
batches let expect of each backend against the engine's choice (`expected`). The backend of the
least expected time is chosen well, not perfectly: `neighbour_loss` computes what it loses on layers
left out. Of MLA nothing is expected: the mean over the 8 nearest batches stands for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..core.backends.table import BACKENDS, compared_package
from ..core.call_text import CallText, Lens, shortened
from ..core.checkpoints import served
from ..core.schedule.caps import BOUNDED, DEFAULT
from ..core.spec import MLA_HEAD_DIM, AttnSpec, MlaSpec, require_int, require_type
from ..measure.calls.cases import case_of, read_case
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.form import NamedCase
from ..measure.calls.lengths import sample_seq_lens
from ..measure.calls.mla.case import MlaCase
from ..measure.stats import geometric_mean
from ..run.look_up import OTHER_KERNEL, kernel_of, nearest_calls
from ..run.study import in_about
from ..select import Call, Choice, explain
from ..select.asked import DECODE, asked_kinds, facts_stated, is_checkpoint, layer_said
from ..select.facts import gpu_named
from ..select.known import (
    HOLDS,
    PROBLEMS,
    Found,
    known_problems,
    report,
    report_in_brief,
    to_data,
)
from ..select.libraries import AUTO, find, library_or_engine
from ..select.lines import DETAILS
from ..select.situation import (
    SERVED_CONTEXT,
    card_named,
    require_server,
    situation_of,
    with_dp_attention,
)
from ..studies import PACE, plan_rivals, random_batches
from ..studies.splits import split_cap
from .advised_times import (
    SPEEDUP,
    best_over_few,
    confidence_of_call,
    confidence_of_nearest,
    expected_speedups,
    mean_slowdowns,
    mean_speedups,
    of_other_pages,
    ranked,
    recorded_rows,
    shown,
    with_speedups,
    with_unrecorded,
)
from .cards import Brief, Card, folded_html, in_columns, in_words
from .engine_builds import (
    RECORDED_GPU,
    able_to_run,
    builds,
    is_another_build,
    own_build,
    preferably_of,
    run_by_engine,
    slower_as_expected,
    slower_nearby,
    time_on_record,
)
from .expected import Expected, expected_ratios
from .known_here import with_records
from .known_sizes import nearest_sizes
from .recorded import NEAREST, batches_for, draws_for, recorded_batches, recorded_calls
from .source import FLASHINFER_PACKAGE, ROUNDS

LIBRARY = "flashinfer==0.7.2"
"""Asked by default."""
SHOWN_BATCHES = 3
SHOWN_STUDIES = 2
PRESENT_PLANNER = "2026-11-26"
SHOWN = (
    *random_batches.BACKENDS,
    plan_rivals.BATCH_ATTENTION,
    *plan_rivals.PAGES_OF_16,
    split_cap.MLA.backend,
    f"{split_cap.MLA.backend}@{BOUNDED}",
    *split_cap.MLA_RIVALS,
    split_cap.TRITON,
)
SIZE_WORDS = {"head_dim": "head_dim", "kv_bytes": "bytes of a cache element"}
SPLIT_CAP = "sglang-fa3-split-cap"
SPLIT_CAP_GQA = f"{SPLIT_CAP}-gqa"
"""How the ids of known problems of SGLang's cap of splits begin, and the one of grouped queries."""
CHOICE_RATIO = "time / engine's choice"
EXPECTED_RATIO = f"{CHOICE_RATIO}: expected"
FASTEST_RATIO = "time / fastest"
"""Ratios of times, as the table names them."""
FEWEST_BACKENDS = 2
"""Backends on record of a call from which they are told of without the engine's pick."""
CLOSE = 1.06
"""Backends within this ratio of the best, in the mean, are no clear winner and loser."""
DISTANCE = "distance 3: about a factor of two in tokens or requests; above 6: weak evidence."
NOTHING_ALIKE = "This call is not on record, and no batch is like it: nothing is compared."
OF_RANK = " of one DP rank"
"""After the tokens of a call with DP attention: its lengths are those of one GPU's attention."""
MOST_RIVALS = "all rivals"
"""The draw of an H200 that speaks for backends of which a card has no record."""
MLA_MODE = "mla"
LATENT_DTYPE = "bfloat16"
"""Of every record of dense MLA."""


class Told(NamedTuple):
    """Times of the engine's backends in short: what they are of, a row per backend with what to set
    for it, and how far to trust them."""

    caption: str
    table: pd.DataFrame
    notes: list[str]


@dataclass(frozen=True, eq=False, repr=False)
class Advice(Brief):
    """The rule's `choice` for a call, and `nearest`, a row per recorded batch, nearest first.

    Columns of `nearest`: case, distance, a column of median us per backend, rounds, spread (largest
    relative difference between rounds of one backend), gpu, machine, release. `beside` are the
    nearest batches of another draw, which has backends that they lack. `same` are records of this
    very call (`recorded_calls`). `runs` are the backends that the engine has, and under which
    name of its own; None where no engine is named. `known` are the known problems that hold, or may
    hold, `card_name` the card that the user named. `of_model` says which kind of a model's layers
    this is, where it has several; `draws` are the recorded batches that it is by. `able` are the
    backends that can run a call that the pick cannot, `is_of_rank` says that the lengths are those
    of one rank of DP attention.
    """

    layer: AttnSpec
    lengths: tuple[int, ...]
    choice: Choice
    nearest: pd.DataFrame
    same: pd.DataFrame
    beside: pd.DataFrame = field(default_factory=pd.DataFrame)
    has_sinks: bool = False
    runs: Mapping[str, str] | None = None
    known: Sequence[Found] = ()
    card_name: str = ""
    of_model: str = ""
    draws: Sequence[str] = ()
    able: Sequence[str] = ()
    is_of_rank: bool = False

    @property
    def is_latent(self) -> bool:
        """Whether it is a call of MLA."""
        return self.choice.mode == MLA_MODE

    @property
    def holding(self) -> list[Found]:
        """The known problems that hold and of which records or threads say by how much, without
        those that cost this call nothing by its own records."""
        return [answer for answer in self.known if answer.costs]

    @property
    def cannot_run(self) -> bool:
        """Whether what the library picks cannot run the call."""
        return bool(self.choice.problem)

    def to_dict(self) -> dict[str, Any]:
        """JSON form: the pick, known problems, what is on record, notes."""
        times = self.times.assign(
            batch=[_batch_words(case) for case in self.nearest.case],
            distance=self.nearest.distance,
        )
        return {
            "library": self.choice.library,
            "mode": self.choice.mode,
            "gpu": self.card_name or self.choice.gpu,
            "picked": self.choice.picked,
            "known": to_data(self.known),
            "notes": self.notes,
            "same": json.loads(self.same.to_json(orient="records")),
            "nearest": json.loads(times.to_json(orient="records")),
        }

    @cached_property
    def times(self) -> pd.DataFrame:
        """Median us of the nearest batches, a column per backend that is on record of one."""
        return _times_in(self.nearest)

    @cached_property
    def times_beside(self) -> pd.DataFrame:
        """Median us of the engine's choice, and of the backends that `times` lacks, of the nearest
        batches of another draw; empty without a record of both."""
        times = _times_in(self.beside)
        lacked = [name for name in times if name not in self.times]
        if self.ours not in times or not lacked:
            return pd.DataFrame()
        return times[[self.ours, *lacked]].dropna(how="all", subset=lacked)

    @property
    def own(self) -> str:
        """Our name of the build that the engine itself runs, or the empty string."""
        return own_build(self.choice)

    @property
    def ours(self) -> str:
        """The column of `times` that is what the rule chose, or the empty string; where vLLM's
        build of a kernel is not on record, another build of it."""
        names = [self.own, *builds(self.choice)]
        recorded = [name for name in names if name in self.times]
        return recorded[0] if recorded else ""

    @cached_property
    def expected(self) -> dict[str, Expected]:
        """What all batches on record let expect of each backend against `base`; empty of MLA, and
        where the engine's choice is not on record."""
        call = _case_of(self.layer, self.lengths)
        if isinstance(call, MlaCase) or not self.ours:
            return {}
        refused = plan_rivals.PAGES_OF_16 if self.layer.page_size % 16 else ()
        rivals = [name for name in SHOWN if name not in refused]
        found = expected_ratios(call, self.ours, rivals, [*self.draws, MOST_RIVALS])
        if self.own not in found:
            return found
        base = found[self.own].ratio
        return {name: each._replace(ratio=each.ratio / base) for name, each in found.items()}

    @property
    def base(self) -> str:
        """The engine's choice by its own build where that is expected, else `ours`."""
        return self.own if self.own in self.expected else self.ours

    @property
    def command(self) -> str:
        """The line that measures this call on a GPU: all backends, round by round; none of MLA, and
        none where no backend can run the call."""
        nothing_runs = self.cannot_run and not self.able
        if self.is_latent or nothing_runs:
            return ""
        # What is measured has no window.
        case = _case_of(replace(self.layer, window=0), self.lengths)
        asked = [f"--engine {self.choice.library}", f"--gpu {self.card_name or self.choice.gpu}"]
        if self.choice.policy != AUTO:
            asked.append(f"--backend {self.choice.policy}")
        return f"python -m attnlib advise {' '.join(asked)} --measure {case.label}"

    @property
    def runs_as(self) -> str:
        """The engine's choice, and what it is called in records of measurements."""
        names = [name for name in builds(self.choice) if name in BACKENDS]
        if not names or names[0] == self.choice.picked:
            return self.choice.picked
        return f"{self.choice.picked}, here {names[0]}"

    def table(self) -> pd.DataFrame:
        """A row per backend, best first: in how many of the nearest batches that have it it is the
        fastest, its expected time over that of the engine's choice, that of the nearest batches
        (geometric mean, least and most), over the fastest (geometric mean and most), and as what
        the engine has it. Those of `times_beside` are compared with the engine's choice alone;
        they are the last where nothing is expected."""
        times = self.times
        over_best = times.div(times.min(axis=1), axis=0)
        fastest = times.idxmin(axis=1).value_counts().reindex(times.columns, fill_value=0)
        table = pd.DataFrame(index=times.columns)
        table["fastest in"] = fastest.astype(str) + " of " + times.count().astype(str)
        if self.ours:
            table[EXPECTED_RATIO] = self._expected_of(times.columns)
            self._add_ratios(table, times)
        table[f"{FASTEST_RATIO}: mean"] = geometric_mean(over_best).round(3)
        table[f"{FASTEST_RATIO}: max"] = over_best.max().round(3)
        table = table.sort_values(f"{FASTEST_RATIO}: mean")
        if len(self.times_beside):
            others = pd.DataFrame(index=self.times_beside.columns.drop(self.ours))
            others[EXPECTED_RATIO] = self._expected_of(others.index)
            self._add_ratios(others, self.times_beside)
            table = pd.concat([table, others.sort_values(f"{CHOICE_RATIO}: mean")])
        if self.expected:
            table = table.sort_values(EXPECTED_RATIO, kind="stable")
        if self.runs is not None:
            table["in the engine"] = [self.runs.get(name, "no") for name in table.index]
        return table.rename_axis("backend").reset_index()

    def _expected_of(self, backends: Sequence[str]) -> list[float]:
        """The expected ratio of each backend, nan without one."""
        unknown = Expected(np.nan, 0, "")
        ratios = [self.expected.get(name, unknown).ratio for name in backends]
        return np.round(ratios, 3).tolist()

    def _add_ratios(self, table: pd.DataFrame, times: pd.DataFrame) -> None:
        """Add to each backend of a table its time over that of the engine's choice."""
        over = times.div(times[self.ours], axis=0)
        table[f"{CHOICE_RATIO}: mean"] = geometric_mean(over).round(3)
        table["min"] = over.min().round(3)
        table["max"] = over.max().round(3)

    @property
    def batches(self) -> pd.DataFrame:
        """The few that are nearest of all, in words: the fastest backend of each and its time."""
        batches = self.nearest.head(SHOWN_BATCHES)
        times = self.times.head(SHOWN_BATCHES)
        spread = batches.spread.map("{:.1%}".format)
        return pd.DataFrame(
            {
                "batch": [_batch_words(case) for case in batches.case],
                "distance": batches.distance.map("{:.2f}".format),
                "fastest": times.idxmin(axis=1),
                "us": times.min(axis=1).map("{:.1f}".format),
                "rounds": batches.rounds,
                "spread": spread.where(batches.rounds > 1, "-"),
            }
        )

    @property
    def notes(self) -> list[str]:
        """What to mind: of the records, of the rule, of the engine."""
        notes = [*report(self.known), *self._sizes_of_heads(), *self._slower_notes()]
        notes += self._how_sure()
        if len(self.times_beside):
            names = ", ".join(self.times_beside.columns.drop(self.ours))
            gpus = _listed(self.beside.gpu)
            notes.append(f"Compared over other batches ({gpus}): {names}.")
        if self.same.empty and not self._is_unlike():
            notes.append("All times below were measured on other batches.")
        if self.nearest.day.min() < PRESENT_PLANNER and random_batches.PLANNED in self.times:
            notes.append(f"{random_batches.PLANNED}: by the planner before {PRESENT_PLANNER}.")
        notes += self._of_choice()
        if lost := self._splits_lost():
            notes.append(lost)
        near = self.nearest.distance.iloc[0]
        if near > OTHER_KERNEL:
            notes.append(f"Nothing near is on record: the nearest batch is at distance {near:.1f}.")
        notes += [*self._not_of_gpu(), *self._not_of_layer()]
        if lacked := self._lacked_by_engine():
            where = f"{self.choice.library} on {self.choice.gpu}"
            notes.append(f"Not in {where}: {', '.join(lacked)}.")
        page_size = self.layer.page_size
        if page_size % 16 and not self.is_latent:
            words = f"Left out, as they refuse pages of {page_size}"
            notes.append(f"{words}: {', '.join(plan_rivals.PAGES_OF_16)}.")
        return notes

    def _of_choice(self) -> list[str]:
        """What to mind of the layer and of the rule's pick."""
        choice = self.choice
        notes = [self.of_model] if self.of_model else []
        if choice.refused_page:
            words = f"takes pages of {choice.pages}, not of {choice.refused_page}"
            notes.append(f"{choice.backend} of {choice.library} {words}.")
        if choice.problem:
            notes.append(f"The rule's pick cannot run: {choice.problem}.")
            able = f"No backend of {choice.library} can run it."
            if self.able:
                able = f"Asked for by name can run it: {_listed(self.able)}."
            notes.append(able)
        return notes

    def _of_another_gpu(self, gpu: str) -> str:
        """That the table of this call is of another GPU, on which more or fewer backends run."""
        card = self.card_name.upper() or self.choice.gpu
        return (
            f"Not of {card}: these times are of {gpu}, and not all of its backends may run there."
        )

    def _not_of_gpu(self) -> list[str]:
        """That the nearest batches are of another GPU."""
        gpus = _listed(self.nearest.gpu)
        if self.choice.gpu != RECORDED_GPU:
            return [f"No batch is on record of {self.choice.gpu}: these are of {gpus}."]
        if not self.card_name or self.card_name in map(card_named, self.nearest.gpu):
            return []
        words = f"No batch is on record of an {self.card_name.upper()}: these are of {gpus}"
        return [f"{words}, whose SMs, rates and bandwidth are others."]

    def _of_other_cards(self, table: pd.DataFrame) -> list[str]:
        """The backends of a table whose expected time is by batches of another GPU."""
        gpus = {*self.nearest.gpu}
        others: dict[str, list[str]] = {}
        for name in table.backend:
            if name in self.expected and self.expected[name].gpu not in gpus:
                others.setdefault(self.expected[name].gpu, []).append(name)
        return [f"By batches of {gpu}: {', '.join(names)}." for gpu, names in others.items()]

    @property
    def unlike(self) -> list[str]:
        """What the nearest batches lack of the GPU, and of the layer."""
        return [*self._not_of_gpu(), *self._not_of_layer()]

    def _not_of_layer(self) -> list[str]:
        """What the nearest batches lack of the call: its size, its layer, the pick."""
        layer = self.layer
        notes = self._sizes_lacked()
        if layer.window or self.has_sinks:
            notes.append("No batch has a window or sinks, and --measure measures without.")
        if not self.ours:
            notes.append(f"No batch near it is on record of {self.choice.kernel or 'the pick'}.")
        return notes

    def _sizes_lacked(self) -> list[str]:
        """The sizes with kernels of their own that no near batch has."""
        notes = []
        sizes = {} if self.is_latent else SIZE_WORDS
        for name, words in sizes.items():
            value = kernel_of(self.layer)[name]
            recorded = sorted({*self.nearest[name]})
            if value not in recorded:
                words = f"{words} {value}: these are of {_listed(recorded)}"
                notes.append(f"No batch near it is on record of {words}.")
        return notes

    def _sizes_of_heads(self) -> list[str]:
        """Of SGLang's cap of splits over grouped queries: the nearest recorded calls with these
        heads that lose splits, a line each."""
        where, sizes = self._capped_nearby()
        if not sizes:
            return []
        head = f"Nearest calls on record that lose splits, with these heads ({where}):"
        lines = [f"  {size}" for size in sizes]
        return [head, *lines]

    def _capped_nearby(self) -> tuple[str, list[str]]:
        """Study and GPU of those calls, and the time of each without and with the bounded cap."""
        names = [answer.problem.id for answer in self.holding]
        if SPLIT_CAP_GQA not in names:
            return "", []
        problem = PROBLEMS[SPLIT_CAP_GQA]
        gpu = "h100" if "H100" in self.nearest.gpu.iloc[0] else "h200"
        call = _case_of(self.layer, self.lengths)
        rows = nearest_sizes(problem, gpu, call).head(SHOWN_BATCHES)
        if not len(rows):
            return "", []
        sizes = []
        for row in rows.itertuples():
            times = f"{row.slow_us:.1f} us, {row.fast_us:.1f} us with SPLITS=bounded"
            sizes.append(f"{shortened(row.case.label)}: {times}")
        return f"{problem.record['study']}, {rows.gpu.iloc[0]}", sizes

    def _cap_in_brief(self) -> list[str]:
        """Of a pick that loses splits: whether the table has another build's times, what the
        nearest call that loses splits takes, and the splits of this one."""
        where, sizes = self._capped_nearby()
        if not sizes:
            return []
        nearest = f"Nearest call on record that loses splits, with these heads ({where}):"
        return [*self._other_build(self.ours), f"{nearest} {sizes[0]}.", self._splits_lost()]

    def _how_sure(self) -> list[str]:
        """Whether one backend wins, whose heads the nearest batch has, and of whose build it is."""
        notes = []
        table = self.table()
        words = "expected" if self.expected else "means"
        ratios = table[EXPECTED_RATIO if self.expected else f"{FASTEST_RATIO}: mean"]
        close = table.backend[ratios <= CLOSE * ratios.min()]
        if len(close) > 1:
            notes.append(f"No clear winner, {words} within 6 %: {', '.join(close)}.")
        return [*notes, *self._other_heads(), *self._other_build(self.ours)]

    def _other_heads(self) -> list[str]:
        """That the nearest batch has other heads."""
        heads = self.nearest.heads.iloc[0]
        if heads == self.layer.heads:
            return []
        return [f"The nearest batch has other heads ({heads})."]

    def _other_build(self, own: str) -> list[str]:
        """That the times of the engine's choice are of a build that is not the engine's."""
        if not is_another_build(own, self.runs):
            return []
        lacks = ", which lacks SGLang's cap" if self._has_caps() else f" ({own})"
        return [f"Times of the engine's choice are of another build{lacks}."]

    @property
    def slower_by_records(self) -> str:
        """The pick's time over that of another backend of the engine: of this very call, or, where
        that is not on record, of the nearest batches if it is slower there; else empty."""
        said = time_on_record(self.own, self.same, self.runs)
        if said or self._is_unlike():
            return said
        if self.expected:
            return slower_as_expected(self.base, self.expected, self.runs)
        return slower_nearby(self.base, self.speedups, self.runs)

    @cached_property
    def speedups(self) -> pd.DataFrame:
        """Speedups of the engine's backends over its choice as all batches let expect them, or in
        the mean of the nearest, and how many batches have both; a fix of a known problem by the
        calls that are like this one. Empty where the choice is not on record."""
        if self.expected:
            table = expected_speedups(self.expected, self.base, self.runs)
        else:
            draws = [self._times_alike(), self.times_beside]
            table = mean_speedups(draws, self.ours, self.runs)
        return self._as_known(table)

    def _times_alike(self) -> pd.DataFrame:
        """`times`, of other caps of splits in batches alone that lose splits as the call does."""
        if not self._has_caps():
            return self.times
        return self._comparable_times(self.own, self._loses_splits())

    def _slower_notes(self) -> list[str]:
        """`slower_by_records`, and whether SGLang's other cap can help at all."""
        return [*filter(None, [self.slower_by_records]), *self._no_help()]

    def _no_help(self) -> list[str]:
        """That SGLang's other cap cannot help, where it can be chosen."""
        if not self._has_caps() or self._loses_splits():
            return []
        return ["No request loses splits in this call: SPLITS=bounded does not help."]

    def _has_caps(self) -> bool:
        """Whether the pick is a build of FlashAttention-3 whose cap of splits can be chosen."""
        return f"{self.own}@{BOUNDED}" in (self.runs or {})

    def _loses_splits(self) -> bool:
        return _loses_splits(self.layer, self.lengths)

    def _comparable_times(self, own: str, loses: bool) -> pd.DataFrame:
        """`times`, those of a build's other caps only in batches that lose splits as the call does,
        or that lose none as the call does."""
        capped = [name for name in self.times if name.startswith(f"{own}@")]
        times = self.times.copy()
        for row, case in zip(times.index, self.nearest.case, strict=True):
            if _loses_splits(case.spec, sample_seq_lens(case).tolist()) != loses:
                times.loc[row, capped] = np.nan
        return times

    def _splits_lost(self) -> str:
        """The splits of the longest request under SGLang's cap and under the bounded one."""
        ids = {answer.problem.id for answer in self.known if answer.verdict == HOLDS}
        if not any(name.startswith(SPLIT_CAP) for name in ids):
            return ""
        longest = int(np.argmax(self.lengths))
        now = _splits(self.layer, self.lengths, DEFAULT)[longest]
        bounded = _splits(self.layer, self.lengths, BOUNDED)[longest]
        return (
            f"Splits of the longest request: {now} now, {bounded} with SPLITS=bounded "
            f"(model, context {SERVED_CONTEXT:,})."
        )

    def _lacked_by_engine(self) -> list[str]:
        """The backends with records that the engine does not have, if one is named."""
        if self.runs is None:
            return []
        recorded = {*self.times, *self.times_beside, *self.same.backend}
        return sorted(recorded - {*self.runs})

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The rule's pick and why, which batches those are, and records of this very call."""
        choice = self.choice
        nearest = self.nearest
        near = f"{nearest.distance.iloc[0]:.2f} to {nearest.distance.iloc[-1]:.2f}"
        first, last = nearest.day.min(), nearest.day.max()
        days = first if first == last else f"{first} to {last}"
        first_row = nearest.iloc[0]
        release = f"{first_row.library} {first_row.release}"
        return [
            ("engine's choice", f"{choice.picked}, {choice.library}"),
            ("decided by", f"{choice.decided_by.why} ({choice.decided_by.source})"),
            ("nearest batches", f"{len(nearest)}, distance {near}"),
            ("measured on", f"{_listed(nearest.gpu)}, {release}, L2 {first_row.l2}, {days}"),
            *self._facts_of_this_call(),
        ]

    def _facts_of_this_call(self) -> list[tuple[str, str]]:
        """Records of this very call, by study, GPU, timer and width of the page table."""
        columns = ["study", "gpu", "timer", "page_table"]
        groups = [*self.same.groupby(columns, sort=False)]
        groups.sort(key=lambda group: -len(group[1]))
        facts = []
        for (study, gpu, timer, page_table), rows in groups[:SHOWN_STUDIES]:
            how = ", ".join(filter(None, ("this call", gpu, timer, page_table)))
            times = ", ".join(f"{_in_words(row)} {row.us:.1f}" for row in rows.itertuples())
            facts.append((f"in {study}", f"{how}, us: {times}"))
        return facts

    def brief(self) -> list[str]:
        """What runs, known problems with their sizes, and times of the engine's backends."""
        told = self._told()
        more = [f"Nearest batches, sources, how to measure: {DETAILS}"]
        known = self._known_in_brief()
        if known and known[-1].endswith(DETAILS):  # which points there already
            more = []
        return [
            self._title,
            *self._runs_in_brief(),
            *known,
            "",
            told.caption,
            *in_columns(told.table),
            *told.notes,
            *more,
        ]

    def _runs_in_brief(self) -> list[str]:
        """What runs and why, and what to mind of it."""
        choice = self.choice
        where = f"{choice.library} on {self.card_name or choice.gpu}"
        return [f"{where} runs {choice.picked}: {choice.decided_by.why}", *self._of_choice()]

    def _known_in_brief(self) -> list[str]:
        return report_in_brief(self.known, self.card_name)

    def _told(self) -> Told:
        """The times of this call, or of the nearest batches where no record is of it."""
        return self._told_of_call() or self._told_of_nearest()

    def _told_of_call(self) -> Told | None:
        """The times of the engine's backends at this call, and whether they decide; None where no
        record is of it."""
        names = [self.own, self.ours]
        recorded = {*self.same.backend}
        own = next((name for name in names if name in recorded), "")
        rows = recorded_rows(self.same, own, self.runs)
        if not own and len(rows) < FEWEST_BACKENDS:
            return None
        first = rows.iloc[0]
        if first.study == split_cap.STUDY.name and self.is_latent:
            others = of_other_pages(self.nearest, rows, own, self.runs)
            rows = pd.concat([rows, others], ignore_index=True)
        how = f"{first.study}, {first.gpu}, {first.timer}"
        if first.page_table:
            how += f", {first.page_table}"
        table = with_speedups(rows, own)
        pick = table[table.backend == own] if own else table
        is_same_card = self.card_name in ("", card_named(first.gpu))
        is_here = is_same_card and self.choice.gpu == RECORDED_GPU
        if not is_here and not self._not_of_gpu():  # the nearest batches are of this GPU
            return None
        notes = [
            confidence_of_call(int(pick.rounds.min()), bool(own), is_here),
            *([] if is_here else [self._of_another_gpu(first.gpu)]),
            *self._no_help(),
        ]
        return Told(
            caption=f"This call on record ({how}; kernels alone):",
            table=shown(table, own, self.runs, self.engine),
            notes=notes,
        )

    def _told_of_nearest(self) -> Told:
        """The speedups of the engine's backends over its pick in the nearest batches, and what
        those batches lack of this call."""
        if self._is_unlike():
            return Told(NOTHING_ALIKE, pd.DataFrame(), self._not_of_layer())
        table = self.speedups
        if not self.ours:
            table = mean_slowdowns(self._times_alike(), self.runs)
        caption = self._caption_of_nearest(table)
        if len(table) == 1:
            table = table.head(0)
        rows = shown(table, self.base, self.runs, self.engine)
        if self._stands_without_cap():
            lacking = [self.own, f"{self.own}@{BOUNDED}"]
            rows = with_unrecorded(rows, self.ours, lacking, self.runs or {})
        off = [*self._not_of_gpu(), *self._not_of_layer()]
        notes = [
            *off,
            confidence_of_nearest(self.nearest.distance.iloc[0], not off),
            *self._of_few(table),
            *self._of_other_cards(rows),
            *self._other_heads(),
            *self._cap_in_brief(),
        ]
        return Told(
            caption=caption,
            table=rows,
            notes=notes,
        )

    def _of_few(self, table: pd.DataFrame) -> list[str]:
        """That rows of few batches are no ranking, where the table has some."""
        if self.expected or not self.ours:
            return []
        said = best_over_few(table, self._times_alike(), self.ours)
        return [said] if said else []

    def _caption_of_nearest(self, table: pd.DataFrame) -> str:
        """That the call is not on record, and of which batches and how many the table is."""
        lacks = "" if self.same.empty else " of this engine and GPU"
        head = f"This call is not on record{lacks}"
        near = f"{self._nearest_counted(table)} ({_listed(self.nearest.gpu)})"
        if table.empty:
            return f"{head}, and the engine has none of the backends of {near}."
        if len(table) == 1:
            (only,) = table.backend
            words = f"of the engine's backends {near} have {only} alone"
            return f"{head}, and {words}: nothing is compared."
        if self.expected:
            cards = [recorded_batches(draw).gpu.iloc[0] for draw in self.draws]
            near = f"expected by all batches ({_listed(cards)})"
        if not self.ours:
            near += ", slowdown against the fastest of each"
        return f"{head}; {near}:"

    def _nearest_counted(self, table: pd.DataFrame) -> str:
        """How many of the nearest batches the rows of a table are of, but that of the pick."""
        total = len(self.nearest)
        counts = table.batches[table.backend != self.ours]
        if not len(counts) or counts.min() == total:
            return f"the {total} nearest batches"
        if counts.min() == counts.max():
            return f"{counts.min()} of the nearest batches"
        return f"{counts.min()} to {counts.max()} of the nearest batches"

    def _stands_without_cap(self) -> bool:
        """Whether another build, without SGLang's cap of splits, stands for a pick that loses
        splits by it."""
        is_other = is_another_build(self.ours, self.runs)
        return is_other and self._has_caps() and self._loses_splits()

    def _is_unlike(self) -> bool:
        """Whether the pick cannot run the call and no batch near it has its sizes, so that those
        batches say nothing of it."""
        return self.cannot_run and bool(self._sizes_lacked())

    def _as_known(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table with what known problems say of their fix, by the calls that are like this;
        no number of it where those disagree."""
        table = table.copy()
        for answer in self.known:
            here = answer.here
            if here is None or not here.nearest:
                continue
            slow, fast = (side.partition("==")[0] for side in answer.problem.record["pair"])
            if slow == self.ours:
                is_fix = table.backend == fast
                speedup = np.nan if here.is_open else here.slowdown
                table.loc[is_fix, [SPEEDUP, "batches"]] = speedup, here.nearest
        if not self.expected:
            return ranked(table, self.ours)
        return table.sort_values(SPEEDUP, ascending=False, kind="stable", ignore_index=True)

    @property
    def engine(self) -> str:
        """The library without its release."""
        return self.choice.library.partition("==")[0]

    @property
    def _title(self) -> str:
        """The call, and its tokens."""
        tokens = f"{sum(self.lengths):,} tokens"
        if self.is_of_rank:
            tokens += OF_RANK
        return f"{shortened(_case_of(self.layer, self.lengths).label)}: {tokens}"

    def _repr_html_(self) -> str:
        return folded_html(self.short_card(), self.card(), "Details")

    def short_card(self) -> Card:
        """What `brief` says, as a card."""
        told = self._told()
        lines = [*self._runs_in_brief(), *self._known_in_brief()]
        if told.table.empty:
            lines.append(told.caption)
        return Card(
            title=self._title,
            notes=[line.strip().replace(DETAILS, "see Details") for line in lines],
            facts=[],
            table=told.table,
            caption=told.caption,
            footer=" ".join(told.notes),
        )

    def card(self) -> Card:
        """The rule, what other backends would change, the nearest batches, how to measure."""
        table = self.table()
        more = [("the nearest of them", self.batches)]
        if self._is_unlike():
            table = table.head(0)
            more = []
        numbers = table.select_dtypes("float").columns
        time = in_about((ROUNDS, ROUNDS * len(BACKENDS)), pace=PACE)
        return Card(
            title=self._title,
            notes=self.notes,
            facts=self.facts,
            table=in_words(table, dict.fromkeys(numbers, ".3f")),
            caption="backends among the nearest recorded batches",
            footer=DISTANCE,
            more=more,
            code=self.command,
            code_caption=f"Measure this call on a GPU{time}:",
        )


def advise(
    call: DecodeCase | MlaCase | AttnSpec | MlaSpec | CallText | str,
    lengths: Sequence[int] = (),
    *,
    library: str = "",
    engine: str = "",
    backend: str = AUTO,
    gpu: str = RECORDED_GPU,
    facts: Call | None = None,
    server: Mapping[str, Any] | None = None,
) -> Advice:
    """What a library runs for a decode call, known problems of it, and the nearest records.

    Parameters
    ----------
    call : DecodeCase, MlaCase, AttnSpec, MlaSpec, CallText or str
        The call, its text (`heads=32/8 head_dim=128 page=16 lens=8192x16`), or its layer; one of
        head_dim 576 is MLA's. An engine takes its own page size for a layer, or a text without
        `page`, unless `facts` have `pinned_page`; that of a case is pinned. Of a model
        (`model=DeepSeek-V3 tp=8 dp=8 lens=8192x16`) it is the first kind of layers.
    lengths : sequence of int
        Tokens of each request, with a layer alone; with DP attention of the requests of one rank.
    library : str
        An engine or FlashInfer, with its release: `sglang==0.5.23`; by default `LIBRARY`.
    engine : str
        The same, where `library` is left out.
    backend : str
        The one that a user of the library pins; by default the library chooses.
    gpu : str
        A name such as `h100`, or a compute capability such as `sm90`.
    facts : Call, optional
        Other facts that rules test.
    server : mapping, optional
        How the server was started, for known problems: `dp_attention`, `context` in tokens and
        others of `attnlib.select.situation`.

    Returns
    -------
    Advice
        Shown by a notebook; times are microseconds, measured, not predicted.

    Raises
    ------
    TypeError, ValueError
        For another call, lengths that are missing or below 1, MLA that is sparse or not of 16 bits,
        facts of the server that there are not, and as `explain` does.

    Examples
    --------
    >>> import attnlib
    >>> advice = attnlib.advise("heads=8/1 head_dim=128 page=16 lens=2048+30720")
    >>> advice.choice.picked, len(advice.nearest)
    ('fa2', 8)
    """
    library = library_or_engine(library, engine) or LIBRARY
    stated = Call() if facts is None else facts
    server = {} if server is None else server
    require_type("facts", stated, Call)
    require_type("gpu", gpu, str, such_as="h100")
    require_type("backend", backend, str, such_as=AUTO)
    require_server(server)
    of_model = ""
    is_of_rank = False
    has_model = False
    is_stated = facts is not None or isinstance(call, CallText | str)
    if isinstance(call, str):
        _require_decode(read_case(call))
        call = CallText.read(call)
    if isinstance(call, CallText):
        has_model = is_checkpoint(call.model or "")
        is_of_rank = (call.dp or 1) > 1
        server, of_model = _served(call, server)
        call, lengths, stated = _said(call, lengths, stated)
    kv_lens = _lengths_of(call, lengths)
    return advise_layer(
        call,
        kv_lens,
        stated,
        known_facts(stated, is_stated, has_model),
        library=library,
        backend=backend,
        gpu=gpu,
        server=server,
        of_model=of_model,
        is_of_rank=is_of_rank,
    )


def advise_layer(
    call: DecodeCase | MlaCase | AttnSpec | MlaSpec,
    kv_lens: tuple[int, ...],
    given: Call,
    known: Sequence[str],
    *,
    library: str,
    backend: str,
    gpu: str,
    server: Mapping[str, Any],
    of_model: str = "",
    is_of_rank: bool = False,
) -> Advice:
    """The advice for a case, or for a layer and its lengths; `known` are the fields of `given` that
    are known."""
    is_case = isinstance(call, DecodeCase | MlaCase)
    layer = _layer_of(call)
    mode = MLA_MODE if layer.head_dim == MLA_HEAD_DIM else "decode"
    stated = replace(
        given,
        kv_lens=kv_lens,
        graph=True,
        pinned_page=given.pinned_page or is_case,
    )
    rules = find(library)[0]
    backend = rules.policy_named(backend, mode)
    rules.require_policy(backend, [mode], "backend")
    how = {"gpu": gpu_named(gpu), "library": library, "policy": backend}
    choice = explain(layer, mode=mode, call=stated, **how)
    layer = replace(layer, page_size=choice.pages or layer.page_size)
    case = _case_asked(call, layer, kv_lens, mode)
    nearest, beside = _nearest_of(case, layer, gpu)
    same = _recorded_on(case, gpu)
    recorded = {*nearest, *beside, *same.backend}
    runs = run_by_engine(layer, stated, recorded, mode=mode, **how)
    situation = situation_of(
        choice,
        layer,
        stated,
        stated=known,
        gpu=gpu,
        server=server,
    )
    answers = known_problems(situation)
    if choice.gpu == RECORDED_GPU:
        answers = with_records(answers, case, card_named(gpu))
    return Advice(
        layer=layer,
        lengths=kv_lens,
        choice=choice,
        nearest=nearest,
        beside=beside,
        same=same,
        has_sinks=stated.sinks,
        runs=runs,
        known=answers,
        card_name=card_named(gpu),
        of_model=of_model,
        draws=draws_for(layer, gpu),
        able=able_to_run(layer, stated, mode=mode, **how) if choice.problem else (),
        is_of_rank=is_of_rank,
    )


def _case_asked(
    call: DecodeCase | MlaCase | AttnSpec | MlaSpec,
    layer: AttnSpec,
    kv_lens: tuple[int, ...],
    mode: str,
) -> DecodeCase | MlaCase:
    """The case that was given, or that of a layer; a call of MLA's head_dim is one of MLA."""
    if isinstance(call, MlaCase):
        return call
    if isinstance(call, DecodeCase) and mode != MLA_MODE:
        return call
    return _case_of(layer, kv_lens)


def _nearest_of(
    case: DecodeCase | MlaCase,
    layer: AttnSpec,
    gpu: str,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The nearest batches of the draw that fits a layer best, and those of the other draws."""
    tables = []
    for draw in draws_for(layer, gpu):
        table = nearest_calls(case, batches_for(layer, draw))
        tables.append(table.head(NEAREST))
    nearest, *others = tables
    beside = pd.concat(others) if others else pd.DataFrame()
    return nearest.reset_index(drop=True), beside.reset_index(drop=True)


def _recorded_on(case: DecodeCase | MlaCase, gpu: str) -> pd.DataFrame:
    """The records of the very call, of this GPU where there are any."""
    same = recorded_calls(case)
    cards = [card_named(name) for name in same.gpu]
    return preferably_of(card_named(gpu), same, cards)


def _served(said: CallText, server: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The facts of the server with what a text's model says, and which kind of its layers it is."""
    model = said.model or ""
    if not is_checkpoint(model):
        return server, ""
    splits = {"tp": said.tp or 1, "dp": said.dp or 1}
    server = with_dp_attention(server, model, **splits)
    checkpoint = served(model, **splits).checkpoint
    first, *others = checkpoint.kinds
    if not others:
        return server, ""
    names = ", ".join(kind.name for kind in others)
    words = f"{checkpoint.name} has several kinds of layers: this is of the first, {first.name}"
    return server, f"{words}, not of {names}."


def require_decode_text(said: CallText) -> None:
    """ValueError for the text of a call of another mode."""
    if said.mode not in (None, DECODE):
        raise ValueError(f"call must be of mode decode, got {str(said)!r}")


def _require_decode(case: NamedCase) -> DecodeCase | MlaCase:
    """The case; ValueError for one of another mode."""
    if not isinstance(case, DecodeCase | MlaCase):
        raise ValueError(f"call must be of mode decode or mla, got {case.label!r}")
    if isinstance(case, MlaCase) and case.q_len > 1:
        words = "q_len must be 1 in advise (explain takes the verification of drafts)"
        raise ValueError(f"{words}, got {case.q_len}")
    return case


def _said(
    said: CallText,
    lengths: Sequence[int],
    facts: Call,
) -> tuple[DecodeCase | MlaCase | AttnSpec | MlaSpec, Sequence[int], Call]:
    """What the text of a call says: a case, or a layer and lengths where it says no page size."""
    if len(lengths):
        raise ValueError(f"lengths must be left out with the text of a call, got {len(lengths)}")
    case = _require_decode(case_of(said))
    if said.model and is_checkpoint(said.model):
        first = asked_kinds(mode=DECODE, facts={}, **layer_said(said))[0]
        facts = replace(facts, **facts_stated(first.call))
    if said.kv_dtype:
        facts = replace(facts, pinned_kv_dtype=True)
    if said.page:
        return case, (), facts
    return case.spec, sample_seq_lens(case).tolist(), facts


def known_facts(given: Call, is_stated: bool, has_model: bool) -> list[str]:
    """The fields of a call that are known: a decode step is in a graph and has no drafts, a model
    by name says its architecture, and the others where they are not those of a plain call."""
    plain = Call()
    names = ["graph", "speculative", "eagle_topk"]
    if has_model:
        names.append("model")
    for name, value in vars(given).items():
        if is_stated and value != getattr(plain, name):
            names.append(name)
    return names


def _layer_of(call: DecodeCase | MlaCase | AttnSpec | MlaSpec) -> AttnSpec:
    """The layer of a call; of MLA its query heads over one KV head of 576."""
    spec = call.spec if isinstance(call, DecodeCase | MlaCase) else call
    if isinstance(spec, AttnSpec):
        if spec.head_dim == MLA_HEAD_DIM and spec.dtypes != LATENT_DTYPE:
            words = f"dtype and kv_dtype of MLA must be {LATENT_DTYPE} (explain takes others)"
            raise ValueError(f"{words}, got {spec.dtypes}")
        return spec
    if spec.top_k or spec.kv_format != "bfloat16":
        words = "a call of MLA must be dense, over a bfloat16 cache"
        got = f"got top_k {spec.top_k} and {spec.kv_format}"
        raise ValueError(f"{words} (explain: sparse_mla), {got}")
    return AttnSpec(spec.num_qo_heads, 1, MLA_HEAD_DIM, spec.page_size)


def _lengths_of(
    call: DecodeCase | MlaCase | AttnSpec | MlaSpec,
    lengths: Sequence[int],
) -> tuple[int, ...]:
    """Tokens of each request of a call; TypeError or ValueError for what `advise` cannot take."""
    is_case = isinstance(call, DecodeCase | MlaCase)
    if isinstance(call, NamedCase):
        _require_decode(call)
    if not is_case and not isinstance(call, AttnSpec | MlaSpec):
        words = "call must be a DecodeCase, MlaCase, AttnSpec, MlaSpec or text"
        raise TypeError(f"{words}, got {type(call).__name__}")
    if is_case == bool(len(lengths)):
        words = "lengths must be given with a layer, and not with a case"
        raise ValueError(f"{words}, got {len(lengths)} with {type(call).__name__}")
    tokens = np.asarray(sample_seq_lens(call) if is_case else lengths).tolist()
    for length in tokens:
        require_int("lengths", length)
    return tuple(tokens)


def _case_of(layer: AttnSpec, lengths: tuple[int, ...]) -> DecodeCase | MlaCase:
    sizes = Lens.of(lengths).fields
    if layer.head_dim == MLA_HEAD_DIM:
        return MlaCase(MlaSpec(layer.num_qo_heads, page_size=layer.page_size), **sizes)
    return DecodeCase(layer, **sizes)


def _times_in(batches: pd.DataFrame) -> pd.DataFrame:
    """Median us of recorded batches, a column per backend that is on record of one."""
    recorded = batches.dropna(axis=1, how="all")
    return recorded[[name for name in SHOWN if name in recorded]]


def _batch_words(case: DecodeCase | MlaCase) -> str:
    """A batch as a row names it: its text, cut, and its tokens where the text is long."""
    words = shortened(case.label)
    if words == case.label:
        return words
    return f"{words}, {sample_seq_lens(case).sum():,} tokens"


def _splits(
    layer: AttnSpec | MlaSpec,
    lengths: Sequence[int],
    cap: str,
) -> np.ndarray:
    """Splits that SGLang's FlashAttention-3 gives each request [bs] under a cap, by the model."""
    lengths = tuple(map(int, lengths))
    if isinstance(layer, MlaSpec):
        layer = _layer_of(layer)
    # SGLang casts the query to the dtype of its cache.
    layer = replace(layer, dtype=layer.kv_dtype)
    served = replace(_case_of(layer, lengths), context=max(SERVED_CONTEXT, *lengths))
    return split_cap.splits_of(served, cap)


def _loses_splits(layer: AttnSpec | MlaSpec, lengths: Sequence[int]) -> bool:
    """Whether a request has fewer splits by SGLang's cap than by the bounded one, by the model."""
    fewer = _splits(layer, lengths, DEFAULT) < _splits(layer, lengths, BOUNDED)
    return bool(fewer.any())


def _listed(values: Sequence[Any]) -> str:
    """Each value once, in words."""
    return ", ".join(map(str, dict.fromkeys(values)))


def _in_words(row: Any) -> str:
    """A backend, and its library's release where that is not FlashInfer."""
    package = compared_package(row.backend)
    if row.release and package != FLASHINFER_PACKAGE:
        return f"{row.backend} ({package} {row.release})"
    return row.backend
