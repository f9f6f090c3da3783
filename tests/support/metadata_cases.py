"""The metadata builders under one contract: their calls, seeded, and what every word must be.

Outputs are poisoned, so that a word left alone shows. Without a GPU Triton's interpreter runs the
same kernels (TRITON_INTERPRET=1, set by conftest).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from attnlib.core.metadata import decode, draft, kv_indices, step
from attnlib.core.metadata.launch import Launcher
from attnlib.core.schedule.fa3 import SchedulerMetadata, reserve, sm_count
from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.core.schedule.splits import plan_splits
from attnlib.kinds.metadata import eager, oracle
from attnlib.studies.scheduler_metadata.words import words_of

POISON = -77
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
SMS = sm_count(torch.device("cuda")) if ON_GPU else 132
Call = dict[str, Any]
READ = ("seq_lens", "req_pool_indices", "req_to_token", "page_size", "max_pages", "seq_len_delta")
"""What the builders of page tables read, and their oracles."""


@dataclass(frozen=True)
class Shape:
    """A call that reads a pool of requests: sizes, and what is unusual about it."""

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
    shuffled: bool = True
    seed: int = 0

    @property
    def max_pages(self) -> int:
        """Columns for the longest request."""
        return -(-(self.max_seq_len + self.delta) // self.page_size)


@dataclass(frozen=True)
class Draft:
    """A call for drafts; `stay` is how often a slot is on the page of the slot before it."""

    batch: int
    topk: int
    decode_length: int
    page_size: int = 1
    extra_slots: int = 1
    extra_columns: int = 1
    slots_dtype: torch.dtype = torch.int64
    lens_dtype: torch.dtype = torch.int32
    stay: float = 0.7
    seed: int = 0


@dataclass(frozen=True)
class Verify:
    """A call for a verification of requests of up to `max_seq_len` tokens."""

    batch: int
    num_draft_tokens: int = 4
    max_seq_len: int = 1000
    dtype: torch.dtype = torch.int64
    seed: int = 0


def poisoned(*sizes: int) -> torch.Tensor:
    return torch.full(sizes, POISON, dtype=torch.int32, device=DEVICE)


def poison(call: Call, names: tuple[str, ...]) -> None:
    """Fill these outputs of `call` with poison."""
    for name in filter(call.__contains__, names):
        output = call[name]
        (output.words if isinstance(output, SchedulerMetadata) else output).fill_(POISON)


def on_host(call: Call) -> Call:
    return {k: v.cpu().numpy() if torch.is_tensor(v) else v for k, v in call.items()}


def pool(shape: Shape, lens: list[int] | None = None) -> Call:
    """What the builders of page tables read, on the device under test."""
    rng = np.random.default_rng(shape.seed)
    low = max(0, shape.max_seq_len // 2)
    lens = lens or rng.integers(low, shape.max_seq_len + 1, shape.batch).tolist()
    width = shape.max_pages * shape.page_size + shape.extra_tokens
    pool_rows = shape.batch + 3
    slots = rng.integers(0, 10_000, (pool_rows, width))
    if shape.holes:
        slots[rng.random(slots.shape) < 0.2] = -1
    rows = rng.permutation(pool_rows) if shape.shuffled else np.arange(pool_rows)
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
        call["swa_slot_map"] = torch.tensor([*moves, -1], dtype=torch.int32, device=DEVICE)
    return call


def facts_of(call: Call, **changes: Any) -> SchedulerFacts:
    """Facts of Llama-3.1-8B's attention over the page table of `call`."""
    batch, columns = call["page_table"].shape
    page_size = call["page_size"]
    facts = SchedulerFacts(
        batch, 32, 8, 128, 1, columns * page_size, SMS, page_size=page_size, causal=True
    )
    return replace(facts, **changes)


def reserved(facts: SchedulerFacts) -> SchedulerMetadata:
    scheduler = reserve(facts, torch.device(DEVICE))
    scheduler.words.fill_(POISON)
    return scheduler


def step_arguments(shape: Shape) -> Call:
    """Keyword arguments of `build_step_metadata`."""
    call = arguments(shape)
    return call | {"scheduler": reserved(facts_of(call))}


def kv_arguments(shape: Shape, lens: list[int] | None = None, capacity: int | None = None) -> Call:
    """Keyword arguments of `build_kv_indices`; by default with room for `extra_columns` more."""
    if capacity is None:
        capacity = shape.batch * shape.max_pages + shape.extra_columns
    sizes = {"kv_indptr": shape.batch + 1, "kv_indices": capacity, "kv_last_page_len": shape.batch}
    return pool(shape, lens) | {name: poisoned(size) for name, size in sizes.items()}


