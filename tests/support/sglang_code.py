"""SGLang's own definitions in the place of `sglang_fakes`, where its wheel is on PYTHONPATH.

They are compiled from its files, over the few names that they use, and SGLang is not imported: what
it really passes meets our kernels, in Triton's interpreter.
"""

import ast
import importlib.util
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import triton
import triton.language as tl

from . import sglang_fakes as fakes

FOUND = importlib.util.find_spec("sglang")
FLASH = {
    *("FlashAttentionMetadata", "FlashAttentionBackend", "normal_decode_set_metadata"),
    *("_fused_metadata_kernel_general", "_fused_metadata_kernel_ps1_no_swa"),
}
INFER = {"FlashInferAttnBackend", "FlashInferIndicesUpdaterDecode", "DecodeMetadata"}


def parts():
    """As `sglang_fakes.parts`; the runner of a model stays a stand-in."""
    root = Path(FOUND.submodule_search_locations[0])
    path = root / "srt/plugins/hook_registry.py"
    spec = importlib.util.spec_from_file_location("hook_registry", path)
    spec.loader.exec_module(registry := importlib.util.module_from_spec(spec))
    folder = root / "srt/layers/attention"
    flash = _compiled(folder / "flashattention_backend.py", FLASH, triton=triton, tl=tl)
    infer = _compiled(
        folder / "flashinfer_backend.py",
        INFER,
        **{"partial": partial, "logger": None, "global_override_indptr_cpu": None},
        **{"debug_kernel_api": lambda f: f, "create_flashinfer_kv_indices_triton": _Indices()},
        BatchDecodeWithPagedKVCacheWrapper=fakes.Wrapper,
        fast_decode_plan=fakes.Wrapper.begin_forward,
    )
    flash["FlashAttentionBackend"].__init__ = _flash_attention
    infer["FlashInferAttnBackend"].__init__ = _flashinfer(infer["FlashInferIndicesUpdaterDecode"])
    return fakes.parts() | {fakes.REGISTRY: vars(registry), fakes.FLASH: flash, fakes.INFER: infer}


def _compiled(path, wanted, **given):
    """The names of a module of these of its definitions alone."""
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if getattr(node, "name", "") in wanted or getattr(node, "module", "") == "__future__"
    ]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            node.bases = []
    module = sys.modules[path.stem] = ModuleType(path.stem)  # dataclasses look annotations up there
    # Triton's decorator reads a kernel's source, from the file that the code names.
    vars(module).update(given, __file__=str(path), torch=torch, dataclass=dataclass)
    exec(compile(tree, str(path), "exec"), vars(module))  # noqa: S102
    return vars(module)


def _flash_attention(self, page_size=1):
    """What SGLang's own code needs to be made ready for graphs, and its schedule, counted."""

    def schedule(batch_size, **_):
        self.schedules += 1
        return torch.full((1 + -(-batch_size // 4) * 16,), 7, dtype=torch.int32)

    none = "use_mla has_local_attention use_sliding_window_kv_pool is_encoder_decoder has_softcap"
    vars(self).update(
        **dict.fromkeys(none.split(), False),
        **{"max_context_len": 64, "page_size": page_size, "device": "cpu", "topk": 0},
        **{"speculative_num_steps": 0, "speculative_num_draft_tokens": 0, "has_swa": False},
        **{"num_attention_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_splits": 0},
        **{"kv_cache_dtype": torch.bfloat16, "req_to_token": fakes.pool(), "schedules": 0},
        **{"speculative_step_id": 1, "_get_scheduler_metadata": schedule},
    )
    self.init_cuda_graph_state(4, fakes.MAX_BS)
    graph = self.decode_cuda_graph_metadata
    graph["page_table_draft_decode"] = graph["page_table"]


def _flashinfer(updaters):
    def make(self, model_runner):
        fakes.FlashInferAttnBackend.__init__(self, model_runner)
        updater = self.indices_updater_decode = object.__new__(updaters)
        vars(updater).update(
            **{"req_to_token": fakes.pool(), "head_dim": 128, "num_qo_heads": 32},
            **{"num_kv_heads": 8, "q_data_type": torch.bfloat16, "data_type": torch.bfloat16},
            **{"kv_indptr": self.kv_indptr, "kv_last_page_len": self.kv_last_page_len},
            **{"update": updater.update_single_wrapper, "attn_backend": self},
        )

    return make


class _Indices:
    """In the place of `create_flashinfer_kv_indices_triton`."""

    def __getitem__(self, grid):
        return lambda *args: None
