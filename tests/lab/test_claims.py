"""The claims: valid entries, verdicts from records, and what happens when records are missing."""

import json
from dataclasses import replace

import pandas as pd
import pytest
import yaml

from attnlib import cli
from attnlib.lab import claims
from attnlib.run import store
from attnlib.studies import STUDIES

SOURCE = {"repo": "o/r", "pull": 1, "date": "2026-01-02"}
ENTRY = {
    "id": "a",
    "source": "s",
    "quote": "q",
    "shape": "none",
    "figure": {"value": 2, "unit": "x"},
    "measured_on": "H200",
    "note": "n",
}
PAIRS = {"study": "fa3_decode_regression", "cases": "all", "pairs": [["a", "b"]]}


@pytest.fixture
def write(tmp_path):
    """Write a file of these claims, each as it differs from `ENTRY`, and load it."""

    def load(*changes):
        path = tmp_path / "claims.yaml"
        entries = [ENTRY | change for change in changes]
        path.write_text(yaml.safe_dump({"sources": {"s": SOURCE}, "claims": entries}))
        return claims.load_claims(path)

    return load


@pytest.mark.slow
def test_every_claim_has_a_verdict_and_its_records_are_in_the_store(published_records):
    judged = claims.verdicts()
    for row in judged:
        assert row.verdict in claims.VERDICTS
        assert row.reason
        if row.claim.study and row.verdict != claims.NOT_MEASURED:
            machine = STUDIES[row.claim.study].reference_machine
            ids = set(store.load(row.claim.study, machine)["id"])
            assert row.records
            assert set(row.records) <= ids
        if row.verdict == claims.NOT_HERE:
            said = row.claim.measured_on + row.claim.quote + row.claim.note
            assert "lackwell" in said or "eight GPUs" in said, row.claim.id


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, r"claim 'a' must be valid: it must have one of .*, got \[\]"),
        ({"verdict": "open", "pairs": {}}, r"must have one of .*, got \['pairs', 'verdict'\]"),
        ({"verdict": "open", "unit": "x"}, "claims.yaml:2: keys must be id, .*, got unit"),
        ({"verdict": "open", "source": "t"}, "claim 'a' must be valid: source must be one of s"),
        ({"verdict": "maybe"}, "verdict must be one of confirmed"),
        ({"pairs": PAIRS | {"expect": ["slowr"]}}, "expect must be one of faster, .* 'slowr'"),
        (
            {"pairs": PAIRS | {"expect": [], "someware": True}},
            "claims.yaml:2: claim 'a' .*: pairs: keys must be .*, got someware",
        ),
        ({"pairs": PAIRS | {"expect": ["about"]}, "figure": None}, "about without a figure"),
    ],
)
def test_an_invalid_entry_is_refused_by_name(write, changes, message):
    with pytest.raises(ValueError, match=message):
        write(changes)


def test_an_id_stands_once(write):
    with pytest.raises(ValueError, match="id must be unique, claim 'a' occurs twice"):
        write({"verdict": "open"}, {"verdict": "open"})


@pytest.mark.parametrize(
    "support, against, undecided, verdict",
    [
        (3, 0, 0, "confirmed"),
        (0, 2, 0, "refuted"),
        (1, 1, 0, "partly"),
        (1, 0, 2, "open"),
        (1, 0, 1, "confirmed"),
    ],
)
def test_cases_vote(support, against, undecided, verdict):
    assert claims.vote(support, against, undecided) == verdict


def test_a_vote_needs_a_case():
    with pytest.raises(ValueError, match="at least one case"):
        claims.vote(0, 0)


@pytest.mark.parametrize(
    ("saved", "expect", "verdict"),
    [
        ((1.5, "faster"), "faster", "confirmed"),
        ((1.5, "faster"), "slower", "refuted"),
        ((0.2, "inconclusive"), "slower", "open"),
    ],
)
def test_a_load_on_a_server_is_judged_by_what_an_arm_saves(
    write, monkeypatch, saved, expect, verdict
):
    percent, word = saved
    table = pd.DataFrame(
        {
            "saved": [percent],
            "low": [percent - 1],
            "high": [percent + 1],
            "rounds": [4],
            "verdict": [word],
        }
    )
    rows = pd.DataFrame({"backend": ["a", "b", "c"], "id": ["1", "2", "3"]})
    monkeypatch.setattr(claims, "_loads", lambda group: rows)
    monkeypatch.setattr(claims.studies.served, "saved", lambda *asked: table)
    form = {"cases": "best", "pair": ["a", "b"], "metric": "request", "expect": expect}
    (claim,) = write({"served": form})
    judged = claims.judge(claim)
    assert (judged.verdict, judged.records) == (verdict, ("1", "2"))
    assert f"saves {percent:.1f} % ({percent - 1:.1f} to {percent + 1:.1f})" == judged.measured
    for change in ({"metric": "ITL"}, {"cases": "none"}, {"expect": "same"}, {"pair": ["a", 2]}):
        with pytest.raises(ValueError, match="claim 'a' must be valid"):
            write({"served": form | change})


