"""The metadata builders under one contract: their calls, seeded, and what every word must be.

Outputs are poisoned, so that a word left alone shows. Without a GPU Triton's interpreter runs the
same kernels (TRITON_INTERPRET=1, set by fixtures).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from hypothesis import strategies as st

from attnlib.core.metadata import decode, device, kv_indices, schedules
from attnlib.core.metadata.launch import Launcher
from attnlib.core.schedule import kinds, splits, words
from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.flash_attn3 import SchedulerMetadata, sm_count
from attnlib.core.schedule.kinds import StepSchedules
from attnlib.core.schedule.splits import plan_splits
from attnlib.core.schedule.words import words_of
from attnlib.studies.metadata import eager, oracle

POISON = -77
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
SMS = sm_count(torch.device("cuda")) if ON_GPU else 132
Call = dict[str, Any]
Rows = dict[str, Any]
READ = ("seq_lens", "req_pool_indices", "req_to_token", "page_size", "max_pages", "seq_len_delta")
"""What the builders of page tables read, and their oracles."""


@dataclass(frozen=True)
class Shape:
    """A call that reads a pool of requests: sizes, and what is unusual about it.

    `moved`: with a `kv_start` of up to three pages.
    """

    batch: int
    max_seq_len: int
    page_size: int = 1
    delta: int = 0
    swa: bool = False
    lens_dtype: torch.dtype = torch.int64
    rows_dtype: torch.dtype = torch.int32
    extra_columns: int = 10
    extra_tokens: int = 8
    holes: bool = False
    seed: int = 0
    moved: bool = False

    @property
    def max_pages(self) -> int:
        """Columns for the longest request."""
        return -(-(self.max_seq_len + self.delta) // self.page_size)


def poisoned(*sizes: int) -> torch.Tensor:
    return torch.full(sizes, POISON, dtype=torch.int32, device=DEVICE)


def poison(call: Call, names: tuple[str, ...]) -> None:
    """Fill these outputs of `call` with poison."""
    for name in filter(call.__contains__, names):
        output = call[name]
        getattr(output, "words", output).fill_(POISON)


def pool(shape: Shape, lens: list[int] | None = None) -> Call:
    """What the builders of page tables read, on the device under test."""
    rng = np.random.default_rng(shape.seed)
    low = max(0, shape.max_seq_len // 2)
    lens = lens or rng.integers(low, shape.max_seq_len + 1, shape.batch).tolist()
    width = (shape.max_pages + 3 * shape.moved) * shape.page_size + shape.extra_tokens
    pool_rows = shape.batch + 3
    slots = rng.integers(0, 10_000, (pool_rows, width))
    if shape.holes:
        slots[rng.random(slots.shape) < 0.2] = -1
    rows = rng.permutation(pool_rows)
    return {
        "seq_lens": torch.tensor(lens, dtype=shape.lens_dtype, device=DEVICE),
        "req_pool_indices": torch.tensor(rows[: shape.batch], dtype=shape.rows_dtype).to(DEVICE),
        "req_to_token": torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        "page_size": shape.page_size,
        "max_pages": shape.max_pages,
        "seq_len_delta": shape.delta,
    }


def arguments(shape: Shape, lens: list[int] | None = None) -> Call:
    """Keyword arguments of `build_decode_metadata`."""
    table = (shape.batch, shape.max_pages + shape.extra_columns)
    sizes = {"cache_seqlens": (shape.batch,), "cu_seqlens_k": (shape.batch + 1,)}
    sizes |= {"page_table": table} | ({"swa_page_table": table} if shape.swa else {})
    call = pool(shape, lens) | {name: poisoned(*size) for name, size in sizes.items()}
    if shape.swa:
        moves = np.random.default_rng(shape.seed).integers(0, 10_000, 10_000)
        call["swa_slot_map"] = torch.tensor(
            [*moves, -1],
            dtype=torch.int32,
            device=DEVICE,
        )
    return call


def facts_of(call, **other):
    """Facts of Llama-3.1-8B's attention over the page table of `call`."""
    (batch, columns), page_size = call["page_table"].shape, call["page_size"]
    widest = columns * page_size
    sizes = (batch, 32, 8, 128, 1, widest, SMS)
    return SchedulerFacts(*sizes, page_size=page_size, causal=True, **other)


