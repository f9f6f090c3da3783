"""Two releases compared: rounds until decided, how often a verdict is wrong, what replays."""

import json
from pathlib import Path

import pandas as pd
import pytest
from support.lab import SLUG, Lab
from support.studies import hand_made

from attnlib import cli, compare_releases
from attnlib.core.backends.table import BACKENDS
from attnlib.core.layer import parse_layer
from attnlib.lab import next_step, upgrade
from attnlib.lab.upgrade import LOOKS, STUDY_NAME
from attnlib.measure.calls.cases import parse_cases, read_case
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.calls.form import Item
from attnlib.run import store
from attnlib.run.pairs import SPARE_ROUNDS
from attnlib.select.known import PROBLEMS
from attnlib.studies import captured
from attnlib.studies.releases.calls import calls_of_layer

PACKAGE, MODEL = "flashinfer-python", "Llama-3.1-8B"
BASE, NEW = "0.6.13", "0.7.2.post1"
KEYS = ["heads=32/8 head_dim=128 page=16 lens=8192x16", "heads=16/2 head_dim=128 page=16 lens=4096"]


@pytest.fixture
def lab(make_record, monkeypatch):
    """A machine with a GPU that measures at once, where every release can be had."""
    found = Lab(
        make_record,
        lambda release: (10.0, "fa2" if release == BASE else "fa3"),
        key=lambda item, release: (item.case.label, release),
    )
    found.stand_in(monkeypatch)
    monkeypatch.setattr(upgrade, "overlay_for", lambda package, release, given: None)
    return found


def compare(cases=KEYS, **options):
    return compare_releases(BASE, NEW, **{"cases": cases, "not_slower": 0, **options})


def words(found):
    return dict(zip(found.rows.case, found.rows.verdict, strict=True))


def test_every_mode_of_a_model_is_measured_in_rounds_that_alternate_and_replays_the_same(
    lab, monkeypatch
):
    found = compare("", models=[MODEL])
    assert found.rows.case.tolist() == [
        case.label for case in calls_of_layer(parse_layer(model=MODEL))
    ]
    assert {*found.rows.verdict} == {"same"} and not found.slower
    timers = {
        text.partition(" ")[0]: timer
        for text, timer in zip(found.rows.case, found.rows.timer, strict=True)
    }
    assert timers["mode=prefill_paged"] == "profiler"
    assert timers["mode=target_verify"] == "graph"
    both = [(0, BASE), (0, NEW), (1, NEW), (1, BASE), (2, BASE), (2, NEW), (3, NEW), (3, BASE)]
    assert lab.order() == [(*side, len(found.rows)) for side in both]
    monkeypatch.setenv("ATTNLIB_MODE", "replay")
    again = compare("", models=[MODEL])
    assert again.to_dict() == found.to_dict() and lab.order() == []


def test_only_cases_without_a_verdict_take_more_rounds_up_to_the_last_look(lab):
    one, other = KEYS
    lab.us[one, NEW], lab.noise[other, NEW] = 11.0, (0.5, 1.0, 2.0)
    found = compare()
    assert words(found) == {one: "slower", other: "inconclusive"} and found.slower == [one]
    assert found.next_step == "24 rounds, the last look, do not decide it: only a wider margin can"
    assert found.rows.rounds.tolist() == [4, LOOKS[-1]]
    counts = [count for *_, count in lab.order()]
    assert counts == [2] * 2 * 4 + [1] * 2 * (LOOKS[-1] - 4)
    assert (words(compare()), lab.order()) == (words(found), []), "what is on record counts"


