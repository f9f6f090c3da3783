"""A planner takes a wrapper of FlashInfer over, or says why not."""

import json
import re
import textwrap
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import backend_calls as calls
from support.library_fakes import PlannedWrapper

from attnlib.core import AttnSpec, DecodeBatch
from attnlib.core.fa2 import planner as module
from attnlib.core.fa2.planner import PRIVATE, Fa2Planner
from attnlib.core.fa2.words import (
    plan_words,
)
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.lengths import shuffled_pages

ROOT = Path(__file__).resolve().parents[2]
LAYER = {"head_dim": 128, "max_seq_len": 4096}


@pytest.fixture
def wrapper(monkeypatch):
    monkeypatch.setattr(module, "installed_version", lambda _: "0.6.4")
    wrapper = PlannedWrapper.of_graph(3, 256)
    floats = 33 * 16 * 32 * 128 * 4
    wrapper._plan_info = [33, 3, 0, 16, 0, 0, 0, 0, 0, 0, 0, floats, 0, True, True]
    return wrapper


def test_a_plan_is_in_the_wrappers_workspace_until_it_plans_itself(wrapper):
    planner = Fa2Planner(wrapper, **LAYER, num_sms=132, q_len=2)
    assert wrapper._qo_indptr_buf.tolist() == [0, 2, 4, 6]
    planner.plan(torch.tensor([4096, 10, 0], dtype=torch.int32))
    assert wrapper._plan_info is planner.info and len(planner.info) == 15
    assert planner.info[:2] + planner.info[3:4] == [planner.shape.max_blocks, 6, 16]
    words = wrapper._int_workspace_buffer[: planner.layout.int_bytes].view(torch.int32)
    assert words.tolist() == plan_words(planner.shape, [4096, 10, 0]).image(len(words)).tolist()


def test_page_arrays_are_written_where_the_wrapper_reads_them(wrapper):
    slots = torch.arange(8192).view(2, 4096).int()
    pool = {"req_pool_indices": torch.tensor([1, 0, 1]), "req_to_token": slots}
    table = {"block_table": slots[[1, 0, 1], ::16] // 16}
    lens = torch.tensor([40, 16, 1])
    for given in (pool, table):
        with pytest.raises(ValueError, match="page_size must be given"):
            Fa2Planner(wrapper, **LAYER, num_sms=132).plan(lens, **given)
    planner = Fa2Planner(wrapper, **LAYER, num_sms=132, page_size=16)
    for name, tensor in pool.items():
        with pytest.raises(TypeError, match="must be a tensor, got NoneType"):
            planner.plan(lens, **{name: tensor})
    with pytest.raises(ValueError, match=r"block_table\) must have .* 4096, .* got \[2, 256\]"):
        planner.plan(lens, **pool | {"req_to_token": slots[:, :256].contiguous()})
    for given in (pool, table):
        wrapper._paged_kv_indices_buf.fill_(-5)
        planner.plan(lens, **given, seq_len_delta=1)
        assert wrapper._paged_kv_indptr_buf.tolist() == [0, 3, 5, 6]
        assert wrapper._paged_kv_indices_buf[:7].tolist() == [256, 257, 258, 0, 1, 256, -5]
        assert wrapper._paged_kv_last_page_len_buf.tolist() == [9, 1, 2]
    assert planner.overflow.tolist() == [0, 0]


def test_what_was_too_long_is_told_until_an_engine_looks(wrapper):
    planner = Fa2Planner(wrapper, **LAYER, num_sms=132)
    planner.plan(torch.tensor([9000, 1, 5000]))
    assert planner.overflow.tolist() == [0, 0], "longer than max_seq_len, and planned whole"
    planner.plan(torch.tensor([2**21 + 1, 7]))
    assert planner.overflow.tolist() == [2**21 + 1, 0]
    planner.plan(torch.tensor([7]))
    assert planner.overflow.tolist() == [2**21 + 1, 0], "an engine may look later"


def notebook_snippet():
    cells = json.loads((ROOT / "notebooks/07_fixes_you_can_switch_on.ipynb").read_text())["cells"]
    (text,) = ("".join(cell["source"]) for cell in cells if "Fa2Planner(wrapper" in str(cell))
    return text.split("```python\n")[1].split("```")[0]


@pytest.fixture
def events(wrapper, monkeypatch):
    """What a snippet does, in its order: plans of both kinds, a capture, runs, a replay."""
    events = []
    plan = Fa2Planner.plan
    counted = lambda *a, **k: (events.append("ours"), plan(*a, **k))  # noqa: E731
    monkeypatch.setattr(Fa2Planner, "plan", counted)
    monkeypatch.setattr(Fa2Planner.__init__, "__kwdefaults__", {"q_len": 1, "page_size": 0})
    Fa2Planner.__init__.__kwdefaults__["num_sms"] = 132

    @contextmanager
    def capture(_):
        events.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "graph", capture)
    return events


