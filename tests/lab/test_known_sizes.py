"""Sizes of known problems are those of the records, at the calls at which the problem holds."""

import json

import pytest

from attnlib import cli
from attnlib.lab import known_sizes
from attnlib.select.known import PROBLEMS, SIZES_FILE, how_much, size_in_brief
from attnlib.studies import served

pytestmark = [pytest.mark.usefixtures("published_records"), pytest.mark.slow]


def test_the_file_of_sizes_is_what_the_records_say():
    assert json.loads(SIZES_FILE.read_text()) == known_sizes.tables()


def test_a_problem_that_is_slower_is_slower_in_most_of_its_recorded_calls():
    for name, entry in known_sizes.tables().items():
        for size in entry["sizes"]:
            assert size["median"] > 1.03, name
            # Calls with two rounds on record have no verdict.
            assert size["judged"] <= size["cases"]
            assert not size["judged"] or 2 * size["slower"] > size["judged"], name


def test_calls_at_which_the_cap_takes_nothing_are_left_out():
    problem = PROBLEMS["sglang-fa3-split-cap-gqa"]
    ratios = known_sizes.ratios_of(problem, "h100")
    longest = ratios.case.map(lambda case: case.kv_len)
    assert len(ratios)
    assert 1024 not in {*longest}, "256 requests of 1,024 tokens are all alike"


def test_what_a_loaded_server_loses_is_told_without_its_control():
    *calls, load = how_much(PROBLEMS["sglang-fa3-split-cap-mla"])
    assert load == (
        "under load: slowdown 1.13 to 1.74 of tokens/s over 3 loads of deepseek-v3-8-layers; "
        "served, NVIDIA H200"
    )
    assert len(calls) == 2
    table = served.speedups(served.load_all(), served.DEEPSEEK)
    judged = table[table.rounds == 4].speedup
    size = known_sizes.size_of(PROBLEMS["sglang-fa3-split-cap-mla"])["loaded"]
    assert size["most"] == pytest.approx(judged.max(), abs=1e-4)
    assert len(judged) == size["cases"] + 1


def test_a_size_of_metadata_says_that_it_is_the_metadata_call_and_its_times():
    (line,) = how_much(PROBLEMS["sglang-page-table-width-page-one"])
    assert "5.9 to 40.5 us of metadata per step instead of 2.2 to 7.9 (2 calls on record" in line
    assert "on record, median slowdown 3.88)" in line
    brief = size_in_brief(PROBLEMS["sglang-page-table-width-page-one"], "h200")
    assert brief == (
        "5.9 to 40.5 us of metadata per step instead of 2.2 to 7.9 (2 calls on record), H200"
    )
    for line in how_much(PROBLEMS["sglang-fa3-split-cap-mla"]):
        assert "metadata" not in line and " us " not in line


@pytest.mark.parametrize(
    "requests, words",
    [
        (64, "262.6 us of metadata per step instead of 3.7 for 128 requests (nearest on record)"),
        (2, "175.6 us of metadata per step instead of 2.1 for 1 request (nearest on record)"),
        (0, "175.6 to 542.3 us of metadata per step instead of 2.1 to 5.5 (4 calls on record)"),
    ],
)
def test_metadata_is_told_of_the_call_with_as_many_requests_or_nearly(requests, words):
    assert size_in_brief(PROBLEMS["sglang-schedule-mla"], "h200", requests) == f"{words}, H200"


def test_the_requests_of_a_call_choose_the_size_that_advise_tells(capsys):
    call = ["mode=mla", "heads=128/1", "lens=2048x1000"]
    cli.main(["advise", *call, "--engine", "sglang==0.5.23", "--gpu", "h100"])
    told = capsys.readouterr().out
    assert "542.3 us of metadata per step instead of 5.5 for 1024 requests (nearest" in told
