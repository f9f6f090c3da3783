"""Tables of the study `fa2_plan`: what a plan of our own makes of the time of FlashInfer's fa2.

`gain` is the time by another plan, or of another backend, over that by ours: above 1 ours is
faster. Means over cases are geometric. `batch` names how the lengths of a case are drawn.
Of the timer `profiler` the library's wrapper is planned for eager; times are of kernels, as traced.
"""

import numpy as np
import pandas as pd

from ...core.fa2.choice import PlanShape
from ...core.fa2.words import plan_words
from ...kinds.decode.case import DecodeCase
from ...kinds.lengths import sample_seq_lens
from ...measure.stats import LONG_MARGIN
from ...run import frame as frames
from ...run.frame import CUDA_CORES, FA2, LABELS, by_design, good_rows, intervals, times
from .blocks import blocks_of, both_plans, both_schedules, busy, schedule, small_example
from .study import KINDS, OTHER_KINDS, OTHERS, REALISTIC, SERVED

OURS, FA3 = "flashinfer-fa2-planned", "flash-attn-3-precomputed"
OURS_MANY, FA2_MANY = "flashinfer-prefill-fa2-planned", "flashinfer-prefill-fa2"
MANY = {OURS_MANY: OURS, FA2_MANY: FA2}
BETTER = "the better of both"
PLANNED_PARTS = {
    "fa2-plan-words": "words alone",
    "fa2-plan": "all arrays",
    "fa2-plan-alone": "all, no overlap",
}
NO_GRAPH = "no graph"
COPIED, HOST, PLANNED = "fa2-step-copied", "fa2-step-host", "fa2-step-planned"
WAYS = {COPIED: "copied", HOST: "host", PLANNED: "planned"}
STEP = ["lengths", "heads", "batch_size", "kv_len", "layers"]
OUR_KERNEL = "plan_kernel"
RIVAL_NAMES = {
    FA2: "FlashInfer's plan",
    FA3: LABELS[FA3],
    BETTER: "the better of these two",
    CUDA_CORES: LABELS[CUDA_CORES],
}
USUAL = {"head_dim": 128, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
"""The layers that all batches are measured with."""
SIZES = ["batch", "heads", "page_size", "batch_size", "kv_len"]
VERDICTS = ("faster", "same", "ambiguous", "slower")
REQUESTS = (8, 40, 80, 140, 300, 600)
"""Ends of the groups of batches by how many requests they have."""
EVERY = "all"
KIND_OF = {case: kind for (kind, _), case in SERVED.items()}
KIND_OF |= {
    case: OTHER_KINDS[at * len(OTHER_KINDS) // len(OTHERS)] for at, case in enumerate(OTHERS)
}


def plan_table(case: DecodeCase, num_sms: int) -> pd.DataFrame:
    """FlashInfer's plan for the case's lengths beside ours, by the model: nothing is measured."""
    lens, plans, found = sample_seq_lens(case), both_plans(case, num_sms), []
    for name, work in both_schedules(case, num_sms).items():
        end, head = work.end.max(), work[work["head"] == 0]
        told = {
            "requests": len(lens),
            "blocks": len(work),
            "chunk, tokens": plans[name].kv_chunk_size,
            "longest block, tokens": work.tokens.max(),
            "parts of the long request": int((head.request == lens.argmax()).sum()),
            "model, us": round(end, 1),
            "slots busy, %": round(100 * busy(work, num_sms)),
        }
        found.append({"plan": name} | told)
    return pd.DataFrame(found)


def order_table(layout: int, num_sms: int) -> pd.DataFrame:
    """Our blocks as planned, request by request, and the longest first: a row per batch.

    `gain` is what the other order would give by the model: nothing is measured.
    """
    found = []
    for kind in KINDS:
        case = SERVED[kind, layout]
        lens = sample_seq_lens(case)
        shape = PlanShape.of(case.spec, lens, num_sms)
        blocks = blocks_of(plan_words(shape, lens), lens)
        longest = blocks.sort_values("tokens", ascending=False, kind="stable")
        planned, sorted_ = (schedule(shape, each).end.max() for each in (blocks, longest))
        told = {"batch": kind, "blocks": len(blocks) * shape.num_kv_heads}
        told |= {"as planned, us": planned, "longest first, us": sorted_}
        found.append(told | {"gain": round(planned / sorted_, 3)})
    return pd.DataFrame(found).round({"as planned, us": 1, "longest first, us": 1})


def word_table() -> pd.DataFrame:
    """Lengths, tokens of each block, and every word of a plan for `blocks.small_example`.

    `...` are zeros to the end: blocks that are not in use.
    """
    shape, lens = small_example()
    words = plan_words(shape, lens)
    tokens = blocks_of(words, lens).tokens
    found = {"seq_lens, given": (len(lens), " ".join(map(str, lens)))}
    found["tokens of each block"] = (len(tokens), " ".join(map(str, tokens)))
    for name in ("request_indices", "qo_tile_indices", "kv_tile_indices", "block_valid_mask"):
        used = np.asarray(getattr(words, name), int)[: len(tokens)]
        found[name] = (shape.max_blocks, " ".join(map(str, used)) + " ...")
    for name in ("o_indptr", "merge_indptr", "kv_chunk_size", "total_num_rows"):
        values = np.atleast_1d(getattr(words, name))
        found[name] = (len(values), " ".join(map(str, values)))
    rows = [(name, count, said) for name, (count, said) in found.items()]
    return pd.DataFrame(rows, columns=["word", "how many", "values"])


def decode_rows(frame: pd.DataFrame, timer: str = "graph", **layer: object) -> pd.DataFrame:
    """Decode calls of whole backends, of the usual layers but for what `layer` says, with `batch`.

    Cases of another kind, and those of planning alone, are left out.
    """
    rows = good_rows(frame[[isinstance(case, DecodeCase) for case in frame.case]], timer)
    return _of_layer(rows, layer or USUAL)


def many_rows(frame: pd.DataFrame, timer: str = "graph") -> pd.DataFrame:
    """Calls with several queries per request, with `batch`; `backend` as in decode."""
    rows = good_rows(frame[frame.backend.isin(MANY)], timer)
    return _of_layer(by_design(rows, MANY), USUAL)


def gains(rows: pd.DataFrame, rival: str = FA2) -> pd.DataFrame:
    """Ours against `rival`, a row per case: its sizes, gain, low, high, pairs, verdict on ours."""
    if rival == BETTER:
        rows = frames.with_better(rows, FA2, FA3, BETTER)
    found = frames.over(rows, OURS, rival)
    batch = found.case.map(rows.drop_duplicates("case").set_index("case").batch)
    turned = {"gain": 1 / found.ratio, "low": 1 / found.high, "high": 1 / found.low}
    found = found.assign(batch=batch.astype(rows.batch.dtype), **turned)
    return found.drop(columns="ratio").sort_values("batch", kind="stable", ignore_index=True)


def gain_table(found: pd.DataFrame, by: str = "batch") -> pd.DataFrame:
    """`gains` by a column, and over all of them: cases, mean, least, most, verdicts, margin."""
    parts = [*found.groupby(by, sort=by == "batch", observed=True), (EVERY, found)]
    rows = [
        {by: name, "cases": len(part), "mean": mean(part.gain)}
        | {"least": part.gain.min(), "most": part.gain.max()}
        | _verdicts(part)
        for name, part in parts
        if len(part)
    ]
    return pd.DataFrame(rows).round({"mean": 3, "least": 2, "most": 2})


def kinds_table(found: pd.DataFrame) -> pd.DataFrame:
    """`gain_table` of the batches that people serve, then of the others, each with all of them."""
    served = found.case.isin(REALISTIC)
    named = {"served": found[served], "others": found[~served]}
    tables = [
        gain_table(part).replace({"batch": {EVERY: f"all {name}"}}) for name, part in named.items()
    ]
    return pd.concat(tables, ignore_index=True)


def realistic(found: pd.DataFrame) -> pd.DataFrame:
    """The rows of batches that people serve."""
    return found[found.case.isin(REALISTIC)]


def rival_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean gain over each rival in realistic cases that both ran: a row per batch, one for all.

    The last columns are of the cases whose cache is in memory, not in the L2, at each call.
    """
    wide = {}
    for timer, word in (("graph", ""), ("graph-cold", ", cold")):
        rows = realistic(decode_rows(frame, timer))
        for rival, name in RIVAL_NAMES.items():
            if len(found := gain_table(gains(rows, rival))):
                wide[name + word] = found.set_index("batch")["mean"]
    return pd.DataFrame(wide).loc[lambda t: [*t.index.drop(EVERY), EVERY]].reset_index()


def no_gain(found: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The cases whose gain is not worth a word, least first, with both times in us."""
    least = found[found.gain < 1 + LONG_MARGIN].sort_values("gain", ignore_index=True)
    us = times(rows[rows.backend.isin((OURS, FA2))]).set_index("case")
    both = {RIVAL_NAMES[FA2]: least.case.map(us[FA2]), "ours": least.case.map(us[OURS])}
    names = [name for name in ("q_len", *SIZES) if name in least]
    told = {name: value.round(1) for name, value in both.items()} | {"gain": least.gain.round(3)}
    return least[names].assign(**told, **{"interval": intervals(least)})


def layer_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Gain over FlashInfer's plan for layers that differ from the usual ones: a row for each."""
    kinds = frame[["head_dim", "dtype", "kv_dtype"]].dropna().drop_duplicates()
    others = [kind for kind in kinds.to_dict("records") if kind != USUAL]
    parts = []
    for kind in others:
        name = f"head_dim {kind['head_dim']:.0f}, {kind['dtype']}"
        name += "" if kind["dtype"] == kind["kv_dtype"] else f", cache {kind['kv_dtype']}"
        parts.append(gains(decode_rows(frame, **kind)).assign(layer=name))
    return gain_table(pd.concat(parts), "layer")


def many_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean gain by queries per request, over the library's plan for a graph and for eager.

    A column per batch and one for all; of all the least, the number, verdicts, margin.
    """
    rows = []
    for timer, word in (("graph", "graph"), ("profiler", "eager")):
        found = gains(many_rows(frame, timer))
        for q_len, part in (*found.groupby("q_len"), (EVERY, found)):
            means = part.groupby("batch", observed=True).gain.agg(mean)
            told = {EVERY: mean(part.gain), "least": part.gain.min(), "cases": len(part)}
            told |= _verdicts(part)
            rows.append({"planned for": word, "q_len": q_len} | means.to_dict() | told)
    return pd.DataFrame(rows).round(2)


def planning_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Planning alone in a graph, us, by page and batch size: medians over rounds.

    The last column starts the launch from Python for each call: with no graph.
    """
    rows = by_design(frame[frame.backend.isin(PLANNED_PARTS) & ~frame.repeat], PLANNED_PARTS)
    sizes = ["page_size", "batch_size"]
    graph, eager = (times(good_rows(rows, timer)) for timer in ("graph", "eager"))
    shown = graph[[*sizes, *PLANNED_PARTS.values()]]
    if len(eager):
        whole = eager.rename(columns={PLANNED_PARTS["fa2-plan"]: NO_GRAPH})
        shown = shown.merge(whole[[*sizes, NO_GRAPH]], "left")
    return shown.sort_values(sizes, ignore_index=True).round(2)


def host_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Host time of the library's `plan()` in the decode records for a graph, us, by requests."""
    rows = good_rows(frame[frame.backend == FA2])
    bins = pd.cut(rows.batch_size, [0, *REQUESTS], labels=[f"up to {most}" for most in REQUESTS])
    found = frames.spread(rows.plan_us, bins).dropna().round(0)
    return found.rename(columns={"shapes": "records"}).rename_axis("requests").reset_index()


def step_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps in a row with planning included, us a step, and over the one that plans on the GPU.

    `copied` is an engine that copies lengths back for the library's planner, `host` one that knows
    them; both then replay the layers' graph. `planned` replays one graph that holds all.
    """
    rows = _step_rows(frame)
    table = times(rows)
    shown = table[[*STEP, *WAYS.values()]].round(0)
    for name in (WAYS[COPIED], WAYS[HOST]):
        found = frames.over(rows, name, WAYS[PLANNED])
        words = [f"{r:.2f} ({i})" for r, i in zip(found.ratio, intervals(found), strict=True)]
        told = table.case.map(dict(zip(found.case, words, strict=True)))
        shown = shown.assign(**{f"{name} / {WAYS[PLANNED]}": told})
    return _in_words(shown)


def planning_share(frame: pd.DataFrame) -> pd.DataFrame:
    """What part of a step is planning: the host's before a replay, or our launch as traced, us."""
    rows = _step_rows(frame)
    launch = [sum(k.gpu_us for k in ran if OUR_KERNEL in k.name) for ran in rows.kernels]
    rows = rows.assign(planning=rows.plan_us.where(rows.backend != WAYS[PLANNED], launch))
    step, planning = times(rows), times(rows, "planning")
    shown = step[STEP]
    for name in WAYS.values():
        part = (100 * planning[name] / step[name]).round(1)
        shown = shown.assign(**{f"{name}, us": planning[name].round(1), f"{name}, %": part})
    return _in_words(shown)


def batch_of(case: DecodeCase) -> str:
    """What a case's lengths are like, in the words of the study."""
    if case.lengths == "fixed":
        other = "four" if case.batch_size == 4 else "uniform"
    else:
        other = f"chat of {case.batch_size}" if case.lengths == "chat" else case.lengths
    return KIND_OF.get(case, other.replace("_", " "))


def mean(values: pd.Series) -> float:
    """The geometric mean."""
    return float(np.exp(np.log(values).mean()))


def _verdicts(part: pd.DataFrame) -> dict[str, float]:
    """How many of `gains` have each verdict, and the widest margin of one."""
    counts = {word: int((part.verdict == word).sum()) for word in VERDICTS}
    return counts | {"margin, %": round(100 * part.margin.max(), 1)}


def _of_layer(rows: pd.DataFrame, layer: dict[str, object]) -> pd.DataFrame:
    rows = rows[(rows[list(layer)] == pd.Series(layer)).all(axis=1)]
    kinds = [batch_of(getattr(case, "cached", case)) for case in rows.case]
    return rows.assign(batch=pd.Categorical(kinds, (*KINDS, *OTHER_KINDS), ordered=True))


def _step_rows(frame: pd.DataFrame) -> pd.DataFrame:
    return by_design(good_rows(frame[frame.backend.isin(WAYS)], "eager"), WAYS)


def _in_words(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(columns={"lengths": "batch"}).sort_values(["batch_size", "batch"])
