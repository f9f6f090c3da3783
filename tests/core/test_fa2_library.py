"""Plans of FlashInfer's host planner: word for word the library's, and the corners of its rules."""

import gzip
import json
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlib.core.fa2.library import (
    CUDA_CORE_INFO,
    FA2_INFO,
    RELEASES,
    LibraryCall,
    LibraryPlan,
    plan_cuda_cores,
    plan_fa2,
)

VECTORS = Path(__file__).resolve().parents[2] / "data" / "vectors" / "flashinfer_plans.jsonl.gz"
HEADER, *LINES = map(json.loads, gzip.decompress(VECTORS.read_bytes()).splitlines())
CALL = LibraryCall(32, 8, 128, 16, cuda_graph=True, num_sms=132, release="0.6.4")
EAGER = replace(CALL, cuda_graph=False)
MQA = replace(CALL, num_qo_heads=8, num_kv_heads=1)
MOST = 33
"""Blocks that two CTAs of each of 132 SMs are for each of 8 KV heads."""


def make(line: dict[str, Any], **changes: Any) -> LibraryPlan:
    """The model's plan of a line; a length that stands alone is that of all requests."""
    call = LibraryCall(**{**HEADER["usual"], **line["call"], **changes})
    kv_lens = np.full(line["bs"], line["kv_lens"])
    if line["mode"] == "cuda-cores":
        return plan_cuda_cores(call, kv_lens)
    return plan_fa2(call, kv_lens, np.full(line["bs"], line.get("q_lens", 1)))


def stamp(plan: LibraryPlan) -> int:
    """CRC-32 of `info` and of all bytes that the plan copies to the GPU, over a buffer of 0xFF."""
    names = CUDA_CORE_INFO if plan.qo_tile_indices is None else FA2_INFO
    info, end = dict(zip(names, plan.info, strict=True)), 0
    room = {"o_indptr": 4 * len(plan.o_indptr), "merge_indptr": 4 * plan.info[1] + 4}
    buffer = np.full(2**23, 255, np.uint8)
    for offset in (name for name in names if name.endswith("_offset")):
        name = offset.removesuffix("_offset").removesuffix("_ptr")
        if (word := getattr(plan, name, None)) is not None:
            word = np.atleast_1d(word).astype("?" if name == "block_valid_mask" else "<i4")
            data, at = np.frombuffer(word.tobytes(), np.uint8), info[offset]
            buffer[at : at + len(data)] = data
            end = max(end, at + room.get(name, len(data)))
    return zlib.crc32(buffer[:end].tobytes(), crc(plan.info))


def crc(words: Any) -> int:
    return zlib.crc32(np.atleast_1d(words).astype("<i8").tobytes())


def test_the_model_agrees_with_the_library_on_a_gpu_word_for_word():
    counts = Counter()
    for line in (line for line in LINES if "info" in line):
        plan = make(line)
        assert list(plan.info) == line["info"], line["call"]
        wrong = [name for name, want in line["crc"].items() if crc(getattr(plan, name)) != want]
        assert wrong == [], line["call"]
        for name, words in line.get("words", {}).items():
            assert np.atleast_1d(getattr(plan, name)).tolist() == words, (name, line["call"])
        counts.update([*line["crc"], *line.get("words", {})])
    # Of padded words what was read behind the blocks in use is not the plan's.
    assert counts["kv_chunk_size"] >= counts["o_indptr"] >= 1178
    assert counts["merge_indptr"] >= 713 and counts["request_indices"] >= 600, counts
    small = [line for line in LINES if "too_small_for" in line]
    assert len(small) == 19
    for line in small:
        assert make(line).info[FA2_INFO.index("s_offset")] == line["too_small_for"]


def test_the_model_fills_the_workspace_as_the_compiled_planner_of_each_release():
    stamps = [(line, *pair) for line in LINES for pair in line.get("compiled", {}).items()]
    releases = Counter(release for _, release, _ in stamps)
    assert len(releases) == 7 and min(releases.values()) >= 30, releases
    wrong = [line["call"] for line, name, want in stamps if stamp(make(line, release=name)) != want]
    assert wrong == []


def test_what_the_compiled_planner_refuses_raises():
    refused = [line for line in LINES if "refused" in line]
    assert len(refused) >= 20
    for line in refused:
        with pytest.raises(ValueError, match="fixed_split_size|q_lens must all be"):
            make(line)


