"""Advice for one decode call: the rule that holds for it, and the nearest recorded batches.

Nothing is predicted: `advise` shows times that were measured, how far those batches are from the
call, on which GPU and release, and the line that measures the call itself. The backend with the
least mean time over the 16 nearest batches chooses well, not perfectly: `neighbour_loss` computes
what it loses on layers left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pandas as pd

from ..core.backends.table import BACKENDS, compared_package
from ..core.call_text import CallText, Lens, shortened
from ..core.schedule.caps import BOUNDED, DEFAULT, UPSTREAM
from ..core.spec import MLA_HEAD_DIM, AttnSpec, require_int, require_word
from ..measure.calls.cases import read_case
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.lengths import sample_seq_lens
from ..run import store
from ..run.look_up import OTHER_KERNEL, distances, kernel_of, nearest_calls, recorded_as, sizes_of
from ..run.releases import Version
from ..run.study import in_about
from ..select import Call, Choice, explain
from ..select.facts import facts_of_model, gpu_named
from ..select.libraries import AUTO, find
from ..studies import PACE, STUDIES, plan_rivals, random_batches
from ..studies.splits import split_cap
from .cards import Card, Shown, in_words
from .source import FLASHINFER, ROUNDS, width_of

NEAREST = 16
SHOWN_BATCHES = 3
SHOWN_STUDIES = 2
RECORDED_GPU = "sm90"
PRESENT_PLANNER = "2026-11-26"
DRAWS = {
    "all layers": (random_batches.STUDY.name, "H200", "0.7.2"),
    "all rivals": (plan_rivals.STUDY.name, "H200", plan_rivals.FLASHINFER_ON_H200),
    "h100": (plan_rivals.STUDY.name, "H100", plan_rivals.FLASHINFER_ON_H100),
}
"""Random batches -> the study, the GPU and FlashInfer's release. All rivals are on record for
head_dim 128 and 16 bits."""
SHOWN = (
    *random_batches.BACKENDS,
    plan_rivals.BATCH_ATTENTION,
    *plan_rivals.PAGES_OF_16,
)
NAMES = {"head_dim": "head_dim", "kv_bytes": "bytes of a cache element"}
FEATURES = "tokens x KV heads, requests, longest / mean length, (query heads per KV head) ^ 3"
SGLANG = "sglang"
FLASH_ATTN_3 = "flash-attn-3"
PRECOMPUTED = "flash-attn-3-precomputed"
SGLANG_FA3 = "sglang-flash-attn-3"
CAPS_SINCE = Version("0.5.16")
"""The first SGLang whose FlashAttention-3 caps splits by the rows of all requests
(`studies.splits.split_cap`), and in which our plugin may choose the cap (`engines.sglang`)."""
SERVED_CONTEXT = 131_072
"""Tokens of the page table's width that SGLang's cap is computed for, or the longest request."""
ANOTHER_BUILD = "of another build"


@dataclass(frozen=True, eq=False, repr=False)
class Advice(Shown):
    """The rule's `choice` for a call, and `nearest`, a row per recorded batch, nearest first.

    Columns of `nearest`: case, distance, a column of median us per backend, rounds, spread (largest
    relative difference between rounds of one backend), gpu, machine, release. `same` are records of
    this very call (`recorded_calls`). `runs` are the backends that the engine has, and under which
    name of its own; None where no engine is named.
    """

    layer: AttnSpec
    lengths: tuple[int, ...]
    choice: Choice
    nearest: pd.DataFrame
    same: pd.DataFrame
    has_sinks: bool = False
    runs: Mapping[str, str] | None = None

    @cached_property
    def times(self) -> pd.DataFrame:
        """Median us of the nearest batches, a column per backend that is on record of one."""
        recorded = self.nearest.dropna(axis=1, how="all")
        return recorded[[name for name in SHOWN if name in recorded]]

    @property
    def ours(self) -> str:
        """The column of `times` that is what the rule chose, or the empty string; where vLLM's
        build of a kernel is not on record, another build of it."""
        recorded = [name for name in _builds(self.choice) if name in self.times]
        return recorded[0] if recorded else ""

    @property
    def command(self) -> str:
        """The line that measures this call on a GPU: all backends, round by round."""
        # What is measured has no window.
        case = _case_of(replace(self.layer, window=0), self.lengths)
        return f"python -m attnlib advise --measure {case.label}"

    def table(self) -> pd.DataFrame:
        """A row per backend, best first, over the nearest batches: in how many it is the fastest,
        its time over that of the rule's backend (geometric mean, least and most), its worst time
        over the fastest, and as what the engine has it."""
        times = self.times
        over_best = times.div(times.min(axis=1), axis=0)
        fastest = times.idxmin(axis=1).value_counts()
        table = pd.DataFrame(index=times.columns)
        table["fastest in"] = fastest.reindex(times.columns, fill_value=0)
        if self.ours:
            over = times.div(times[self.ours], axis=0)
            table["over the rule's"] = _geometric_mean(over)
            table["least"] = over.min().round(3)
            table["most"] = over.max().round(3)
        table["mean of time / best"] = _geometric_mean(over_best)
        table["worst"] = over_best.max().round(3)
        if self.runs is not None:
            table["in the engine"] = [self.runs.get(name, "no") for name in table.index]
        table = table.sort_values("mean of time / best")
        return table.rename_axis("backend").reset_index()

    @property
    def batches(self) -> pd.DataFrame:
        """The few that are nearest of all, in words: the fastest backend of each and its time."""
        batches = self.nearest.head(SHOWN_BATCHES)
        times = self.times.head(SHOWN_BATCHES)
        spread = batches.spread.map("{:.1%}".format)
        return pd.DataFrame(
            {
                "batch": [case.label for case in batches.case],
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
        layer = self.layer
        choice = self.choice
        nearest = self.nearest
        notes = ["Recorded times, not predictions."]
        if nearest.day.min() < PRESENT_PLANNER:
            notes.append(f"{random_batches.PLANNED}: by the planner before {PRESENT_PLANNER}.")
        if choice.refused_page:
            words = f"takes pages of {choice.pages}, not of {choice.refused_page}"
            notes.append(f"{choice.backend} of {choice.library} {words}.")
        near = nearest.distance.iloc[0]
        if near > OTHER_KERNEL:
            notes.append(f"Nothing near is on record: the nearest batch is at distance {near:.1f}.")
        if choice.problem:
            notes.append(f"The rule's pick cannot run: {choice.problem}.")
        if lost := self._splits_lost():
            notes.append(lost)
        if choice.gpu != RECORDED_GPU:
            gpus = _listed(nearest.gpu)
            notes.append(f"No batch is on record of {choice.gpu}: these are of {gpus}.")
        for name, words in NAMES.items():
            value = kernel_of(layer)[name]
            recorded = sorted({*nearest[name]})
            if value not in recorded:
                words = f"{words} {value}: these are of {_listed(recorded)}"
                notes.append(f"No batch near it is on record of {words}.")
        if layer.window or self.has_sinks:
            notes.append("No batch has a window or sinks, and the last line measures without.")
        if not self.ours:
            notes.append(f"No batch near it is on record of {choice.kernel or 'the pick'}.")
        if lacked := self._lacked_by_engine():
            where = f"{choice.library} on {choice.gpu}"
            notes.append(f"Not in {where}: {', '.join(lacked)}.")
        if layer.page_size % 16:
            words = f"Left out, as they refuse pages of {layer.page_size}"
            notes.append(f"{words}: {', '.join(plan_rivals.PAGES_OF_16)}.")
        return notes

    def _splits_lost(self) -> str:
        """What SGLang's cap of splits takes from this call, and what to set; empty if nothing."""
        choice = self.choice
        engine, release = find(choice.library)
        has_cap = engine.name == SGLANG and release is not None and release >= CAPS_SINCE
        if not has_cap or choice.ours != FLASH_ATTN_3:
            return ""
        by_default = _most_splits(self.layer, self.lengths, DEFAULT)
        bounded = _most_splits(self.layer, self.lengths, BOUNDED)
        if by_default >= bounded:
            return ""
        return (
            f"SGLang since {CAPS_SINCE} caps the splits of a request by the rows of all requests: "
            f"here at most {by_default}, with ATTNLIB_SGLANG_SPLITS=bounded {bounded} "
            f"(by the model, in a context of {SERVED_CONTEXT:,}). Notebook 11 has what that costs."
        )

    def _lacked_by_engine(self) -> list[str]:
        """The backends with records that the engine does not have, if one is named."""
        if self.runs is None:
            return []
        recorded = {*self.times, *self.same.backend}
        return sorted(recorded - {*self.runs})

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The rule's pick and why, which batches those are, and records of this very call."""
        choice = self.choice
        nearest = self.nearest
        picked = choice.picked
        if not choice.inner and self.ours not in ("", choice.backend):
            picked += f", here {self.ours}"
            if (self.runs or {}).get(self.ours, "").endswith(ANOTHER_BUILD):
                picked += f", {ANOTHER_BUILD}"
        near = f"{nearest.distance.iloc[0]:.2f} to {nearest.distance.iloc[-1]:.2f}"
        first, last = nearest.day.min(), nearest.day.max()
        days = first if first == last else f"{first} to {last}"
        release = f"FlashInfer {nearest.release.iloc[0]}"
        return [
            (f"rule of {choice.library}", picked),
            ("decided by", f"{choice.decided_by.why} ({choice.decided_by.source})"),
            ("nearest batches", f"{len(nearest)}, distance {near}"),
            ("measured on", f"{_listed(nearest.gpu)}, {release}, L2 cold, {days}"),
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

    def card(self) -> Card:
        """The rule, what other backends would change, the nearest batches, how to measure."""
        table = self.table()
        numbers = table.select_dtypes("float").columns
        tokens = f"{sum(self.lengths):,} tokens"
        time = in_about((ROUNDS, ROUNDS * len(BACKENDS)), pace=PACE)
        return Card(
            title=f"{shortened(_case_of(self.layer, self.lengths).label)}: {tokens}",
            notes=self.notes,
            facts=self.facts,
            table=in_words(table, dict.fromkeys(numbers, ".3f")),
            caption="backends among the nearest recorded batches",
            footer=f"distance: sum of differences of log2({FEATURES})",
            more=[("the nearest of them", self.batches)],
            code=self.command,
            code_caption=f"Measure this call on a GPU{time}:",
        )


def advise(
    call: DecodeCase | AttnSpec | str,
    lengths: Sequence[int] = (),
    *,
    library: str = "flashinfer==0.7.2",
    backend: str = AUTO,
    gpu: str = RECORDED_GPU,
    facts: Call | None = None,
) -> Advice:
    """The rule of a library for a decode call, and the nearest recorded batches.

    Parameters
    ----------
    call : DecodeCase, AttnSpec or str
        The call, its text (`heads=32/8 head_dim=128 page=16 lens=8192x16`), or its layer. An engine
        takes its own page size for a layer, or a text without `page`, unless `facts` have
        `pinned_page`; that of a case is pinned.
    lengths : sequence of int
        Tokens of each request, with a layer alone.
    library : str
        An engine or FlashInfer, with its release: `sglang==0.5.23`.
    backend : str
        The one that a user of the library pins; by default the library chooses.
    gpu : str
        A name such as `h100`, or a compute capability such as `sm90`.
    facts : Call, optional
        Other facts that rules test.

    Returns
    -------
    Advice
        Shown by a notebook; times are microseconds, measured, not predicted.

    Raises
    ------
    TypeError, ValueError
        For another call, lengths that are missing or below 1, MLA, and as `explain` does.

    Examples
    --------
    >>> import attnlib
    >>> advice = attnlib.advise("heads=8/1 head_dim=128 page=16 lens=2048+30720")
    >>> advice.choice.picked, len(advice.nearest)
    ('fa2', 16)
    """
    stated = facts or Call()
    if isinstance(call, str):
        call, lengths, stated = _read(call, lengths, stated)
    kv_lens = _lengths_of(call, lengths)
    layer = call.spec if isinstance(call, DecodeCase) else call
    is_pinned = stated.pinned_page or isinstance(call, DecodeCase)
    stated = replace(stated, kv_lens=kv_lens, graph=True, pinned_page=is_pinned)
    find(library)[0].require_policy(backend, ["decode"], "backend")
    how = {"gpu": gpu_named(gpu), "library": library, "policy": backend}
    choice = explain(layer, mode="decode", call=stated, **how)
    layer = replace(layer, page_size=choice.pages or layer.page_size)
    case = call if isinstance(call, DecodeCase) else _case_of(layer, kv_lens)
    nearest = nearest_calls(case, _batches_for(layer, gpu)).head(NEAREST)
    same = _preferably_of(gpu, recorded_calls(case))
    runs = _run_by_engine(layer, stated, {*nearest, *same.backend}, **how)
    nearest = nearest.reset_index(drop=True)
    return Advice(layer, kv_lens, choice, nearest, same, stated.sinks, runs)


def _read(
    text: str,
    lengths: Sequence[int],
    facts: Call,
) -> tuple[DecodeCase | AttnSpec, Sequence[int], Call]:
    """What the text of a call says: a case, or a layer and lengths where it says no page size."""
    if len(lengths):
        raise ValueError(f"lengths must be left out with the text of a call, got {len(lengths)}")
    case = read_case(text)
    if not isinstance(case, DecodeCase):
        raise ValueError(f"call must be of mode decode, got {text!r}")
    said = CallText.read(text)
    stated = facts_of_model(said.model or "")
    if said.kv_dtype:
        stated["pinned_kv_dtype"] = True
    facts = replace(facts, **stated)
    if said.page:
        return case, (), facts
    return case.spec, sample_seq_lens(case).tolist(), facts


def _lengths_of(call: DecodeCase | AttnSpec, lengths: Sequence[int]) -> tuple[int, ...]:
    """Tokens of each request of a call; TypeError or ValueError for what `advise` cannot take."""
    is_case = isinstance(call, DecodeCase)
    if not isinstance(call, DecodeCase | AttnSpec):
        raise TypeError(f"call must be a DecodeCase or an AttnSpec, got {type(call).__name__}")
    if is_case == bool(len(lengths)):
        words = "lengths must be given with an AttnSpec, and not with a case"
        raise ValueError(f"{words}, got {len(lengths)} with {type(call).__name__}")
    tokens = np.asarray(sample_seq_lens(call) if is_case else lengths).tolist()
    for length in tokens:
        require_int("lengths", length)
    layer = call.spec if isinstance(call, DecodeCase) else call
    if layer.head_dim == MLA_HEAD_DIM:
        raise ValueError(f"head_dim must not be of MLA (explain: mode mla), got {MLA_HEAD_DIM}")
    return tuple(tokens)


def _case_of(layer: AttnSpec, lengths: tuple[int, ...]) -> DecodeCase:
    return DecodeCase(layer, **Lens.of(lengths).fields)


def _batches_for(layer: AttnSpec, gpu: str) -> pd.DataFrame:
    """The random batches with most rivals on record, of the GPU where there are some."""
    is_usual = layer.head_dim == 128 and "float8" not in layer.dtypes
    draw = "all rivals" if is_usual else "all layers"
    if "h100" in gpu.lower():
        draw = "h100"
    batches = recorded_batches(draw)
    if layer.page_size % 16:
        return batches.drop(columns=[*plan_rivals.PAGES_OF_16], errors="ignore")
    return batches


def _preferably_of(gpu: str, same: pd.DataFrame) -> pd.DataFrame:
    """The rows of the GPU that was named, or all where it has none."""
    of_gpu = same[same.gpu.str.contains(gpu.upper(), regex=False)]
    return of_gpu if len(of_gpu) else same


def _builds(choice: Choice) -> tuple[str, str, str]:
    """What a choice's kernel is called in the records, another build of it last."""
    name = (choice.inner or choice).ours
    return (
        name,
        f"{name}-precomputed",
        f"{name.removeprefix('vllm-')}-precomputed",
    )


def _run_by_engine(
    layer: AttnSpec, call: Call, recorded: Collection[str], **how: str
) -> dict[str, str] | None:
    """Our names of what an engine has on this GPU, or of another build that is `recorded` in its
    place -> its names; None for FlashInfer. Without cubins it takes FlashInfer's own decode."""
    engine, release = find(how["library"])
    if not engine.calls:
        return None
    runs: dict[str, str] = {}
    policies = [name for name in engine.policies_for("decode") if name != AUTO]
    for policy in policies:
        how["policy"] = policy
        for cubins in (True, False):
            words = policy if cubins else f"{policy}, cubins=no"
            with suppress(RuntimeError):
                facts = replace(call, cubins=cubins)
                choice = explain(layer, mode="decode", call=facts, **how)
                _add_builds(runs, choice, words, recorded)
    if random_batches.FA2 in runs:
        runs[random_batches.PLANNED] = "our planner"
    if engine.name == SGLANG and FLASH_ATTN_3 in runs:
        word = runs[FLASH_ATTN_3]
        runs[SGLANG_FA3] = word
        for build in (FLASH_ATTN_3, PRECOMPUTED):
            runs[build] = f"{word}, {ANOTHER_BUILD}"
        if release and release >= CAPS_SINCE:
            for cap in (UPSTREAM, BOUNDED):
                runs[f"{SGLANG_FA3}@{cap}"] = f"our plugin, SPLITS={cap}"
    return runs


def _most_splits(layer: AttnSpec, lengths: tuple[int, ...], cap: str) -> int:
    """The most splits that SGLang's FlashAttention-3 gives a request of this call, by the model."""
    # SGLang casts the query to the dtype of its cache.
    layer = replace(layer, dtype=layer.kv_dtype)
    served = replace(_case_of(layer, lengths), context=max(SERVED_CONTEXT, *lengths))
    return int(split_cap.splits_of(served, cap).max())


def _add_builds(
    runs: dict[str, str], choice: Choice, words: str, recorded: Collection[str]
) -> None:
    """Add what an engine's backend is called in the records, where an earlier one is not."""
    name, precomputed, other_build = _builds(choice)
    if not name or choice.problem:
        return
    runs.setdefault(name, words)
    runs.setdefault(precomputed, words)
    if name not in recorded and precomputed not in recorded:
        runs.setdefault(other_build, f"{words}, {ANOTHER_BUILD}")


def _geometric_mean(ratios: pd.DataFrame) -> pd.Series:
    return np.exp(np.log(ratios).mean()).round(3)


def _listed(values: Sequence[Any]) -> str:
    """Each value once, in words."""
    return ", ".join(map(str, dict.fromkeys(values)))


def _in_words(row: Any) -> str:
    """A backend, and its library's release where that is not FlashInfer."""
    package = compared_package(row.backend)
    if row.release and package != FLASHINFER:
        return f"{row.backend} ({package} {row.release})"
    return row.backend


def recorded_calls(case: DecodeCase) -> pd.DataFrame:
    """The records of a call in all studies: a row per study, GPU, timer, width of the page table
    and backend, fastest first of each; the median time (us) and the rounds of the newest release.

    Records of a library that was installed have no release, and are the oldest.
    """
    by = ["study", "gpu", "timer", "page_table", "backend"]
    tables = [pd.DataFrame(columns=[*by, "release", "run_us", "status", "throttled"])]
    for study in STUDIES:
        for machine in store.machines(study):
            for recorded in recorded_as(case, study, machine):
                rows = store.load(study, machine, case=recorded)
                tables.append(rows.assign(page_table=width_of(recorded)))
    rows = pd.concat(tables, ignore_index=True)
    rows = rows[(rows.status == "ok") & ~rows.throttled.astype(bool)]
    ages = rows.release.map(lambda release: Version(release or "0"))
    rows = rows.assign(age=ages).sort_values("age", kind="stable")
    newest = rows.groupby(by).release.transform("last")
    times = rows[rows.release == newest].groupby([*by, "release"]).run_us
    table = times.agg(us="median", rounds="size").reset_index()
    return table.sort_values([*by[:-1], "us"], ignore_index=True)


@cache
def recorded_batches(draw: str = "all layers") -> pd.DataFrame:
    """The recorded random batches: which backend decoded each in what time.

    Parameters
    ----------
    draw : {"all layers", "all rivals", "h100"}
        Which batches: of all layers, of fewer layers with all rivals, or those of an H100.

    Returns
    -------
    pandas.DataFrame
        A row per batch: `case`, sizes as logarithms, a column of median microseconds per backend,
        `rounds`, `spread` between them (a fraction), and where it was measured.

    Raises
    ------
    ValueError
        For another draw.

    Examples
    --------
    >>> import attnlib
    >>> batches = attnlib.recorded_batches("h100")
    >>> batches.gpu.unique().tolist()
    ['NVIDIA H100 80GB HBM3']
    """
    require_word("draw", draw, DRAWS)
    study, gpu, release = DRAWS[draw]
    rows = random_batches.load_all(study)
    rows = rows[rows.gpu.str.contains(gpu)]
    keys = ["machine", "case"]
    wide = rows.pivot_table("run_us", keys, "backend", "median", sort=False)
    times = rows.groupby([*keys, "backend"], sort=False).run_us
    ends = times.agg(["min", "max", "size"])
    spreads = ends["max"] / ends["min"] - 1
    rounds = ends["size"].groupby(keys, sort=False).min()
    spread = spreads.groupby(keys, sort=False).max()
    table = wide.assign(rounds=rounds, spread=spread).reset_index()
    sizes = pd.DataFrame([sizes_of(case) for case in table.case])
    machines = rows.drop_duplicates("machine").set_index("machine")
    return pd.concat([table, sizes], axis=1).assign(
        heads=[case.spec.heads for case in table.case],
        gpu=table.machine.map(machines.gpu),
        day=table.machine.map(machines.started_at.str[:10]),
        release=release,
    )


def neighbour_loss(backends: Sequence[str] = random_batches.BACKENDS) -> pd.Series:
    """How much slower the backend is that the nearest batches of *other layers* choose.

    The choice is the backend with the least mean of log(time / best) over the 16 nearest.

    Parameters
    ----------
    backends : sequence of str
        Names of backends; batches that lack one of them are left out.

    Returns
    -------
    pandas.Series
        Time of the choice over that of the best backend, less 1: a value per recorded batch.

    Raises
    ------
    KeyError
        For a backend that no batch was measured with.

    Examples
    --------
    >>> import attnlib
    >>> bool(attnlib.neighbour_loss().mean() < 0.05)
    True
    """
    names = [*backends]
    batches = recorded_batches().dropna(subset=names).reset_index(drop=True)
    times = batches[names].to_numpy()
    over_best = times / times.min(axis=1, keepdims=True)
    specs = np.array([case.spec for case in batches.case], dtype=object)
    layers, _ = pd.factorize(specs)
    losses = []
    for place, case in enumerate(batches.case):
        far = distances(case, batches)
        far[layers == layers[place]] = np.inf
        nearest = np.argsort(far)[:NEAREST]
        chosen = np.log(over_best[nearest]).mean(axis=0).argmin()
        losses.append(over_best[place, chosen] - 1)
    return pd.Series(losses, name="loss")
