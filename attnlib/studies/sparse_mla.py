"""Sparse MLA decode on Hopper over a bfloat16 and an FP8 cache, by the kernels that engines run.

Heads are those of one GPU with tensor parallelism 1, 2, 4 and 8 of DeepSeek's 128. The L2 is cold.
FlashAttention-3 is SGLang's build (sglang-kernel 0.4.2 in `versions`): the tokenspeed-fa3 build has
no kernel for 64 x 512 dims and returns wrong output without an error, so it is refused. Its rounds
ran in a row, one to three minutes before those of the other kernels, on the same GPU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pandas as pd

from ..core.spec import MlaSpec
from ..measure.calls.mla.case import MlaCase
from ..run.figures import charts, style
from ..run.frame import good_rows, over
from ..run.store import load
from ..run.study import Grid, Study

KERNELS = {
    ("bfloat16", "flashinfer-mla-fa3"): "FlashInfer fa3, bf16",
    ("bfloat16", "flash-attn-3-mla"): "FlashAttention-3, bf16",
    ("bfloat16", "flashmla-sparse-bf16"): "FlashMLA prefill, bf16",
    ("bfloat16", "flashmla-dense"): "FlashMLA dense, bf16",
    ("fp8-576", "flashinfer-mla-fa3"): "FlashInfer fa3, FP8",
    ("fp8-656", "flashmla-sparse-fp8"): "FlashMLA, FP8",
}
"""(cache format, backend) -> name. SGLang 0.5.23 and vLLM 0.33.0 run FlashAttention-3 over bfloat16
and FlashMLA over FP8."""
HEADS = (128, 64, 32, 16)
TOP_K = (512, 1024, 2048)
SPARSE_BATCHES = (8, 64)
SPARSE_LEN, DENSE_LEN = 32768, 8192
OVERFLOW_MACHINE = "nvidia-h200-2ef2f3bb"
_WRAPPING = MlaSpec(16, top_k=2048)
EITHER_SIDE = (
    MlaCase(_WRAPPING, batch_size=56, kv_len=131072),
    MlaCase(_WRAPPING, batch_size=57, kv_len=131072),
)
"""7,340,032 and 7,471,104 tokens: on either side of the first token that wraps, 7,456,541."""


def _sparse(heads: int, top_k: int, batch: int, kv_format: str) -> MlaCase:
    spec = MlaSpec(heads, top_k, kv_format=kv_format)
    return MlaCase(spec, batch_size=batch, kv_len=SPARSE_LEN)


def _dense(heads: int, batch: int, kv_format: str) -> MlaCase:
    spec = MlaSpec(heads, top_k=0, kv_format=kv_format)
    return MlaCase(spec, batch_size=batch, kv_len=DENSE_LEN)


def _cases(kv_format: str, backend: str) -> tuple[MlaCase, ...]:
    """The shapes that a kernel supports: its name says if it is for sparse or dense ones alone."""
    cases = []
    if "dense" not in backend:
        for heads, top_k, batch in product(HEADS, TOP_K, SPARSE_BATCHES):
            case = _sparse(heads, top_k, batch, kv_format)
            cases.append(case)
    if "sparse" not in backend:
        for heads, batch in product((128, 16), (1, 64)):
            case = _dense(heads, batch, kv_format)
            cases.append(case)
    return tuple(cases)


COLD = ("graph-cold",)
ALL_SHAPES = []
LIVE = []
for _format, _backend in KERNELS:
    _release = "0.7.2" if _backend.startswith("flashinfer") else ""
    _shapes = _cases(_format, _backend)
    _all = Grid(
        cases=_shapes,
        backends=(_backend,),
        releases=(_release,),
        timers=COLD,
        rounds=4,
    )
    ALL_SHAPES.append(_all)
    if _backend != "flashmla-dense":
        _live = _sparse(heads=64, top_k=2048, batch=64, kv_format=_format)
        LIVE.append(replace(_all, cases=(_live,), headline=True))

FLASH_ATTN_3 = "flash-attn-3-mla"
_FEW = [_sparse(heads, 512, 8, "bfloat16") for heads in HEADS]
_MANY = [_sparse(heads, 1024, 64, "bfloat16") for heads in HEADS]
AGAIN = (
    *_FEW,
    *_MANY,
    _dense(128, 1, "bfloat16"),
    _dense(16, 64, "bfloat16"),
)
OVERFLOWING = ("flashinfer-mla-fa2", "flashinfer-mla-fa3")

STUDY = Study(
    name="sparse_mla",
    question="Which kernel decodes sparse MLA fastest on Hopper, over which cache format?",
    grids=(
        *ALL_SHAPES,
        Grid(
            AGAIN,
            backends=(),
            timers=COLD,
            rounds=4,
            again=(FLASH_ATTN_3,),
        ),
        Grid(
            EITHER_SIDE,
            OVERFLOWING,
            releases=("0.6.4", "0.6.13"),
            rounds=3,
        ),
        *LIVE,
    ),
    reference_machine="nvidia-h200-89dc5463",
)


def kernel_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The good rows; `backend` is the kernel's name and `case` the one over bfloat16.

    So all kernels of a shape pair up, whatever their cache format.
    """
    rows = good_rows(frame[frame.top_k.notna()], "graph-cold")
    names = []
    plain_cases = []
    for row in rows.itertuples():
        name = KERNELS[row.kv_format, row.backend]
        plain_spec = replace(row.case.spec, kv_format="bfloat16")
        plain_case = replace(row.case, spec=plain_spec)
        names.append(name)
        plain_cases.append(plain_case)
    rows = rows.drop(columns=["heads", "kv_format"])
    rows = rows.assign(backend=names, case=plain_cases)
    return rows.rename(columns={"num_qo_heads": "heads"})


