"""Wrong arguments of public functions: each is a ValueError that names the argument first."""

import numpy as np
import pytest
import torch

import attnlib
from attnlib import core

SHAPE = core.PlanShape(32, 8, 128, kv_bytes=2, max_batch_size=2, max_seq_len=512, num_sms=132)
LENS = np.array([300, 200])
CALL = "heads=32/8 head_dim=128 page=16 lens=8192x16"
ENDS = {"package": "flashinfer-python", "good": "0.5.3", "bad": "0.6.3"}
STUDY = "fa3_decode_regression"
SIDES = ("flashinfer-fa3", "flashinfer-fa2")
WRONG = {
    "load_or_measure of no study": (
        lambda: attnlib.load_or_measure("nope"),
        "study must be one of 21 names, such as .*, got 'nope'",
    ),
    "load_or_measure(None)": (
        lambda: attnlib.load_or_measure(None),
        r'study must be of type Study, such as attnlib.STUDIES\["split_cap"\], got None',
    ),
    "load of None": (lambda: attnlib.load(None, ""), "study must be of type str, got None"),
    "load on None": (lambda: attnlib.load(STUDY, None), "machine must be of type str, got None"),
    "bisect of no study": (
        lambda: attnlib.bisect("nope", CALL, **ENDS),
        "study must be one of 21 names",
    ),
    "bisect(STUDY, 'x')": (
        lambda: attnlib.bisect(STUDY, "x", **ENDS),
        "case must be one of study 'fa3_decode_regression', got 'x'",
    ),
    "bisect(STUDY, 3)": (lambda: attnlib.bisect(STUDY, 3, **ENDS), r"case must be of type .*got 3"),
    "decode_call(None)": (
        lambda: attnlib.decode_call(None, CALL),
        "backend must be of type str, got None",
    ),
    "decode_call on gpu": (
        lambda: attnlib.decode_call("sdpa", CALL, device="gpu"),
        "device must be one of cuda, cpu, got 'gpu'",
    ),
    "create on gpu": (
        lambda: core.create("sdpa", core.AttnSpec(8, 2, 64, 16), device="gpu"),
        "device must be one of cuda, cpu, got 'gpu'",
    ),
    "changes(1, 2)": (
        lambda: attnlib.changes(1, 2),
        "old must be of type str, such as flashinfer==0.6.3, got 1",
    ),
    "changes of one release": (
        lambda: attnlib.changes("flashinfer==0.6.3", "flashinfer==0.6.3"),
        "old and new must be two releases, both are flashinfer==0.6.3",
    ),
    "over(None)": (lambda: attnlib.over(None, *SIDES), "rows must be of type DataFrame, such as"),
    "savings(None)": (lambda: attnlib.savings(None, *SIDES), "rows must be of type DataFrame"),
    "good_rows(3)": (lambda: attnlib.good_rows(3), "frame must be of type DataFrame, .* got 3"),
    "decode_rows(3)": (lambda: attnlib.decode_rows(3), "frame must be of type DataFrame"),
    "aa_check(3)": (lambda: attnlib.aa_check(3), "frame must be of type DataFrame"),
    "tally(3)": (lambda: attnlib.tally(3, "page_size"), "table must be of type DataFrame"),
    "ceilings(3)": (lambda: attnlib.ceilings(3), "frame must be of type DataFrame"),
    "decisions(3)": (lambda: attnlib.decisions(3), "without must be a list of texts, got 3"),
    "decisions of a text": (
        lambda: attnlib.decisions(without="sdpa"),
        "without must be a list of texts, got 'sdpa'",
    ),
    "judge_ratios(None)": (
        lambda: attnlib.judge_ratios(None),
        "pairs must be of type Sequence, such as .*, got None",
    ),
    "save(3, None)": (lambda: attnlib.save(3, None), "figure must be of type Figure, got 3"),
    "sample_seq_lens('x')": (
        lambda: attnlib.sample_seq_lens("x"),
        "case must be of type NamedCase, such as a DecodeCase, got 'x'",
    ),
    "a long value": (
        lambda: attnlib.good_rows("x" * 100),
        "frame must be of type DataFrame, .*, got one of type str",
    ),
    "play_schedule(None)": (
        lambda: attnlib.play_schedule(None),
        "layout must be of type str, such as 8/1, got None",
    ),
    "play_schedule of no lens": (
        lambda: attnlib.play_schedule("8/1", None),
        r"lens must be of type str, such as 8192x15\+300, got None",
    ),
    "play_schedule of a list": (
        lambda: attnlib.play_schedule("8/1", [1, 2]),
        r"lens must be of type str, .*, got \[1, 2\]",
    ),
    "play_schedule of one build": (
        lambda: attnlib.play_schedule(builds="upstream"),
        "builds must be a list of texts, got 'upstream'",
    ),
    "plan_words(None)": (
        lambda: core.plan_words(None, LENS),
        "shape must be of type PlanShape, got None",
    ),
    "plan_words of -1": (
        lambda: core.plan_words(SHAPE, np.array([300, -1])),
        r"seq_lens must lie in 0\.\.2147483647, got -1\.\.300",
    ),
    "plan_words by chunk -1": (
        lambda: core.plan_words(SHAPE, LENS, chunk=-1),
        "chunk must be an integer >= 0, got -1",
    ),
    "PlanLayout.of(3)": (lambda: core.PlanLayout.of(3), "shape must be of type PlanShape, got 3"),
    "build_fa2_plan(shape=None)": (
        lambda: core.build_fa2_plan(
            seq_lens=torch.tensor([3]), words=torch.zeros(4, dtype=torch.int32), shape=None
        ),
        "shape must be of type PlanShape, got None",
    ),
    "SchedulerFacts(window=3)": (
        lambda: core.SchedulerFacts(1, 8, 1, 128, 1, 8192, 132, window=3),
        r"window must be of type tuple \| list, such as \(127, 0\), got 3",
    ),
    "precompute(None, None)": (
        lambda: core.precompute(None, None),
        "facts must be of type SchedulerFacts, got None",
    ),
    "plan_splits(None)": (
        lambda: core.plan_splits(None, LENS),
        "facts must be of type SchedulerFacts, got None",
    ),
    "schedule_words(None)": (
        lambda: core.schedule_words(None, LENS),
        "facts must be of type SchedulerFacts, got None",
    ),
}


@pytest.mark.parametrize("call, message", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(call, message, published_records):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_a_path_of_no_figure_file_is_named():
    from matplotlib.figure import Figure

    with pytest.raises(ValueError, match=r"^path must be of type str \| .*PathLike, got None"):
        attnlib.save(Figure(), None)


def test_a_study_is_taken_by_its_name_and_a_case_by_its_text(published_records):
    study = attnlib.STUDIES[STUDY]
    by_name = attnlib.load_or_measure(STUDY)
    assert by_name.equals(attnlib.load_or_measure(study))
    found = attnlib.bisect(STUDY, CALL, **ENDS)
    assert found.to_dict() == attnlib.bisect(study, study.case_named(CALL), **ENDS).to_dict()