def draft_arguments(shape: Draft) -> Call:
    """Keyword arguments of `build_draft_metadata`."""
    rng = np.random.default_rng(shape.seed)
    rows, slots = shape.batch * shape.topk, shape.decode_length + shape.extra_slots
    moves = rng.random((rows, slots)) >= shape.stay
    pages = np.cumsum(moves * rng.integers(-3, 4, (rows, slots)), axis=1) + 5
    cache_loc = pages * shape.page_size + rng.integers(0, shape.page_size, (rows, slots))
    last = rng.integers(0, shape.page_size, shape.batch)
    return {
        "cache_loc": torch.tensor(cache_loc, dtype=shape.slots_dtype, device=DEVICE),
        "last_page_lens": torch.tensor(last, dtype=shape.lens_dtype, device=DEVICE),
        "cache_seqlens": poisoned(rows),
        "page_table": poisoned(rows, shape.decode_length + shape.extra_columns),
        "decode_length": shape.decode_length,
        "topk": shape.topk,
        "page_size": shape.page_size,
    }


def verify_arguments(shape: Verify) -> Call:
    """Keyword arguments of `build_verify_metadata`."""
    lens = np.random.default_rng(shape.seed).integers(0, shape.max_seq_len, shape.batch)
    return {
        "seq_lens": torch.tensor(lens, dtype=shape.dtype, device=DEVICE),
        "num_draft_tokens": shape.num_draft_tokens,
        "cache_seqlens": poisoned(shape.batch),
        "cu_seqlens_q": poisoned(shape.batch + 1),
        "cu_seqlens_k": poisoned(shape.batch + 1),
    }


def assert_right(call: Call, *, tails: bool = True) -> None:
    """Every word of a decode step: the oracle's where live, poison elsewhere if `tails`."""
    have = on_host(call)
    given = {name: have[name] for name in (*READ, "swa_slot_map") if name in have}
    cache_seqlens, cu_seqlens_k, full, swa = oracle.decode_metadata(**given)
    np.testing.assert_array_equal(have["cache_seqlens"], cache_seqlens)
    np.testing.assert_array_equal(have["cu_seqlens_k"], cu_seqlens_k)
    tables = {"page_table": full} | ({"swa_page_table": swa} if swa else {})
    for name, rows in tables.items():
        for row, pages in zip(have[name], rows, strict=True):
            np.testing.assert_array_equal(row[: len(pages)], pages, err_msg=name)
            if tails:
                assert (row[len(pages) :] == POISON).all(), f"{name}: a tail was written"


def assert_schedule(scheduler: SchedulerMetadata, lens: torch.Tensor) -> None:
    """Every word the model's, which is the library's where the library writes one."""
    words = words_of(plan_splits(scheduler.facts, lens.cpu().numpy()))
    np.testing.assert_array_equal(scheduler.words.cpu().numpy(), words.values)


def assert_step_right(call: Call, *, tails: bool = True) -> None:
    """The same, and every word of the schedule."""
    assert_right(call, tails=tails)
    assert_schedule(call["scheduler"], call["cache_seqlens"])


def assert_kv_right(call: Call, *, tails: bool = True) -> None:
    """Every word of the three arrays: the oracle's where live and within, poison after."""
    have = on_host(call)
    found = oracle.kv_indices(**{name: have[name] for name in READ if name in have})
    kv_indptr, pages, last_page_len = found
    np.testing.assert_array_equal(have["kv_indptr"], kv_indptr)
    np.testing.assert_array_equal(have["kv_last_page_len"], last_page_len)
    written = have["kv_indices"][: len(pages)]
    np.testing.assert_array_equal(written, pages[: len(written)])
    assert (have["kv_indices"][len(pages) :] == POISON).all(), "words past the end were written"


def assert_draft_right(call: Call, *, tails: bool = True) -> None:
    """Every word of a draft: the oracle's where live, poison everywhere else."""
    numbers = {name: call[name] for name in ("decode_length", "topk", "page_size")}
    slots = (call[name].cpu().numpy() for name in ("cache_loc", "last_page_lens"))
    cache_seqlens, tables = oracle.draft_metadata(*slots, **numbers)
    assert call["cache_seqlens"].tolist() == cache_seqlens.tolist()
    width = call["page_table"].shape[1]
    expected = [pages + [POISON] * (width - len(pages)) for pages in tables]
    assert call["page_table"].tolist() == expected


def assert_verify_right(call: Call, *, tails: bool = True) -> None:
    """Every word of the three outputs is the oracle's."""
    expected = oracle.verify_metadata(call["seq_lens"].cpu().numpy(), call["num_draft_tokens"])
    for name, words in zip(VERIFY.outputs, expected, strict=True):
        assert call[name].tolist() == words.tolist(), name