def sparse_rows(frame: pd.DataFrame, top_k: int) -> pd.DataFrame:
    """The `kernel_rows` of sparse calls that read `top_k` tokens of a request."""
    rows = kernel_rows(frame)
    return rows[rows.top_k == top_k]


def shape_chart(frame: pd.DataFrame, top_k: int = 2048) -> charts.Figure:
    """Median time of every kernel, a row per shape: heads of one GPU, and requests."""
    rows = sparse_rows(frame, top_k).sort_values(["batch_size", "heads"])
    shapes = []
    for heads, requests in zip(rows.heads, rows.batch_size, strict=True):
        shapes.append(f"{requests:.0f} requests, {heads:.0f} heads")
    rows = rows.assign(shape=shapes)
    times = rows.groupby(["shape", "backend"], sort=False).run_us
    medians = times.median().reset_index()
    order = [*dict.fromkeys(shapes)]
    place = medians["shape"].map(order.index)
    placed = medians.assign(place=place)
    title = f"Sparse MLA, {top_k:,} of {SPARSE_LEN:,} tokens a request"
    height = 1.4 + 0.32 * len(order)
    figure, (axis,) = charts.panels(
        [title],
        (8.5, height),
        rows,
        ("time of one call, us (median over rounds, L2 cold)", ""),
    )
    of_sparse = [name for name in KERNELS.values() if "dense" not in name]
    charts.dots(
        axis,
        placed,
        "run_us",
        "place",
        by="backend",
        looks=style.looks(of_sparse),
    )
    charts.categories(axis, "y", order)
    style.log_axes(axis, "x")
    axis.legend(
        fontsize=8,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    return figure


def fp8_over_bf16(frame: pd.DataFrame, top_k: int = 2048) -> pd.DataFrame:
    """The fastest kernel over FP8 against the fastest over bfloat16, a row per shape.

    FlashAttention-3, the default of the engines over bfloat16, has a column of its own.
    """
    rows = sparse_rows(frame, top_k)
    us = rows.pivot_table(
        values="run_us",
        index="case",
        columns="backend",
        aggfunc="median",
        sort=False,
    )
    sides = []
    for cache in ("FP8", "bf16"):
        best = us.filter(like=cache).idxmin(axis=1)
        mine = rows[rows.backend == rows.case.map(best)]
        sides.append(mine.assign(backend=cache))
    both = pd.concat(sides)
    judged = over(both, "FP8", "bf16")
    judged = judged.sort_values(["batch_size", "heads"])
    table = pd.DataFrame(
        {
            "heads": judged.heads.astype(int),
            "requests": judged.batch_size.astype(int),
        }
    )
    for cache in ("FP8", "bf16"):
        of_cache = us.filter(like=cache)
        best = judged.case.map(of_cache.idxmin(axis=1))
        fastest = judged.case.map(of_cache.min(axis=1))
        table[f"fastest, {cache}"] = best.str.removesuffix(f", {cache}")
        table[f"{cache}, us"] = fastest
    table["FlashAttention-3, bf16, us"] = judged.case.map(us["FlashAttention-3, bf16"])
    return table.assign(ratio=judged.ratio, verdict=judged.verdict)


def cache_sizes(gib: float = 64, layers: int = 61) -> pd.DataFrame:
    """Tokens that fit into `gib` GiB, by cache format, without the indexer's keys."""
    names = dict.fromkeys(name for name, _ in KERNELS)
    lines = []
    for name in names:
        spec = MlaSpec(128, 2048, kv_format=name)
        tokens = gib * 2**30 / (layers * spec.token_bytes)
        line = {
            "cache": name,
            "bytes per token and layer": spec.token_bytes,
            "million tokens": tokens / 1e6,
        }
        lines.append(line)
    return pd.DataFrame(lines)


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """The largest relative error of each kernel against float64 over the same cache."""
    rows = kernel_rows(frame)
    rows = rows.assign(percent=100 * rows.oracle_error)
    sparse = rows[rows.top_k > 0]
    worst = sparse.groupby("backend").percent.agg(["max", "size"])
    worst = worst.sort_values("max").reset_index()
    heads = {
        "backend": "kernel",
        "max": "largest error, %",
        "size": "records",
    }
    return worst.rename(columns=heads)


def overflow() -> pd.DataFrame:
    """Records on either side of the token whose product with 576 wraps in 32 bits."""
    rows = load("sparse_mla", OVERFLOW_MACHINE).dropna(subset="top_k")
    tokens = (rows.batch_size * rows.kv_len).astype(int)
    rows = rows.assign(
        tokens=tokens,
        gib=tokens * MlaSpec(16).token_bytes / 2**30,
        wrong=rows.status == "incorrect",
        percent=100 * rows.oracle_error,
    )
    groups = rows.groupby(["release", "tokens", "gib"])
    columns = {
        "records": groups.size(),
        "wrong": groups.wrong.sum(),
        "largest error, %": groups.percent.max(),
    }
    table = pd.DataFrame(columns).reset_index()
    heads = {"release": "FlashInfer", "gib": "GiB a layer"}
    return table.rename(columns=heads)