def test_all_tokens_of_a_request_are_in_one_block_for_each_query_tile():
    plan = plan_fa2(EAGER, [9000, 0, 300], [40, 3, 0])
    pairs = list(zip(plan.request_indices, plan.qo_tile_indices, plan.kv_tile_indices, strict=True))
    chunks = -(-9000 // plan.kv_chunk_size)
    tiles = -(-40 * 4 // plan.info[3])
    assert pairs == [(0, q, kv) for q in range(tiles) for kv in range(chunks)] + [(1, 0, 0)]
    assert plan.merge_indptr.tolist()[-4:] == [40 * chunks + n for n in range(4)]
    assert plan.o_indptr.tolist() == [0, 40 * chunks, 40 * chunks + 3, 40 * chunks + 3]


@pytest.mark.parametrize(
    ("changes", "chunks", "size", "split"),
    [
        ({}, MOST, 2000, True),
        ({"window_left": 1023}, 9, 128, True),  # 65 pages: the window and a tile of 16
        ({"window_left": 0}, 1, 128, True),
        ({"fixed_split_size": 500}, 9, 8000, True),
        ({"fixed_split_size": 5000}, 1, 80_000, False),
        ({"disable_split_kv": True, "fixed_split_size": 500}, 1, -16, False),
    ],
)
def test_how_a_long_request_is_cut(changes, chunks, size, split):
    plan = plan_fa2(replace(CALL, **changes), [66_000])
    assert (len(plan.request_indices), plan.kv_chunk_size) == (chunks, size)
    assert (plan.info[-1], plan.merge_indptr is not None) == (split, split)
    assert plan.info[0] == MOST and plan.total_num_rows == 1


def test_an_eager_plan_that_needs_no_split_has_none():
    plan = plan_fa2(EAGER, [100] * 5)
    assert plan.info[-1] == 0 and plan.merge_indptr is plan.block_valid_mask is None
    assert plan.total_num_rows is None and plan.kv_chunk_size == 128


@pytest.mark.parametrize(
    ("changes", "q_lens", "tile", "padded"),
    [
        ({}, [8] * 4, 128, MOST),  # 29 tokens for one request would be 116 rows
        ({"release": "0.6.16", "uniform_q_len": 8}, [8] * 4, 64, MOST),
        ({"graph_rows": 400}, [1] * 4, 128, MOST),
        ({"head_dim": 256}, [8] * 4, 64, MOST),
        ({"head_dim": 512}, [8] * 4, 64, MOST),
        ({"head_dim": 512, "release": "0.6.14"}, [8] * 4, 32, MOST),
        ({}, [1] * 40, 16, 49),
        ({}, [0] * 39 + [1], 128, 40),  # fewer tokens than requests: the library's uint32 wraps
        ({"cuda_graph": False}, [8] * 4, 64, 4),
    ],
)
def test_query_tiles(changes, q_lens, tile, padded):
    plan = plan_fa2(replace(CALL, **changes), [100] * len(q_lens), q_lens)
    assert (plan.info[3], plan.info[0]) == (tile, padded)


def test_partial_outputs_and_masks_of_0_7_1():
    old, new = (replace(CALL, release=release) for release in ("0.7.0", "0.7.1"))
    sums = [plan_fa2(call, [5000]).info[11] for call in (old, new)]
    assert sums == [4 * 32 * MOST * 16 * 128, 4 * 32 * MOST * 4 * 128]
    for changes, masks in (
        ({"disable_split_kv": True}, (False, True)),
        ({"cuda_graph": False}, (True, False)),
    ):
        plans = [plan_fa2(replace(call, **changes), [5000]) for call in (old, new)]
        assert tuple(plan.block_valid_mask is not None for plan in plans) == masks


@pytest.mark.parametrize(
    ("changes", "lens", "message"),
    [
        ({"release": "0.7.3"}, ([1],), "release must be .*0.4.0.*0.7.2.post1.*'0.7.3'"),
        (
            {"uniform_q_len": 1},
            ([1],),
            "release must have uniform_q_len, since 0.6.16, got '0.6.4'",
        ),
        ({"page_size": 0}, ([1],), "page_size must be"),
        ({"num_kv_heads": 5}, ([1],), "num_qo_heads must be"),
        ({}, ([],), r"kv_lens must hold lengths >= 0, got \[\]"),
        ({}, ([1, 2], [1, -1]), "q_lens must hold lengths >= 0"),
        ({}, ([1, 2], [1]), "q_lens must be of 2 requests, got 1"),
        (
            {"graph_rows": 3},
            ([1, 2], [2, 2]),
            "q_lens must sum up to 3, graph_rows, at most, got 4",
        ),
        ({"fixed_split_size": 1}, ([16 * 34],), "at most 33 blocks, a graph's, got 34"),
    ],
)
def test_what_cannot_be_planned_raises(changes, lens, message):
    with pytest.raises(ValueError, match=message):
        plan_fa2(replace(CALL, **changes), *lens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 64}, "call must have head_dim 128"),
        ({"num_qo_heads": 5}, "and a group of 1, 2, 3, 4, 8, got"),
        ({"fixed_split_size": 8}, "fixed_split_size must be an integer in -1..0, got 8"),
        ({"page_size": 1}, "kv_lens must give at most 1188 blocks, got 2287"),
    ],
)
def test_what_cannot_be_planned_for_cuda_cores_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        plan_cuda_cores(replace(MQA, **changes), [0] * 1100 + [400_000])


def test_releases_stand_in_order():
    parts = [[int(p.removeprefix("post")) for p in release.split(".")] for release in RELEASES]
    assert parts == sorted(parts) and len(parts) == 44