@pytest.mark.parametrize(
    ("backend", "runs"),
    [
        ("fa2", "flashinfer-fa2"),
        ("flashinfer-xqa", "flashinfer-xqa"),
        ("fa2-planned", "flashinfer-fa2-planned"),
    ],
)
def test_an_engines_pinned_backend_is_compared_over_a_layer_of_its_own(lab, backend, runs):
    table = compare("", models="Qwen3-32B", tp=8, lens="2048..30720", batch=4, backend=backend).rows
    assert table.case.tolist() == ["heads=8/1 head_dim=128 page=16 lens=2048..30720x4"]
    assert table.backend.tolist() == [runs]
    assert compare("", heads="8/1", lens="9", backend=backend.upper()).rows.backend[0] == runs
    usual = compare("", heads="8/1", page_size=64, backend="prefill-fa2").rows
    assert {*usual.backend} == {"flashinfer-prefill-fa2"} and len(usual) == 5


def test_a_search_that_was_stopped_goes_on_to_its_next_look(lab):
    lab.us[KEYS[0], NEW], lab.noise[KEYS[0], NEW] = 11.0, (0.9, 1.1)
    found = compare()
    lab.keep(STUDY_NAME, 2 * 2 * 4 + 2 * 2 + 1)
    again = compare()
    assert words(again) == words(found) and lab.order()[0] == (7, NEW, 1)
    assert again.rows.rounds.tolist() == found.rows.rounds.tolist()


def test_a_round_of_the_base_belongs_to_one_comparison(lab):
    compare()
    lab.order()
    compare_releases(BASE, "0.8.0", cases=KEYS)
    sides = [(number, {BASE, "0.8.0"}) for number in range(4, 8)]
    jobs = lab.order()
    assert [(jobs[n][0], {jobs[n][1], jobs[n + 1][1]}) for n in range(0, len(jobs), 2)] == sides


def test_a_throttled_round_is_measured_again_and_an_item_without_a_look_is_inconclusive(lab):
    lab.is_hot = lambda item, number: number > 0 if item.case.label == KEYS[0] else number == 1
    found = compare()
    assert words(found) == {KEYS[0]: "inconclusive", KEYS[1]: "same"}
    assert found.rows.rounds.tolist() == [1, 4] and found.outcome == "not decided"
    assert max(number for number, *_ in lab.order()) == LOOKS[0] + SPARE_ROUNDS - 1


def test_not_slower_asks_for_less_than_the_same(lab):
    lab.us[KEYS[0], NEW] = 10.45
    assert words(compare()) == {KEYS[0]: "slower", KEYS[1]: "same"}
    assert words(compare(not_slower=0.05)) == dict.fromkeys(KEYS, "not slower")


@pytest.mark.parametrize(
    ("failing", "word", "slower"),
    [((NEW,), "fails", KEYS[:1]), ((BASE,), "not run", []), ((BASE, NEW), "not run", [])],
)
def test_a_case_that_a_release_cannot_run_is_told_and_the_others_go_on(lab, failing, word, slower):
    lab.failing = {(KEYS[0], release): "refused" for release in failing}
    found = compare()
    assert words(found) == {KEYS[0]: word, KEYS[1]: "same"} and found.slower == slower
    assert f"{KEYS[0]}, flashinfer-auto: {failing[0]} refused: no luck" in found.notes
    assert "no luck" in repr(found) and lab.order()[-1][2] == 1


def test_the_table_has_kernels_and_planning_apart(lab):
    found = compare("\n".join(KEYS))
    row = found.table().iloc[0]
    assert (row.base_ran, row.new_ran, row.base_plan_us) == ("fa2", "fa3", 45.0)
    html = found._repr_html_()
    assert "plan on the host" in html and "2 same" in html


