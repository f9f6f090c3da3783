"""The tables of the study `engine_modes`: which backend for which mode, and what a pin costs.

Unless a table says otherwise a mode is shown as engines call it: few queries per request in a CUDA
graph, prefill planned for eager (times are then the profiler's kernel times). In rows of this study
`backend` holds a short name: fa2 and fa3 are FlashInfer's, whichever wrapper a mode goes through,
`library` is FlashAttention-3 itself. `group` is the mode, with paged prefill split by whether the
cache held a prefix. FlashInfer is the release that was installed, unless a table names another.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from ...core.spec import CUSTOM_MASKS
from ...kinds.cost import Ceilings, DecodeCost, decode_cost, extend_cost, fa2_tile_rows, predict_fa3
from ...kinds.decode.case import DecodeCase
from ...kinds.extend.case import ExtendCase
from ...run import frame as frames
from ...run.frame import cases_of, decode_rows, intervals, spread, tally, with_better
from .study import EAGER, GRAPH, NOW, PINNED

FA2, FA3, AUTO, LIBRARY, BETTER = "fa2", "fa3", "auto", "library", "the better of both"
CHOSEN = (FA2, FA3, LIBRARY)
NAMES = {
    "flashinfer-fa2": FA2,
    "flashinfer-fa3": FA3,
    "flashinfer-auto": AUTO,
    "flashinfer-prefill-fa2": FA2,
    "flashinfer-prefill-fa3": FA3,
    "flashinfer-prefill-auto": AUTO,
    "flash-attn-3-extend": LIBRARY,
}
DECODE, PREFIX = "decode", "prefill_paged, prefix"
FEW = (DECODE, "target_verify", "draft_extend", "dllm_extend")
"""Groups with few queries per request, which engines capture in CUDA graphs."""
MANY = ("prefill_paged", PREFIX, "prefill_ragged")
"""Groups of prefill, which engines launch eagerly."""
GROUPS = (*FEW, *MANY)
PLANNED = {GRAPH: "for a graph", EAGER: "for eager"}
"""Timer -> how its calls were planned."""
SIZES = ["group", "heads", "page_size", "q_len", "batch_size", "kv_len"]
RATIO = "fa2 / fa3"
TILE_ROWS = 128
"""Query rows of fa3's tile at head_dim 128; up to as many per request are one tile per head."""
POLICIES: dict[str, tuple[str, ...]] = {
    "fa2 everywhere": (),
    "as #18364 left it": ("prefill_ragged",),
    "auto": GROUPS[1:],
    "fa3 everywhere": GROUPS,
    "fa3 for prefill": MANY,
}
"""Policy -> the groups that it gives to fa3, under no custom mask; the others go to fa2."""
WORDS = {word: f"fa2 {word}" for word in ("slower", "same", "ambiguous", "faster")}
ENDS = ("least", "median", "most")


def mode_rows(frame: pd.DataFrame, timer: str | None = None, *, release: str = NOW) -> pd.DataFrame:
    """Attention records that are ok and not throttled, of one timer, or of each mode's usual one.

    Of FlashInfer those of one release. Columns of the frame, and `group`.
    """
    frame = frame[(frame.release == release) | ~frame.backend.str.startswith("flashinfer")]
    rows = pd.concat([decode_rows(frame, timer=name) for name in (GRAPH, EAGER)])
    # A frame of decode alone has no such columns, one of all modes has gaps in them.
    known = {"mode": DECODE, "mask": "causal", "q_len": 1}
    rows = rows.reindex(columns=list(dict.fromkeys([*frame.columns, *known])))
    objects = rows.astype(dict.fromkeys(known, object))
    rows = objects.assign(**{name: objects[name].fillna(usual) for name, usual in known.items()})
    prefixed = (rows["mode"] == "prefill_paged") & (rows.q_len < rows.kv_len)
    group = pd.Categorical(rows["mode"].mask(prefixed, PREFIX), GROUPS, ordered=True)
    rows = rows.assign(backend=rows.backend.map(NAMES), group=group).astype({"q_len": int})
    return rows[rows.timer == (timer or rows.group.map(usual_timer))]


def usual_timer(group: str) -> str:
    """The timer of the way in which an engine calls a group's mode."""
    return EAGER if group in MANY else GRAPH


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the rows of a custom mask, which only fa2 takes."""
    return rows[~rows["mask"].isin(CUSTOM_MASKS)]


def over(rows: pd.DataFrame, numerator: str, denominator: str) -> pd.DataFrame:
    """`frame.over` of each timer: a row per case and timer, in the order of `GROUPS`."""
    parts = list(rows.groupby("timer")) or [(GRAPH, rows)]
    found = [frames.over(part, numerator, denominator).assign(timer=t) for t, part in parts]
    return in_order(pd.concat([part for part in found if len(part)] or found[:1]))


def times(rows: pd.DataFrame, value: str = "run_us") -> pd.DataFrame:
    """`frame.times` of each timer: a row per case and timer, a column per backend, so ordered."""
    parts = list(rows.groupby("timer")) or [(GRAPH, rows)]
    return in_order(pd.concat([frames.times(part, value).assign(timer=t) for t, part in parts]))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of `GROUPS`, then of heads, queries, batch and tokens."""
    return table.sort_values(SIZES, kind="stable", ignore_index=True)


