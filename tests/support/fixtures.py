"""Shared fixtures: every test has its own data folder and none of the caller's switches."""

import logging
import os
import sys
import tempfile
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Before a kernel is defined: without a GPU Triton runs it in Python.
    os.environ["TRITON_INTERPRET"] = "1"

from support import library_fakes as fakes
from support.interpreter import make_quick
from support.metadata_cases import FEWER
from support.records import right_row
from support.studies import CPU, QUICK_START

from attnlib import cli
from attnlib.core import backends
from attnlib.core.backends import flash_attn3, flashinfer, mla, sglang, xqa
from attnlib.core.fa2 import planner
from attnlib.core.metadata import decode, device, kv_indices
from attnlib.core.schedule import flash_attn3 as scheduler
from attnlib.core.schedule import library
from attnlib.measure import timer
from attnlib.run import store, study
from attnlib.run.schema import now

# One thread per process, and per process that a test starts: two workers share few cores.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
matplotlib.use("agg")
# jsonschema compiles grammars of IRIs as nbformat imports it (3 s); no notebook is checked by them.
sys.modules["rfc3987_syntax"] = None
# Loggers that do not propagate cost time: pytest handles every such one six times a test.
for logger in logging.root.manager.loggerDict.values():
    logger.propagate = True

SWITCHES = ("MODE", "MACHINE", "WHEELS")
folders = []

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory):
    """For temporary files and locks of GPUs: parallel test runs must not exclude each other."""
    folder, children = map(tmp_path_factory.mktemp, ("temporary", "children"))
    (children / "sitecustomize.py").write_text(QUICK_START)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(children), prepend=os.pathsep)
        for name in ("TMPDIR", "ATTNLIB_LOCKS"):
            patch.setenv(name, str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def small_grids():
    """What `metadata_cases.FEWER` says, fewer searches, and without a GPU fewer times."""
    sizes = (
        (device, "MAX_SCAN"),
        (device, "MAX_PART"),
        (decode, "MANY_ROWS"),
        (kv_indices, "SMALL_GRID"),
        (kv_indices, "MANY_REQUESTS"),
    )
    with pytest.MonkeyPatch.context() as patch:
        for module, name in sizes:
            patch.setattr(module, name, getattr(module, name) // FEWER)
        if not torch.cuda.is_available():
            make_quick(patch)
            patch.setattr(timer, "PLAN_SAMPLES", 2)
        yield


@pytest.fixture(autouse=True)
def data(own_temporary_folder, monkeypatch):
    """The test's own data folder; the published records need `delenv("ATTNLIB_DATA")`."""
    # That of the test before if it is empty: to make and remove 6,000 takes seconds.
    if not folders or [*folders[-1].parent.rglob("*")] != folders[-1:]:
        folders.append(own_temporary_folder / f"data-{len(folders)}" / "data")
        folders[-1].mkdir(parents=True)
    monkeypatch.setenv("ATTNLIB_DATA", str(folders[-1]))
    for name in SWITCHES:
        monkeypatch.delenv(f"ATTNLIB_{name}", raising=False)
    return folders[-1]


@pytest.fixture(autouse=True)
def closed_figures():
    """Figures that a test leaves open are closed: matplotlib warns of many, and we would fail."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.fixture
def replayed(monkeypatch):
    monkeypatch.setenv("ATTNLIB_MODE", "replay")


@pytest.fixture
def published_records(monkeypatch, replayed):
    """The committed records, replayed, in place of the test's own data folder."""
    monkeypatch.delenv("ATTNLIB_DATA", raising=False)


@pytest.fixture
def without_gpu(monkeypatch):
    """No CUDA GPU, even where there is one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def on_hopper():
    if reason := backends.unavailable("flash-attn-3"):
        pytest.skip(reason)


@pytest.fixture
def make_record():
    """A right record, less what the overrides change; a status other than ok takes its times."""
    return right_row


class InstantJobs:
    """Stands in for worker processes: a record per item at once; `jobs` are those it got."""

    def __init__(self, make):
        self.make = make
        self.jobs = []
        self.overlays = []

    def run(self, job, machine, overlay, watch):
        self.jobs.append(job)
        self.overlays.append(overlay)
        for item in job.items:
            named = {"study": job.study, "round": job.round, "item": item, "machine": machine}
            store.keep(self.make(**named, started_at=now()))
            watch.on_done(1)


@pytest.fixture
def instant_jobs(make_record, monkeypatch):
    """`Sweep.measure` without processes, on a CPU called `cpu-test64`."""
    jobs = InstantJobs(make_record)
    monkeypatch.setattr(study, "run_job", jobs.run)
    monkeypatch.setattr(study, "describe", lambda device: CPU)
    return jobs


@pytest.fixture
def fails(capsys):
    """Run a command that must fail as expected; returns its one line on stderr."""

    def run(*arguments):
        assert cli.main(arguments) in (cli.COMMANDS[arguments[0]].status, cli.USAGE, cli.UNDECIDED)
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith(f"attnlib {arguments[0]}: ")
        return line

    return run


@pytest.fixture
def fake_fa2(monkeypatch):
    """FlashInfer's wrappers on the CPU, as they are made, on a GPU of 4 multiprocessors."""
    if torch.cuda.is_available():
        pytest.skip("the libraries' stand-ins are for machines without a GPU")
    fakes.FakeWrapper.made = made = []
    module = SimpleNamespace(
        BatchAttention=fakes.FakeBatchAttention,
        BatchDecodeWithPagedKVCacheWrapper=fakes.FakeDecode,
        BatchPrefillWithPagedKVCacheWrapper=fakes.FakePaged,
        BatchPrefillWithRaggedKVCacheWrapper=fakes.FakeRagged,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    decode = SimpleNamespace(trtllm_batch_decode_with_kv_cache=fakes.fake_xqa)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    for ours in (flashinfer, mla, xqa):
        monkeypatch.setattr(ours, "WORKSPACE_BYTES", 2**21)
    monkeypatch.setattr(planner, "installed_version", lambda _: "0.6.4")
    small = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    monkeypatch.setattr(backends, "unavailable", lambda name: "")
    return made


@pytest.fixture
def fake_fa3(monkeypatch):
    """FlashAttention-3 of the model and the oracle, as on a GPU of 132 multiprocessors."""
    fake = fakes.FakeFlashAttention()
    monkeypatch.setattr(library, "import_library", lambda *_: fake)
    monkeypatch.setattr(library, "_build_flags", dict)
    for module in (flash_attn3, scheduler):
        monkeypatch.setattr(module, "sm_count", lambda device: fakes.SMS)
    flash_attn3._facts.cache_clear()
    yield fake
    flash_attn3._facts.cache_clear()


@pytest.fixture
def libraries(monkeypatch, fake_fa2, fake_fa3):
    """The libraries on the CPU: FlashInfer's wrappers as they are made, and FlashMLA."""
    latent = SimpleNamespace(BatchMLAPagedAttentionWrapper=fakes.FakeMla)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", latent)
    for name in ("vllm.vllm_flash_attn", "vllm.v1.attention.ops.triton_unified_attention"):
        monkeypatch.setitem(sys.modules, name, fakes.FakeVllm)
    found = SimpleNamespace(
        wrappers=fake_fa2,
        flashmla=fakes.FakeFlashMla(),
        sglang=fakes.FakeSglangFlashAttention(),
    )
    loaded = {
        library.FLASH_ATTN_3: fake_fa3,
        library.FLASHMLA: found.flashmla,
        library.SGLANG_FLASH_ATTN_3: found.sglang,
    }
    monkeypatch.setattr(library, "sglang_release", lambda: "0.4.10")
    monkeypatch.setattr(sglang, "sm_count", lambda device: fakes.SMS)
    monkeypatch.setattr(library, "import_library", lambda name=library.FLASH_ATTN_3: loaded[name])
    return found
