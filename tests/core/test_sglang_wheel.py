"""The hook points of the SGLang that is installed, read and run without importing it.

Its definitions are compiled from its files, over the few names that they use: what it really passes
meets our kernels, here in Triton's interpreter.
"""

import ast
import importlib.util
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from support import sglang_fakes as fakes

from attnlib.core.engines import arms, sglang_hooks
from attnlib.core.fa2 import planner
from attnlib.core.fa2.words import plan_words

PACKAGE = importlib.util.find_spec("sglang")
if PACKAGE is None or not PACKAGE.submodule_search_locations:
    pytest.skip("sglang is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("made for machines without a GPU", allow_module_level=True)

ROOT = Path(PACKAGE.submodule_search_locations[0])
LENS = torch.tensor([33, 1, 60], dtype=torch.int32)
ROWS = torch.tensor([2, 0, 4])
MODE = SimpleNamespace(is_decode_or_idle=lambda: True, name="DECODE")


def tree_of(module):
    path = ROOT / f"{module.removeprefix('sglang.').replace('.', '/')}.py"
    return path, ast.parse(path.read_text())


def arguments_of(module):
    """Arguments of a module's functions and methods, by dotted name."""
    for node in tree_of(module)[1].body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in inner:
            if isinstance(each, ast.FunctionDef):
                yield prefix + each.name, [a.arg for a in each.args.args]


@pytest.mark.parametrize("point", sglang_hooks.POINTS, ids=lambda p: p.name)
def test_each_hook_point_is_there_with_the_arguments_relied_on(point):
    arguments = dict(arguments_of(point.module))[point.name]
    exact = len(point.arguments) > 2
    assert tuple(arguments if exact else arguments[: len(point.arguments)]) == point.arguments


def compiled(name, wanted, given):
    """A module of these of its definitions alone."""
    path, tree = tree_of(f"{fakes.ATTENTION}.{name}")
    tree.body = [
        node
        for node in tree.body
        if getattr(node, "name", "") in wanted or getattr(node, "module", "") == "__future__"
    ]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            node.bases = []
    module = sys.modules[name] = ModuleType(name)  # where dataclasses look annotations up
    vars(module).update(given, __file__=str(path))
    exec(compile(tree, str(path), "exec"), vars(module))  # noqa: S102
    return module


def hook(monkeypatch, module, **chosen):
    """Hook a module for these arms, by SGLang's own registry."""
    monkeypatch.setattr(arms, "STATE", state := arms.State(chosen))
    monkeypatch.setattr(sglang_hooks, "STATE", state)
    monkeypatch.setattr(sglang_hooks, "sm_count", lambda _: 132)
    spec = importlib.util.spec_from_file_location("r", ROOT / "srt/plugins/hook_registry.py")
    spec.loader.exec_module(source := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(source.pkgutil, "resolve_name", lambda path: _found(module, path))
    for point in sglang_hooks.POINTS:
        if {*chosen} & {*point.arms}:
            target = f"{point.module}.{point.name}"
            source.HookRegistry.register(target, point.hook, source.HookType(point.how))
    source.HookRegistry.apply_hooks()
    assert len(source.HookRegistry._patched) == len(source.HookRegistry._hooks)
    return state


def _found(module, path):
    name = path.rpartition(".")[2]
    return getattr(module, name) if name[0].isupper() else module


def flash_attention(page_size=16):
    """SGLang's backend of FlashAttention-3, as its own code makes it ready for graphs."""
    given = {"torch": torch, "triton": triton, "tl": tl, "dataclass": dataclass}
    wanted = {
        *("FlashAttentionMetadata", "FlashAttentionBackend", "normal_decode_set_metadata"),
        *("_fused_metadata_kernel_general", "_fused_metadata_kernel_ps1_no_swa"),
    }
    # Triton's decorator reads a kernel's source, from the file that the code names.
    module = compiled("flashattention_backend", wanted, given)
    backend = object.__new__(module.FlashAttentionBackend)
    none = "use_mla has_local_attention use_sliding_window_kv_pool is_encoder_decoder has_softcap"
    made = {
        **dict.fromkeys(none.split(), False),
        **{"max_context_len": 64, "page_size": page_size, "device": "cpu", "topk": 0},
        **{"speculative_num_steps": 0, "speculative_num_draft_tokens": 0, "has_swa": False},
        **{"num_attention_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_splits": 0},
        "kv_cache_dtype": torch.bfloat16,
        "req_to_token": fakes.pool(),
        "speculative_step_id": 1,
        "_get_scheduler_metadata": lambda batch_size, **_: torch.full(
            (1 + -(-batch_size // 4) * 16,), 7, dtype=torch.int32
        ),
    }
    vars(backend).update(made)
    backend.init_cuda_graph_state(4, 4)
    return module, backend


def replayed(backend, lens, bs=3, spec_info=None):
    backend.init_forward_metadata_replay_cuda_graph(
        *(bs, ROWS, lens, int(LENS.sum()), None, MODE, spec_info, LENS)
    )
    step = backend.decode_cuda_graph_metadata[bs]
    pages = -(-step.cache_seqlens_int32 // backend.page_size)
    table = [row[:n].tolist() for row, n in zip(step.page_table, pages, strict=True)]
    return step.cache_seqlens_int32.tolist(), step.cu_seqlens_k.tolist(), table


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("arm", arms.ARMS["metadata"])
def test_sglangs_own_steps_get_the_same_metadata_from_every_arm(monkeypatch, arm, page_size, draft):
    module, backend = flash_attention(page_size)
    spec_info = object() if draft else None
    if draft:
        table = backend.decode_cuda_graph_metadata["page_table"]
        backend.decode_cuda_graph_metadata["page_table_draft_decode"] = table
    lens = torch.ones(3, dtype=torch.int32)
    captured = (3, 3, ROWS, lens, None, MODE, spec_info)
    backend.init_forward_metadata_capture_cuda_graph(*captured)
    lens.copy_(LENS)
    wanted = replayed(backend, lens, spec_info=spec_info)
    state = hook(monkeypatch, module, metadata=arm)
    backend.decode_cuda_graph_metadata["page_table"].zero_()
    assert replayed(backend, lens, spec_info=spec_info) == wanted
    assert wanted[0] == (LENS + 2 * draft).tolist() and state.calls == {f"metadata={arm}": 1}
    words = backend._sched_meta_buf.tolist()
    assert (words[:3] == [1, 1, 1]) == (arm == "one-launch" and not draft)


@pytest.mark.parametrize("arm", arms.ARMS["schedule"])
def test_sglangs_own_capture_keeps_a_schedule_or_none(monkeypatch, arm):
    module, backend = flash_attention()
    hook(monkeypatch, module, schedule=arm)
    lens = torch.ones(3, dtype=torch.int32)
    backend.init_forward_metadata_capture_cuda_graph(3, 3, ROWS, lens, None, MODE, None)
    replayed(backend, lens)
    step = backend.decode_cuda_graph_metadata[3]
    assert (step.scheduler_metadata is None) == (arm == "layer")


class Wrapper(fakes.Wrapper):
    """Planned by the arguments that SGLang passes."""

    def begin_forward(self, *args, **kwargs):
        super().begin_forward()


def fast_decode_plan(wrapper, *args, **kwargs):
    """Of FlashInfer, which SGLang puts in the place of `begin_forward`."""
    wrapper.plans += 1


class Indices:
    """In the place of `create_flashinfer_kv_indices_triton`."""

    def __getitem__(self, grid):
        return lambda *args: None


def test_sglangs_own_flashinfer_steps_are_planned_in_one_launch(monkeypatch):
    given = {
        **{"torch": torch, "partial": partial, "dataclass": dataclass, "logger": None},
        **{"debug_kernel_api": lambda f: f, "fast_decode_plan": fast_decode_plan},
        "BatchDecodeWithPagedKVCacheWrapper": lambda *args, use_cuda_graph, **more: Wrapper(
            *args, **more
        ),
        "create_flashinfer_kv_indices_triton": Indices(),
        "global_override_indptr_cpu": None,
    }
    wanted = {"FlashInferAttnBackend", "FlashInferIndicesUpdaterDecode", "DecodeMetadata"}
    module = compiled("flashinfer_backend", wanted, given)
    backend = object.__new__(module.FlashInferAttnBackend)
    updater = object.__new__(module.FlashInferIndicesUpdaterDecode)
    vars(updater).update(
        **{"req_to_token": fakes.pool(), "head_dim": 128, "num_qo_heads": 32, "num_kv_heads": 8},
        **{"kv_indptr": [torch.zeros(5, dtype=torch.int32)], "q_data_type": torch.bfloat16},
        **{"kv_last_page_len": torch.ones(4, dtype=torch.int32), "data_type": torch.bfloat16},
        update=updater.update_single_wrapper,
    )
    vars(backend).update(
        **{"num_wrappers": 1, "decode_backend": "fa2", "decode_use_tensor_cores": True},
        **{"max_context_len": 64, "disable_cuda_graph_kv_split": False},
        **{"kv_indptr": updater.kv_indptr, "kv_last_page_len": updater.kv_last_page_len},
        cuda_graph_kv_indices=[torch.zeros(4 * 64, dtype=torch.int32)],
        workspace_buffer=torch.zeros(2**24, dtype=torch.uint8),
        indices_updater_decode=updater,
        decode_cuda_graph_metadata={},
    )
    monkeypatch.setattr(planner, "installed_version", lambda name: "0.6.8.post1")
    small = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    state = hook(monkeypatch, module, decode="planned")
    ones = torch.ones(3, dtype=torch.int32)
    backend.init_forward_metadata_capture_cuda_graph(3, 3, ROWS, ones, None, MODE, None)
    (wrapper,) = backend.decode_cuda_graph_metadata[3]
    assert wrapper.plans == 1 and wrapper._plan_info is wrapper.attnlib.info
    backend.init_forward_metadata_replay_cuda_graph(3, ROWS, LENS, 94, None, MODE, None, LENS)
    assert wrapper.plans == 1 and state.calls["decode=planned, steps"] == 1
    own = wrapper.attnlib
    words = wrapper._int_workspace_buffer[: own.layout.int_bytes].view(torch.int32)
    assert words.tolist() == plan_words(own.shape, LENS.tolist()).image(own.layout).tolist()
    assert backend.kv_indptr[0][:4].tolist() == [0, 33, 34, 94]
    table = updater.req_to_token[ROWS]
    slots = [slot for row, n in zip(table, LENS, strict=True) for slot in row[:n].tolist()]
    assert backend.cuda_graph_kv_indices[0][:94].tolist() == slots