def counted(cases: Iterable[DecodeCase | ExtendCase], limit: Ceilings) -> pd.DataFrame:
    """What each case must do, from its lengths alone: FLOPs, bytes, roof, and which bounds it.

    `fa3 predicted` is the time that its schedule implies where a request is one tile per head
    (`predict_fa3`; no tile of 128 rows is fuller than `full, %`); NaN for longer ones.
    """
    found = []
    for case in cases:
        cached = case if isinstance(case, DecodeCase) else case.cached
        cost, q_len = _cost(case), getattr(case, "q_len", 1)
        one_tile = predict_fa3(cached, limit).run_us if q_len <= TILE_ROWS else float("nan")
        memory = cost.floor_us(limit) == cost.roof_us(limit)
        found.append(
            {
                "mode": getattr(case, "mode", DECODE),
                "q_len": q_len,
                "batch_size": cached.batch_size,
                "kv_len": cached.kv_len,
                "GFLOP": cost.flops / 1e9,
                "MB": cost.io_bytes / 1e6,
                "bound": "memory" if memory else "matmul",
                "roof": cost.roof_us(limit),
                "full, %": 100 * min(1.0, q_len / TILE_ROWS),
                "fa3 predicted": one_tile,
            }
        )
    return pd.DataFrame(found).round(1)


def headline(
    frame: pd.DataFrame, cases: Iterable[DecodeCase | ExtendCase], limit: Ceilings
) -> pd.DataFrame:
    """Roof, times (us) of what was measured at `cases`, and fa2 / fa3 with its 95 % interval."""
    rows = mode_rows(frame)
    rows = rows[rows.case.isin(cases)]
    table = _with_times(over(rows, FA2, FA3), rows).assign(roof=lambda t: roofs_us(t, limit))
    shown = table.filter(items=[*SIZES, "roof", *CHOSEN]).round(1)
    told = {RATIO: table.ratio.round(2), "interval": intervals(table), "rounds": table.rounds}
    return shown.assign(**told)


def roofs_us(table: pd.DataFrame, limit: Ceilings) -> np.ndarray:
    """The roof (us) of each row's case."""
    return np.array([_cost(case).roof_us(limit) for case in table.case])


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """By group: shapes by verdict on fa2 against fa3, and the least, median and most fa2 / fa3."""
    table = tally(over(plain(mode_rows(frame)), FA2, FA3), "group").rename(columns=WORDS)
    columns = ["group", "shapes", *WORDS.values(), *ENDS]
    return table.reindex(columns=columns, fill_value=0)


def releases(frame: pd.DataFrame) -> pd.DataFrame:
    """A kernel's time now over its time in `PINNED`: shapes by verdict, least to most.

    A row per kernel and group, of the shapes that both releases ran.
    """
    found = []
    for name in (FA2, FA3):
        both = [plain(mode_rows(frame, release=r)).assign(release=r) for r in (PINNED, NOW)]
        rows = pd.concat(part[part.backend == name] for part in both)
        table = tally(over(rows.assign(backend=rows.release), NOW, PINNED), "group")
        found.append(table.assign(kernel=name))
    columns = ["kernel", "group", "shapes", *WORDS, *ENDS]
    table = pd.concat(found, ignore_index=True).reindex(columns=columns).fillna(0)
    return table.astype(dict.fromkeys(WORDS, int))


def exceptions(frame: pd.DataFrame) -> pd.DataFrame:
    """Shapes without their group's verdict: fa2 faster with few queries, slower with many."""
    found = over(plain(mode_rows(frame)), FA2, FA3)
    few = found.group.isin(FEW)
    against = found[found.verdict != few.map({True: "faster", False: "slower"})]
    told = {RATIO: against.ratio.round(2), "interval": intervals(against)}
    return against[SIZES].assign(**told).reset_index(drop=True)


def costs(frame: pd.DataFrame) -> pd.DataFrame:
    """What a policy costs: its time over the better of fa2 and fa3, both pinned.

    A row per group, the geometric mean over its shapes, and `worst`, the worst shape of all.
    """
    table = times(plain(mode_rows(frame))).reindex(columns=["group", FA2, FA3]).dropna()
    fa3 = {name: table.group.isin(groups) for name, groups in POLICIES.items()}
    chosen = {name: table[FA3].where(taken, table[FA2]) for name, taken in fa3.items()}
    lost = pd.DataFrame(chosen).div(table[[FA2, FA3]].min(axis=1), axis=0)
    means = np.exp(np.log(lost).groupby(table.group).mean())
    return pd.concat([means, lost.max().rename("worst").to_frame().T]).round(2)


