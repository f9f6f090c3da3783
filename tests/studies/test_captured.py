"""A user's own traffic, from the lines of a capture to cases and a study."""

from dataclasses import replace

import pytest
import torch
from support.records import full_disk

from attnlib import cli
from attnlib.core import AttnSpec
from attnlib.engines import capture
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.decode.measure import build_workload
from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.calls.extend.measure import build_extend_workload
from attnlib.measure.calls.form import case_from_dict
from attnlib.measure.calls.lengths import sample_seq_lens
from attnlib.studies import captured
from attnlib.studies.captured import case_of, cases
from attnlib.studies.metadata.case import MetadataCase

LINES = """\
{"call": "mode=extend q_lens=30+8 heads=32/8 head_dim=128 page=16 lens=40+8", \
"batch_size": 2, "kind": "mha", "backend": "fa3", "release": "0.5.11", "draft": false}
{"call": "mode=decode heads=32/8 head_dim=128 page=16 lens=41+9+60", \
"batch_size": 3, "kind": "mha", "backend": "fa3", "release": "0.5.11", "draft": false}
"""
SPEC = AttnSpec(32, 8, 128, 16)
DECODE = DecodeCase(SPEC, 3, 60, "41+9+60")
EXTEND = ExtendCase(DecodeCase(SPEC, 2, 40, "40+8"), "prefill_paged", 30, q_lengths="30+8")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "My steps.jsonl"
    path.write_text(LINES)
    return path


def test_the_lines_are_those_that_a_capture_writes(path, tmp_path):
    again = capture.Capture(str(tmp_path / "again"))
    for step in capture.read(path):
        again.write(step)
    assert (tmp_path / "again").read_text() == LINES


def test_a_step_is_read_back_but_for_lengths_where_a_request_has_no_tokens(path, tmp_path):
    step, _ = capture.read(path)
    alike = replace(step, lengths="8+8", q_lengths="", dtype="float16", kv_dtype="fp8_e5m2")
    unknown = replace(step, lengths="", q_lengths="")
    empty = replace(step, lengths="8+0")
    written = capture.Capture(str(tmp_path / "again"))
    for each in (alike, unknown, empty):
        written.write(each)
    assert capture.read(tmp_path / "again") == [alike, unknown, replace(step, lengths="")]


def test_a_full_disk_is_told_and_costs_one_line(path, tmp_path):
    written = capture.Capture(str(tmp_path / "again"))
    step, _ = capture.read(path)
    written.write(step)
    whole = (tmp_path / "again").read_text()
    with full_disk(len(whole) + 20), pytest.raises(OSError, match=r"20 of \d+ bytes had room in"):
        written.write(step)
    written.write(step)
    assert capture.read(tmp_path / "again") == [step, step]


def test_a_step_is_a_case_of_its_own_lengths_and_equal_steps_are_one(path):
    extend, decode = capture.read(path)
    counts, left_out = cases([decode, extend, decode, replace(decode, mode="idle")])
    assert counts == {DECODE: 2, EXTEND: 1}
    assert left_out == {"idle: mode must be one of decode, extend, mixed, got 'idle'": 1}
    for case in counts:
        assert case_from_dict(case.to_dict()) == case
    metadata = MetadataCase("decode", 3, 16, 60, "41+9+60")
    assert sample_seq_lens(metadata).tolist() == [41, 9, 60]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mode": "target_verify"}, "mode must be one of decode, extend, mixed"),
        ({"lengths": ""}, "lengths must be known to the host, got none"),
        ({"kind": "mla"}, "kind must be mha, got 'mla'"),
        ({"kv_dtype": "float8_e5m2"}, "kv_dtype must be one of"),
        ({"batch_size": 4}, "lengths must be .* 4 like 33.1.60, 60 the largest, got '41.9.60'"),
    ],
)
def test_a_step_that_is_no_case_says_why(path, changes, words):
    with pytest.raises(ValueError, match=words):
        case_of(replace(capture.read(path)[1], **changes))


def test_lengths_that_are_said_reach_tensors_and_costs_and_names():
    decode = build_workload(DECODE, device="cpu").batch
    assert decode.seq_lens_cpu.tolist() == [41, 9, 60]
    work = build_extend_workload(EXTEND, device="cpu")
    assert work.batch.q_lens_cpu.tolist() == [30, 8]
    assert work.q.shape == (38, 32, 128)
    lens = work.batch.paged.seq_lens_cpu
    assert lens.dtype == torch.int32
    assert lens.tolist() == [40, 8]
    pairs = 30 * 40 - 30 * 29 // 2 + 8 * 8 - 8 * 7 // 2
    assert EXTEND.cost.flops == 4 * 128 * 32 * pairs
    assert DECODE.label == "heads=32/8 head_dim=128 page=16 lens=41+9+60"
    assert EXTEND.label == (
        "mode=prefill_paged q_lens=30+8 heads=32/8 head_dim=128 page=16 lens=40+8"
    )
    assert "q_lengths" not in replace(EXTEND, q_lengths="").to_dict(), "older records keep ids"


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("q_lengths", "30+9", "q_lengths must be at most the lengths 40.8, got '30.9'"),
        ("q_lengths", "29+8", "q_lengths must be 2 like 33.1.60, 30 the largest, got '29.8'"),
        ("q_lengths", "ragged", "q_lengths must be 2 like"),
        ("mode", "target_verify", "q_lengths must be empty unless mode is prefill_paged"),
        (
            "cached",
            DecodeCase(SPEC, 2, 40),
            "and lengths are explicit, got '30.8' for .* and fixed",
        ),
    ],
)
def test_queries_that_do_not_fit_are_named(field, value, words):
    with pytest.raises(ValueError, match=words):
        replace(EXTEND, **{field: value, "mask": ""})


def test_a_capture_is_a_study_that_measure_takes(path, capsys):
    study = cli._study_named(str(path))
    assert study.name == "captured_my_steps"
    assert study.cases == (DECODE, EXTEND)
    assert study.case_named(DECODE.label) == DECODE
    assert {job.command for job in study.jobs(headline=True)} == {
        f"python -m attnlib measure '{path}'"
    }
    assert capsys.readouterr().err == ""
    path.write_text(LINES.replace("mode=extend", "mode=idle"))
    assert cli._study_named(str(path)).cases == (DECODE,)
    assert capsys.readouterr().err.startswith("left out: 1 steps, idle: mode must be one of")
    path.write_text("")
    with pytest.raises(ValueError, match="must hold a step that can be a case, got none"):
        captured.study_of(path)
