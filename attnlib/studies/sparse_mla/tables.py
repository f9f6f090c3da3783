"""The tables of sparse MLA decode: what a call must take, what it takes, and where it is wrong.

Times are microseconds of one call in a graph. A design or shape that was not measured leaves its
column or row out. In rows of this study `backend` holds the design's name, one per library and
release, and `case` the one over a bfloat16 cache, so that both libraries pair up.
"""

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from ...core.spec import MLA_TOKEN_BYTES
from ...kinds.cost import Ceilings, mla_cost
from ...kinds.mla.case import MlaCase
from ...run.frame import by_design, intervals, over, tally, times, whole_counts
from .model import lost_share, padded_flops, pool_tokens, predict_mla
from .study import FLASHINFER_RELEASES

SHAPE = ["num_qo_heads", "top_k", "batch_size", "kv_len"]
OLD, NEW = FLASHINFER_RELEASES
FA2, FA3, OLD_FA2, OLD_FA3 = f"fa2 {NEW}", f"fa3 {NEW}", f"fa2 {OLD}", f"fa3 {OLD}"
FLASHMLA, FLASHMLA_DENSE = "FlashMLA FP8", "FlashMLA bf16"
DESIGNS = {
    "flashinfer-mla-fa2": "fa2",
    "flashinfer-mla-fa3": "fa3",
    "flashmla-sparse-fp8": FLASHMLA,
    "flashmla-dense": FLASHMLA_DENSE,
}
ALL_HEADS = 128
"""DeepSeek's query heads, of which tensor parallelism gives a GPU its share."""
LAYERS = 61
"""DeepSeek-V3's."""
SHORT = {"num_qo_heads": "heads", "batch_size": "batch"}
BOTH = [FA3, FLASHMLA]
FORMATS = {"bfloat16": "bf16", "fp8-656": "FP8"}
FORMAT_OF = {FA2: "bfloat16", FA3: "bfloat16", FLASHMLA: "fp8-656"}
PARTS = {
    "flash_fwd_splitkv_mla_fp8_sparse_kernel": "attention",
    "flash_fwd_mla_combine_kernel": "combine",
    "Memcpy DtoD": "query copy",
    "elementwise_kernel": "query copy",
}
"""Kernel in FlashMLA's traces -> what it does; PyTorch copies by one or the other kernel."""
MIB, GIB = 2.0**20, 2.0**30


def mla_records(frame: pd.DataFrame) -> pd.DataFrame:
    """MLA records of timer `graph`, whatever their status; `backend` is the design."""
    rows = frame[frame.backend.isin(DESIGNS) & (frame.timer == "graph") & ~frame.repeat]
    rows = rows.assign(case=[in_format(case, "bfloat16") for case in rows.case])
    return whole_counts(by_design(rows, DESIGNS).drop(columns="heads"))


def mla_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The same that are ok and not throttled."""
    rows = mla_records(frame)
    return rows[(rows.status == "ok") & ~rows.throttled]


def sparse_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """`mla_rows` over chosen tokens."""
    rows = mla_rows(frame)
    return rows[rows.top_k > 0]


def in_format(case: MlaCase, kv_format: str) -> MlaCase:
    """`case` over a cache of `kv_format`: the same tokens."""
    return replace(case, spec=replace(case.spec, kv_format=kv_format))


def memory_table() -> pd.DataFrame:
    """What a token costs in each format, and how many fit, from the formats alone."""
    named = FORMATS | {"fp8-576": "FP8, one scale"}
    sizes = pd.Series({name: MLA_TOKEN_BYTES[own] for own, name in named.items()})
    table = {
        "bytes a token and layer": sizes,
        f"KiB a token, {LAYERS} layers": (sizes * LAYERS / 1024).round(1),
        "million tokens in 64 GiB": (64 * GIB / (sizes * LAYERS) / 1e6).round(2),
    }
    return pd.DataFrame(table).rename_axis("format").reset_index()


def counted(cases: Iterable[MlaCase], limit: Ceilings) -> pd.DataFrame:
    """Bytes and bounds of each shape in both formats; `FP8 gains` is what the bounds allow."""
    found = []
    for case in cases:
        row: dict[str, float] = {"heads": case.spec.num_qo_heads, "batch": case.batch_size}
        both = {name: in_format(case, kv_format) for kv_format, name in FORMATS.items()}
        bounds = {name: predict_mla(other, limit) for name, other in both.items()}
        row |= {f"MiB {name}": mla_cost(other).kv_bytes / MIB for name, other in both.items()}
        row |= {f"memory {name}": bound.memory_us for name, bound in bounds.items()}
        row |= {"tensor cores": bounds["FP8"].tensor_us}
        row |= {f"bound {name}": bound.bound_us for name, bound in bounds.items()}
        found.append(row | {"FP8 gains": bounds["bf16"].bound_us / bounds["FP8"].bound_us})
    table = pd.DataFrame(found)
    return table.round(1).assign(**{"FP8 gains": table["FP8 gains"].round(2)})


def against_bounds(rows: pd.DataFrame, limit: Ceilings) -> pd.DataFrame:
    """A row per shape and design with a bound: us, bound_us, and the rates that it reaches.

    `gbps` counts bytes that must be read, `tflops` matrix products of whole tiles.
    """
    table = times(rows).filter(items=["case", *SHAPE, *FORMAT_OF])
    table = table.melt(["case", *SHAPE], var_name="design", value_name="us").dropna()
    named = zip(table.case, table.design, strict=True)
    cases = pd.Series([in_format(case, FORMAT_OF[name]) for case, name in named], table.index)
    return table.assign(
        case=cases,
        bound_us=cases.map(lambda case: predict_mla(case, limit).bound_us),
        gbps=cases.map(lambda case: mla_cost(case).io_bytes) / table.us / 1e3,
        tflops=cases.map(padded_flops) / table.us / 1e6,
    ).reset_index(drop=True)


def side_by_side(frame: pd.DataFrame, cases: Iterable[MlaCase], limit: Ceilings) -> pd.DataFrame:
    """Times of the newer release's kernels and FlashMLA, and their bounds over them."""
    rows = sparse_rows(frame)
    rows = rows[rows.case.isin(cases)]
    table, found, bounds = times(rows), over(rows, FA3, FLASHMLA), against_bounds(rows, limit)
    shown = table.filter(items=[*SHAPE, FA2, *BOTH]).round(1)
    for name in table.filter(items=BOTH):
        own = bounds[bounds.design == name]
        shown[f"{name}: of bound, %"] = (100 * own.bound_us / own.us).round().to_numpy(int)
    if found.empty:
        return _short(shown)
    told = {"fa3 / FlashMLA": found.ratio.round(2), "interval": intervals(found)}
    return _short(shown.assign(**told, rounds=found.rounds))