def test_the_snippet_of_a_page_names_the_query_dtype_and_plans_before_the_capture(wrapper, events):
    wrapper.plan = lambda *_, **layer: events.append(layer["q_data_type"])
    wrapper.run = lambda *_: events.append("run")
    slots = torch.arange(2**18).view(2, 2**17).int()
    wrapper._paged_kv_indices_buf = torch.zeros(2**14, dtype=torch.int32)
    names = {
        "torch": torch,
        "wrapper": wrapper,
        "pool": slots,
        "rows": torch.tensor([1, 0]),
    }
    names |= {"block_table": slots[:, : 2**13], "seq_lens": torch.tensor([40, 5000])}
    names |= {"num_qo_heads": 32, "num_kv_heads": 8, "arrays": (), "graph": None}
    names |= {"layers": range(2), "q": None, "cache": None, "Fa2Planner": Fa2Planner}
    exec(notebook_snippet(), names)
    assert events == [torch.bfloat16, "ours", "capture", "ours", "run", "run"]


class GraphWrapper(PlannedWrapper):
    """One that a snippet makes; it is planned as FlashInfer's own, for any heads."""

    def __init__(self, events, *arguments, **options):
        super().__init__(*arguments, **options)
        self.events = events

    def plan(self, indptr, indices, last, heads, kv_heads, head_dim, page_size, **dtypes):
        rows = self._fixed_batch_size
        assert len(indptr) == rows + 1 and len(indices) == len(last) == rows
        assert (head_dim, page_size) == (128, 16)
        self._num_qo_heads, self._num_kv_heads = heads, kv_heads
        self._plan_info = [33, 3, 0, 16, 0, 0, 0, 0, 0, 0, 0, 33 * 16 * 32 * 128 * 4, 0, True, True]
        self.events.append(dtypes["q_data_type"])

    def run(self, q, cache, out):
        assert len(q) == len(out) == self._fixed_batch_size
        self.events.append("run")


def docstring_snippet():
    """The complete example of `Fa2Planner`, on the CPU."""
    (lines,) = re.findall(r"::\n\n((?:        .*\n|\n)+)", Fa2Planner.__doc__)
    return textwrap.dedent(lines).replace('"cuda"', '"cpu"')


def test_the_complete_example_makes_a_wrapper_captures_and_replays(wrapper, events, monkeypatch):
    made = []

    def make(*arguments, **options):
        made.append(GraphWrapper(events, *arguments, **options))
        return made[0]

    def replay():
        names["planner"].plan(names["seq_lens"], block_table=names["block_table"])

    graph = SimpleNamespace(replay=replay)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    names = {"torch": torch, "Fa2Planner": Fa2Planner, "caches": [None, None]}
    names |= {"flashinfer": SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=make)}
    names |= {"max_batch": 3, "num_pages": 2000, "num_qo_heads": 32, "num_kv_heads": 8}
    table = torch.arange(1, 1201, dtype=torch.int32).view(2, 600)
    names |= {"lens": torch.tensor([40, 9000]), "table": table}
    exec(docstring_snippet(), names)
    assert events == [torch.bfloat16, "ours", "run", "capture", "ours", "run", "run", "ours"]
    planner = names["planner"]
    assert planner.shape.max_batch_size == 3
    assert planner.page_arrays["kv_indptr"].tolist() == [0, 3, 566, 566]
    assert planner.page_arrays["kv_indices"][:4].tolist() == [1, 2, 3, 601]
    assert (names["skipped"], names["lost"]) == (0, 0)


