"""The record of a call, or of calls like it, says whether a known problem costs time there."""

import json

import pytest

import attnlib
from attnlib import cli
from attnlib.lab.known_here import here, with_records
from attnlib.lab.known_sizes import alike, ratios_of
from attnlib.lab.recorded import recorded_calls
from attnlib.measure.calls.cases import read_case
from attnlib.run.look_up import plain
from attnlib.select.known import HOLDS, MAY_HOLD, PROBLEMS, Found, Here, report, report_in_brief

pytestmark = [pytest.mark.usefixtures("published_records"), pytest.mark.slow]
CAP = "sglang-fa3-split-cap-mla"
UNLIKE = "lens=32768x8+2048x56"
SERVED = ["--engine", "sglang==0.5.23", "--gpu", "h100"]
LOSES = f"mode=mla heads=16/1 page=1 {UNLIKE}"
GAINS = f"mode=mla heads=128/1 page=1 {UNLIKE}"
NEAR_LOSES = "mode=mla heads=16/1 page=1 lens=30000x8+2048x50"
FAR = "mode=mla heads=16/1 page=1 lens=131072+2048x63"


def cap_of(text, gpu="h100"):
    """What `advise` knows of the cap for a call of SGLang."""
    known = attnlib.advise(text, engine="sglang==0.5.23", gpu=gpu).known
    (found,) = [answer for answer in known if answer.problem.id == CAP]
    return found


@pytest.mark.parametrize("gpu, speedup", [("h100", 0.92), ("h200", 0.93)])
def test_a_fix_that_is_slower_on_record_of_the_call_is_not_prescribed(gpu, speedup, capsys):
    call = ["model=DeepSeek-V3", "tp=8", UNLIKE]
    engine = ["--engine", "sglang==0.5.23", "--gpu", gpu]
    cli.main(["advise", *call, *engine])
    told = capsys.readouterr().out
    size = f"on record of this call the fix is slower (speedup {speedup}), {gpu.upper()}\n"
    assert f"  size: {size}" in told
    assert "Not slower at this call, at others since SGLang 0.5.16 (known to 0.5.23): " in told
    assert "fix: ATTNLIB_SGLANG_SPLITS" not in told and "median slowdown" not in told
    assert f"{speedup}  ATTNLIB_SGLANG_SPLITS=bounded" in told, "the table has the same number"
    cli.main(["advise", *call, *engine, "--details"])
    told = capsys.readouterr().out
    assert f"  {size}" in told and "  at other calls, fix: ATTNLIB_SGLANG_SPLITS" in told


def test_such_a_problem_is_no_exit_status(capsys):
    lens = "32768x8+2048x56"
    diff = ["--diff", "sglang==0.5.15", "sglang==0.5.23", "--lens", lens, "--tp", "8"]
    command = ["advise", "--gpu", "h100", *diff, "--model", "DeepSeek-V3"]
    assert cli.main(command) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "not slower at this call, at others since sglang 0.5.16 (DeepSeek-V3 latent)" in told
    assert "(not slower here); stays: sglang-schedule-mla" in told
    assert f"DeepSeek-V3 latent: {CAP}, on record of this call the fix is slower" in told
    assert cli.main([*command, "--dp", "8"]) == cli.KNOWN_PROBLEM
    told = " ".join(capsys.readouterr().out.split())
    assert f"DeepSeek-V3 latent: {CAP}, slowdown 3.55 on record of this call, H100" in told
    assert "not slower" not in told


def test_the_record_of_the_call_stands_in_place_of_the_median(capsys):
    assert cli.main(["advise", *GAINS.split(), *SERVED]) == cli.KNOWN_PROBLEM
    told = capsys.readouterr().out
    assert "  size: slowdown 3.55 on record of this call, H100\n  fix: ATTNLIB_SGLANG" in told
    assert "median slowdown" not in told
    assert cap_of(GAINS).costs and not cap_of(LOSES).costs


def test_a_call_that_is_not_on_record_has_the_mean_of_those_like_it():
    like = cap_of("mode=mla heads=128/1 page=1 lens=30000x8+2048x56").here
    ends = (like.least, like.most)
    assert (like.nearest, like.costs) == (3, True) and ends[0] < like.slowdown < ends[1]
    assert str(like).endswith(" in the mean of the 3 nearest calls on record, H100")
    assert cap_of(NEAR_LOSES).is_open, "of the three nearest one gains by the fix"
    far = cap_of(FAR)
    assert far.here is None and far.costs, "nothing like it is on record"


def test_verification_of_drafts_and_another_card_do_not_speak_for_a_call():
    call = read_case(NEAR_LOSES)
    assert here(PROBLEMS[CAP], call, "h20") is None
    with_drafts = read_case(f"{NEAR_LOSES} q_len=4")
    assert here(PROBLEMS[CAP], with_drafts, "h100").slowdown > 2
    assert here(PROBLEMS[CAP], call, "h100").least < 1
    assert here(PROBLEMS["sglang-schedule-mla"], call, "h200") is None, "metadata is no call"


