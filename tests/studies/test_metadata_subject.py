"""Metadata in the worker: every word is checked before a time is taken."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from support.records import measure

from attnlib.measure.calls.base import Bench
from attnlib.measure.calls.form import Item
from attnlib.studies.metadata import builders, eager, schedules, sglang
from attnlib.studies.metadata.case import ONCE, MetadataCase
from attnlib.studies.metadata.measure import POISON, MetadataSubject

CASE = MetadataCase("decode", 5, 4, 70, pool_size=9)
EAGER = Item("metadata-eager", "host", CASE)
DESIGNS = builders.named("decode").designs
OURS = [name for name in DESIGNS if name.startswith("metadata-")]
WINDOWED = replace(CASE, swa=True)
PAGES = MetadataCase("kv_indices", 5, 4, 70, pool_size=9)
WIDE = replace(WINDOWED, context=300, lengths="41+9+60+1+70")


@pytest.mark.parametrize(
    "backend, case",
    [
        *product(OURS, [CASE, WINDOWED, WIDE]),
        *product(OURS[1:], [PAGES, replace(PAGES, context=300)]),
    ],
    ids=str,
)
def test_a_right_builder_gets_times_and_an_exact_check(backend, case):
    record = measure(Item(backend, "host", case))
    assert record.status == "ok"
    assert record.reason == ""
    assert record.oracle_error == 0.0
    assert record.oracle_budget == 0.0
    assert record.oracle_rows == 5
    assert record.work_per_call == case.fetched_bytes


@pytest.mark.parametrize(
    "backend, case",
    [
        ("metadata-eager", PAGES),
        ("metadata-fast", CASE),
    ],
)
def test_what_does_not_build_the_case_lists_the_backends_that_do(backend, case):
    record = measure(Item(backend, "host", case))
    assert record.status == "error"
    assert "metadata-fused, metadata-fused-alone" in record.reason


@pytest.mark.parametrize(
    "output", ["cache_seqlens", "cu_seqlens_k", "page_table", "swa_page_table"]
)
def test_one_wrong_word_is_incorrect_and_has_no_times(output, monkeypatch):
    honest = eager.build_decode_metadata

    def wrong(**call):
        honest(**call)
        call[output].view(-1)[0] = POISON  # as if it had not been written

    monkeypatch.setitem(DESIGNS, "metadata-eager", wrong)
    record = measure(replace(EAGER, case=WINDOWED))
    assert record.status == "incorrect"
    assert record.reason == "wrong words 1 over budget 0"
    assert record.oracle_error == 1.0
    assert record.run_us == ()


DRAFTED = replace(CASE, seq_len_delta=4)


@pytest.mark.parametrize("backend", schedules.BACKENDS)
def test_a_step_with_its_schedules_is_one_launch_or_one_in_each_layer(backend, monkeypatch):
    asked = []
    monkeypatch.setattr(schedules, "unavailable", lambda _: "")
    monkeypatch.setattr(schedules, "ask_library", lambda *call: asked.append(call))
    case = DRAFTED if backend.endswith("verify") else CASE
    record = measure(Item(backend, "host", case))
    assert record.status == "ok"
    assert record.reason == ""
    assert record.oracle_error == 0.0
    way, _, model = backend.partition("-")
    if way == ONCE:
        assert asked == []
        return
    launches = {"gpt-oss-120b": 19, "deepseek-v3": 61, "llama-3.1-8b-verify": 32}[model]
    assert len(asked) % launches == 0
    facts, lens, sums = asked[0]
    assert facts.max_seqlen_q == int(sums[1])
    assert len(sums) == len(lens) + 1


def test_a_wrong_word_of_a_schedule_is_incorrect(monkeypatch):
    twin = schedules.schedule_words
    monkeypatch.setattr(schedules, "schedule_words", lambda *call: twin(*call) + 1)
    record = measure(Item("once-gpt-oss-120b", "host", CASE))
    assert record.status == "incorrect" and "wrong words 50" in record.reason


def test_without_sglangs_library_its_launches_are_refused():
    record = measure(Item("each-deepseek-v3", "host", CASE))
    assert record.status == "refused" and "must be sglang-kernel's, got" in record.reason


def test_without_sglang_its_kernel_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("attnlib.studies.metadata.sglang.unavailable", lambda: "pip install it")
    record = measure(Item("sglang-metadata", "host", CASE))
    assert record.status == "refused"
    assert record.reason == "pip install it"


@pytest.mark.parametrize(
    "release, longest, pages",
    [
        ("0.5.14", 64, 16),
        ("0.5.14", 65, 17),
        ("0.5.15", 64, 75),
        ("0.5.23", 64, 75),
    ],
)
def test_sglang_copies_the_longest_requests_pages_or_from_0_5_15_on_the_whole_width(
    release, longest, pages, monkeypatch
):
    """The stand-in copies all it is told to, as the kernels before 0.5.17 do."""
    told = []

    def original(lens, ends, table, tokens, rows, columns, seq_lens, delta, page_size):
        lens.copy_(seq_lens + delta)
        ends[0] = 0
        ends[1:] = lens.cumsum(0)
        table[:, :columns] = tokens[rows, : columns * page_size : page_size] // page_size
        told.append((columns, tuple(table.shape), tokens.shape[1]))

    monkeypatch.setattr(sglang, "unavailable", lambda: "")
    monkeypatch.setattr(sglang, "installed_version", lambda name: release)
    module = SimpleNamespace(normal_decode_set_metadata=original)
    monkeypatch.setattr(sglang, "_module", lambda name: module)
    case = replace(CASE, context=300, max_ctx=longest, lengths=f"41+9+60+1+{longest}")
    record = measure(Item("sglang-metadata", "host", replace(case, seq_len_delta=1)))
    assert record.status == "ok"
    assert record.reason == ""
    assert set(told) == {(pages, (5, 75), 300)}


def test_outputs_are_poisoned_before_each_call(monkeypatch):
    subject = MetadataSubject(Bench("cpu", {}, {}))
    monkeypatch.setitem(DESIGNS, "metadata-eager", lambda **call: None)
    for _ in range(2):
        subject.prepared(CASE).outputs["page_table"].zero_()
        assert subject.measure(EAGER)["status"] == "incorrect"
        assert bool((subject.prepared(CASE).outputs["page_table"] == POISON).all())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", OURS)
def test_on_a_gpu_the_fused_builders_launch_one_kernel(backend):
    record = measure(Item(backend, "graph", CASE), "cuda")
    assert record.status == "ok", record.reason
    launches = sum(kernel["launches"] for kernel in record.kernels)
    assert (launches > 5) if backend == "metadata-eager" else (launches == 1)