def test_overflow_is_what_its_docstring_says(wrapper):
    planner = Fa2Planner(wrapper, **LAYER, num_sms=132, page_size=16)
    table = torch.arange(3 * 256).view(3, 256).int()
    limit = 256 * 16
    planner.plan(torch.tensor([limit + 1, 16, limit + 9]), block_table=table)
    assert planner.overflow.tolist() == [limit + 9, 0], "the longest of those above the limit"
    assert planner.page_arrays["kv_indptr"].tolist() == [0, 0, 1, 1]
    planner.plan(torch.tensor([limit, 16, 0]), block_table=table)
    assert planner.overflow.tolist() == [limit + 9, 257], "256 pages fit: all are skipped"
    words = wrapper._int_workspace_buffer[: planner.layout.int_bytes].view(torch.int32)
    nothing = plan_words(planner.shape, np.zeros(3, int)).image(len(words))
    at = planner.layout.offsets[3]
    assert words[at : at + 4].tolist() == nothing[at : at + 4].tolist() == [0, 0, 0, 0]
    planner.overflow.zero_()
    planner.plan(torch.tensor([limit - 16, 16, 0]), block_table=table)
    assert planner.overflow.tolist() == [0, 0]


def test_a_gpu_that_was_not_measured_is_named_once():
    with pytest.warns(UserWarning, match="on H100 and H200, not on NVIDIA B200") as warned:
        for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA B200", "NVIDIA H200"):
            module.warn_if_not_measured(gpu)
    assert len(warned) == 1


@pytest.mark.parametrize(
    "name, other",
    [
        ("_num_qo_heads", 64),
        ("_num_kv_heads", 4),
        ("_cached_kv_data_type", torch.float16),
        ("_fixed_batch_size", 4),
        ("_window_left", 128),
        ("_int_workspace_buffer", torch.zeros(2**20, dtype=torch.uint8)),
        ("_float_workspace_buffer", torch.zeros(2**24, dtype=torch.uint8)),
    ],
)
def test_a_wrapper_planned_for_something_else_is_refused_before_the_launch(wrapper, name, other):
    planner = Fa2Planner(wrapper, **LAYER, num_sms=132)
    words = wrapper._int_workspace_buffer.clone()
    setattr(wrapper, name, other)
    with pytest.raises(ValueError, match=f"as it was taken over, .*: {name} was .*, is "):
        planner.plan(torch.ones(3, dtype=torch.int32))
    assert (planner._words.view(torch.uint8) == words[: planner.layout.int_bytes]).all()


@pytest.mark.parametrize("name", PRIVATE)
def test_a_wrapper_whose_private_names_have_moved_is_refused(wrapper, name):
    delattr(wrapper, name)
    with pytest.raises(RuntimeError, match=f"planned once, got .*Wrapper without {name}"):
        Fa2Planner(wrapper, **LAYER, num_sms=132)


