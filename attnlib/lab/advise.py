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
from itertools import product

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..core.backends.table import BACKENDS
from ..core.layer import lengths_of_case, words_of_lengths
from ..core.spec import MLA_HEAD_DIM, AttnSpec, require_int, require_word
from ..draw.cards import Card, Shown, in_words
from ..kinds.decode.case import DecodeCase
from ..kinds.lengths import sample_seq_lens
from ..run import store
from ..run.releases import Version
from ..run.study import in_about
from ..select import Call, Choice, explain
from ..select.facts import gpu_named
from ..select.libraries import AUTO, find
from ..studies import PACE, STUDIES, plan_rivals, random_batches
from ..studies.next_step import OTHER_KERNEL, features, kernel_of
from .source import ROUNDS

NEAREST, SHOWN_BATCHES, SHOWN_CALLS = 16, 3, 2
RECORDED_GPU = "sm90"
PRESENT_PLANNER = "2026-11-26"
DRAWS = {
    "all layers": (random_batches.STUDY.name, "H200", "0.7.2"),
    "all rivals": (plan_rivals.STUDY.name, "H200", plan_rivals.FLASHINFER_ON_H200),
    "h100": (plan_rivals.STUDY.name, "H100", plan_rivals.FLASHINFER_ON_H100),
}
"""Random batches -> the study, the GPU and FlashInfer's release. All rivals are on record for
head_dim 128 and 16 bits."""
SHOWN = (*random_batches.BACKENDS, plan_rivals.BATCH_ATTENTION, *plan_rivals.PAGES_OF_16)
NAMES = {"head_dim": "head_dim", "kv_bytes": "bytes of a cache element"}
FEATURES = "tokens x KV heads, requests, longest / mean length, (query heads per KV head) ^ 3"


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
        return next((name for name in _builds(self.choice) if name in self.times), "")

    @property
    def command(self) -> str:
        """The line that measures this call on a GPU: all backends, round by round."""
        layer = self.layer
        words = [f"--heads {layer.heads}", f"--head-dim {layer.head_dim}"]
        words += [f"--page-size {layer.page_size}", f"--dtype {layer.dtype}"]
        words += [f"--kv-dtype {layer.kv_dtype}", f"--lens {words_of_lengths(self.lengths)}"]
        return f"python -m attnlib advise --measure {' '.join(words)}"

    def table(self) -> pd.DataFrame:
        """A row per backend, best first, over the nearest batches: in how many it is the fastest,
        its time over that of the rule's backend (geometric mean, least and most), its worst time
        over the fastest, and as what the engine has it."""
        times = self.times
        over_best = times.div(times.min(axis=1), axis=0)
        table = {"fastest in": times.idxmin(axis=1).value_counts()}
        if self.ours:
            over = times.div(times[self.ours], axis=0)
            table["over the rule's"] = np.exp(np.log(over).mean()).round(3)
            table["least"], table["most"] = over.min().round(3), over.max().round(3)
        table["mean of time / best"] = np.exp(np.log(over_best).mean()).round(3)
        table["worst"] = over_best.max().round(3)
        if self.runs is not None:
            table["in the engine"] = pd.Series(self.runs)
        rows = pd.DataFrame(table).reindex(times.columns)
        rows = rows.fillna({"fastest in": 0, "in the engine": "no"})
        rows = rows.astype({"fastest in": int}).sort_values("mean of time / best")
        return rows.rename_axis("backend").reset_index()

    @property
    def batches(self) -> pd.DataFrame:
        """The few that are nearest of all, in words: the fastest backend of each and its time."""
        batches, times = self.nearest.head(SHOWN_BATCHES), self.times.head(SHOWN_BATCHES)
        return pd.DataFrame(
            {
                "batch": [case.key for case in batches.case],
                "distance": batches.distance.map("{:.2f}".format),
                "fastest": times.idxmin(axis=1),
                "us": times.min(axis=1).map("{:.1f}".format),
                "rounds": batches.rounds,
                "spread": batches.spread.map("{:.1%}".format).where(batches.rounds > 1, "-"),
            }
        )

    @property
    def notes(self) -> list[str]:
        """What to mind: of the records, of the rule, of the engine."""
        layer, choice, nearest = self.layer, self.choice, self.nearest
        notes = ["Recorded times, not predictions."]
        if nearest.day.min() < PRESENT_PLANNER:
            notes.append(f"{random_batches.PLANNED}: by the planner before {PRESENT_PLANNER}.")
        if choice.refused_page:
            words = f"takes pages of {choice.pages}, not of {choice.refused_page}"
            notes.append(f"{choice.backend} of {choice.library} {words}.")
        if (near := nearest.distance.iloc[0]) > OTHER_KERNEL:
            notes.append(f"Nothing near is on record: the nearest batch is at distance {near:.1f}.")
        if choice.problem:
            notes.append(f"The rule's pick cannot run: {choice.problem}.")
        if choice.gpu != RECORDED_GPU:
            gpus = ", ".join(dict.fromkeys(nearest.gpu))
            notes.append(f"No batch is on record of {choice.gpu}: these are of {gpus}.")
        for name, words in NAMES.items():
            recorded, value = sorted({*nearest[name]}), kernel_of(layer)[name]
            if value not in recorded:
                words = f"{words} {value}: these are of {', '.join(map(str, recorded))}"
                notes.append(f"No batch near it is on record of {words}.")
        if layer.window or self.has_sinks:
            notes.append("No batch has a window or sinks, and the last line measures without.")
        if not self.ours:
            notes.append(f"No batch near it is on record of {choice.kernel or 'the pick'}.")
        lacked = sorted({*self.times, *self.same.backend} - {*(self.runs or ())})
        if self.runs is not None and lacked:
            notes.append(f"Not in {choice.library} on {choice.gpu}: {', '.join(lacked)}.")
        if layer.page_size % 16:
            words = f"Left out, as they refuse pages of {layer.page_size}"
            notes.append(f"{words}: {', '.join(plan_rivals.PAGES_OF_16)}.")
        return notes

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The rule's pick and why, which batches those are, and records of this very call."""
        choice, nearest = self.choice, self.nearest
        ran = f", here {self.ours}" if self.ours not in ("", choice.backend) else ""
        near, far = nearest.distance.iloc[0], nearest.distance.iloc[-1]
        days = " to ".join(dict.fromkeys((nearest.day.min(), nearest.day.max())))
        gpus = ", ".join(dict.fromkeys(nearest.gpu))
        this_call = []
        groups = [*self.same.groupby(["study", "gpu", "timer"], sort=False)]
        for (study, on, timer), rows in sorted(groups, key=lambda group: -len(group[1])):
            times = ", ".join(f"{row.backend} {row.us:.1f}" for row in rows.itertuples())
            this_call.append((f"in {study}", f"this call, {on}, {timer}, us: {times}"))
        return [
            (f"rule of {choice.library}", choice.picked + ("" if choice.inner else ran)),
            ("decided by", f"{choice.decided_by.why} ({choice.decided_by.source})"),
            ("nearest batches", f"{len(nearest)}, distance {near:.2f} to {far:.2f}"),
            ("measured on", f"{gpus}, FlashInfer {nearest.release.iloc[0]}, L2 cold, {days}"),
            *this_call[:SHOWN_CALLS],
        ]

    def card(self) -> Card:
        """The rule, what other backends would change, the nearest batches, how to measure."""
        layer, table = self.layer, self.table()
        count = f"{len(self.lengths)} request{'s' * (len(self.lengths) > 1)}"
        heads = f"{layer.heads} heads, head_dim {layer.head_dim}, {count}"
        time = in_about((ROUNDS, ROUNDS * len(BACKENDS)), pace=PACE)
        return Card(
            title=f"decode, {heads}, {sum(self.lengths):,} tokens",
            notes=self.notes,
            facts=self.facts,
            table=in_words(table, dict.fromkeys(table.select_dtypes("float"), ".3f")),
            caption="backends among the nearest recorded batches",
            footer=f"distance: sum of differences of log2({FEATURES})",
            more=[("the nearest of them", self.batches)],
            code=self.command,
            code_caption=f"Measure this call on a GPU{time}:",
        )


