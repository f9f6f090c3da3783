"""The ledger of claims: whole, sourced, and each verdict standing on records that exist."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml

from attnlib import cli
from attnlib.run import parquet, store
from attnlib.studies import STUDIES, claims
from attnlib.studies.evidence import NOT_HERE
from attnlib.studies.fa3_decode_regression.study import AT_ONCE_MACHINE

PUBLISHED = Path(__file__).resolve().parents[2] / "data"
SOURCES = {
    "sgl-project/mini-sglang #99",
    "sgl-project/sglang #18364",
    "sgl-project/sglang #20778",
    "sgl-project/sglang #21104",
    "sgl-project/sglang #24632",
    "vllm-project/vllm #37252",
}
VERDICTS = ("confirmed", "refuted", "partly", NOT_HERE, "open")
SLUG = "mini-sglang-99-fa3-5x-slower"
ENTRY = {"id": "a", "source": "s", "quote": "q", "shape": "not stated", "figure": None}
ENTRY |= {"measured_on": "H200", "check": "open", "note": "n"}


@pytest.fixture
def published(monkeypatch):
    monkeypatch.delenv("ATTNLIB_DATA", raising=False)


@pytest.fixture
def copied(data):
    """A copy of the published records that a test may spoil."""
    shutil.copytree(PUBLISHED / "records", data / "records")
    return data


@pytest.fixture
def ledger(tmp_path):
    """Write a ledger of these entries, each ENTRY but for what it changes."""

    def write(*entries):
        path = tmp_path / "claims.yaml"
        source = {"repo": "o/r", "pull": 1, "date": "2026-01-02"}
        whole = [{**ENTRY, **e} if isinstance(e, dict) else e for e in entries]
        path.write_text(yaml.safe_dump({"sources": {"s": source}, "claims": whole}))
        return path

    return write


def stands(checked, ids):
    """A checked claim stands on records, all of them in the store, or on rules; others on none."""
    finding = checked.finding
    by_rule = str(checked.claim.check).endswith("_by_rule")
    alone = by_rule or finding.verdict == NOT_HERE or not claims.check_of(checked.claim)
    return set(finding.records) <= ids and (alone or bool(finding.records))


def fallen(checked):
    """Those of some checked claims that do not stand on the records of the data folder in use."""
    asked = {STUDIES[name] for each in checked for name in claims.studies_of(each.claim)}
    places = [(study.name, study.reference_machine) for study in asked]
    ids = {record.id for name, machine in places for record in store.read(name, machine)}
    return [each.claim.id for each in checked if not stands(each, ids)]


def lose(folder, study, lost):
    """Delete the records of a study that `lost` picks."""
    machine = STUDIES[study].reference_machine
    path = folder / "records" / machine / f"{study}.parquet"
    records = store.read(study, machine)
    kept = [record for record in records if not lost(record.to_form())]
    path.write_bytes(parquet.encode(kept))
    assert len(kept) < len(records)


def test_every_claim_is_few_words_of_one_of_the_six_sources_and_has_its_slug():
    found = claims.load_claims()
    counts = Counter(claim.source.label.split(",")[0] for claim in found)
    assert set(counts) == SOURCES and min(counts.values()) >= 3
    assert max(len(claim.quote) for claim in found) <= 100
    for claim in found:
        repo = claim.source.repo.partition("/")[2]
        assert re.fullmatch(rf"{repo}-{claim.source.pull}-[a-z0-9-]+", claim.id)


def test_every_check_is_asked_by_a_claim():
    named = {claim.check for claim in claims.load_claims() if isinstance(claim.check, str)}
    assert set(claims.checks()) == named - set(claims.UNCHECKED)
    assert [name for name, check in claims.checks().items() if not check.function.__doc__] == []


def test_every_claim_has_the_verdict_on_record_stands_on_records_and_is_a_line_of_the_command(
    published, capsys, monkeypatch
):
    checked = claims.verdicts()
    assert fallen(checked) == []
    found = {each.claim.id: each.finding for each in checked}
    known = yaml.safe_load(Path(__file__).with_name("verdicts.yaml").read_text())
    assert {name: [each.verdict, each.measured] for name, each in found.items()} == known
    assert [f.reason for f in found.values() if not f.reason.endswith((".", '."'))] == []
    monkeypatch.setattr(claims, "verdicts", lambda ids: [] if ids else checked)
    assert cli.main(["claims"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "claimed", "measured", "verdict"]
    assert [line.split()[0] for line in lines] == [claim.id for claim in claims.load_claims()]
    assert {line[head.index("verdict") :] for line in lines} <= set(VERDICTS)


@pytest.mark.parametrize(
    ("study", "lost", "taken"),
    [
        (
            "fa3_decode_regression",
            lambda r: (r["backend"], r["release"]) == ("flashinfer-graph-auto", "0.6.3"),
            {"mini-sglang-99-cuda-graph-wrapper", SLUG},
        ),
        (
            "auto_resolution",
            lambda r: r["release"] == "0.6.1",
            {"mini-sglang-99-auto-defaults-to-fa3", "sglang-18364-auto-fa3-since-06"},
        ),
    ],
)
def test_what_is_lost_takes_down_the_claims_that_need_it(copied, study, lost, taken):
    lose(copied, study, lost)
    checked = claims.verdicts(ids=sorted(taken))
    assert taken == set(fallen(checked))
    found = [each.finding for each in checked]
    assert {(finding.verdict, finding.measured) for finding in found} == {("open", "")}
    said = f"Records of {study} are missing: "
    assert all(finding.reason.startswith(said) for finding in found)


def test_a_lost_study_is_an_error(copied):
    (copied / "records" / AT_ONCE_MACHINE / "auto_resolution.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="no records of study 'auto_resolution'"):
        claims.verdicts()


def test_a_machine_that_has_not_measured_a_study_leaves_its_claims_open(published, monkeypatch):
    monkeypatch.setenv("ATTNLIB_MODE", "replay")
    other, asked = "nvidia-h200-c9736401", ["sglang-20778-5-2x", "sglang-21104-63-calls"]
    there, here = claims.verdicts(ids=asked), claims.verdicts(other, ids=asked)
    assert "open" not in {checked.finding.verdict for checked in there}
    assert here[0].finding.reason == (
        "Records of decode_metadata are missing: this machine has none of decode_metadata."
    )
    assert here[1] == there[1], "which that machine has measured"
    monkeypatch.setenv("ATTNLIB_MACHINE", other)
    assert claims.verdicts(ids=asked) == here
    assert claims.verdicts(claims.PUBLISHED, ids=asked) == there


def test_a_right_ledger_is_read_in_its_order(ledger):
    found = claims.load_claims(ledger({}, {"id": "b", "figure": {"value": 4.5, "unit": "x"}}))
    assert [(claim.id, claim.claimed) for claim in found] == [("a", "yes"), ("b", "4.5 x")]
    assert found[0].source.label == "o/r #1, 2026-01-02"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"id": "b"}, "id must be unique, claim 'b' stands there twice"),
        ({"check": "guess"}, "check of claim 'a' must be one of open, elsewhere, .*got 'guess'"),
        ({"check": None}, "check of claim 'a' must be one of"),
        ({"source": "t"}, "source of claim 'a' must be one of s, got 't'"),
        ({"quote": " "}, "quote of claim 'a' must be a text, got ' '"),
        ({"note": 3}, "note of claim 'a' must be a text, got 3"),
        ({"verdict": "yes"}, "claim 'a' must have the fields id, source"),
        ({"figure": 5}, "figure of claim 'a' must have the fields value, unit"),
        ({"figure": {"value": "5", "unit": "x"}}, "figure of claim 'a' must be a number, got '5'"),
        ({"check": "microseconds_saved"}, "figure of claim 'a' must be a number"),
        ({"check": {"expect": "slow"}}, "check of claim 'a' must have study"),
        ("words", "claim 2 must have the fields"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(ledger, entry, message):
    with pytest.raises(ValueError, match=message):
        claims.load_claims(ledger({"id": "b"}, entry))


def test_a_missing_field_is_refused(ledger):
    path = ledger({})
    path.write_text(path.read_text().replace("  note: n\n", ""))
    with pytest.raises(ValueError, match="claim 'a' must have the fields"):
        claims.load_claims(path)


def test_what_is_no_yaml_is_refused_in_one_line(tmp_path):
    (tmp_path / "bad.yaml").write_text("claims: [")
    with pytest.raises(ValueError, match="^bad.yaml must be YAML: [^\n]*$"):
        claims.load_claims(tmp_path / "bad.yaml")


def test_an_unknown_id_names_the_close_ones_or_all(fails):
    close = fails("claims", "mini-sglang-99-fa3")
    assert re.search(f"ID must be one of .*{SLUG}.*, got 'mini-sglang-99-fa3'", close)
    every = fails("claims", "?")
    assert all(claim.id in every for claim in claims.load_claims())


def test_the_command_shows_all_there_is_on_a_claim_in_words_and_as_json(published, capsys):
    assert cli.main(["claims", SLUG]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    told = dict(line.strip().split(maxsplit=1) for line in lines)
    assert (first, told["source"]) == (SLUG, "sgl-project/mini-sglang #99, 2026-03-09")
    assert told["claimed"] == "5 x" and "expect: about" in told["check"]
    assert " and " in told["records"]
    assert cli.main(["claims", "--json", SLUG]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    (checked,) = claims.verdicts(ids=[SLUG])
    assert (found["figure"], found["source"]["pull"]) == ({"value": 5.0, "unit": "x"}, 99)
    assert found["records"] == list(checked.finding.records)
    assert found["low"] <= found["value"] <= found["high"]