@pytest.fixture
def of_servers(monkeypatch):
    """Make the records of servers: what an arm makes of 100 tokens per second of its base."""
    served = claims.studies.served
    monkeypatch.setattr(served, "good_rows", lambda frame, timer: frame)
    monkeypatch.setattr(served, "require_comparable", lambda rows: None)

    def make(asked, rates, rounds=3):
        arm, base, loads = served.QUESTIONS[asked]
        rows = []
        for case, rate in zip(loads, rates, strict=True):
            for number in range(rounds):
                for backend, mean in ((arm, rate), (base, 100.0)):
                    tokens_per_s = mean + 0.1 * number
                    row = {"case": case, "backend": backend, "round": number, "gpu_id": "one"}
                    row |= {"tokens_per_s": tokens_per_s, "id": f"{backend} {number}"}
                    row |= {"started_us": [0.0], "ended_us": [1e8 / tokens_per_s]}
                    rows.append(row)
        monkeypatch.setattr(served, "load_all", lambda: pd.DataFrame(rows))
        monkeypatch.setattr(store, "machines", lambda study: list(served.MACHINES))

    return make


@pytest.mark.parametrize(
    ("asked", "rates", "verdicts"),
    [
        (
            "schedule",
            (104, 103, 102),
            {"sglang-21104-2-percent": "confirmed", "sglang-21104-bs1-throughput": "confirmed"},
        ),
        (
            "schedule",
            (96, 103, 102),
            {"sglang-21104-2-percent": "partly", "sglang-21104-bs1-throughput": "refuted"},
        ),
        (
            "metadata",
            (103, 102),
            {
                "sglang-20778-end-to-end-best": "confirmed",
                "sglang-20778-end-to-end-worst": "refuted",
            },
        ),
    ],
)
def test_claims_of_a_loaded_server_wait_for_their_records(of_servers, asked, rates, verdicts):
    of_servers(asked, rates)
    judged = claims.verdicts([*verdicts])
    assert {row.claim.id: row.verdict for row in judged} == verdicts
    of_servers("flashinfer", (100, 100))
    for row in claims.verdicts([*verdicts]):
        assert (row.verdict, row.records) == (claims.NOT_MEASURED, ())


@pytest.mark.parametrize(
    ("expect", "somewhere", "verdict"),
    [
        (["slower"], False, "partly"),
        (["slower"], True, "confirmed"),
        (["about"], False, "partly"),
        (["slower", "faster"], False, "open"),
        (["same"], True, "open"),
    ],
)
def test_a_pair_is_judged_by_what_is_expected(write, monkeypatch, expect, somewhere, verdict):
    table = pd.DataFrame({"ratio": [2.1, 0.5], "verdict": ["slower", "faster"]})
    if verdict == "open":
        undecided = pd.DataFrame({"ratio": [1.0] * 3, "verdict": ["inconclusive"] * 3})
        table = pd.concat([table, undecided])
    backends = ["a", "b"]
    rows = pd.DataFrame({"backend": backends, "release": "", "id": ["1", "2"]})
    monkeypatch.setattr(claims, "TIMERS", ["graph"])
    monkeypatch.setattr(claims, "_rows", lambda study, cases: rows)
    monkeypatch.setattr(claims, "good_rows", lambda rows, timer: rows)
    monkeypatch.setattr(claims, "over", lambda *args, **options: table)
    (claim,) = write({"pairs": PAIRS | {"expect": expect, "somewhere": somewhere}})
    judged = claims.judge(claim)
    assert judged.verdict == verdict
    assert judged.records == ("1", "2")


def test_records_vote_by_the_family_or_the_kernel_that_ran(write, monkeypatch, make_record):
    path = store.keep(make_record())
    rows = store.load(path.parent.name, path.parents[1].name)
    (record,) = rows.itertuples()
    monkeypatch.setattr(claims, "_rows", lambda study, cases: rows)
    check = {"study": "auto_resolution", "cases": "all", "backend": record.backend}

    def verdict(*wanted):
        releases = {record.release: list(wanted)}
        (claim,) = write({"ran": check | {"releases": releases}})
        return claims.judge(claim).verdict

    assert verdict(record.kernel_family) == "confirmed"
    kernel = record.kernels[0].name
    assert verdict(kernel[:4]) == "confirmed"
    assert verdict("another") == "refuted"
    other = check | {"releases": {"0.0.1": ["fa2"]}}
    (claim,) = write({"ran": other})
    assert claims.judge(claim).verdict == "not measured"


def test_a_claim_without_records_is_not_measured(write, replayed):
    (claim,) = write({"pairs": PAIRS | {"expect": ["slower"]}})
    judged = claims.judge(claim)
    assert judged.verdict == "not measured"
    assert "are missing" in judged.reason


def test_a_claim_of_a_study_that_nobody_measured_says_so(write, monkeypatch):
    new = replace(STUDIES["split_cap"], name="new", reference_machine="")
    monkeypatch.setitem(STUDIES, "new", new)
    (claim,) = write({"pairs": PAIRS | {"study": "new", "expect": ["slower"]}})
    judged = claims.judge(claim)
    assert judged.verdict == "not measured"
    assert judged.reason == "Records of new are missing: no machine has any."


def test_the_command_shows_all_claims_one_claim_and_json(published_records, capsys, fails):
    assert cli.main(["claims"]) == 0
    assert "mini-sglang-99-fa3-5x-slower" in capsys.readouterr().out
    assert cli.main(["claims", "sglang-21104-215us"]) == 0
    assert "verdict      partly" in capsys.readouterr().out
    assert cli.main(["claims", "sglang-21104-215us", "--json"]) == 0
    (claim,) = json.loads(capsys.readouterr().out)
    assert claim["verdict"] == "partly"
    assert claim["claimed"] == "215 us a step"
    assert "ID must be one of sglang-21104-215us" in fails("claims", "sglang-21104-215")