def test_a_build_of_ones_own_is_measured_anew_each_time(lab, tmp_path, monkeypatch):
    folder = hand_made(tmp_path / "mine", PACKAGE, "0.7.2+mine")
    for first in (0, 4):
        found = compare_releases(BASE, str(folder), cases=KEYS, not_slower=0)
        assert found.new == "0.7.2+mine" and {*found.rows.verdict} == {"same"}
        assert [round_ for round_, *_ in lab.order()] == [
            r for r in range(first, first + 4) for _ in "ab"
        ]
    commands = store.load(STUDY_NAME, SLUG).command
    assert not commands.str.contains(str(tmp_path), regex=False).any()
    monkeypatch.setenv("ATTNLIB_MODE", "replay")
    (wheel := tmp_path / "flashinfer_python-0.7.2+mine-py3-none-any.whl").touch()
    replayed = compare_releases(BASE, str(wheel), cases=KEYS)  # Nor is it installed for nothing.
    assert {*replayed.rows.verdict} == {"not on record"} and replayed.outcome == "not decided"
    assert KEYS[0] not in repr(replayed), "nothing has a time"
    assert "mine-py3-none-any.whl is a build of your own: it needs a CUDA GPU." in replayed.notes[1]
    with pytest.raises(ValueError, match=r"a version of its own, such as 0.7.2\+mine"):
        compare_releases("0.7.2+mine", str(wheel), cases=KEYS)


@pytest.mark.slow
def test_releases_around_are_the_closest_seen_from_either_side(monkeypatch):
    item = Item("flashinfer-fa2", "graph", read_case(KEYS[0]))
    rows = []
    for number, pair in enumerate(
        [("0.6.4", "0.7.2.post1"), ("0.6.3", "0.6.13"), ("0.6.3", "0.7.1")]
    ):
        for release in pair:
            row = dict.fromkeys(next_step.ROUND, number) | {"release": release, "case": item.case}
            rows.append(row)
    monkeypatch.setattr(next_step, "_on_record", lambda _: pd.DataFrame(rows))
    around = next_step.nearest_items(item, ("0.6.5", "0.6.6"))
    assert list(around) == [("0.6.4", "0.7.2.post1"), ("0.6.3", "0.6.13")]
    assert set(around.values()) == {item}


def test_published_records_of_both_releases_are_replayed_and_the_rest_is_said(published_records):
    cases = [KEYS[0], "heads=32/8 head_dim=128 page=16 lens=8192x8"]
    found = compare_releases("0.6.3", "0.6.4", cases=cases, not_slower=0)
    assert found.outcome == "not decided" and "1 not on record, of 2 calls" in found.conclusion
    assert words(found) == {KEYS[0]: "faster", cases[1]: "not on record"}
    assert "PrefillWithKVCacheKernel 1 to 0" in found.rows.kernels[0]
    assert {*found.rows.study.dropna()} == {"fa3_decode_regression"}
    assert "margin 4% below 30 us, 2% from there on" in found.notes[0]
    other = compare_releases("flashinfer==0.6.3", "0.6.4", heads="32/8", lens="8192x8")
    assert other.conclusion.endswith(f"near {KEYS[0]}, 0.6.3 to 0.6.4, on record: faster")
    assert other.nearest.verdict.tolist() == ["faster"] and KEYS[0] in repr(other)
    layer = {"heads": "8/1", "lens": "2048..30720x64", "backend": "fa2"}
    for both in ("0.6.4", "0.7.2.post1"), ("0.6.13", "0.7.2.post1"), ("0.7.2.post1", "0.6.5"):
        other = compare_releases(*both, **layer)
        (near,) = other.nearest.itertuples()
        assert (near.case, near.machine) == (
            "heads=8/1 head_dim=128 page=16 lens=8192x64",
            "nvidia-h200-30af7b45",
        )
        assert {near.base, near.new} == {"0.6.4", "0.7.2.post1"}
        assert f"{near.base_plan_us:,.1f}" in repr(other)
        assert "explain heads=8/1 --gpu" in repr(other)
    searched = compare_releases("0.6.3", "0.6.13", cases=KEYS[:1])
    assert {*searched.rows.study} == {"bisect_fa3_decode_regression"}
    other = compare_releases("0.6.5", "0.6.6", cases=KEYS[:1])
    sides = [*zip(other.nearest.base, other.nearest.new, strict=True)]
    assert sides == [("0.6.4", "0.6.13")], "the closest on either side"
    assert "the same command measures it, in about 1 to 5 minutes" in other.conclusion
    early = compare_releases("0.4.0", "0.5.0", cases=KEYS[:1])
    known = "0.5.3, 0.6.0, 0.6.1, 0.6.2, 0.6.3, 0.6.4, 0.6.13, 0.7.2.post1, 0.7.4"
    assert early.conclusion.endswith(f"releases of flashinfer-auto on record: {known}")
    assert early.nearest.empty and "(nothing)" not in repr(early)
    wide = compare_releases("0.6.3", "0.6.4", heads="8/1", lens="9", head_dim=576)
    assert (
        "auto of 0.6.3 cannot run heads=8/1 head_dim=576 page=16 lens=9: head_dim must be 64"
        in wide.conclusion
    )
    fp8 = KEYS[0].replace("lens", "kv_dtype=float8_e4m3fn lens")
    broken = compare_releases("0.5.3", "0.6.3", cases=[KEYS[0], fp8])
    assert broken.conclusion == f"slower: {KEYS[0]}; fails: {fp8}"
    assert any("0.6.3 error: " in note for note in broken.notes)
    broken = compare_releases("0.6.3", "0.6.4", cases=[fp8])
    assert broken.conclusion.endswith("a base that runs what 0.6.3 does not would decide it")
    padded = compare_releases("v0.6.03", "0.6.4", cases=KEYS[:1])
    assert (padded.base, padded.outcome) == ("0.6.3", "not slower")
    latent = compare_releases("0.6.4", "0.6.13", models=["DeepSeek MLA"])
    assert {*latent.rows.backend} == {"flashinfer-mla-fa2", "flashinfer-mla-fa3"}


