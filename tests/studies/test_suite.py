"""The suite: what its calls cover, and what a step from release to release looks like."""

import json
from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest

from attnlib.core import releases as coverage
from attnlib.core.backends.limits import why_not
from attnlib.core.backends.table import compared_package, entry_of
from attnlib.core.spec import AttnSpec
from attnlib.lab import measured
from attnlib.measure.calls.form import Item
from attnlib.run import frame as frames
from attnlib.run import store
from attnlib.select import known
from attnlib.studies.releases import calls, suite

US = {"0.6.4": 100.0, "0.6.13": 100.0, "0.7.2.post1": 110.0, "0.7.4": 100.0}
ONE = "1 user of 4k"
MANY = "128 users of 4k"
PROMPT = "a prompt of 2k"


def layers(package):
    return [getattr(item.case, "spec", None) for item in calls.items_of(package)]


def test_the_calls_cover_what_serving_does():
    assert 45 <= len(calls.CALLS) <= 60
    specs = [spec for spec in layers(calls.FLASHINFER) if isinstance(spec, AttnSpec)]
    assert {spec.group_size for spec in specs} >= {1, 4, 8, 16}
    assert {spec.page_size for spec in specs} == {1, 16}
    assert {spec.head_dim for spec in specs} == {64, 128}
    assert any(spec.window for spec in specs) and any("float8" in spec.kv_dtype for spec in specs)
    modes = {getattr(case, "mode", case.kind or "decode") for case in calls.CALLS.values()}
    assert modes == {
        "decode",
        "mla",
        "target_verify",
        "draft_extend",
        "prefill_paged",
        "prefill_ragged",
    }
    decodes = [case for case in calls.CALLS.values() if not case.kind]
    assert {1, 256} <= {case.batch_size for case in decodes}
    traces = {name.split(",")[0] for name in calls.TRACED}
    assert traces == {"kimi-conversation", "kimi-synthetic", "azure-conversation", "azure-code"}
    assert max(case.cost.kv_bytes for case in calls.CALLS.values()) < 16 * 2**30


@pytest.mark.parametrize("package", calls.BACKENDS)
def test_a_package_is_asked_for_what_its_newest_release_runs(package):
    for item in calls.items_of(package):
        entry = entry_of(item.backend)
        assert entry.plans == (item.case.kind or "decode")
        spec = item.case.spec
        if package == calls.FLASHINFER and isinstance(spec, AttnSpec):
            mode = getattr(item.case, "mode", "decode")
            for release in suite.RELEASES[package]:
                assert not why_not(entry.asks, spec, mode=mode, release=release)


def test_the_history_has_four_releases_of_flashinfer_and_the_rounds_on_record():
    asked = Counter()
    for job in suite.STUDY.jobs(headline=False):
        for item in job.items:
            if item.case and not item.again:
                asked[item.release, item.case] += 1
    cases = {case for _, case in asked}
    names = suite.HISTORY[calls.FLASHINFER]
    on_record = suite.RELEASES[calls.FLASHINFER]
    assert len(cases) == len(names) == 26
    assert {*on_record} == {*US}
    for (release, _), rounds in asked.items():
        assert rounds == on_record[release]
    assert len(asked) == len(cases) * len(US)


@pytest.mark.parametrize(
    ("package", "calls_of_a_round"), [(calls.FLASHINFER, 29), (calls.SGLANG, 33)]
)
def test_any_releases_of_a_package_are_measured_in_four_rounds(package, calls_of_a_round):
    releases = [*suite.RELEASES[package]]
    jobs = suite.STUDY.over_releases(package, releases).jobs(headline=False)
    assert [job.release for job in jobs] == [*releases, *releases[::-1]] * 2
    for job in jobs:
        assert len(job.items) == calls_of_a_round
        assert {compared_package(item.backend) for item in job.items} == {package}


