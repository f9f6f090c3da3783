"""The doctor: what is here, what cannot run and why, in a dict and in lines."""

import pytest
import torch

from attnlib.core.backends import BACKENDS, EXTEND_BACKENDS, MLA_BACKENDS
from attnlib.doctor import diagnose, render
from attnlib.run import store
from attnlib.studies import STUDIES


def test_every_backend_is_listed_with_its_reason(without_gpu):
    found = diagnose()["backends"]
    assert tuple(found) == (*BACKENDS, *MLA_BACKENDS, *EXTEND_BACKENDS)
    assert found.pop("sdpa") == ""
    assert all("not installed" in why or "needs a CUDA GPU" in why for why in found.values())


def test_the_text_holds_all_findings_in_aligned_lines(without_gpu, make_record):
    first, *others = STUDIES
    store.append(make_record(study=first))
    lines = render(diagnose()).splitlines()
    assert lines[0] == "mode      replay (ATTNLIB_MODE=auto)"
    assert lines[1] == "machine   no CUDA GPU (cpu)"
    start = lines.index("backends") + 1
    listed = lines[start : start + len(BACKENDS)]
    versions = [line.split() for line in lines[lines.index("versions") + 1 : start - 1]]
    assert ["torch", torch.__version__] in versions
    assert {"python", "numpy", "cuda"} <= {name for name, *_ in versions}
    assert [line.split()[0] for line in listed] == list(BACKENDS)
    assert len({line.index(line.split(maxsplit=1)[1]) for line in listed}) == 1
    found = dict(line.split(maxsplit=1) for line in lines[lines.index("records") + 1 :])
    assert found == {first: "test-gpu-0badcafe"} | {name: "none" for name in others}


@pytest.mark.parametrize("asked", ["replay", "live"])
def test_the_mode_is_as_asked_or_why_it_cannot_be_had(without_gpu, monkeypatch, asked):
    monkeypatch.setenv("ATTNLIB_MODE", asked)
    found = diagnose()
    assert found["mode"].startswith({"replay": "replay", "live": "none: "}[asked])
    assert render(found).startswith(f"mode      {found['mode']} (ATTNLIB_MODE={asked})")


def test_a_gpu_is_called_by_its_name():
    found = {"mode": "live", "mode_asked": "live", "versions": {}, "studies": {}}
    found |= {"machine": {"gpu": "NVIDIA H200", "gpu_id": "1a2b3c4d"}}
    found["backends"] = {"sdpa": "", "flashinfer-fa3": "needs Hopper"}
    text = render(found)
    assert "machine   NVIDIA H200 (1a2b3c4d)" in text and "ready" in text and "needs Hopper" in text