@pytest.mark.parametrize(
    "change, layer, words",
    [
        ({"_backend": "fa3"}, {}, "wrapper must be fa2 in CUDA-graph mode.*backend='fa3'"),
        ({"_use_cuda_graph": False}, {}, "got use_cuda_graph=False"),
        ({"_custom_mask_buf": torch.zeros(1)}, {}, "wrapper must not have a custom mask"),
        ({"_plan_info": None}, {}, "a plan of 0 integers"),
        ({}, {"max_seq_len": 0}, "max_seq_len must be an integer in 1..2097152, got 0"),
        ({}, {"max_seq_len": 4096.0}, "max_seq_len must be an integer .*, got 4096.0"),
        ({}, {"head_dim": 64}, "head_dim must be the wrapper's, 128, got 64"),
        ({}, {"head_dim": 512}, "head_dim must be one of 64, 128, 256, got 512"),
        ({"_cached_q_data_type": torch.float32}, {}, "q_data_type must be one of .*float32"),
        ({"_cached_kv_data_type": torch.uint8}, {}, "kv_data_type must be one of .*e4m3.*uint8"),
        ({}, {"page_size": 24}, "page_size must be a power of two, got 24"),
        ({}, {"page_size": 8}, "kv_indices buffer must have 512 pages .*, got 256"),
        ({}, {"q_len": 0}, "q_len must be an integer >= 1, got 0"),
        ({}, {"num_sms": -4}, "num_sms must be an integer >= 1, got -4"),
        ({"_int_workspace_buffer": torch.zeros(99, dtype=torch.uint8)}, {}, "int workspace must"),
        ({"_float_workspace_buffer": torch.zeros(99, dtype=torch.uint8)}, {}, "float workspace"),
    ],
)
def test_a_wrapper_that_cannot_be_planned_for_is_refused(wrapper, change, layer, words):
    vars(wrapper).update(change)
    with pytest.raises(ValueError, match=words):
        Fa2Planner(wrapper, **(LAYER | {"num_sms": 132} | layer))


