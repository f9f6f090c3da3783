"""Metadata in the worker: every word is checked before a time is taken."""

from typing import Any

import pytest
import torch

from attnlib.kinds.cost import metadata_cost
from attnlib.kinds.item import Item
from attnlib.kinds.metadata import eager
from attnlib.kinds.metadata.case import MetadataCase
from attnlib.kinds.metadata.measure import MODULES
from attnlib.run.record import Record
from attnlib.run.worker import Worker

CASE = MetadataCase("decode", 5, 4, 70, pool_size=9)
JOB = {"study": "demo", "round": 0, "device": "cpu", "command": "repeat me"}
OURS = [name for name in MODULES if name != "sglang-metadata"]
OTHERS = [
    MetadataCase("kv_indices", 5, 4, 70, pool_size=9),
    MetadataCase("draft", 5, 4, 70, topk=3, draft_tokens=6),
    MetadataCase("verify", 5, 1, 70, draft_tokens=4),
]


def measure(backend: str = "metadata-eager") -> Record:
    return Worker(JOB).measure(Item(backend, "host", CASE))


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        *((backend, CASE) for backend in OURS),
        *((backend, case) for backend in OURS[:2] for case in OTHERS),
    ],
    ids=str,
)
def test_a_right_builder_gets_times_and_an_exact_check(backend: str, case: MetadataCase) -> None:
    record = Worker(JOB).measure(Item(backend, "host", case))
    assert (record.status, record.reason) == ("ok", "")
    assert (record.oracle_error, record.oracle_budget, record.oracle_rows) == (0.0, 0.0, 5)
    assert record.work_per_call == metadata_cost(case).fetch_bytes
    assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("backend", "case"), [("metadata-serial", OTHERS[0]), ("metadata-fast", CASE)]
)
def test_what_does_not_build_the_case_lists_the_backends_that_do(backend: str, case) -> None:
    record = Worker(JOB).measure(Item(backend, "host", case))
    assert record.status == "error"
    assert "must be one of metadata-eager, metadata-fused, metadata-fused-alone" in record.reason


@pytest.mark.parametrize("output", ["cache_seqlens", "cu_seqlens_k", "page_table"])
def test_one_wrong_word_is_incorrect_and_has_no_times(output: str, monkeypatch) -> None:
    honest = eager.build_decode_metadata

    def wrong(**call: Any) -> None:
        honest(**call)
        call[output].view(-1)[0] += 1

    monkeypatch.setattr(eager, "build_decode_metadata", wrong)
    record = measure()
    assert (record.status, record.reason) == ("incorrect", "1 words differ")
    assert (record.oracle_error, record.run_us) == (1.0, ())


def test_what_is_not_written_at_all_is_incorrect(monkeypatch) -> None:
    monkeypatch.setattr(eager, "build_decode_metadata", lambda **_: None)
    assert measure().status == "incorrect"


def test_without_sglang_its_kernel_is_refused_with_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(
        "attnlib.kinds.metadata.sglang.unavailable",
        lambda: "sglang is not installed: pip install it",
    )
    record = measure("sglang-metadata")
    assert (record.status, record.reason) == ("refused", "sglang is not installed: pip install it")


def test_neighbours_of_one_case_share_its_pool() -> None:
    worker = Worker(JOB)
    worker.measure(Item("metadata-eager", "host", CASE))
    (subject,) = worker._subjects.values()
    pool = subject._call.inputs["req_to_token"]
    worker.measure(Item("metadata-fused", "host", CASE))
    assert subject._call.inputs["req_to_token"] is pool


@pytest.mark.gpu
@pytest.mark.parametrize("backend", OURS)
def test_on_a_gpu_the_fused_builders_launch_one_kernel(backend: str) -> None:
    record = Worker(JOB | {"device": "cuda"}).measure(Item(backend, "graph", CASE))
    assert record.status == "ok", record.reason
    launches = sum(kernel["launches"] for kernel in record.kernels)
    assert (launches > 5) if backend == "metadata-eager" else (launches == 1)
    assert torch.cuda.is_available()
