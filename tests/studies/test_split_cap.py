"""The study of the cap of splits: its batches, its rule, and what its records say."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from attnlib.lab import repro
from attnlib.lab.bisect import bisect
from attnlib.measure.calls.mla.case import sample_mla_lens
from attnlib.measure.stats import FASTER
from attnlib.run.store import PUBLISHED, load, machines
from attnlib.studies.splits import split_cap, split_cap_torch
from attnlib.studies.splits.split_cap import MLA, MLA_LAYOUTS, MLA_VERIFY, STUDY

pytestmark = pytest.mark.usefixtures("published_records")
MLA_CASE = split_cap.NAMED_CASES[MLA][0]
ENGINE = PUBLISHED / "captures" / "split_cap_engine.jsonl"
REPRO = PUBLISHED / "captures" / "repro_split_cap.json"


@pytest.fixture
def h100(published_records):
    return split_cap.load_all("h100")


def test_log_normal_lengths_are_the_quantiles_of_their_distribution():
    lens = split_cap.log_normal(64, 4096, 0.9)
    assert lens[:3] == [4804, 2483, 1088]
    assert sum(lens) == 387507
    assert max(lens) == 36083
    assert np.isclose(np.std(np.log(lens)), 0.9, rtol=0.03)
    assert np.isclose(np.median(lens), 4096, rtol=0.02)


def test_a_case_has_the_facts_of_its_call():
    facts = split_cap.facts_of(split_cap.VERIFY[2].case("100+7", page_size=16))
    assert facts.batch_size == 2
    assert facts.max_seqlen_q == 4
    assert facts.max_seqlen_k == split_cap.CONTEXT
    assert facts.num_qo_heads == 16
    assert facts.num_kv_heads == 1
    assert facts.head_dim_v == 128
    latent = split_cap.facts_of(MLA_VERIFY.case("100+7"))
    assert latent.num_kv_heads == 1
    assert latent.head_dim == 64
    assert latent.head_dim_v == 512
    assert latent.max_seqlen_q == 4


def test_the_rule_tells_who_loses_splits_in_nine_of_ten_batches():
    cases = [case for case in STUDY.cases if case != split_cap.SHORT_PREFILL]
    right = 0
    for case in cases:
        lens = split_cap.lengths_of(case)[1]
        rows = split_cap.layout_of(case).group * lens.max() / lens.mean()
        right += (rows > split_cap.LOSES_FROM) == split_cap.loses_splits(case)
    assert len(cases) > 400 and right >= 0.9 * len(cases)


def test_requests_that_are_alike_lose_none():
    alike = MLA.case("+".join(["4096"] * 64))
    assert not split_cap.loses_splits(alike) and split_cap.loses_splits(MLA_CASE)


def test_every_item_of_the_study_is_on_record_and_right():
    found = {}
    for machine in machines(STUDY.name):
        for row in load(STUDY.name, machine).itertuples():
            assert row.status == "ok" and row.kernel_family in ("flash-attn-3", *FAMILIES)
            found.setdefault(
                (
                    row.backend,
                    row.release,
                    row.case,
                ),
                set(),
            ).add(row.round)
    wanted = {
        (item.backend, item.release, item.case)
        for grid in STUDY.grids
        for item in grid.items()
        if not grid.headline
    }
    assert wanted <= set(found)
    few = {backend for backend, release, case in wanted if len(found[backend, release, case]) < 3}
    assert few == {split_cap.TRITON}


FAMILIES = ("flashmla-dense", "mla-fa2", "mla-fa3", "triton-decode")


def test_the_default_cap_costs_mla_over_traffic_on_both_gpus(h100):
    lines = split_cap.traffic_table(h100).set_index("layout")
    assert len(lines) == 6
    assert (lines.batches >= 16).all()
    assert lines["slowdown, median"]["MLA 128 heads"] > 1.9
    assert lines["slowdown, median"]["8/1"] == 1.0
    h200 = split_cap.sides_of(split_cap.load_all("h200"), MLA, "default")
    assert (h200.trace != "").sum() == 48
    assert h200[h200.trace != ""].slowdown.median() > 1.9


def text_of_page(name):
    path = Path(__file__).parents[2] / "notebooks" / f"{name}.ipynb"
    cells = json.loads(path.read_text())["cells"]
    return "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def test_readme_says_how_often_and_by_how_much_the_fix_is_slower(h100):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    lost = {}
    for gpu in ("h100", "h200"):
        rows = split_cap.sides_of(split_cap.load_all(gpu), MLA, "default")
        is_alike = [len(set(sample_mla_lens(case).tolist())) == 1 for case in rows.case]
        lost[gpu] = round(100 * (1 / rows[is_alike].ratio.min() - 1))
    most = max(lost.values())
    assert f"equal lengths gain nothing, and such a call is up to {most} % slower." in text
    page = text_of_page("04_sglang_two_regressions")
    assert f"up to {lost['h100']} % slower, on an H200 {lost['h200']} %" in page
    of_h200 = text_of_page("08_does_it_reach_the_user")
    assert f"128 x 2,048, where one call loses {lost['h200']} %" in of_h200
    tables = [split_cap.sides_of(h100, layout, "default") for layout in MLA_LAYOUTS]
    traffic = pd.concat(tables)
    traffic = traffic[traffic.trace != ""]
    slower = traffic[traffic.verdict == FASTER]
    worst = round(100 * (1 / slower.slowdown.min() - 1))
    words = f"Of {len(traffic)} MLA batches of traffic {len(slower)} are slower too, by up to"
    assert f"{words} {worst} %:" in text


def test_one_bad_round_moves_the_ratio_but_not_the_slowdown(h100):
    rows = h100[(h100.case == MLA_CASE) & (h100.release == split_cap.NOW)].copy()
    before = split_cap.sides_of(rows, MLA, "default")
    first = (rows.backend == MLA.backend) & (rows["round"] == 0)
    rows.loc[first, "run_us"] *= 5
    after = split_cap.sides_of(rows, MLA, "default")
    assert after.ratio[0] > 1.5 * before.ratio[0]
    assert after.slowdown[0] == pytest.approx(before.slowdown[0], rel=0.03)


def test_sides_that_were_not_measured_are_named(h100):
    with pytest.raises(ValueError, match="sglang-flash-attn-3-mla@7==0.4.10 and .* they have not"):
        split_cap.sides_of(h100, MLA, "7")


def test_bisect_finds_the_release_that_brought_the_cap():
    found = bisect(
        STUDY,
        MLA_CASE,
        package="sglang-kernel",
        good="0.4.4",
        bad="0.4.10",
        backend=MLA.backend,
    )
    assert found.changed == "0.4.5"
    assert {step.release for step in found.steps} == {
        "0.4.10",
        "0.4.5",
    }
    assert all(step.verdict.ratio > 3 for step in found.steps)


def test_another_release_of_pytorch_changes_no_call_significantly():
    table = split_cap_torch.torch_table(
        load(split_cap_torch.STUDY.name, split_cap_torch.STUDY.reference_machine)
    )
    assert len(table) == 9
    assert set(table.verdict) <= {"same", "inconclusive"}
    assert table.ratio.between(0.97, 1.03).all()


def test_the_bounded_arm_ran_in_sglang_with_equal_tokens_and_prefills_as_large():
    runs = [json.loads(line) for line in ENGINE.read_text().splitlines()]
    by_model = {}
    for run in runs:
        by_model.setdefault(run["model"], {})[run["arm"]] = run
    assert set(by_model) == {"gqa", "mla", "gqa-verify", "mla-verify"}
    for default, bounded in (
        tuple(arms[arm] for arm in ("default", "bounded")) for arms in by_model.values()
    ):
        assert bounded["runs"] and not default["runs"] and bounded["said"]
        assert default["first"]["sha256"] == bounded["first"]["sha256"]
        assert default["prefill"]["rise_mib"] == bounded["prefill"]["rise_mib"] > 13_000


def test_the_script_that_ran_on_a_gpu_is_the_one_that_is_printed():
    record = json.loads(REPRO.read_text())
    printed = hashlib.sha256(repro.script("split_cap").encode()).hexdigest()
    assert record["script_sha256"] == printed
    assert set(record["runs"]) == {"0.4.4", "0.4.10"}
    assert all(text.endswith("exit 0\n") for text in record["runs"].values())


def test_a_case_of_another_width_is_another_case():
    wider = replace(MLA_CASE, context=2 * split_cap.CONTEXT)
    assert STUDY.case_named(MLA_CASE.key) == MLA_CASE != wider