QUERY_TOKENS = 3


def kinds_of(call):
    """Facts of a step of verification of up to `QUERY_TOKENS` over the page table of `call`: full
    attention, a window, and MLA with 16 heads."""
    (batch, columns), page_size = call["page_table"].shape, call["page_size"]
    full = SchedulerFacts(
        batch_size=batch,
        num_qo_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_seqlen_q=QUERY_TOKENS,
        max_seqlen_k=columns * page_size,
        num_sms=SMS,
        page_size=page_size,
        causal=True,
        varlen_q=True,
        build="sglang",
    )
    latent = replace(full, num_qo_heads=16, num_kv_heads=1, head_dim=64, head_dim_v=512)
    return {
        "full": full,
        "window": replace(full, window=(20, 0)),
        "mla": latent,
    }


def schedules_arguments(shape):
    """Keyword arguments of `build_step_schedules`."""
    call = arguments(shape)
    made = StepSchedules.reserve(kinds_of(call), torch.device(DEVICE))
    made.words.fill_(POISON)
    rng = np.random.default_rng(shape.seed)
    sums = np.append(
        0,
        rng.integers(
            1,
            QUERY_TOKENS + 1,
            shape.batch,
        ).cumsum(),
    )
    queries = torch.tensor(sums, dtype=torch.int32, device=DEVICE)
    return call | {"schedules": made, "cu_seqlens_q": queries}


def kv_arguments(shape: Shape, lens: list[int] | None = None, capacity: int | None = None) -> Call:
    """Keyword arguments of `build_kv_indices`; by default with room for `extra_columns` more."""
    if capacity is None:
        capacity = shape.batch * shape.max_pages + shape.extra_columns
    sizes = {"kv_indptr": shape.batch + 1, "kv_indices": capacity, "kv_last_page_len": shape.batch}
    call = pool(shape, lens) | {name: poisoned(size) for name, size in sizes.items()}
    if shape.moved:
        starts = np.random.default_rng(shape.seed).integers(0, 4, shape.batch) * shape.page_size
        call["kv_start"] = torch.tensor(starts, dtype=shape.rows_dtype, device=DEVICE)
    return call


def expected_pages(have: Call) -> Rows:
    read = {name: have[name] for name in READ}
    lens, sums, full, swa = oracle.decode_metadata(**read, swa_slot_map=have.get("swa_slot_map"))
    tables = {"page_table": full} | ({"swa_page_table": swa} if swa else {})
    return {"cache_seqlens": [lens], "cu_seqlens_k": [sums]} | tables


def expected_schedules(have: Call) -> Rows:
    pages = expected_pages(have)
    (lens,) = pages["cache_seqlens"]
    return pages | {
        "schedules": [
            step_words(
                have["schedules"],
                lens,
                have.get("cu_seqlens_q"),
            )
        ]
    }


def step_words(made: StepSchedules, lens: Any, cu_seqlens_q: Any = None) -> np.ndarray:
    """The model's words of all kinds, each where it lies; poison between them."""
    row = np.full(len(made.words), POISON)
    for kind in made.kinds.values():
        first = kind.words.storage_offset()
        model = kind_words(kind.facts, lens, cu_seqlens_q)
        row[first : first + len(model)] = model
    return row


def kind_words(facts: SchedulerFacts, lens: Any, cu_seqlens_q: Any = None) -> np.ndarray:
    """The model's words of one kind; where no request has KV, one split each."""
    q_lens = None
    if facts.varlen_q:
        q_lens = np.full(len(lens), facts.max_seqlen_q)
    if cu_seqlens_q is not None:
        q_lens = np.diff(cu_seqlens_q)
    if not lens.any():
        facts = replace(facts, num_splits=1)
    return words_of(plan_splits(facts, lens, q_lens))


def expected_kv(have: Call) -> Rows:
    read = {name: have[name] for name in READ}
    sums, pages, last = oracle.kv_indices(**read, kv_start=have.get("kv_start"))
    fit = pages[: len(have["kv_indices"])]
    lasts = {"kv_last_page_len": [last]} if "kv_last_page_len" in have else {}
    return {"kv_indptr": [sums], "kv_indices": [fit]} | lasts