def advise(
    call: DecodeCase | AttnSpec,
    lengths: Sequence[int] = (),
    *,
    library: str = "flashinfer==0.7.2",
    backend: str = AUTO,
    gpu: str = RECORDED_GPU,
    facts: Call | None = None,
) -> Advice:
    """The rule of `library` for a decode call, and the nearest recorded batches.

    `call` is a case, or a layer with the `lengths` (tokens) of its requests. `library` is an engine
    or FlashInfer, `backend` the one that its user pins, `gpu` a name such as h100 or sm90. `facts`
    are others that rules test. An engine takes its own page size for a layer, unless the facts have
    `pinned_page`; that of a case is pinned. Raises TypeError for a call of another kind, ValueError
    for lengths that are missing or below 1, and what `explain` raises.
    """
    if not isinstance(call, DecodeCase | AttnSpec):
        raise TypeError(f"call must be a DecodeCase or an AttnSpec, got {type(call).__name__}")
    if isinstance(call, DecodeCase) == bool(len(lengths)):
        words = "lengths must be given with an AttnSpec, and not with a case"
        raise ValueError(f"{words}, got {len(lengths)} with {type(call).__name__}")
    tokens = np.asarray(lengths if isinstance(call, AttnSpec) else sample_seq_lens(call))
    kv_lens = tuple(tokens.tolist())
    for length in kv_lens:
        require_int("lengths", length)
    layer = call.spec if isinstance(call, DecodeCase) else call
    if layer.head_dim == MLA_HEAD_DIM:
        raise ValueError(f"head_dim must not be of MLA (explain: mode mla), got {MLA_HEAD_DIM}")
    stated = facts or Call()
    pinned = stated.pinned_page or isinstance(call, DecodeCase)
    stated = replace(stated, kv_lens=kv_lens, graph=True, pinned_page=pinned)
    find(library)[0].require_policy(backend, ["decode"], "backend")
    how = {"gpu": gpu_named(gpu), "library": library, "policy": backend}
    choice = explain(layer, mode="decode", call=stated, **how)
    layer = replace(layer, page_size=choice.pages or layer.page_size)
    is_usual = layer.head_dim == 128 and "float8" not in layer.dtypes
    draw = "all rivals" if is_usual else "all layers"
    batches = recorded_batches("h100" if "h100" in gpu.lower() else draw)
    if layer.page_size % 16:
        batches = batches.drop(columns=[*plan_rivals.PAGES_OF_16], errors="ignore")
    batches = batches.assign(distance=distances(layer, tokens, batches).round(3))
    nearest = batches.nsmallest(NEAREST, "distance").reset_index(drop=True)
    case = call if isinstance(call, DecodeCase) else DecodeCase(layer, **lengths_of_case(kv_lens))
    same = recorded_calls(case)
    of_gpu = same[same.gpu.str.contains(gpu.upper(), regex=False)]
    same = of_gpu if len(of_gpu) else same
    runs = _run_by_engine(layer, stated, {*nearest, *same.backend}, **how)
    return Advice(layer, kv_lens, choice, nearest, same, stated.sinks, runs)


