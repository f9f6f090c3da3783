"""Plans of FlashInfer's host planner: word for word the library's, and the corners of its rules."""

import json
import lzma
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.library_plan import LibraryCall, plan_fa2

from attnlib.core.fa2.library import FA2_INFO, RELEASES, Words

VECTORS = Path(__file__).resolve().parents[2] / "data" / "vectors" / "flashinfer_plans.jsonl.xz"
HEADER, *EVERY = map(json.loads, lzma.decompress(VECTORS.read_bytes()).splitlines())
LINES = [line for line in EVERY if line["mode"] != "cuda-cores"]
CALL = LibraryCall(32, 8, 128, 16, cuda_graph=True, num_sms=132, release="0.6.4")
EAGER = replace(CALL, cuda_graph=False)


def make(line: dict[str, Any], **changes: Any) -> Words:
    """The model's plan of a line; a length that stands alone is that of all requests."""
    call = LibraryCall(**{**HEADER["usual"], **line["call"], **changes})
    kv_lens = np.full(line["bs"], line["kv_lens"])
    return plan_fa2(call, kv_lens, np.full(line["bs"], line.get("q_lens", 1)))


def stamp(plan: Words) -> int:
    """CRC-32 of `info` and of all bytes that the plan copies to the GPU, over a buffer of 0xFF."""
    info, ends = dict(zip(plan.names, plan.info, strict=True)), [0]
    room = {"o_indptr": 4 * len(plan.o_indptr), "merge_indptr": 4 * plan.info[1] + 4}
    for offset in (name for name in plan.names if name.endswith("_offset")):
        name = offset.removesuffix("_offset").removesuffix("_ptr")
        if (word := getattr(plan, name, None)) is not None:
            each = 1 if name == "block_valid_mask" else 4
            ends.append(info[offset] + room.get(name, each * np.size(word)))
    return zlib.crc32(plan.image(-(-max(ends) // 4), -1).tobytes()[: max(ends)], crc(plan.info))


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
    assert counts["kv_chunk_size"] >= counts["o_indptr"] >= 1125
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


def test_rules_change_with_the_releases_in_which_they_were_read():
    """Seven releases were compiled; what lies between them was read."""
    for since, head_dim in (("0.6.14", 512), ("0.7.1", 128)):
        calls = [replace(CALL, release=name, head_dim=head_dim) for name in RELEASES]
        infos = [plan_fa2(call, [5000] * 4, [8] * 4).info for call in calls]
        assert [info == infos[0] for info in infos].index(False) == RELEASES.index(since)
    assert plan_fa2(replace(CALL, release="0.6.16", uniform_q_len=1), [5000]).info[0] == 33


@pytest.mark.parametrize(
    ("changes", "lens", "message"),
    [
        ({"release": "0.7.3"}, ([1],), "release must be .*0.4.0.*0.7.2.post1.*'0.7.3'"),
        (
            {"uniform_q_len": 1, "release": "0.6.15.post1"},
            ([1],),
            "release must have uniform_q_len, since 0.6.16, got '0.6.15.post1'",
        ),
        ({"page_size": 0}, ([1],), "page_size must be"),
        ({"num_kv_heads": 5}, ([1],), "num_qo_heads must be"),
        ({}, ([],), r"kv_lens must hold lengths >= 0, got \[\]"),
        ({}, ([1, 2], [1, -1]), "q_lens must hold lengths >= 0"),
        ({}, ([1, 2], [1]), "q_lens must be of 2 requests, got 1"),
        ({}, ([1.5, 2],), r"kv_lens must hold lengths >= 0, got \[1.5, 2.0\] float64"),
        ({"graph_rows": 3}, ([1, 2], [2, 2]), "q_lens must sum up to 3, graph_rows, .*, got 4"),
        ({"fixed_split_size": 1}, ([16 * 34],), "at most 33 blocks, a graph's, got 34"),
    ],
)
def test_what_cannot_be_planned_raises(changes, lens, message):
    with pytest.raises(ValueError, match=message):
        plan_fa2(replace(CALL, **changes), *lens)


def test_releases_stand_in_order():
    parts = [[int(p.removeprefix("post")) for p in release.split(".")] for release in RELEASES]
    assert parts == sorted(parts) and len(parts) == 44
