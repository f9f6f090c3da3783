"""The tables of how far a number can be trusted, from the published records."""

import pytest

import attnlib
from attnlib.studies import measurement_trust as study


@pytest.fixture
def frame(published_records):
    return attnlib.load(study.STUDY.name, study.STUDY.reference_machine)


def test_every_row_that_compares_code_with_itself_is_counted(published_records):
    table = study.false_verdicts(attnlib.STUDIES)
    assert table["A/A rows"].sum() >= 285
    assert table["false verdicts"].sum() <= 1


def test_a_row_of_two_rounds_can_have_no_verdict_and_is_not_counted(published_records):
    assert study.false_verdicts(["context_width"]).empty
    assert study.false_verdicts(["sparse_mla"])["A/A rows"].tolist() == [10]


def test_the_interval_is_narrower_with_more_rounds(frame):
    table = study.by_rounds(frame)
    assert (table["10 rounds, ± %"] < table["2 rounds, ± %"]).all()
    assert table["flashinfer-fa2, us"].is_monotonic_increasing


def test_fewer_rounds_have_fewer_columns(frame):
    table = study.by_rounds(frame[frame["round"] < 4])
    assert [name for name in table if "rounds" in name][-1] == "4 rounds, ± %"


def test_long_calls_agree_between_timers_and_short_ones_do_not(frame):
    table = study.timers(frame)
    eager = table["eager, us"] / table["graph, us"]
    assert eager.iloc[0] > 2
    assert eager.iloc[-1] == pytest.approx(1, abs=0.05)


def test_the_chart_counts_the_shapes_that_agree(published_records):
    (axis,) = study.agreement_chart().axes
    words = [text.get_text() for text in axis.get_legend().get_texts()]
    assert words[0] == "SGLang: 41 of 43 within 10 % from 30 us"


def test_the_power_cap_is_counted_by_gpu_and_backend(published_records):
    table = study.clocks("plan_rivals", ["flash-attn-3-precomputed"])
    assert (table["at the power cap"] == table.records).all()
    assert (table["lowest, MHz"] <= table["median clock, MHz"]).all()