def verdict_counts(frame: pd.DataFrame) -> pd.DataFrame:
    """fa3 against FlashMLA by heads: shapes by verdict, and the spread of the ratios."""
    return _counts(over(sparse_rows(frame), FA3, FLASHMLA), "num_qo_heads")


def exceptions(frame: pd.DataFrame) -> pd.DataFrame:
    """The shapes where fa3 is not faster than FlashMLA, with interval and verdict."""
    found = over(sparse_rows(frame), FA3, FLASHMLA)
    found = found[found.verdict != "faster"].reset_index(drop=True)
    told = {"interval": intervals(found), "fa3 is": found.verdict}
    return _short(found[[*SHAPE, "ratio"]].round(2).assign(**told))


def reached(frame: pd.DataFrame, limit: Ceilings) -> pd.DataFrame:
    """Rates of the largest batch and top-k, in percent of read speed and of the matmul rate."""
    rows = sparse_rows(frame)
    rows = rows[rows.top_k == rows.top_k.max()]
    table = against_bounds(rows[rows.batch_size == rows.batch_size.max()], limit)
    table = table[table.design.isin(BOTH)].reset_index(drop=True)
    rates = {
        "GB/s": table.gbps,
        "of read, %": 100 * table.gbps / limit.read_gbps,
        "TFLOP/s, padded": table.tflops,
        "of matmul, %": 100 * table.tflops / limit.matmul_tflops,
    }
    shown = table[["design", *SHAPE]].assign(us=table.us.round(1), **rates)
    return _short(shown.round(dict.fromkeys(rates, 0)).astype(dict.fromkeys(rates, int)))


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """FlashMLA's kernels as traced, us per call: batches of 64 and more, medians over rounds."""
    rows = sparse_rows(frame)
    rows = rows[rows.backend == FLASHMLA]
    kinds = list(dict.fromkeys(PARTS.values()))
    named = [{PARTS[k.name]: k.gpu_us for k in ran if k.name in PARTS} for ran in rows.kernels]
    traced = pd.DataFrame(named, columns=kinds, index=rows.index).fillna(0.0)
    table = rows[SHAPE].join(traced).groupby(SHAPE).median().reset_index()
    shown = table[table.batch_size >= 64].sort_values([*SHAPE[1:], SHAPE[0]])
    return _short(shown.round(1).reset_index(drop=True))


def by_heads(frame: pd.DataFrame) -> pd.DataFrame:
    """Time by heads per GPU, and what the fewest cost of the most; shapes with all head counts."""
    rows, found = sparse_rows(frame), []
    for name in (n for n in BOTH if n in set(rows.backend)):
        wide = rows[rows.backend == name].pivot_table(
            index=SHAPE[1:], columns="num_qo_heads", values="run_us", aggfunc="median"
        )
        wide = wide[sorted(wide, reverse=True)].dropna()
        ratio = (wide.iloc[:, -1] / wide.iloc[:, 0]).round(2)
        label = f"{wide.columns[-1]} / {wide.columns[0]}"
        found.append(wide.round(1).assign(**{label: ratio}).reset_index().assign(design=name))
    table = pd.concat(found, ignore_index=True).rename_axis(columns=None)
    return _short(table[["design", *table.columns.drop("design")]])