@pytest.mark.parametrize("buffer, size", [("int", "int_bytes"), ("float", "float_bytes")])
def test_a_workspace_holds_the_whole_plan_and_a_byte_less_is_refused(wrapper, buffer, size):
    least = getattr(Fa2Planner(wrapper, **LAYER, num_sms=132).layout, size)
    name = f"_{buffer}_workspace_buffer"
    setattr(wrapper, name, torch.zeros(least, dtype=torch.uint8))
    Fa2Planner(wrapper, **LAYER, num_sms=132)
    setattr(wrapper, name, torch.zeros(least - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"{buffer} workspace must .*{least:,} .*{least - 1:,}"):
        Fa2Planner(wrapper, **LAYER, num_sms=132)


@pytest.mark.parametrize("release", ["", "0.9.9"])
def test_a_release_whose_plan_is_not_known_is_refused(wrapper, monkeypatch, release):
    monkeypatch.setattr(module, "installed_version", lambda _: release)
    with pytest.raises(RuntimeError, match=f"is known, 0.4.0 to .*, got {release or 'none'}"):
        Fa2Planner(wrapper, **LAYER, num_sms=132)


def page_arrays_of(lens, page_size, seed):
    """Prefix sums in pages, shuffled pages, last pages, and a block table: int32 on the host."""
    spec = AttnSpec(1, 1, 128, page_size)
    lens = np.array(lens, np.int32)
    table = torch.from_numpy(shuffled_pages(lens, page_size, seed))
    batch = DecodeBatch.build(spec, torch.from_numpy(lens), table)
    return batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len, table


@pytest.mark.gpu
@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(32, 8), (5, 1)], ids=str)
def test_one_graph_replans_itself_for_other_lengths_over_poisoned_workspaces(
    heads, page_size, q_len, by_table
):
    calls.able("flashinfer-fa2", DecodeCase(AttnSpec(*heads, 128, page_size), 3, 8000))
    import flashinfer

    batches = (
        [900, 40, 8000],
        [q_len] * 3,
        [20000, 300, 7],
        [5000] * 3,
    )
    pool = 40000 // page_size
    device = torch.device("cuda", torch.cuda.current_device())
    floats = torch.zeros(512 * 2**20, dtype=torch.uint8, device=device)
    sums, pages, last, _ = (x.to(device) for x in page_arrays_of(batches[0], page_size, 0))
    held = torch.zeros(pool, dtype=torch.int32, device=device)
    held[: len(pages)] = pages
    rows = torch.arange(4, dtype=torch.int32) * q_len
    form = "Decode" if q_len == 1 else "Prefill"
    suffix = "buffer" if q_len == 1 else "buf"
    arguments = {
        f"paged_kv_indptr_{suffix}": sums,
        f"paged_kv_indices_{suffix}": held,
        f"paged_kv_last_page_len_{suffix}": last,
    }
    arguments |= {"use_tensor_cores": True} if q_len == 1 else {"qo_indptr_buf": rows.to(device)}
    cls = getattr(flashinfer, f"Batch{form}WithPagedKVCacheWrapper")
    wrapper = cls(floats, "NHD", use_cuda_graph=True, backend="fa2", **arguments)
    cache = torch.randn(
        2,
        pool,
        page_size,
        heads[1],
        128,
        device=device,
        dtype=torch.bfloat16,
    )
    q = torch.randn(
        3 * q_len,
        heads[0],
        128,
        device=device,
        dtype=torch.bfloat16,
    )
    layer = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    layer |= {} if q_len == 1 else {"causal": True}
    wanted = []
    for seed, lens in enumerate(batches):
        given = page_arrays_of(lens, page_size, seed)
        first = () if q_len == 1 else (rows,)
        wrapper.plan(
            *first, given[0], given[1].to(device), given[2], *heads, 128, page_size, **layer
        )
        out, lse = wrapper.run(q, tuple(cache), return_lse=True)
        wanted.append((given, out.clone(), lse.clone()))

    # The batch of 20,000 tokens is longer than what the grid is sized for, and planned whole.
    layer = {"head_dim": 128, "max_seq_len": 8000, "q_len": q_len}
    planner = Fa2Planner(wrapper, **layer, page_size=page_size * by_table)
    lens = torch.tensor(batches[0], dtype=torch.int32, device=device)
    table = torch.zeros(
        8,
        20000 // page_size + 3,
        dtype=torch.int32,
        device=device,
    )[:4, :-3]
    inputs = {"block_table": table} if by_table else {}
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], device=device)
    planner.plan(lens, **inputs)
    wrapper.run(q, tuple(cache), out=out, lse=lse, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planner.plan(lens, **inputs)
        wrapper.run(q, tuple(cache), out=out, lse=lse, return_lse=True)
    for which in (2, 0, 3, 1, 2):
        (new_sums, new_pages, new_last, new_table), right, right_lse = wanted[which]
        lens.copy_(torch.tensor(batches[which], dtype=torch.int32))
        sums.copy_(new_sums)
        held[: len(new_pages)] = new_pages.to(device)
        last.copy_(new_last)
        if by_table:
            table[:3, : new_table.shape[1]].copy_(new_table)
            for array in planner.page_arrays.values():
                array.fill_(-1)
        for buffer in (wrapper._int_workspace_buffer, floats, out.view(torch.uint8)):
            buffer.fill_(0xFF)
        graph.replay()
        torch.testing.assert_close(out, right, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse, right_lse, atol=1e-2, rtol=0)
    assert planner.overflow.tolist() == [0, 0]
    if by_table:
        lens[1] = 20001
        graph.replay()
        assert planner.overflow.tolist() == [20001, 0]
        assert not out[q_len : 2 * q_len].any()
        assert out[:q_len].any()


def test_a_wrapper_that_runs_xqa_reads_no_plan_and_is_refused(wrapper):
    wrapper._use_xqa_mtp_decode = True
    with pytest.raises(ValueError, match="planned for XQA: give it backend='fa2'"):
        Fa2Planner(wrapper, **LAYER, num_sms=132)
    wrapper._use_xqa_mtp_decode = False
    assert Fa2Planner(wrapper, **LAYER, num_sms=132).info
