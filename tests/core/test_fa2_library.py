"""FlashInfer's own plans in CUDA graphs, word for word: what ours takes over, and its own chunk."""

import json
import lzma
import zlib
from bisect import bisect_left
from collections import Counter
from pathlib import Path

import numpy as np

from attnlib.core.fa2.library import (
    FA2_INFO,
    MIN_CHUNK,
    RELEASES,
    ROWS_SINCE,
    by_name,
    tile_rows,
)
from attnlib.core.fa2.words import Words, block_indices, in_order, offsets, prefix_sums
from attnlib.core.spec import ceil_div

VECTORS = Path(__file__).resolve().parents[2] / "data" / "vectors" / "flashinfer_plans.jsonl.xz"
HEADER, *EVERY = map(json.loads, lzma.decompress(VECTORS.read_bytes()).splitlines())
CALLS = [line | {"call": HEADER["usual"] | line["call"]} for line in EVERY]
OURS = {"cuda_graph": True, "disable_split_kv": False, "fixed_split_size": -1, "uniform_q_len": 0}
"""Calls of wrappers that a planner may take over, with FlashInfer's own choice of the chunk."""
LINES = [
    line
    for line in CALLS
    if line["mode"] != "cuda-cores" and "refused" not in line
    if OURS.items() <= line["call"].items() and line["call"]["head_dim"] < 512
]


def lengths(line, name):
    """Tokens of each request; a length that stands alone is that of all."""
    return np.full(line["bs"], line.get(name, 1))


def library_words(
    info: tuple[int, ...],
    seen: np.ndarray,
    q_lens: np.ndarray,
    chunk: int,
    group_size: int,
) -> Words:
    """What FlashInfer writes by a plan of these integers for requests of `q_lens` [bs] queries,
    `seen` [bs] tokens cut into chunks of `chunk`; read in scheduler.cuh (PrefillPlan)."""
    facts = by_name(info)
    parts = ceil_div(seen, chunk)
    tiles = ceil_div(q_lens * group_size, facts["cta_tile_q"])
    requests, qo_tiles, kv_tiles = block_indices(tiles, parts)
    return Words(
        info=info,
        request_indices=requests,
        qo_tile_indices=qo_tiles,
        kv_tile_indices=kv_tiles,
        o_indptr=prefix_sums(q_lens * parts),
        merge_indptr=prefix_sums(np.repeat(parts, q_lens)),
        kv_chunk_size=chunk,
        total_num_rows=int(q_lens.sum()),
        block_valid_mask=np.arange(facts["padded_batch_size"]) < len(requests),
    )


def library_plan(line, release):
    """FlashInfer's plan of a call by `release`; read in scheduler.cuh (PrefillPlan)."""
    call = line["call"]
    q_lens = lengths(line, "q_lens")
    heads = call["num_kv_heads"]
    page_size = call["page_size"]
    group = call["num_qo_heads"] // heads
    rows = int(q_lens.sum())
    room = call["graph_rows"] or rows
    # The longest request if the others have a token each. In the library's uint32: with fewer
    # tokens than that it wraps, and tiles are the largest.
    tile = tile_rows((room - len(q_lens) + 1) % 2**32 * group, call["head_dim"])
    tiles = -(-q_lens * group // tile)
    pages = -(-lengths(line, "kv_lens") // page_size)
    if call["window_left"] >= 0:
        pages = np.minimum(pages, -(-(call["window_left"] + tile) // page_size))
    pages = np.maximum(pages, 1)
    most = 2 * call["num_sms"] // heads
    least = max(MIN_CHUNK // page_size, 1)
    size = least + bisect_left(
        range(least, int(pages.max())),
        True,
        key=lambda size: int((tiles * -(-pages // size)).sum()) <= most,
    )
    padded = max(most, -(-room * group // tile) + len(q_lens) - 1)
    partials = padded * tile
    if RELEASES.index(release) >= RELEASES.index(ROWS_SINCE):
        partials = -(-partials // group)
    info = offsets(
        {
            "request_indices": padded,
            "qo_tile_indices": padded,
            "kv_tile_indices": padded,
            "o_indptr": len(pages) + 1,
            "kv_chunk_size_ptr": 1,
            "total_num_rows": 1,
            "merge_indptr": room + 1,
            "block_valid_mask": 0,
        }
    )
    info |= {"padded_batch_size": padded, "total_num_rows": room, "cta_tile_q": tile}
    info |= {"enable_cuda_graph": True, "split_kv": True}
    info["s_offset"] = partials * 4 * call["num_qo_heads"] * call["head_dim"]
    return library_words(in_order(info), pages * page_size, q_lens, size * page_size, group)


def crc(words):
    return zlib.crc32(np.atleast_1d(words).astype("<i8").tobytes())


def stamp(plan):
    """CRC-32 of `info` and of all bytes that the plan copies to the GPU, over a buffer of 0xFF."""
    end = plan.info[FA2_INFO.index("block_valid_mask_offset")] + len(plan.block_valid_mask)
    return zlib.crc32(plan.image(-(-end // 4), -1).tobytes()[:end], crc(plan.info))


def test_the_model_agrees_with_the_library_on_a_gpu_word_for_word():
    counts = Counter()
    for line in (line for line in LINES if "info" in line):
        plan = library_plan(line, line["call"]["release"])
        assert list(plan.info) == line["info"], line["call"]
        wrong = [name for name, want in line["crc"].items() if crc(getattr(plan, name)) != want]
        assert wrong == [], line["call"]
        counts.update(line["crc"])
    # Of padded words what was read behind the blocks in use is not the plan's.
    assert min(counts[name] for name in ("kv_chunk_size", "o_indptr", "merge_indptr")) >= 400
    small = [line for line in LINES if "too_small_for" in line]
    assert len(small) > 10
    for line in small:
        plan = library_plan(line, line["call"]["release"])
        assert plan.info[FA2_INFO.index("s_offset")] == line["too_small_for"]


def test_the_model_fills_the_workspace_as_the_compiled_planner_of_each_release():
    stamps = [(line, *pair) for line in LINES for pair in line.get("compiled", {}).items()]
    assert len({release for _, release, _ in stamps}) == 7
    assert len(stamps) > 1000
    wrong = [line["call"] for line, name, want in stamps if stamp(library_plan(line, name)) != want]
    assert wrong == []


def test_releases_stand_in_order():
    parts = [[int(p.removeprefix("post")) for p in release.split(".")] for release in RELEASES]
    assert parts == sorted(parts)
    assert RELEASES[0] == "0.4.0"
    assert len(parts) >= 44