def tensor_or_data(frame: pd.DataFrame) -> pd.DataFrame:
    """Attention of N GPUs: heads shared out (TP, all requests on each), or requests (DP).

    Both with the same tokens: 128 / N heads at a batch of N times that of all 128 heads.
    """
    table = times(sparse_rows(frame)).reindex(columns=[*SHAPE, *BOTH])
    table = table.assign(GPUs=ALL_HEADS // table.num_qo_heads, requests=table.batch_size)
    shared, own = table[table.GPUs > 1], table[table.GPUs == 1]
    shared = shared[shared.requests % shared.GPUs == 0]
    shared = shared.assign(batch_size=shared.requests // shared.GPUs)
    both = shared.merge(own, on=["top_k", "kv_len", "batch_size"], suffixes=("", ": DP"))
    shown = both[["GPUs", "requests", "top_k"]]
    for name in BOTH:
        tensor, data = both[name], both[f"{name}: DP"]
        times_us = {f"{name}: TP": tensor.round(1), f"{name}: DP": data.round(1)}
        shown = shown.assign(**times_us, **{f"{name}: TP / DP": (tensor / data).round(2)})
    return shown.sort_values(["GPUs", "requests", "top_k"], ignore_index=True)


def by_context(frame: pd.DataFrame) -> pd.DataFrame:
    """Time at the largest top-k by kv_len, beside dense attention to every token of a context."""
    rows = mla_rows(frame)
    rows = rows[rows.backend.isin((*BOTH, FLASHMLA_DENSE))]
    rows = rows[rows.top_k.isin((0, rows.top_k.max()))].sort_values(["top_k", "kv_len"])
    tokens = (rows.kv_len // 1024).astype(str) + "k"
    kinds = rows.top_k.map(lambda k: "sparse " if k else "dense ") + tokens
    rows = rows.assign(kind=kinds, library=rows.backend.str.partition(" ")[0])
    keys = ["library", "num_qo_heads", "batch_size"]
    table = rows.pivot_table(index=keys, columns="kind", values="run_us", aggfunc="median")
    # Heads and batches with one context only say nothing of it.
    several = table.notna().sum(axis=1) >= min(2, table.shape[1])
    shown = table.loc[several, list(rows.kind.unique())].round(1)
    return _short(shown.reset_index().rename_axis(columns=None))


def overflow(frame: pd.DataFrame) -> pd.DataFrame:
    """By size of the cache: its share that 32-bit offsets lose, and wrong of all records.

    `worst row` is the largest relative error, of the older release.
    """
    rows = mla_records(frame)
    rows = rows[rows.status.isin(("ok", "incorrect"))]
    rows = rows.assign(tokens=rows.case.map(pool_tokens), lost=100 * rows.case.map(lost_share))
    found = []
    for (tokens, lost), group in rows.groupby(["tokens", "lost"]):
        size = tokens * MLA_TOKEN_BYTES["bfloat16"] / GIB
        row = {"tokens": tokens, "GiB bf16": size, "lost, %": lost}
        for label, release in ((OLD, OLD), (NEW, NEW), ("FlashMLA", "")):
            wrong = group[group.release == release].status == "incorrect"
            row[label] = f"{wrong.sum()} of {len(wrong)}"
        found.append(row | {f"worst row, {OLD}": group[group.release == OLD].oracle_error.max()})
    return pd.DataFrame(found).round({"GiB bf16": 2, "lost, %": 1, f"worst row, {OLD}": 3})


def release_counts(frame: pd.DataFrame) -> pd.DataFrame:
    """The newer release over the older one, kernel by kernel, where both are right."""
    rows = sparse_rows(frame)
    pairs = {"fa2": (FA2, OLD_FA2), "fa3": (FA3, OLD_FA3)}
    found = [over(rows, *pair).assign(kernel=name) for name, pair in pairs.items()]
    return _counts(pd.concat(found, ignore_index=True), "kernel")


def kernel_counts(frame: pd.DataFrame) -> pd.DataFrame:
    """fa3 over fa2 of the newer release, by heads."""
    return _counts(over(sparse_rows(frame), FA3, FA2), "num_qo_heads")


def _counts(found: pd.DataFrame, by: str) -> pd.DataFrame:
    table = tally(found, by).sort_values(by, ascending=False, ignore_index=True)
    return _short(table.rename(columns={"least": "lowest", "most": "highest"}))


def _short(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(columns=SHORT)
