"""The claims: valid entries, verdicts from records, and what happens when records are missing."""

import json
from collections import Counter

import pandas as pd
import pytest
import yaml

from attnlib import cli
from attnlib.run import store
from attnlib.studies import STUDIES, claims

ENTRY = {"id": "a", "source": "s", "quote": "q", "shape": "none", "figure": None}
ENTRY |= {"measured_on": "H200", "note": "n", "verdict": "open"}


@pytest.fixture
def write(tmp_path):
    """Write a file of one claim with these changes, and load it."""

    def load(**changes):
        path = tmp_path / "claims.yaml"
        source = {"repo": "o/r", "pull": 1, "date": "2026-01-02"}
        entry = {key: value for key, value in {**ENTRY, **changes}.items() if value != "drop"}
        path.write_text(yaml.safe_dump({"sources": {"s": source}, "claims": [entry]}))
        return claims.load_claims(path)

    return load


@pytest.mark.slow
def test_every_claim_has_a_verdict_and_its_records_are_in_the_store(published_records):
    judged = claims.verdicts()
    assert len(judged) == 54 and len({row.claim.source for row in judged}) == 6
    for row in judged:
        assert row.verdict in claims.VERDICTS and row.reason
        if row.claim.study:
            machine = STUDIES[row.claim.study].reference_machine
            ids = set(store.load(row.claim.study, machine)["id"])
            assert row.records and set(row.records) <= ids, row.claim.id
    counts = Counter(row.verdict for row in judged)
    assert counts["confirmed"] >= 20 and counts["partly"] >= 8
    assert counts[claims.NOT_HERE] <= 14 and counts["open"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quote": "drop"}, "claim 'a' must have id, source, quote"),
        ({"pairs": {}}, "claim 'a' must have id, source, quote"),
        ({"source": "t"}, "source of claim 'a' must be one of s"),
        ({"verdict": "maybe"}, "verdict of claim 'a' must be one of confirmed"),
    ],
)
def test_an_invalid_entry_is_refused_by_name(write, changes, message):
    with pytest.raises(ValueError, match=message):
        write(**changes)


def test_cases_vote():
    assert claims.vote(3, 0) == "confirmed" and claims.vote(0, 2) == "refuted"
    assert claims.vote(1, 1) == "partly" and claims.vote(1, 0, 2) == "open"
    with pytest.raises(ValueError, match="at least one case"):
        claims.vote(0, 0)


def pairs_claim(write, expect, **more):
    """A claim that compares two backends of a made-up table, with the figure 2."""
    check = {"study": "fa3_decode_regression", "cases": "all", "pairs": [["a", "b"]]}
    figure = {"value": 2, "unit": "x"}
    (claim,) = write(verdict="drop", figure=figure, pairs=check | {"expect": expect} | more)
    return claim


def test_a_misspelt_expectation_or_field_of_pairs_is_refused(write):
    with pytest.raises(ValueError, match="expect of claim 'a' must be one of faster, .* 'slowr'"):
        pairs_claim(write, ["slowr"])
    with pytest.raises(ValueError, match=r"pairs of claim 'a' may have .*, got \['someware'\]"):
        pairs_claim(write, ["slower"], someware=True)
    with pytest.raises(ValueError, match=r"claim 'a' must be \[about\] alone, with a figure"):
        write(verdict="drop", pairs={"expect": ["about"]})


@pytest.mark.parametrize(
    ("expect", "more", "verdict"),
    [
        (["slower"], {}, "partly"),
        (["slower"], {"somewhere": True}, "confirmed"),
        (["about"], {}, "partly"),
        (["slower", "faster"], {}, "confirmed"),
    ],
)
def test_a_pair_is_judged_by_what_is_expected(write, monkeypatch, expect, more, verdict):
    table = {"ratio": [2.1, 0.5], "low": [2, 0.4], "high": [2.2, 0.6]}
    table = pd.DataFrame(table | {"verdict": ["slower", "faster"]})
    rows = pd.DataFrame({"backend": ["a", "b"], "release": "", "id": ["1", "2"]})
    monkeypatch.setattr(claims, "_rows", lambda claim: rows)
    monkeypatch.setattr(claims, "good_rows", lambda rows, timer: rows)
    monkeypatch.setattr(claims, "over", lambda *args, **options: table)
    judged = claims.judge(pairs_claim(write, expect, **more))
    assert (judged.verdict, judged.records) == (verdict, ("1", "2"))


def test_missing_records_leave_a_claim_open(write, replayed):
    judged = claims.judge(pairs_claim(write, ["slower"]))
    assert judged.verdict == "open" and "are missing" in judged.reason


def test_the_command_shows_all_claims_one_claim_and_json(published_records, capsys, fails):
    assert cli.main(["claims"]) == 0
    assert "mini-sglang-99-fa3-5x-slower" in capsys.readouterr().out
    assert cli.main(["claims", "sglang-21104-215us", "--json"]) == 0
    (claim,) = json.loads(capsys.readouterr().out)
    assert claim["verdict"] == "partly" and claim["claimed"] == "215 us a step"
    assert "ID must be one of sglang-21104-215us" in fails("claims", "sglang-21104-215")