UPSTREAM = {
    "page_size_1_small": (2, 128, 1),
    "page_size_1_medium": (16, 256, 1),
    "page_size_1_large": (64, 512, 1),
    "page_size_1_with_seq_len_delta": (8, 200, 1, 5),
    "page_size_16_small": (4, 256, 16),
    "page_size_16_medium": (16, 512, 16),
    "page_size_64_small": (4, 512, 64),
    "page_size_64_medium": (32, 1024, 64),
    "page_size_64_with_delta": (8, 512, 64, 3),
    "page_size_16_with_swa": (8, 256, 16, 0, True),
    "page_size_64_with_swa": (16, 512, 64, 0, True),
    "page_size_64_with_swa_and_delta": (8, 400, 64, 2, True),
    "batch_size_1": (1, 128, 1),
    "batch_size_1_page_size_64": (1, 256, 64),
    "max_seq_pages_small": (2, 10, 64),
    "varied_sequence_lengths": (8, 512, 64),
    **{f"page_size_{2**n}": (4, 256, 2**n) for n in range(8)},
}
"""The configurations of the sixteen tests that came with SGLang's fused kernel."""
MISSED = {
    "page_size_1_with_swa": Shape(8, 300, 1, swa=True),
    "int32_lengths_and_int64_rows": Shape(9, 70, 4, lens_dtype=torch.int32, rows_dtype=torch.int64),
    "slots_of_minus_one": Shape(5, 90, 4, swa=True, holes=True),
    "slots_of_minus_one_page_size_1": Shape(5, 90, 1, swa=True, holes=True),
    "odd_widths": Shape(3, 37, 1, extra_columns=1, extra_tokens=2),
    "widths_of_one_vector": Shape(3, 36, 1, extra_columns=0, extra_tokens=0),
    "odd_widths_swa": Shape(3, 75, 2, swa=True, extra_columns=1, extra_tokens=1),
    "several_blocks": Shape(3, 2900, 1),
    "several_turns": Shape(2, 1024 * 2 * 300, 1, extra_columns=0),
    "delta_beyond_a_page": Shape(4, 50, 8, delta=21),
    "page_size_256": Shape(4, 1000, 256),
    "batch_beyond_one_scan": Shape(4100, 3, 1, extra_columns=0),
}
"""What the sixteen leave out."""
STEPS = {**{name: Shape(*sizes, shuffled=False) for name, sizes in UPSTREAM.items()}, **MISSED}


KV_SHAPES = {
    **{name: replace(s, swa=False) for name, s in STEPS.items() if name in MISSED or not s.swa},
    "two_rows_per_program": Shape(515, 90, 1),
    "four_rows_per_program": Shape(1037, 40, 2, holes=True),
    "eight_rows_per_program_page_size_1": Shape(2051, 9, 1),
    "eight_rows_per_program_several_turns": Shape(2049, 500, 1),
    "eight_rows_per_program_page_size_16": Shape(2050, 130, 16),
}
DRAFT_SHAPES = {
    "one_token": Draft(1, 1, 1),
    "one_token_of_a_page": Draft(3, 4, 1, 64),
    "page_size_1": Draft(5, 4, 6),
    "page_size_16": Draft(9, 8, 7, 16),
    "int32_slots_int64_lengths": Draft(4, 2, 5, 4, 1, 1, torch.int32, torch.int64),
    "exact_widths": Draft(4, 3, 8, 4, extra_slots=0, extra_columns=0),
    "wide_buffers": Draft(4, 3, 2, 4, extra_slots=40, extra_columns=70),
    "all_on_one_page": Draft(2, 2, 9, 32, stay=1.0),
    "a_page_each": Draft(2, 2, 9, 32, stay=0.0),
    "several_programs": Draft(150, 8, 3, 4),
    "no_power_of_two": Draft(7, 3, 11, 2),
    "several_turns": Draft(2, 2, 1300, 2),
    "a_turn_exactly": Draft(2, 1, 1024, 2, extra_slots=0),
    "page_size_256": Draft(3, 2, 300, 256),
    "no_tokens": Draft(3, 2, 0, 4),
    "empty_batch": Draft(0, 4, 3),
}
BATCHES = (0, 1, 2, 31, 32, 33, 127, 4095, 4096, 5000)
DTYPES = st.sampled_from((torch.int32, torch.int64))
SEEDS, PAGE_SIZES = st.integers(0, 1000), st.sampled_from([2**n for n in range(9)])