def test_it_is_the_ratio_of_the_times_that_advise_shows():
    call = read_case(LOSES)
    times = recorded_calls(call)
    times = times[times.gpu.str.contains("H100")].groupby("backend").us.median()
    slow, fast = times["sglang-flash-attn-3-mla"], times["sglang-flash-attn-3-mla@bounded"]
    assert here(PROBLEMS[CAP], call, "h100").slowdown == pytest.approx(slow / fast)


def test_calls_left_out_of_the_records_are_told_rightly_by_those_like_them(monkeypatch):
    problem = PROBLEMS[CAP]
    ratios = ratios_of(problem, "h100")
    calls = [plain(case) for case in ratios.case]
    everywhere = ratios_of(problem, "h100", everywhere=True)
    recorded = [plain(case) for case in everywhere.case]
    seen = []
    undecided = 0
    for call in dict.fromkeys(calls):
        others = everywhere[[each != call for each in recorded]]
        others = others[others.case.map(alike) == alike(call)].reset_index(drop=True)
        monkeypatch.setattr("attnlib.lab.known_sizes.ratios_of", lambda *_, rows=others, **__: rows)
        said = here(problem, call, "h100")
        if said is not None and said.is_open:
            undecided += 1
        elif said is not None:
            true = ratios[[each == call for each in calls]].ratio.iloc[0]
            is_slower = true > 1 + said.margin
            seen.append((said.costs == is_slower, is_slower))
    right, slower = (sum(values) / len(seen) for values in zip(*seen, strict=True))
    assert len(seen) > 200 and undecided < 20
    assert right > 0.98 and right > slower


def test_a_call_that_just_loses_splits_is_told_as_those_that_lose_none():
    found = cap_of("mode=mla heads=128/1 page=1 lens=4096x63+4800")
    assert found.is_harmless and found.here.nearest == 3
    assert found.here.slowdown == pytest.approx(0.98, abs=0.01)


ONE_TOKEN_MORE = "lens=1500x8+1100x24"


def test_calls_nearby_that_disagree_are_inconclusive_and_said_once(capsys):
    text = f"model=DeepSeek-V3 tp=8 dp=8 {ONE_TOKEN_MORE}"
    found = cap_of(text)
    assert found.is_open and not found.is_harmless and found.costs, "it may cost time here"
    size = "inconclusive, the 3 nearest calls on record have slowdowns of 0.85 to 1.19, H100"
    assert str(found.here) == size
    for more in ([], ["--details"]):
        cli.main(["advise", *text.split(), *SERVED, *more])
        told = capsys.readouterr().out
        assert "Inconclusive at this call, slower at others since SGLang 0.5.16" in told
        assert size in told and "if slower here, fix: ATTNLIB_SGLANG_SPLITS=bounded" in told
        assert "Not slower at this call" not in told
        assert "of the nearest recorded batches" not in told, "no second sentence by other records"
    cli.main(["advise", *text.split(), *SERVED])
    told = capsys.readouterr().out
    assert "not on record; 3 of the nearest batches (NVIDIA H100" in told
    assert "sglang-flash-attn-3-mla@bounded        -        3  ATTNLIB_SGLANG" in told


@pytest.mark.parametrize(
    "least, most, is_open, costs",
    [(0.85, 1.19, True, False), (1.1, 1.2, False, True), (0.85, 1.01, False, False)],
)
def test_the_nearest_calls_decide_where_they_agree(least, most, is_open, costs):
    said = Here(1.1 if costs else 1.0, 0.02, "g", nearest=3, least=least, most=most)
    assert (said.is_open, said.costs, said.is_harmless) == (is_open, costs, not is_open | costs)


@pytest.mark.parametrize(
    "slowdown, costs, words",
    [
        (1.5, True, "slowdown 1.50 on record of this call, H100"),
        (1.01, False, "on record of this call the fix changes nothing (speedup 1.01), H100"),
        (0.9, False, "on record of this call the fix is slower (speedup 0.90), H100"),
    ],
)
def test_an_effect_within_the_margin_is_none(slowdown, costs, words):
    said = Here(slowdown, 0.02, "NVIDIA H100 80GB HBM3")
    assert (str(said), said.costs) == (words, costs)
    holds = Found(PROBLEMS[CAP], package="sglang", here=said)
    assert (holds.verdict, holds.costs) == (HOLDS, costs)
    for lines in (report([holds]), report_in_brief([holds])):
        assert any(line.endswith(words) for line in lines)
        assert any(line.startswith("  fix: ") for line in lines) == costs


def test_what_may_hold_costs_nothing_yet_and_json_says_what_costs(capsys):
    open_one = Found(PROBLEMS[CAP], missing=("kv_lens",), package="sglang")
    assert (open_one.verdict, open_one.costs) == (MAY_HOLD, False)
    assert [each.here for each in with_records([open_one], read_case(FAR), "h100")] == [None]
    cli.main(["advise", *LOSES.split(), *SERVED, "--json"])
    known = {row["id"]: row["here"] for row in json.loads(capsys.readouterr().out)["known"]}
    assert known[CAP]["costs"] is False and known[CAP]["nearest"] == 0
    assert known["sglang-schedule-mla"] is None