COMMAND = ("compare", "--base", BASE, "--new", NEW)


def test_the_command_prints_a_table_or_json_and_its_status_is_the_outcome(lab, tmp_path, capsys):
    listed = ("--cases", str(tmp_path / "cases.txt"))
    (tmp_path / "cases.txt").write_text("# mine\n" + "\n".join(KEYS) + "\n")
    assert cli.main([*COMMAND, *listed]) == 0
    out = capsys.readouterr().out
    assert "FlashInfer 0.6.13 (base) to 0.7.2.post1 (new): 2 not slower" in out
    assert out.splitlines()[-1] == "not slower: proved of 2 calls"
    lab.noise[KEYS[0], "0.9.0"] = (0.5, 1.0, 2.0)
    assert cli.main([*COMMAND[:-1], "0.9.0", *listed]) == 3
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("not decided: 1 inconclusive (the interval spans the margin), of 2")
    )
    lab.us[KEYS[1], "0.8.0"] = 12.0
    slower = (*COMMAND[:-1], "0.8.0", *listed, "--not-slower", "2.5%")
    assert cli.main(slower) == 1
    assert KEYS[1] in capsys.readouterr().out.splitlines()[4], "what is slower comes first"
    assert cli.main([*slower, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["outcome"], found["slower"]) == ("slower", [KEYS[1]])
    assert found["cases"][0]["verdict"] == "not slower"


@pytest.mark.slow
def test_every_model_and_backend_that_is_offered_can_be_compared(published_records):
    one = {"base": "0.6.3", "new": "0.7.2.post1"}
    for backend in (name for name in BACKENDS if name.startswith("flashinfer-")):
        name = backend.partition("-")[2]
        last = compare_releases(**one, backend=name, heads="8/1", lens="8192x64")
        assert last.rows.backend.tolist() == [backend] and last.conclusion and repr(last)
    lens = {"lens": "2048..30720", "batch": 64, "page_size": 64}
    for model in ("Qwen2.5-7B", "gpt-oss-120b"):
        last = compare_releases(**one, models=model, tp=2, **lens)
        assert last.outcome == "not decided" and last.next_step in last.conclusion
    every = compare_releases("0.6.13", "0.6.14")
    # By hand: 2 releases x (5.4 s a process + 52 calls x 0.6 s) a round, 4 to 24 rounds.
    assert len(every.rows) == 52 and "in about 5 to 30 minutes" in every.conclusion


def test_every_call_that_is_asked_for_has_a_row_and_nothing_else_decides(published_records):
    both, heads = ("0.6.3", "0.6.4"), {"heads": "8/1"}
    for options, layers in (
        ({"models": MODEL, "page_size": 16}, [parse_layer(model=MODEL)]),
        ({"models": [MODEL, "Qwen3-32B"]}, [parse_layer(model=n) for n in (MODEL, "Qwen3-32B")]),
        (heads, [parse_layer("8/1")]),
        ({**heads, "page_size": 16}, [parse_layer("8/1")]),
    ):
        found = compare_releases(*both, **options)
        asked = [case.label for layer in layers for case in calls_of_layer(layer)]
        assert found.rows.case.tolist() == asked and found.outcome == "not decided"


def test_captured_steps_are_cases_too(lab, capsys):
    path = Path(__file__).parents[2] / "data/captures/engine.jsonl"
    cases = captured.study_of(path)[0].cases
    assert {type(case) for case in cases} == {DecodeCase, ExtendCase}
    assert parse_cases([case.label for case in cases]) == cases
    assert cli.main([*COMMAND, "--cases", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cases"]
    assert {row["case"] for row in found} == {case.label for case in cases}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "GPT-9"], "names, such as gpt-oss-20b, "),
        (["--model", "Qwen3-32B", "--tp", "3"], "tp must divide the heads of Qwen3-32B, 64/8, got"),
        (["--lens", "9x2"], "lens must go with heads (--heads) or models (--model)"),
        (["--heads", "8/1", "--lens", "9..2x4"], "lens must have a range from low to high of 2"),
        (["--heads", "8/1", "--lens", "9x2", "--batch", "3"], "batch must be left out where lens"),
        (["--batch", "3"], "batch must go with lens, got 3"),
        (["--tp", "8"], "tp must go with heads or models other than DeepSeek MLA, got tp 8"),
        (
            ["--model", "DeepSeek MLA", "--page-size", "16"],
            "page_size must go with heads or models",
        ),
        (["--heads", "8/1", "--cases", "odd.txt"], "cases must stand alone"),
        (["--backend", "fast"], "backend must be one of auto, fa2, fa2-planned"),
        (["--new", "0.5.9", "--backend", "fa3"], "in both releases: since 0.6.0, got 0.5.9"),
        (["--model", "DeepSeek MLA", "--backend", "fa2"], "must run one of the calls (mla)"),
        (["--new", "0.6.13.0"], "base and new must be two releases"),
        (
            ["--new", "vllm==0.33.0"],
            "what engines change: python -m attnlib advise --diff 0.6.13 v",
        ),
        (["--new", "fast"], f"fast must be a release of {PACKAGE}, a wheel or a folder"),
        (["--new", "mine.whl"], "mine.whl must be a wheel that is there: no such file"),
        (["--new", "empty"], "it has none; pip install --target FOLDER SOURCE"),
        (["--new", "probe-1.0-py3-none-any.whl"], f"must be of {PACKAGE}, for this Python"),
        (["--new", "flashinfer_python-1.0-cp39-cp39-win32.whl"], f"must be of {PACKAGE}, for"),
        (["--cases", "blank.txt"], "cases must hold one that can be run"),
        (["--cases", "odd.txt"], "line 2 of the cases: a call must be words such as heads=32/8"),
        (["--cases", "none.txt"], "none.txt must be a file, there is none"),
        (["--new", "0.9.9"], "pip could not install flashinfer-python==0.9.9"),
    ],
)
def test_bad_input_is_one_line_status_2_and_nothing_written(
    lab, fails, data, tmp_path, monkeypatch, options, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("probe-1.0-py3-none-any.whl", "flashinfer_python-1.0-cp39-cp39-win32.whl"):
        (tmp_path / name).touch()
    (tmp_path / "blank.txt").write_text("# nothing\n\n")
    (tmp_path / "odd.txt").write_bytes(b"\xef\xbb\xbfheads=32/8 page=16 lens=1024x8\nodd \xff\n")

    def refuse(package, release, given):
        if release == "0.9.9":
            raise RuntimeError(f"pip could not install {package}=={release}: no such thing")

    monkeypatch.setattr(upgrade, "overlay_for", refuse)
    assert cli.COMMANDS["compare"].status == cli.USAGE
    assert said in fails(*COMMAND, *options)
    assert lab.jobs == [] and not [*data.iterdir()]


def test_without_a_gpu_and_records_it_is_not_decided(capsys, fails, without_gpu):
    assert cli.main(COMMAND) == 3
    *_, last = capsys.readouterr().out.splitlines()
    measured = "on a GPU the same command measures it"
    assert last.startswith(f"not decided: 52 not on record, of 52 calls; {measured}")
    assert "must be a release up to 0.7.4, or on record" in fails(*COMMAND[:-1], "99.0")
    assert "the wheel or folder of 0.7.2+mine" in fails(*COMMAND[:-1], "0.7.2+mine")
    assert "nearest to it: 0.6.18.post1 and 0.7.0" in fails(*COMMAND[:-1], "0.6.99")
    for margin in ("2", "0%", "x%"):
        assert "must be above 0% and below 100%, as 2%, got" in fails(
            *COMMAND, "--not-slower", margin
        )
    with pytest.raises(ValueError, match="heads must be text, got 8"):
        compare_releases("0.5.3", "0.6.3", heads=8)
    with pytest.raises(ValueError, match=r"not_slower must lie in 0\.\.1, .*got 2"):
        compare(not_slower=2)


def test_a_release_after_the_asked_one_that_has_the_call_is_named(published_records):
    found = compare_releases("0.6.3", "0.7.2", cases=KEYS[0])
    assert found.outcome == "not decided"
    assert "this call is on record: --base 0.6.3 --new 0.7.2.post1" in found.conclusion
    other = "heads=32/8 head_dim=128 page=16 lens=8191x17"
    elsewhere = compare_releases("0.6.3", "0.7.2", cases=other)
    assert "this call is on record" not in elsewhere.conclusion


def test_known_problems_that_come_or_end_are_told_of_the_calls_that_were_timed(published_records):
    slow = "flashinfer-fa3-decode-auto"
    ended = compare_releases("0.6.3", "0.6.4", cases=KEYS[0])
    (note,) = [note for note in ended.notes if slow in note]
    assert note.startswith("ended, slower (decode on NVIDIA H200): auto decodes a 16-bit cache")
    notes = "\n".join(compare_releases("0.5.3", "0.6.3", cases=KEYS[0]).notes)
    assert f"slower since flashinfer 0.6.0 (decode on NVIDIA H200): {PROBLEMS[slow].says}" in notes
    assert f"fix: {PROBLEMS[slow].do}" in notes
    pinned = compare_releases("0.6.3", "0.6.4", cases=KEYS[0], backend="fa2")
    assert not [note for note in pinned.notes if "[flashinfer" in note]
    untimed = compare_releases("0.6.3", "0.6.4", heads="16/2", lens="4097", page_size=16)
    assert untimed.outcome == "not decided" and not [n for n in untimed.notes if slow in n]


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ([], r"cases must hold one that can be run, got \[\]"),
        ((), r"cases must hold one that can be run, got \(\)"),
        (5, "cases must be text or a list of texts, got 5"),
        ([5], r"cases must be text or a list of texts, got \[5\]"),
    ],
)
def test_an_empty_list_of_cases_is_not_all_of_them(cases, words):
    with pytest.raises(ValueError, match=words):
        compare_releases(BASE, NEW, cases=cases)
