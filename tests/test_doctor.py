"""The doctor: what is here, what cannot run and why, in a dict and in lines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnlib import cli
from attnlib.core.backends import (
    BACKENDS,
    EXTEND_BACKENDS,
    MLA_BACKENDS,
    available,
    backend_class,
)
from attnlib.doctor import NO_DRIVER, examine, render
from attnlib.run import store
from attnlib.studies import STUDIES


def test_the_command_prints_all_that_is_known_in_aligned_lines_or_as_json(
    without_gpu, make_record, capsys
):
    first, *others = STUDIES
    store.keep(make_record(study=first))
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["mode      replay (ATTNLIB_MODE=auto)", "machine   no CUDA GPU (cpu)"]
    starts = [lines.index(title) for title in ("versions", "backends", "records")]
    versions, backends, records = (
        dict(line.split(maxsplit=1) for line in lines[start + 1 : end])
        for start, end in zip(starts, [*starts[1:], None], strict=True)
    )
    assert versions["torch"] == torch.__version__
    assert {"python", "numpy", "cuda"} <= set(versions)
    assert tuple(backends) == (*BACKENDS, *MLA_BACKENDS, *EXTEND_BACKENDS)
    assert backends.pop("sdpa") == "ready"
    assert all("not installed" in why or "needs a CUDA GPU" in why for why in backends.values())
    assert records == {first: "test-gpu-0badcafe"} | dict.fromkeys(others, "none")
    block = lines[starts[1] + 1 : starts[2]]
    places = set()
    for line in block:
        name, words = line.split(maxsplit=1)
        places.add(line.index(words))
    assert len(places) == 1
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == examine()


@pytest.mark.parametrize("mode", ["replay", "live"])
def test_the_mode_is_as_asked_or_why_it_cannot_be_had(without_gpu, monkeypatch, mode):
    monkeypatch.setenv("ATTNLIB_MODE", mode)
    facts = examine()
    assert facts["mode"].startswith({"replay": "replay", "live": "none: "}[mode])
    assert render(facts).startswith(f"mode      {facts['mode']} (ATTNLIB_MODE={mode})")


def test_without_a_driver_the_class_of_a_backend_says_whether_it_needs_one(monkeypatch):
    monkeypatch.setattr("attnlib.measure.machine.has_driver", lambda: False)
    name = BACKENDS[-1]
    assert examine()["backends"][name] == NO_DRIVER
    runs_anywhere = classmethod(lambda cls, entry: "")
    monkeypatch.setattr(backend_class(name), "unavailable", runs_anywhere)
    assert examine()["backends"][name] == ""


def test_with_a_driver_each_backend_says_what_it_lacks(without_gpu, monkeypatch):
    monkeypatch.setattr("attnlib.measure.machine.has_driver", lambda: True)
    assert examine()["backends"] == available()


def test_explain_loads_no_pandas_and_no_torch():
    code = """
import sys
from attnlib import cli
cli.main("explain --library flashinfer==0.6.3 --mode decode --heads 32/8 --gpu sm90".split())
assert not {"pandas", "torch"} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[1],
        check=True,
        capture_output=True,
    )