def _builds(choice: Choice) -> tuple[str, str, str]:
    """What a choice's kernel is called in the records, another build of it last."""
    name = (choice.inner or choice).ours
    return name, f"{name}-precomputed", f"{name.removeprefix('vllm-')}-precomputed"


def _run_by_engine(
    layer: AttnSpec, call: Call, recorded: Collection[str], **how: str
) -> dict[str, str] | None:
    """Our names of what an engine has on this GPU, or of another build that is `recorded` in its
    place -> its names; None for FlashInfer. Without cubins it takes FlashInfer's own decode."""
    engine = find(how["library"])[0]
    if not engine.calls:
        return None
    runs: dict[str, str] = {}
    policies = [name for name in engine.policies_for("decode") if name != AUTO]
    for policy, cubins in product(policies, (True, False)):
        with suppress(RuntimeError):
            facts = replace(call, cubins=cubins)
            choice = explain(layer, mode="decode", call=facts, **how | {"policy": policy})
            *own, other = _builds(choice)
            words = policy if cubins else f"{policy}, cubins=no"
            names = own if own[0] and not choice.problem else []
            runs = dict.fromkeys(names, words) | runs
            if names and not {*names} & {*recorded}:
                runs.setdefault(other, f"{words}, of another build")
    if random_batches.FA2 in runs:
        runs[random_batches.PLANNED] = "our planner"
    return runs


