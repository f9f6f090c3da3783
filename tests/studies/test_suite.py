"""The suite: what its calls cover, and what a step from release to release looks like."""

from collections import Counter

import pandas as pd
import pytest

from attnlib.core.backends.limits import why_not
from attnlib.core.backends.table import entry_of
from attnlib.core.spec import AttnSpec
from attnlib.measure.calls.form import Item
from attnlib.run import frame as frames
from attnlib.run import store
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


def test_the_history_has_four_releases_of_flashinfer_and_three_rounds():
    asked = Counter()
    for job in suite.STUDY.jobs(headline=False):
        for item in job.items:
            if item.case and not item.again:
                asked[item.backend, item.release, item.case] += 1
    assert set(asked.values()) == {3}
    releases = {release for backend, release, _ in asked if backend == "flashinfer-auto"}
    assert releases == {*US}


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
    return frames.frame_of(*_read())


def _read():
    from attnlib.run import rows

    table = store.read("suite", "test-gpu-0badcafe")
    return table, rows.items_of(table)


def test_a_step_is_seen_where_it_came_and_where_it_went(make_record):
    frame = kept(make_record)
    table = suite.history(frame, calls.FLASHINFER)
    assert table.loc[ONE, [*US]].tolist() == pytest.approx([100.1, 100.1, 110.1, 100.1])
    assert table["largest step"].round(2).to_dict() == {ONE: 1.1, MANY: 1.0, PROMPT: 1.0}
    assert table.loc[ONE, "at"] == "0.7.2.post1"
    found = suite.steps(frame, calls.FLASHINFER)
    assert len(found) == 9
    changed = found[~found.verdict.isin(["same"])]
    assert changed[["call", "base", "new", "verdict"]].to_numpy().tolist() == [
        [ONE, "0.6.13", "0.7.2.post1", "slower"],
        [ONE, "0.7.2.post1", "0.7.4", "faster"],
    ]


def test_the_figure_names_the_calls_that_changed_and_no_other(make_record):
    figure = suite.draw_history(kept(make_record))
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [ONE]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == [*US]


def test_records_of_two_gpus_are_no_history(make_record):
    frame = kept(make_record)
    other = pd.concat([frame, frame.assign(gpu_id="deadbeef")])
    with pytest.raises(ValueError, match="gpu_id must be the same"):
        suite.history(other, calls.FLASHINFER)