def assert_schedule(scheduler: SchedulerMetadata, lens: torch.Tensor) -> None:
    """Every word the model's, which is the library's where the library writes one."""
    model = words_of(plan_splits(scheduler.facts, lens.cpu().numpy()))
    np.testing.assert_array_equal(scheduler.words.cpu().numpy(), model)


FEWER = 1 if torch.cuda.is_available() else 32
"""Without a GPU programs run one by one: a kernel takes more rows, scans and turns from batches on
that are so many times smaller (`fixtures.small_grids`)."""
STEPS = {
    "several_blocks": Shape(3, 2900, 1),
    "several_turns": Shape(2, 1024 * 2 * 300, 1, extra_columns=0),
    "widths_of_one_vector": Shape(
        3,
        36,
        swa=True,
        extra_columns=0,
        extra_tokens=0,
        holes=True,
    ),
    "batch_beyond_one_scan": Shape(4096 // FEWER + 4, 3, 1, extra_columns=0),
    "empty_batch": Shape(0, 16),
}
"""What random shapes do not reach."""
KV_SHAPES = STEPS | {
    "from_a_start_four_rows_per_program": Shape(1024 // FEWER + 3, 90, 2, moved=True),
    "several_turns": Shape(2, 1024 * 2 * 300 // FEWER, 1, extra_columns=0),
    "four_rows_per_program": Shape(1024 // FEWER + 13, 40, 2, holes=True),
    "four_rows_per_program_page_size_1": Shape(1024 // FEWER + 3, 9, 1),
    "four_rows_per_program_several_turns": Shape(1024 // FEWER + 1, 2100, 1),
    "four_rows_per_program_page_size_16": Shape(1024 // FEWER + 2, 130, 16),
}
DTYPES = st.sampled_from((torch.int32, torch.int64))
SEEDS = st.integers(0, 1000)
PAGE_SIZES = st.sampled_from([2**n for n in range(9)])
DRAWN_SHAPES = st.builds(
    Shape,
    *(
        st.integers(0, 20),
        st.integers(1, 700),
        PAGE_SIZES,
        st.integers(0, 70),
        st.booleans(),
    ),
    *(
        DTYPES,
        DTYPES,
        st.integers(0, 9),
        st.integers(0, 9),
        st.booleans(),
        SEEDS,
        st.booleans(),
    ),
)


POOL = [
    ("page_size", 3, "a power of two, got 3"),
    ("page_size", 4.0, "an integer >= 1"),
    ("max_pages", -1, "an integer >= 0"),
    ("max_pages", True, "an integer >= 0"),
    ("seq_len_delta", -1, "an integer >= 0, got -1"),
    ("seq_len_delta", 1.0, "an integer >= 0"),
]
PAIR = "given where the other one of the SWA pair is"
PAGES = [
    *POOL,
    ("max_pages", 99, "<= 18 (page_table has 26 columns, req_to_token 72 tokens a request, page_"),
    ("swa_page_table", None, PAIR),
    ("swa_slot_map", None, PAIR),
    ("swa_page_table", lambda c: c["page_table"][:, :5].contiguous(), "[4, 26] int32, got [4, 5]"),
    (
        "swa_page_table",
        lambda c: torch.cat([c["page_table"]] * 2, 1)[:, :26],
        "laid out as page_table, rows 26 words apart, got 52",
    ),
    ("cache_seqlens = seq_lens", ..., {"seq_len_delta": 1}),
]
KV_PAGES = [
    *POOL,
    ("max_pages", 22, "<= 21 (int32 counts the pages of 4 requests, req_to_token 84 tokens a"),
    ("kv_last_page_len = seq_lens", ...),
    ("kv_indptr = seq_lens", ...),
    ("kv_last_page_len = kv_start", ...),
]
"""Wrong arguments: the name, its value or how it follows from the right call, and what the error
says after "must be". `(a = b, ...)` puts input b into output a's memory, in a call with those
numbers."""


@dataclass(frozen=True, eq=False)
class Builder:
    """A builder under contract: a shape gives its call, a call says which words are right.

    `expected` has the live words of each output, row by row; `wrong` the arguments of a small call
    that it refuses, beside wrong tensors.
    """

    ours: Callable[..., None]
    launcher: Launcher
    arguments: Callable[[Any], Call]
    expected: Callable[[Call], Rows]
    outputs: tuple[str, ...]
    shapes: dict[str, Any]
    drawn: st.SearchStrategy[Any]
    small: Any
    large: Any
    wrong: list[tuple[Any, ...]]
    eager: Callable[..., None] | None = None

    def assert_right(self, call: Call, *, tails: bool = True) -> None:
        """Every word: the oracle's where it has one, poison elsewhere if `tails`."""
        have = {k: v.cpu().numpy() if torch.is_tensor(v) else v for k, v in call.items()}
        for name, rows in self.expected(have).items():
            is_schedule = name == "schedules"
            written = have[name].words.cpu().numpy() if is_schedule else have[name]
            for row, live in zip(np.atleast_2d(written), rows, strict=True):
                np.testing.assert_array_equal(row[: len(live)], live, err_msg=name)
                if tails:
                    assert (row[len(live) :] == POISON).all(), f"{name}: a tail was written"

    def compiled(self) -> int:
        """Kernels that Triton has compiled for it in this process."""
        return sum(len(cache[0]) for cache in self.launcher.kernel.device_caches.values())


def requests_of_a_cta(monkeypatch: Any, builder: Builder) -> int:
    """Requests that the library sorts among themselves, 992; fewer without a GPU, where 992
    programs take a second."""
    assert device.CTA.value == splits.BATCHES_PER_CTA == 992
    if ON_GPU:
        return 992
    most = 56  # in a span of 64, as 992 in one of 1024
    monkeypatch.setattr(device, "CTA", tl.constexpr(most))
    monkeypatch.setattr(builder.launcher, "remembered", {})
    for module in (device, kinds, splits, words):
        monkeypatch.setattr(module, "BATCHES_PER_CTA", most)
    return most


SMALL = Shape(4, 64, 4, swa=True)
LARGE = Shape(50, 4000, 2, swa=True)
OTHER_NUMBERS = tuple(
    {"seq_len_delta": delta, "max_pages": pages}
    for delta, pages in ((1, 9), (2, 16), (16, 1), (0, 0))
)
"""For a call of `small`."""
TABLES = ("cache_seqlens", "cu_seqlens_k", "page_table", "swa_page_table")
DECODE = Builder(
    ours=decode.build_decode_metadata,
    eager=eager.build_decode_metadata,
    launcher=decode.LAUNCHER,
    arguments=arguments,
    expected=expected_pages,
    outputs=TABLES,
    shapes=STEPS,
    drawn=DRAWN_SHAPES,
    small=SMALL,
    large=LARGE,
    wrong=PAGES,
)
SCHEDULES = Builder(
    ours=schedules.build_step_schedules,
    launcher=schedules.LAUNCHER,
    arguments=schedules_arguments,
    expected=expected_schedules,
    outputs=(*TABLES, "schedules"),
    # FlashAttention-3 has no schedule for an empty batch.
    shapes={n: s for n, s in STEPS.items() if s.batch and (ON_GPU or s.batch * s.max_pages < 1e4)},
    drawn=DRAWN_SHAPES.filter(lambda shape: shape.batch),
    small=SMALL,
    large=LARGE,
    wrong=PAGES,
)
KV_INDICES = Builder(
    ours=kv_indices.build_kv_indices,
    launcher=kv_indices.LAUNCHER,
    arguments=kv_arguments,
    expected=expected_kv,
    outputs=("kv_indptr", "kv_indices", "kv_last_page_len"),
    shapes=KV_SHAPES,
    drawn=DRAWN_SHAPES,
    small=Shape(4, 64, 4, moved=True),
    large=Shape(2500, 900, 4),
    wrong=KV_PAGES,
)
BUILDERS = {
    "decode": DECODE,
    "schedules": SCHEDULES,
    "kv_indices": KV_INDICES,
}
