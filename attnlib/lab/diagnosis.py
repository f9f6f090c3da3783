"""Diagnose a trace of a server: which attention ran, what surrounds it, which known patterns show.

A trace is slower than the server was; shares and counts are the trace's, gains are of records. All
that is said of a kind of step is of the same steps (`Diagnosis.usual`), so that parts add up.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from statistics import fmean, median
from typing import Any

import pandas as pd

from ..core.backends.table import family_of, role_of
from ..core.call_text import Lens
from ..core.layer import parse_layer
from ..core.spec import ELEMENT_BYTES, require_int, require_word
from ..measure.marks import DECODE, SGLANG, VERIFY
from ..measure.spans import Span, busy_us
from ..measure.steps import EITHER, UNKNOWN, Step, find_steps, idle_under
from ..measure.trace_file import Trace, read_trace
from ..select.known import PROBLEMS, Found, report, report_in_brief, size_in_brief, to_data
from ..select.lines import DETAILS, fact_rows
from ..select.situation import card_named
from .cards import BLANK, Brief, Card, fact_lines, in_columns, in_digits
from .fix_gains import LENS, LONGEST, SIZES, STATED, gained
from .patterns import PATTERNS, WAITING, Pattern, kind_of, ran, tile_rows
from .step_rows import around, calls_in, host_rows, kernel_rows, lengths_of
from .trace_known import (
    CONTEXT,
    ENGINES,
    PACKAGES,
    fixes_of,
    holding_in,
    possible,
    releases_of,
    require_release,
    situation_in,
    sizes_of,
    with_switch,
)

Row = dict[str, Any]
Shape = Mapping[str, Any]
MOST_KERNELS = 12
DECODES = (DECODE, VERIFY, EITHER)
LEAST_IDLE = 0.05
"""Share of a step that the GPU idles under a call, from which the call is told of."""
LATE = 1.5
"""How many times as long as the usual ones a step is that is told apart."""
TIMES = (
    "Times are means per kind of step. Steps at the start or end of the trace and the slowest and "
    "fastest quarter are left out."
)
NO_MARKS = "No marks of steps: decode or verification is unknown, copies of lengths are unseen."
LENGTHS = "lens=TOKENSxREQUESTS"
"""What a note asks for, until the number of requests is known."""
NO_LENGTHS = f"The trace has no request lengths. Pass yours: --shape '{LENGTHS}'."
SUMS = "Marks have the sum of a step's KV tokens, not the longest request: kv_len is the mean."
NO_HEADS = "Pass --shape 'heads=32/8 lens=...' to check SGLang's cap of splits."
NO_BATCH_SIZE = f"Pass --shape '{LENGTHS}' to check whether fa2 splits requests."
NO_LAUNCHES = "No calls of the CUDA API: launches, and what was marked, are unseen."
NO_WAITS = "No waits of the host: copies that it waits for are unseen."
NO_GRAPHS = "No calls of the CUDA API, or no ids of graphs and launches: graphs are unseen."
NO_COPIES = "No copies by the GPU: plans and lengths that are copied are unseen."
NO_GRIDS = "Kernels have no grids: whether one has few blocks is unseen."
NO_SMS = "Its SMs are not counted: whether a kernel has few blocks is unseen."
LIKE_ATTENTION = re.compile("attn|attention|fmha|mla|sparse", re.IGNORECASE)
NOT_ATTENTION = re.compile(
    "cache|rope|norm|metadata|combine|reduce|merge|concat|index|indices|topk|gemm|scatter|stage2"
    "|table|score|logits|compress|insert|build",
    re.IGNORECASE,
)
"""What is in the name of a kernel that may be attention, and of one that is beside it."""
NO_DECODE = "No decode step: the patterns are of decode and verification."
NO_WHOLE_STEP = "No decode step but at an end of the trace: what runs before it is unseen."
NO_TILES = "Names are without template arguments: fa2's tiles are unseen."


ASKS = (NO_LENGTHS, NO_HEADS, NO_BATCH_SIZE)
"""What a caller can state, so that more is said."""
LEAST_TOLD = 0.5
"""Percent of a step, below which a part of it is not told."""
MOST_IN_BRIEF = 6
LEFT_TO_DETAILS = ["library", "per attention call"]
"""Kernels of a short answer, and the columns that it leaves out."""
SAVING = "Possible saving per step: "
HEADS = {"is": "purpose", "of": "library", "a step": "launches a step"}
"""Columns as a card heads them."""


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis(Brief):
    """What a trace shows; `shape` is what the trace and the caller tell of the layer."""

    trace: Trace
    steps: list[Step]
    shape: dict[str, Any]

    @cached_property
    def decodes(self) -> list[Step]:
        """The steps with a query, or a few, per request."""
        return [step for step in self.steps if step.kind in DECODES]

    @property
    def origin(self) -> str:
        """Who traced, and which GPU."""
        return f"{self.trace.source}, {self.trace.gpu or 'GPU unknown'}"

    @cached_property
    def usual(self) -> dict[str, list[Step]]:
        """Kind -> the steps that all that is said of it is of (`TIMES`), by length."""
        return {kind: _middle_half(steps) for kind, steps in self.whole.items()}

    @cached_property
    def whole(self) -> dict[str, list[Step]]:
        """Kind -> its steps by length, without cut ones and those at the trace's ends."""
        whole = {}
        for kind in dict.fromkeys(step.kind for step in self.steps):
            steps = [step for step in self.steps if step.kind == kind]
            steps.sort(key=lambda step: step.length_us)
            whole[kind] = _whole_steps(kind, steps)
        return whole

    def table(self) -> pd.DataFrame:
        """A row per kind of step and kernel of attention or beside it (`TIMES`)."""
        rows = self.kernels()
        return rows[rows["is"] != ""].reset_index(drop=True)

    def kernels(self) -> pd.DataFrame:
        """A row per kind of step and kernel, all of them, most time first (`TIMES`).

        Without steps it is the whole trace.
        """
        return pd.DataFrame(self._kernel_rows)

    @cached_property
    def _kernel_rows(self) -> list[Row]:
        kinds = self.usual or {"whole trace": [_all_of(self.trace)]}
        rows: list[Row] = []
        for kind, steps in kinds.items():
            rows += kernel_rows(kind, steps)
        return rows

    def around(self) -> pd.DataFrame:
        """A row per kind of step: what it has and what is before it (`TIMES`), and their count."""
        rows = [around(step) for steps in self.usual.values() for step in steps]
        if not rows:
            return pd.DataFrame(columns=["step", "steps"])
        means = pd.DataFrame(rows).groupby("step", sort=False).mean()
        count = pd.Series(Counter(step.kind for step in self.steps))
        return means.assign(steps=count).reset_index()

    def lengths(self) -> pd.DataFrame:
        """A row per step whose mark has tokens: its requests, query tokens and KV tokens."""
        rows = []
        for step in self.steps:
            if step.mark.query_tokens:
                rows.append(lengths_of(step))
        return pd.DataFrame(rows).dropna(axis="columns", how="all")

    def host_calls(self) -> pd.DataFrame:
        """A row per kind of step and call of the CUDA API that the GPU idles under (`TIMES`).

        Time that is in none of them is the host's own, of Python for instance.
        """
        rows: list[Row] = []
        for kind, steps in self.usual.items():
            rows += host_rows(self.trace, kind, steps)
        return pd.DataFrame(rows)

    @cached_property
    def patterns(self) -> pd.DataFrame:
        """A row per known pattern and kind of decode step of which most show it, by its time."""
        kinds = [kind for kind in self.usual if kind in DECODES]
        rows = []
        for pattern, kind in product(PATTERNS, kinds):
            rows.append(self._found(pattern, kind))
        found = [row for row in rows if row]
        return pd.DataFrame(sorted(found, key=lambda row: -row["us per step"]))

    def _found(self, pattern: Pattern, kind: str) -> Row:
        """The row of a pattern that most steps of a kind show, else empty."""
        steps = self.usual[kind]
        shown = [pattern.shows(self.trace, step) for step in steps]
        evidence = [each for each in shown if each]
        if len(evidence) <= len(steps) / 2:
            return {}
        us = fmean(each.us for each in evidence)
        middle = evidence[len(evidence) // 2]
        named = possible(pattern.known, situation_in(self.trace, steps, self.shape))
        by_records = gained(
            key=pattern.gain,
            shape=self.shape,
            us=us,
            gpu=self.trace.gpu,
        )
        if not pattern.gain:
            by_records = sizes_of(named) or by_records
        fix = middle.fix or pattern.fix or fixes_of(named or pattern.known)
        links = [*pattern.see]
        for problem in named or pattern.known:
            links += problem.links
        return {
            "pattern": pattern.name,
            "fix": with_switch(fix, steps[0], self.shape),
            "known problem": ", ".join(problem.id for problem in named),
            "step": kind,
            "evidence": f"{middle.text}; in {len(evidence)} of {len(steps)} usual {kind} steps",
            "us per step": round(us, 1),
            "by the records": by_records,
            "since": pattern.since or releases_of(named or pattern.known),
            "see": ", ".join(dict.fromkeys(links)),
        }

    @cached_property
    def known(self) -> list[Found]:
        """The known problems that hold by the facts of decode steps and the stated releases.

        Those that a pattern names are left to it.
        """
        told = ", ".join(row["known problem"] for row in self.patterns.to_dict("records"))
        answers: dict[str, Found] = {}
        for kind, steps in self.usual.items():
            if kind in DECODES:
                for answer in holding_in(situation_in(self.trace, steps, self.shape)):
                    answers[answer.problem.id] = answer
        for name in told.split(", "):
            answers.pop(name, None)
        return [*answers.values()]

    def unseen(self) -> list[str]:
        """What the trace could not show."""
        return [TIMES, *self.harmless, *self.blind(), *self.idles()]

    def idles(self) -> list[str]:
        """Where the GPU idles for long in steps of decode."""
        notes = []
        for row in self.around().to_dict("records"):
            if row["step"] in DECODES and row["us idle before"] > WAITING * row["us busy"]:
                us = f"{row['us idle before']:,.0f} us before the first layer"
                step = row["step"]
                notes.append(f"The GPU idles for {us} of a {step} step; a profiler adds to it.")
        return [*notes, *self._longest_waits()]

    def _longest_waits(self) -> list[str]:
        """What is said of each kind of decode step in which the CPU waits in one call for long.

        Only where the GPU idles meanwhile: else the wait is hidden.
        """
        notes = []
        for kind in DECODES:
            steps = self.usual.get(kind, [])
            lengths_us: defaultdict[str, float] = defaultdict(float)
            for wait in chain.from_iterable(step.waits for step in steps):
                lengths_us[wait.name] += wait.length_us / len(steps)
            name = max(lengths_us, key=lengths_us.__getitem__, default="")
            busy = sum(step.busy_us for step in steps) / max(1, len(steps))
            if not name or lengths_us[name] <= WAITING * busy:
                continue
            idle_us = fmean(idle_under(self.trace, step).get(name, 0.0) for step in steps)
            if idle_us < LEAST_IDLE * fmean(step.length_us for step in steps):
                continue
            waits = f"The CPU waits {lengths_us[name]:,.0f} us per {kind} step in {name}."
            notes.append(f"{waits} The GPU is idle for {idle_us:,.0f} us of that.")
        return notes

    def blind(self) -> list[str]:
        """What traces of other settings show."""
        notes = [self._of_batch(note) for note in self._lacks()]
        if not self.trace.gpu:
            notes.append("The GPU is not named.")
        unknown = sum(step.kind == UNKNOWN for step in self.steps)
        if unknown:
            notes.append(f"Steps of unknown kind, under no mark: {unknown} of {len(self.steps)}.")
        unmarked = []
        for step in self.steps:
            if step.kind in (EITHER, UNKNOWN):
                unmarked.append(step)
        by_copies = [step for step in unmarked if not step.in_graph or step.attention[0].launch < 0]
        if by_copies:
            notes.append("Steps are told apart by copies only: several may be counted as one.")
        for kind, usual in self.usual.items():
            calls = {calls_in(step) for step in self.steps if step.kind == kind}
            cut = sorted(calls - {calls_in(step) for step in usual})
            if kind in DECODES and cut:
                notes.append(f"Cut or of a draft, left out: {kind} steps of {cut} attention calls.")
            if late := self._late(kind):
                notes.append(f"Left out: {late}.")
            if any(step.at_end for step in usual):
                words = f"The only {kind} steps are the first or last of the trace."
                notes.append(f"{words} They may be cut off.")
        if self.trace.gpus > 1:
            notes.append(f"Of {self.trace.gpus} GPUs only the one that ran most is looked at.")
        return notes

    def _late(self, kind: str) -> str:
        """That some steps of a kind take much longer than the usual ones, or the empty string."""
        whole = self.whole[kind]
        usual_us = max(step.length_us for step in self.usual[kind])
        late = [step.length_us for step in whole if step.length_us > LATE * usual_us]
        if not late:
            return ""
        taken = "step takes" if len(late) == 1 else "steps take"
        return (
            f"{len(late)} of {len(whole)} {kind} {taken} up to {max(late):,.0f} us, the usual ones "
            f"at most {usual_us:,.0f} us"
        )

    def _of_batch(self, note: str) -> str:
        """The note with an example of as many requests as the steps have, one of them long, and
        with the release of the engine that marked them."""
        example = LENGTHS
        requests = self.shape.get("batch_size", 0)
        if requests:
            example = f"lens=32768+2048x{requests - 1}" if requests > 1 else "lens=32768"
        engines = {step.mark.engine.lower() for step in self.decodes}
        for engine in sorted(engines & {*PACKAGES} - {*self.shape}):
            example += f" {engine}=RELEASE"
        return note.replace(LENGTHS, example)

    @cached_property
    def harmless(self) -> list[str]:
        """A sentence for each known pattern that shows but for the lengths that were stated."""
        notes: dict[str, None] = {}
        if LENS not in self.shape:
            return []
        for kind, steps in self.usual.items():
            if kind not in DECODES:
                continue
            unstated = [_without_lens(step) for step in steps]
            for pattern in PATTERNS:
                is_shown = self._shows(pattern, steps)
                if not is_shown and self._shows(pattern, unstated):
                    notes[f"Not slower at these lengths, at others: {pattern.name}."] = None
        return list(notes)

    def _shows(self, pattern: Pattern, steps: list[Step]) -> bool:
        """Whether most of the steps show a pattern."""
        shown = [pattern.shows(self.trace, step) for step in steps]
        return sum(map(bool, shown)) > len(steps) / 2

    def _lacks(self) -> list[str]:
        """A sentence for each thing that some pattern needs and the trace does not have."""
        trace = self.trace
        work = trace.work
        kinds = {*self.usual}
        fa2 = [span for span in work if family_of(span.name) == "fa2"]
        usual = [step for kind in DECODES for step in self.usual.get(kind, ())]
        has_graphs = any(span.in_graph and span.launch >= 0 for span in work)
        is_there = {
            NO_MARKS: trace.marks and (not kinds or kinds - {UNKNOWN, EITHER}),
            NO_LENGTHS: "kv_len" in self.shape,
            NO_HEADS: "heads" in self.shape or not _may_be_capped(usual),
            NO_BATCH_SIZE: not fa2 or any(step.batch_size for step in self.decodes),
            NO_LAUNCHES: trace.has_launches,
            NO_WAITS: trace.waits,
            NO_GRAPHS: trace.has_launches or has_graphs,
            NO_COPIES: any(span.kind == "memcpy" for span in work),
            NO_GRIDS: any(span.grid for span in work),
            NO_SMS: trace.num_sms,
            NO_DECODE: self.decodes,
            NO_WHOLE_STEP: not self.decodes or any(not step.at_end for step in usual),
            NO_TILES: not fa2 or tile_rows(fa2[0]),
        }
        lacks = [words for words, there in is_there.items() if not there]
        has_sums = any(step.mark.kv_tokens for step in self.decodes)
        return [*lacks, SUMS] if has_sums else lacks

    def to_dict(self) -> Row:
        """JSON form."""
        return {
            "trace": self.trace.path,
            "origin": self.origin,
            "times": TIMES,
            "shape": self.shape,
            "patterns": json_rows(self.patterns),
            "known": to_data(self.known),
            "steps": json_rows(self.around()),
            "lengths": json_rows(self.lengths()),
            "calls of the host": json_rows(self.host_calls()),
            "kernels": json_rows(self.kernels()),
            "unseen": self.unseen(),
        }

    def brief(self) -> list[str]:
        """Where the time of a step goes, the patterns that show, the kernels of attention, and
        what to state for more."""
        card = card_named(self.trace.gpu)
        facts = [*self._steps_in_words().items()]
        for kind in self.usual:
            if late := self._late(kind):
                facts.append(("left out", late))
        step_us = {}
        for row in self.around().to_dict("records"):
            step_us[row["step"]] = row["us"]
        if call := [*self._call_in_words()]:
            facts.append(("call", ", ".join(call)))
        for row in self.patterns.to_dict("records"):
            facts += [BLANK, *_pattern_facts(row, card, step_us[row["step"]])]
        asks = []
        for note in self._lacks():
            if note in ASKS:
                asks.append(self._of_batch(note))
        if self.steps:
            kernels = self.table()
        else:
            kernels = self.kernels()
        if not self.steps:
            facts.append(("no attention", "of the known kernels; most time is in"))
        words = _digits(kernels.head(MOST_IN_BRIEF)).drop(columns=LEFT_TO_DETAILS, errors="ignore")
        words = words.rename(columns={"share": "share of busy"})
        return [
            f"{self._title}; {self.origin}",
            *report_in_brief(self.known, card),
            *fact_rows(facts),
            "",
            *in_columns(words),
            "",
            *self.harmless,
            *self.idles(),
            *asks,
            f"All kernels, steps, calls of the host, what the trace does not show: {DETAILS}",
        ]

    def _steps_in_words(self) -> dict[str, str]:
        """Where the time of each kind of decode step goes."""
        words = {}
        for row in self.around().to_dict("records"):
            kind = row["step"]
            if kind in DECODES:
                words[f"{kind} step"] = _step_in_words(row, self.usual[kind])
        return words

    def _call_in_words(self) -> Iterator[str]:
        """What the trace and the caller tell of the layer and the batch."""
        for name, value in self.shape.items():
            yield f"{name} {value}"
        for kind, steps in self.usual.items():
            step = steps[len(steps) // 2]
            if step.batch_size and step.mark.query_tokens > step.batch_size and kind in DECODES:
                tokens = step.mark.query_tokens // step.batch_size
                yield f"{tokens} query tokens per request in {kind} steps"

    @property
    def _title(self) -> str:
        """`fa2_unsplit.json.gz: 4 steps, 1 known pattern`."""
        names = {row["pattern"] for row in self.patterns.to_dict("records")}
        steps = _counted(len(self.steps), "step")
        counted = "no known pattern"
        if names:
            counted = _counted(len(names), "known pattern")
        return f"{self.trace.path}: {steps}, {counted}"

    def card(self) -> Card:
        """Where the time of a step goes, the patterns that show, and the kernels."""
        patterns = self.patterns.to_dict("records")
        facts = fact_lines([self._steps_in_words(), *patterns, self.shape])
        if not self.steps:
            facts.append(("no attention", "of the known kernels; by time there ran the following"))
        kinds = [*self.usual] or ["whole trace"]
        of_one = f" ({kinds[0]})" if len(kinds) == 1 else ""
        return Card(
            title=self._title,
            notes=[*report(self.known), *self.unseen()],
            facts=facts,
            table=_digits(self.table()),
            caption=f"attention, us a step{of_one}",
            footer=self.origin,
            more=[
                (f"all kernels by time{of_one}", _readable(self.kernels().head(MOST_KERNELS))),
                ("steps, and what runs before the first layer", _readable(self.around())),
                ("calls of the host that the GPU idles under", _readable(self.host_calls())),
                ("lengths by the marks, a row a step", _readable(self.lengths())),
            ],
        )


def _step_in_words(row: Row, steps: list[Step]) -> str:
    """How long a row of `around` says that `steps` are, and what takes it, most first."""
    attention_us = fmean(busy_us(step.attention) for step in steps)
    parts = {
        "attention": attention_us,
        "other work": row["us busy"] - attention_us,
        "idle before the first layer": row["us idle before"],
        "idle later": row["us idle later"],
    }
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    shares = []
    for name, us in largest_first:
        shares.append((name, 100 * us / row["us"]))
    told = [f"{share:.0f} % {name}" for name, share in shares if share >= LEAST_TOLD]
    return f"{row['us']:,.0f} us: {', '.join(told)}"


def _pattern_facts(row: Row, card: str, step_us: float) -> list[tuple[str, str]]:
    """A pattern in brief: what it is, what shows it, its share of a step, what to do, and what
    that may save."""
    share = f"{100 * row['us per step'] / step_us:.1f} % of the step"
    facts = {
        "pattern": row["pattern"],
        "evidence": row["evidence"],
        "us per step": f"{in_digits(row['us per step'])} ({share})",
        "fix": row["fix"],
        "possible saving": "",
        "size": "",
        "known problem": row["known problem"],
    }
    # What to state for a narrower gain is among the details.
    gain = row["by the records"].partition(" Pass ")[0].rstrip(".")
    names = list(filter(None, row["known problem"].split(", ")))
    problems = [PROBLEMS[name] for name in names]
    if gain == sizes_of(problems):
        sizes = [size_in_brief(problem, card) for problem in problems]
        facts["size"] = "; ".join(dict.fromkeys(filter(None, sizes)))
    else:
        facts["possible saving"] = gain.removeprefix(SAVING)
    if problems:
        told = [f"{problem.id} ({releases_of([problem])})" for problem in problems]
        facts["known problem"] = "; ".join(told)
    return fact_lines([facts])


def _digits(table: pd.DataFrame) -> pd.DataFrame:
    """A table with heads that a reader knows and three digits."""
    return table.rename(columns=HEADS).map(_cell)


def _readable(table: pd.DataFrame) -> pd.DataFrame:
    """The same; one kind of step, which the caption says, is not repeated in each row."""
    words = _digits(table)
    if "step" in words and words.step.nunique() == 1:
        words = words.drop(columns="step")
    return words


def _cell(value: Any) -> str:
    """A whole number as it is, another one with three digits."""
    is_whole = isinstance(value, float) and value == round(value)
    return in_digits(int(value) if is_whole else value)


def read_diagnosis(path: str | os.PathLike[str], shape: Shape) -> Diagnosis:
    """The diagnosis of one trace; arguments and errors as of `lab.diagnose.diagnose`."""
    _require_shape(shape)
    has_lengths = LENS in shape
    shape = _with_sizes(shape)
    trace = read_trace(path)
    steps = [_with_stated(step, shape) for step in _steps_of(trace)]
    _require_engine(steps, shape)
    decodes = [step for step in steps if step.kind in DECODES]
    _require_kv_heads(decodes, str(shape.get("heads", "")))
    sizes = [step.batch_size for step in decodes if step.batch_size]
    if not sizes:
        return Diagnosis(trace, steps, dict(shape))
    stated = shape.get("batch_size", sizes[0])
    if stated not in sizes:
        marked = " or ".join(map(str, sorted({*sizes})))
        name = f"requests of {LENS}" if has_lengths else "batch_size"
        raise ValueError(f"{name} must be {marked}, as the trace marks its steps, got {stated}")
    known: Row = {"batch_size": round(median(sizes))}
    lengths = [step.mean_kv_len for step in decodes if step.mean_kv_len]
    if lengths:
        known["kv_len"] = round(median(lengths))
    return Diagnosis(trace, steps, {**known, **shape})


def _require_engine(steps: list[Step], shape: Shape) -> None:
    """ValueError for a release of another engine than that which marked the steps."""
    marked = {step.mark.engine.lower() for step in steps} & {*ENGINES}
    for name in ENGINES:
        if marked and name in shape and name not in marked:
            (engine, *_) = sorted(marked)
            raise ValueError(f"the release must be of {engine}, which marked the steps, got {name}")


def _steps_of(trace: Trace) -> list[Step]:
    """The steps of known attention; then also of one kernel that is in none of them and is named
    like attention."""
    steps = find_steps(trace, kind_of)
    seen = {span.name for step in steps for span in step.work}
    spent_us: defaultdict[str, float] = defaultdict(float)
    for span in trace.work:
        if span.name not in seen and _is_like_attention(span):
            spent_us[span.name] += span.length_us
    if not spent_us:
        return steps
    unknown = max(spent_us, key=spent_us.__getitem__)

    def kind_or_unknown(span: Span) -> str:
        if span.name == unknown:
            return UNKNOWN
        return kind_of(span)

    return find_steps(trace, kind_or_unknown)


def _is_like_attention(span: Span) -> bool:
    """Whether a kernel of no known family or role has a name like that of attention."""
    if span.kind != "kernel" or role_of(span.name):
        return False
    return bool(LIKE_ATTENTION.search(span.name)) and not NOT_ATTENTION.search(span.name)


def _may_be_capped(steps: list[Step]) -> bool:
    """Whether a step is SGLang's, and FlashAttention-3 runs in it."""
    return any(step.mark.engine == SGLANG and ran(step, "flash-attn-3") for step in steps)


def _require_shape(shape: Shape) -> None:
    """ValueError for a fact that is none of `STATED`, or has no such value, and for two engines."""
    engines = [f"{name}={shape[name]}" for name in ENGINES if name in shape]
    if len(engines) > 1:
        raise ValueError(f"shape must name one engine, which served, got {' and '.join(engines)}")
    for name, value in shape.items():
        require_word(
            name="shape",
            value=name,
            words=(*STATED, LENS, CONTEXT, *PACKAGES),
        )
        if name in PACKAGES:
            require_release(name, value)
        elif name == "heads":
            parse_layer(str(value))
        elif name == LENS:
            Lens.read(str(value))
        elif name in (*SIZES, CONTEXT):
            require_int(name, value)
        else:
            require_word(name, value, ELEMENT_BYTES)


def _with_sizes(shape: Shape) -> Shape:
    """The facts, with what `lens` says of the batch: requests, and tokens, mean and longest."""
    if LENS not in shape:
        return shape
    for name in ("batch_size", "kv_len"):
        if name in shape:
            raise ValueError(f"{name} must be left out where lens says it, got {shape[name]}")
    lens = Lens.read(str(shape[LENS]))
    return {
        **shape,
        "batch_size": lens.batch_size,
        "kv_len": round(fmean(lens.tokens)),
        LONGEST: lens.kv_len,
    }


def _require_kv_heads(decodes: list[Step], heads: str) -> None:
    """ValueError for heads that are not those of fa2's grid, whose last axis is the KV heads."""
    grids = {span.grid for step in decodes for span in ran(step, "fa2")}
    counts = {grid[-1] for grid in grids if len(grid) > 2}
    if heads and counts and parse_layer(heads).num_kv_heads not in counts:
        known = " or ".join(map(str, sorted(counts)))
        raise ValueError(f"heads must have {known} KV heads, as fa2's grid has, got {heads!r}")


def _with_stated(step: Step, shape: Shape) -> Step:
    """A decode step with what the caller states; a batch size only where its mark has none."""
    if step.kind not in DECODES:
        return step
    batch_size = step.batch_size or shape.get("batch_size", 0)
    return replace(step, batch_size=batch_size, layer=shape)


def _without_lens(step: Step) -> Step:
    """A step as if nobody had stated the tokens of each request; their mean is kept."""
    return replace(step, layer={name: step.layer[name] for name in step.layer if name != LENS})


def _whole_steps(kind: str, by_length: list[Step]) -> list[Step]:
    """Steps of a kind without cut ones and those at the trace's ends."""
    whole = by_length
    if kind in DECODES:
        often = Counter(calls_in(step) for step in by_length)
        most = max(often, key=lambda calls: (often[calls], calls))
        # Decodes with fewer calls are cut; without marks they may be drafts, if not rarer.
        cut = {calls for calls in often if calls < most}
        if kind == EITHER:
            cut = {calls for calls in cut if often[calls] < often[most]}
        whole = [step for step in by_length if calls_in(step) not in cut]
    return [step for step in whole if not step.at_end] or whole


def _middle_half(by_length: list[Step]) -> list[Step]:
    """Without the fastest and the slowest quarter."""
    quarter = len(by_length) // 4
    return by_length[quarter : len(by_length) - quarter]


def _all_of(trace: Trace) -> Step:
    """A whole trace as one step without attention."""
    return Step(
        kind="all",
        batch_size=0,
        ahead=(),
        body=trace.work,
        attention=(),
        waits=(),
        marked=(),
    )


def json_rows(table: pd.DataFrame) -> list[Row]:
    """The rows of a table as JSON has them."""
    return json.loads(table.to_json(orient="records"))


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