def one_tile(frame: pd.DataFrame, limit: Ceilings, *, kv_len: int = 8192) -> pd.DataFrame:
    """fa3 over queries per request, as long as they fit one tile: predicted and measured, us.

    In a graph, 32/8 heads, page size 1, `kv_len` tokens; fa2 beside it.
    """
    rows = plain(mode_rows(frame, GRAPH))
    chosen = (rows.heads == "32/8") & (rows.page_size == 1) & (rows.kv_len == kv_len)
    table = times(rows[chosen & (rows.q_len <= TILE_ROWS)]).dropna(subset=[FA2, FA3])
    table = table.sort_values(["batch_size", "q_len"], ignore_index=True)
    told = np.array([predict_fa3(getattr(c, "cached", c), limit).run_us for c in table.case])
    shown = table[["batch_size", "q_len", "mode", FA2, FA3]].assign(predicted=told).round(1)
    return shown.assign(**{"fa3 / predicted": (table[FA3] / told).round(2)})


def shares(frame: pd.DataFrame, limit: Ceilings) -> pd.DataFrame:
    """Share of the roof (%) that each backend reaches: least, median, most of a group's shapes."""
    table = times(plain(mode_rows(frame)))
    found = [
        spread(100 * roofs_us(table, limit) / table[name], table.group).add_prefix(f"{name} ")
        for name in table.filter(items=CHOSEN)
    ]
    return pd.concat(found, axis=1).round(0).filter(regex="least|median|most")


def resolved(frame: pd.DataFrame) -> pd.DataFrame:
    """What `auto` ran in each mode and how its plan was made, beside fa2 and fa3, us."""
    parts = pd.concat([mode_rows(frame, timer) for timer in (GRAPH, EAGER)])
    ran = parts[parts.backend == AUTO].drop_duplicates(["case", "timer"])
    found = over(parts, AUTO, FA2).merge(ran[["case", "timer", "kernel_family"]])
    found = _with_times(found, parts)
    told = {
        "planned": found.timer.map(PLANNED),
        "ran": found.kernel_family,
        **found.reindex(columns=[AUTO, FA2, FA3]).round(1),
        "auto / fa2": found.ratio.round(2),
        "interval": intervals(found),
    }
    return found[["mode", "mask", "heads", "q_len", "batch_size", "kv_len"]].assign(**told)


def plans(frame: pd.DataFrame) -> pd.DataFrame:
    """The same call planned for a graph and for eager, few queries: tiles, and time by one tracer.

    Times are those of the kernels that the profiler saw, so no two timers meet. `fa3`, whose plan
    is the same both ways, says what the order and the power limit alone can move.
    """
    parts = pd.concat([mode_rows(frame, timer) for timer in (GRAPH, EAGER)])
    few = parts[parts.group.isin(FEW) & (parts["mode"] != DECODE) & parts.backend.isin((FA2, FA3))]
    wide = few.pivot_table(
        index=["case", "backend"], columns="timer", values="kernel_us", aggfunc="median", sort=False
    )
    wide = wide.reindex(columns=[GRAPH, EAGER]).dropna().rename_axis(columns=None)
    table = in_order(cases_of(few).merge(wide.reset_index(), on="case"))
    tiles, ratio = {}, (table[GRAPH] / table[EAGER]).round(2)
    for timer, how in PLANNED.items():
        rows = table.case.map(partial(fa2_tile_rows, cuda_graph=timer == GRAPH))
        tiles[f"tile {how}"] = rows.where(table.backend == FA2, TILE_ROWS)
    traced = {how: table[timer].round(1) for timer, how in PLANNED.items()}
    shown = table[["backend", "mode", "mask", "q_len", "batch_size"]]
    shown = shown.assign(**tiles, **traced, ratio=ratio)
    return shown.sort_values("backend", kind="stable", ignore_index=True)


def masks(frame: pd.DataFrame) -> pd.DataFrame:
    """Verification by fa2, the same drafts under three masks, us; chain / causal with its interval.

    A chain's bits are those of the causal mask, so that ratio is the price of reading a mask.
    """
    rows = mode_rows(frame, GRAPH)
    rows = rows[(rows.backend == FA2) & (rows["mode"] == "target_verify")]
    pairs = [replace(case, mask="causal") for case in rows.case]
    rows = rows.assign(backend=rows["mask"], mask="any", case=pairs)
    table = _with_times(over(rows, "chain", "causal"), rows)
    told = {"chain / causal": table.ratio.round(2), "interval": intervals(table)}
    sizes = ["heads", "q_len", "batch_size", "kv_len"]
    return table.reindex(columns=[*sizes, "causal", "chain", "tree"]).round(1).assign(**told)


def library(frame: pd.DataFrame) -> pd.DataFrame:
    """FlashAttention-3 itself, over the better of FlashInfer's two: verdicts on it, by group."""
    rows = with_better(plain(mode_rows(frame)), FA2, FA3, BETTER)
    return tally(over(rows, LIBRARY, BETTER), "group")


def _cost(case: DecodeCase | ExtendCase) -> DecodeCost:
    return decode_cost(case) if isinstance(case, DecodeCase) else extend_cost(case)


def _with_times(found: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """`found` with the times of every backend that it has a case and timer of."""
    names = sorted(rows.backend.unique())
    return found.merge(times(rows)[["case", "timer", *names]], on=["case", "timer"])