def recorded_calls(case: DecodeCase) -> pd.DataFrame:
    """The records of a call in all studies: a row per study, GPU, timer and backend, fastest first
    of each; the median time (us) and the rounds of the newest release.

    Records of a library that was installed have no release, and are the oldest.
    """
    places = [(name, machine) for name in STUDIES for machine in store.machines(name)]
    tables = [store.load(*place, case=case) for place in places]
    rows = pd.concat([table for table in tables if len(table)] or tables, ignore_index=True)
    rows = rows[(rows.status == "ok") & ~rows.throttled.astype(bool)]
    rows = rows.assign(age=rows.release.map(lambda release: Version(release or "0")))
    rows = rows.sort_values("age", kind="stable")
    by = ["study", "gpu", "timer", "backend"]
    newest = rows.groupby(by).release.transform("last")
    times = rows[rows.release == newest].groupby([*by, "release"]).run_us
    table = times.agg(us="median", rounds="size").reset_index()
    return table.sort_values([*by[:-1], "us"], ignore_index=True)


def distances(layer: AttnSpec, lens: NDArray[np.int64], rows: pd.DataFrame) -> NDArray[np.float64]:
    """How far the recorded batches are from a call: 1 is a factor of two in one feature."""
    apart = np.zeros(len(rows))
    for name, value in features(layer, lens).items():
        apart += np.abs(rows[name].to_numpy() - value)
    for name, kind in kernel_of(layer).items():
        apart += OTHER_KERNEL * (rows[name].to_numpy() != kind)
    return apart


@cache
def recorded_batches(draw: str = "all layers") -> pd.DataFrame:
    """A row per recorded random batch: case, features, median us per backend, where measured.

    `draw` is one of `DRAWS`, else ValueError.
    """
    require_word("draw", draw, DRAWS)
    study, gpu, release = DRAWS[draw]
    rows = random_batches.load_all(study)
    rows = rows[rows.gpu.str.contains(gpu)]
    keys = ["machine", "case"]
    wide = rows.pivot_table("run_us", keys, "backend", "median", sort=False)
    ends = rows.groupby([*keys, "backend"], sort=False).run_us.agg(["min", "max", "size"])
    rounds = ends["size"].groupby(keys, sort=False).min()
    spread = (ends["max"] / ends["min"] - 1).groupby(keys, sort=False).max()
    table = wide.assign(rounds=rounds, spread=spread).reset_index()
    cases = table.case
    sizes = (features(case.spec, sample_seq_lens(case)) | kernel_of(case.spec) for case in cases)
    machines = rows.drop_duplicates("machine").set_index("machine")
    return pd.concat([table, pd.DataFrame(sizes)], axis=1).assign(
        heads=[case.spec.heads for case in cases],
        gpu=table.machine.map(machines.gpu),
        day=table.machine.map(machines.started_at.str[:10]),
        release=release,
    )


def neighbour_loss(backends: Sequence[str] = random_batches.BACKENDS) -> pd.Series:
    """Time of the backend that the nearest batches of *other layers* choose / the best, - 1.

    The choice is the backend with the least mean of log(time / best). A value per recorded batch
    that has all `backends`; batches of the same layer are left out.
    """
    batches = recorded_batches().dropna(subset=list(backends)).reset_index(drop=True)
    times = batches[list(backends)].to_numpy()
    over_best = times / times.min(axis=1, keepdims=True)
    layers, _ = pd.factorize(np.array([case.spec for case in batches.case], dtype=object))
    losses = []
    for place, case in enumerate(batches.case):
        far = distances(case.spec, sample_seq_lens(case), batches)
        far[layers == layers[place]] = np.inf
        nearest = np.argsort(far)[:NEAREST]
        chosen = np.log(over_best[nearest]).mean(axis=0).argmin()
        losses.append(over_best[place, chosen] - 1)
    return pd.Series(losses, name="loss")