def test_what_is_on_record_has_no_verdict_and_the_steps_that_were_seen(published_records):
    frame = store.load("suite", suite.STUDY.reference_machine)
    found = suite.steps(frame, calls.FLASHINFER)
    assert len(found) == 78
    assert {*found.verdict} == {"inconclusive"}
    table = suite.history(frame, calls.FLASHINFER)
    large = table[(table["largest step"] > 1.05) | (table["largest step"] < 1 / 1.05)]
    assert large["at"].to_dict() == {
        ONE: "0.7.2.post1",
        "1 user of 32k, a GPU of 4": "0.7.2.post1",
        "1 user of 4k, pages of 1": "0.7.2.post1",
        "256 users of 1k, a GPU of 4": "0.7.4",
        "kimi-synthetic, 32 in flight": "0.7.4",
    }


def test_of_flashinfer_0_7_4_a_full_gpu_has_no_merge(published_records):
    rows = suite.named_rows(store.load("suite", suite.STUDY.reference_machine))
    names = suite.HISTORY[calls.FLASHINFER]
    merged = {}
    for row in rows.itertuples():
        has_merge = any("MergeStates" in kernel.name for kernel in row.kernels)
        merged.setdefault((row.call, row.release), set()).add(has_merge)
    for release in ("0.6.4", "0.6.13", "0.7.2.post1"):
        assert all(merged[call, release] == {True} for call in names)
    without = {call for call in names if merged[call, "0.7.4"] == {False}}
    assert without == {
        "16 users of 8k, 1 query head per KV head",
        "64 users of 4k",
        MANY,
        "256 users of 1k",
        "256 users of 1k, a GPU of 4",
        "1 agent of 100k among 39 chats",
        "kimi-conversation, 64 in flight",
        "azure-conversation, 128 in flight",
        "azure-code, 64 in flight",
    }


def kept(make_record, us=US, rounds=3):
    """Records of three calls over the releases of FlashInfer; `ONE` alone has a step."""
    for release in us:
        for number in range(rounds):
            for name in (ONE, MANY, PROMPT):
                case = calls.CALLS[name]
                backend = calls.BACKENDS[calls.FLASHINFER][case.kind]
                took = us[release] if name == ONE else 100.0
                noise = 1 + 0.001 * number
                item = Item(backend, calls.timer_of(case), case, release)
                store.keep(
                    make_record(study="suite", round=number, item=item, run_us=(took * noise,) * 3)
                )
    return _frame()


def _frame():
    return frames.frame_of(*_read())


def _read():
    from attnlib.run import rows

    table = store.read("suite", "test-gpu-0badcafe")
    return table, rows.items_of(table)


def test_a_step_is_seen_where_it_came_and_where_it_went(make_record):
    frame = kept(make_record)
    table = suite.history(frame, calls.FLASHINFER)
    assert table.loc[ONE, [*US]].tolist() == pytest.approx([100.1, 100.1, 110.11, 100.1])
    assert table["largest step"].round(2).to_dict() == {ONE: 1.1, MANY: 1.0, PROMPT: 1.0}
    assert table.loc[ONE, "at"] == "0.7.2.post1"
    found = suite.steps(frame, calls.FLASHINFER)
    assert len(found) == 9
    changed = found[~found.verdict.isin(["same"])]
    assert changed[["call", "base", "new", "verdict"]].to_numpy().tolist() == [
        [ONE, "0.6.13", "0.7.2.post1", "slower"],
        [ONE, "0.7.2.post1", "0.7.4", "faster"],
    ]


def test_the_figure_names_the_calls_with_a_large_step_and_no_other(make_record):
    figure = suite.draw_history(kept(make_record), calls.FLASHINFER)
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [ONE]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == [*US]
    grey = [line for line in axis.lines if line.get_color() == "0.75"]
    assert len(grey) == 2


BUILDS = {"0.4.4": 100.0, "0.4.5": 130.0, "0.4.10": 130.0}