def drawn_shapes(swa: bool, least: int = 0) -> st.SearchStrategy[Shape]:
    few = st.integers(0, 9)
    sizes = (st.integers(least, 40), st.integers(1, 700), PAGE_SIZES, st.integers(0, 70))
    window = st.booleans() if swa else st.just(False)
    rest = (window, DTYPES, DTYPES, few, few, st.booleans(), st.just(True), SEEDS)
    return st.builds(Shape, *sizes, *rest)


DRAWN_DRAFTS = st.builds(
    Draft,
    *(st.integers(0, 40), st.integers(1, 9), st.integers(0, 20), PAGE_SIZES),
    *(st.integers(0, 9), st.integers(0, 9), DTYPES, DTYPES),
    *(st.sampled_from((0.0, 0.5, 0.9)), SEEDS),
)
DRAWN_VERIFIES = st.builds(
    Verify, st.integers(0, 70), st.integers(1, 64), st.integers(1, 100_000), DTYPES, SEEDS
)


@dataclass(frozen=True)
class Builder:
    """A builder under contract: a shape gives its call, a call says whether it is right.

    `ours` and `eager` build; `stepped` is the input that grows from step to step; `sizes` are other
    numbers for a call of `small`.
    """

    launcher: Launcher
    ours: Callable[..., None]
    eager: Callable[..., None] | None
    outputs: tuple[str, ...]
    arguments: Callable[[Any], Call]
    assert_right: Callable[..., None]
    shapes: dict[str, Any]
    drawn: st.SearchStrategy[Any]
    small: Any
    large: Any
    empty: Any
    stepped: str
    sizes: tuple[dict[str, int], ...]


def compiled(builder: Builder) -> int:
    """Kernels that Triton has compiled for `builder` in this process."""
    return sum(len(cache[0]) for cache in builder.launcher.kernel.device_caches.values())


PAGES = {
    "drawn": drawn_shapes(swa=True),
    "small": Shape(4, 64, 4, swa=True),
    "large": Shape(50, 4000, 2, swa=True),
    "empty": Shape(0, 16),
    "stepped": "seq_lens",
    "sizes": tuple(
        {"seq_len_delta": delta, "max_pages": pages}
        for delta, pages in ((1, 9), (2, 16), (16, 1), (0, 0))
    ),
}
NO_WINDOW = {
    "drawn": drawn_shapes(swa=False),
    "small": Shape(4, 64, 4),
    "large": Shape(2500, 900, 4),
}
TABLES = ("cache_seqlens", "cu_seqlens_k", "page_table", "swa_page_table")
DECODE = Builder(
    decode.LAUNCHER,
    decode.build_decode_metadata,
    eager.build_decode_metadata,
    TABLES,
    arguments,
    assert_right,
    STEPS,
    **PAGES,
)
STEP = Builder(
    step.LAUNCHER,
    step.build_step_metadata,
    None,
    (*TABLES, "scheduler"),
    step_arguments,
    assert_step_right,
    {n: s for n, s in STEPS.items() if ON_GPU or s.batch * s.max_pages < 10_000},
    **PAGES | {"empty": None, "drawn": drawn_shapes(swa=True, least=1)},
)
KV_INDICES = Builder(
    kv_indices.LAUNCHER,
    kv_indices.build_kv_indices,
    eager.build_kv_indices,
    ("kv_indptr", "kv_indices", "kv_last_page_len"),
    kv_arguments,
    assert_kv_right,
    KV_SHAPES,
    **PAGES | NO_WINDOW,
)
DRAFT = Builder(
    draft.DRAFTS,
    draft.build_draft_metadata,
    eager.build_draft_metadata,
    ("cache_seqlens", "page_table"),
    draft_arguments,
    assert_draft_right,
    DRAFT_SHAPES,
    DRAWN_DRAFTS,
    small=Draft(4, 2, 5, 4),
    large=Draft(40, 8, 5, 4),
    empty=Draft(0, 4, 3),
    stepped="last_page_lens",
    sizes=tuple({"decode_length": length} for length in (1, 2, 3)),
)
VERIFY = Builder(
    draft.VERIFIES,
    draft.build_verify_metadata,
    eager.build_verify_metadata,
    ("cache_seqlens", "cu_seqlens_q", "cu_seqlens_k"),
    verify_arguments,
    assert_verify_right,
    {f"batch_{n}": Verify(n) for n in BATCHES},
    DRAWN_VERIFIES,
    small=Verify(3),
    large=Verify(300),
    empty=Verify(0),
    stepped="seq_lens",
    sizes=tuple({"num_draft_tokens": 16 * tokens} for tokens in (1, 2, 3)),
)
BUILDERS = {
    "decode": DECODE,
    "step": STEP,
    "kv_indices": KV_INDICES,
    "draft": DRAFT,
    "verify": VERIFY,
}