def kept_of_two_packages(make_record, rounds=3):
    """FlashInfer's records, and a decode call of three releases of sglang-kernel."""
    for release, took in BUILDS.items():
        for number in range(rounds):
            noise = 1 + 0.001 * number
            item = Item("sglang-flash-attn-3", "graph", calls.CALLS[ONE], release)
            record = make_record(study="suite", round=number, item=item, run_us=(took * noise,) * 3)
            store.keep(record)
    return kept(make_record)


def test_a_figure_has_a_panel_for_each_package_with_a_history_and_says_the_card(make_record):
    figure = suite.draw_history(kept_of_two_packages(make_record))
    flashinfer, sglang = figure.axes
    assert [axis.get_title("left") for axis in figure.axes] == [calls.FLASHINFER, calls.SGLANG]
    assert [tick.get_text() for tick in flashinfer.get_xticklabels()] == [*US]
    ticks = [tick.get_text() for tick in sglang.get_xticklabels()]
    assert ticks == ["0.4.4", "0.4.5", "0.4.10\n= 0.4.9"]
    assert sglang.get_legend().get_texts()[0].get_text() == ONE
    assert any("Test GPU" in text.get_text() for text in figure.texts)
    (alone,) = suite.draw_history(_frame(), calls.SGLANG).axes
    assert alone.get_title("left") == calls.SGLANG


def test_a_build_equal_by_hash_was_read():
    read = json.loads(coverage.PATH.read_text())
    for package, twins in suite.EQUAL_RELEASES.items():
        assert {*twins, *twins.values()} <= {*read[package]}


def test_packages_of_the_study_have_their_own_calls_and_rounds(monkeypatch):
    later = {**suite.RELEASES, calls.SGLANG: {"0.4.4": 3, "0.4.10": 4}, calls.VLLM: {"": 3}}
    monkeypatch.setattr(suite, "RELEASES", later)
    study = replace(suite.STUDY, grids=suite._grids())
    rounds = Counter()
    for job in study.jobs(headline=False):
        for item in job.items:
            rounds[item.backend, item.release, item.case, item.again] += 1
    sglang = {key[2] for key in rounds if key[0].startswith("sglang")}
    vllm = {key[2] for key in rounds if key[0].startswith("vllm")}
    assert (len(sglang), len(vllm)) == (33, 23)
    for (backend, release, _, _), count in rounds.items():
        if backend.startswith("sglang"):
            assert count == later[calls.SGLANG][release]


def test_a_step_that_three_rounds_prove_becomes_a_draft_and_two_rounds_none(make_record, tmp_path):
    frame = kept_of_two_packages(make_record)
    (draft,) = measured.drafts_of_history(frame, calls.FLASHINFER)
    (tmp_path / "flashinfer.yaml").write_text(draft)
    (problem,) = known.load_problems(tmp_path).values()
    assert problem.id == "flashinfer-0-7-2-post1-decode"
    assert ONE in problem.says and MANY not in problem.says and problem.do == "pin 0.6.13"
    assert problem.record["pair"] == ["flashinfer-auto==0.7.2.post1", "flashinfer-auto==0.6.13"]
    (other,) = measured.drafts_of_history(frame, calls.SGLANG)
    assert other.startswith("sglang-kernel-0-4-5-decode:") and "gpu: gpu" in other
    of_two = frame[frame["round"] < 2]
    assert measured.drafts_of_history(of_two, calls.FLASHINFER) == []
    with pytest.raises(ValueError, match="package must be one of"):
        measured.drafts_of_history(frame, calls.VLLM)


def test_one_release_is_no_history(make_record):
    frame = kept(make_record, us={"0.7.4": 100.0})
    with pytest.raises(ValueError, match="frame must have two releases of flashinfer-python"):
        suite.draw_history(frame, calls.FLASHINFER)
    with pytest.raises(ValueError, match="frame must have two releases of a package, got none"):
        suite.draw_history(frame)


def test_records_of_two_gpus_are_no_history(make_record):
    frame = kept(make_record)
    other = pd.concat([frame, frame.assign(gpu_id="deadbeef")])
    with pytest.raises(ValueError, match="gpu_id must be the same"):
        suite.history(other, calls.FLASHINFER)
