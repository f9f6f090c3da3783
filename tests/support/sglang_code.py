"""SGLang's own definitions that the plugin hooks, of the oldest release, without SGLang installed.

They are compiled from its wheel's files, over the few names that they use: what it really passes
meets our kernels, in Triton's interpreter. Stand-ins are what a GPU or a model makes: the runner of
a model, FlashInfer's wrappers, and how a backend is made.
"""

import ast
import linecache
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial, partialmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock
from zipfile import ZipFile

import pytest
import torch
import triton
import triton.language as tl

from attnlib.core.fa2 import planner
from attnlib.core.schedule import guard as guards
from attnlib.engines import arms, points, sglang

from .library_fakes import PlannedWrapper

FOLDER = Path(__file__).parents[2] / "build" / "wheels"
FLASH = "sglang.srt.layers.attention.flashattention_backend"
INFER = "sglang.srt.layers.attention.flashinfer_backend"
REGISTRY = "sglang.srt.plugins.hook_registry"
RANKS = "sglang.srt.layers.dp_attention"
COMPILED = {
    FLASH: {
        *("FlashAttentionMetadata", "FlashAttentionBackend", "normal_decode_set_metadata"),
        *("_fused_metadata_kernel_general", "_fused_metadata_kernel_ps1_no_swa"),
    },
    INFER: {"FlashInferAttnBackend", "FlashInferIndicesUpdaterDecode", "DecodeMetadata"},
}
CONTEXT = 64
MAX_BS = 4
POOL = 5
LENS = torch.tensor([33, 1, 60], dtype=torch.int32)
ROWS = torch.tensor([2, 0, 4])
DECODE = SimpleNamespace(name="DECODE", is_decode_or_idle=lambda: True)


@cache
def _download(release):
    """The wheel, downloaded once into build/wheels, or why there is none."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = f"sglang-{release}-*.whl"
    said = ""
    if not [*FOLDER.glob(name)]:
        # Apart until it is whole: another worker may look for it meanwhile.
        with TemporaryDirectory(dir=FOLDER) as own:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", own]
            command += ["--only-binary=:all:", f"sglang=={release}"]
            said = subprocess.run(command, capture_output=True, text=True).stderr
            for path in Path(own).glob(name):
                path.replace(FOLDER / path.name)
    found = [*FOLDER.glob(name)]
    return found[0] if found else f"no wheel of SGLang {release}: {said.strip()[-200:]}"


def wheel_of(release=sglang.OLDEST):
    """Path of a release's wheel; without a package index the test is skipped."""
    path = _download(release)
    if isinstance(path, str):
        pytest.skip(path)
    return path


def keep_alone(tree, wanted):
    """Leave what is named in a module, classes without their bases."""
    tree.body = [
        node
        for node in tree.body
        if getattr(node, "name", "") in wanted or getattr(node, "module", "") == "__future__"
    ]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            node.bases = []


@cache
def _compiled(module):
    """Its definitions of `COMPILED` alone, or all of a module that is not there."""
    path = f"{module.replace('.', '/')}.py"
    with ZipFile(wheel_of()) as archive:
        text = archive.read(path).decode()
    # Triton's decorator asks for a kernel's source by the name of its file.
    linecache.cache[path] = (
        len(text),
        None,
        text.splitlines(keepends=True),
        path,
    )
    tree = ast.parse(text)
    wanted = COMPILED.get(module)
    if wanted:
        keep_alone(tree, wanted)
    return compile(tree, path, "exec")


def _definitions(module, **given):
    """What the module defines, anew, over the names that are given."""
    # Under another name than the one that is imported: dataclasses look annotations up there, and
    # the registry hooks a function wherever a module has it.
    name = module.rpartition(".")[2]
    made = sys.modules[name] = ModuleType(name)
    vars(made).update(given, torch=torch, dataclass=dataclass)
    exec(_compiled(module), vars(made))  # noqa: S102
    return vars(made)


def parts():
    """What is imported of SGLang, by module."""
    flash = _definitions(FLASH, triton=triton, tl=tl, SWAKVPool=SimpleNamespace)
    infer = _definitions(
        INFER,
        **{"partial": partial, "logger": None, "global_override_indptr_cpu": None},
        **{"debug_kernel_api": lambda f: f, "create_flashinfer_kv_indices_triton": _Indices()},
        BatchDecodeWithPagedKVCacheWrapper=PlannedWrapper,
        fast_decode_plan=PlannedWrapper.begin_forward,
    )
    flash["FlashAttentionBackend"].__init__ = partialmethod(_flash_attention)
    infer["FlashInferAttnBackend"].__init__ = partialmethod(
        _flashinfer, infer["FlashInferIndicesUpdaterDecode"]
    )
    ranks = {"get_attention_tp_rank": lambda: 0, "get_attention_tp_size": lambda: 1}
    return {
        REGISTRY: _definitions(REGISTRY),
        FLASH: flash,
        INFER: infer,
        "sglang.srt.model_executor.model_runner": copies(ModelRunner),
        RANKS: ranks | {"is_dp_attention_enabled": lambda: False},
    }


class AttentionType(Enum):
    """Of a layer, as in SGLang's `radix_attention`."""

    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"


@cache
def _flash_code(release):
    """Backend, metadata and functions of a release's module, compiled, and what it imports."""
    path = f"{FLASH.replace('.', '/')}.py"
    with ZipFile(wheel_of(release)) as archive:
        tree = ast.parse(archive.read(path))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {each.asname or each.name for node in imports for each in node.names}
    wanted = {"FlashAttentionBackend", "FlashAttentionMetadata", "merge_state_v2_wrapper"}
    keep_alone(tree, wanted)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []  # torch.compile
    return compile(tree, f"{release}:{path}", "exec"), names


def _earlier(
    cache_seqlens_int32,
    cu_seqlens_k,
    page_table,
    req_to_token,
    req_pool_indices,
    strided_indices,
    max_seq_pages,
    seq_lens,
    seq_len_delta,
    page_size,
    swa_page_table=None,
    token_to_kv_pool=None,
):
    """In the place of SGLang's metadata of a step: the lengths alone."""
    cache_seqlens_int32.copy_(seq_lens + seq_len_delta)


def _later(
    cache_seqlens_int32,
    cu_seqlens_k,
    page_table,
    req_to_token,
    req_pool_indices,
    max_seq_pages,
    seq_lens,
    seq_len_delta,
    page_size,
    swa_page_table=None,
    full_to_swa_index_mapping=None,
    skip_page_table=False,
):
    """The same since 0.5.20, with a pool that has page tables of its own."""
    cache_seqlens_int32.copy_(seq_lens + seq_len_delta)


def flash_of(release, library):
    """SGLang's own FlashAttentionBackend of a release, calling `library` for attention; what else
    its module has are mocks, but for what decides a path."""
    has_later = points.order(release) >= points.order("0.5.20")
    code, names = _flash_code(release)
    name = f"flashattention_backend_{release}"
    made = sys.modules[name] = ModuleType(name)
    vars(made).update({each: MagicMock() for each in names})
    vars(made).update(
        torch=torch,
        dataclass=dataclass,
        AttentionType=AttentionType,
        flash_attn_with_kvcache=library,
        merge_state_v2=lambda output, *_: (output, None),
        is_cp_active=lambda batch: False,
        is_cp_v2_active=lambda batch: False,
        paged_view=lambda cache, page_size: cache,
        normal_decode_set_metadata=_later if has_later else _earlier,
    )
    exec(code, vars(made))  # noqa: S102
    return vars(made)


def pool():
    """Each request's slots, [POOL, CONTEXT + 4] int32: no two rows alike."""
    return torch.randperm(POOL * (CONTEXT + 4), dtype=torch.int32).view(POOL, -1)


def _flash_attention(self, page_size=1):
    """What SGLang's own code needs to be made ready for graphs, and its schedule, counted."""

    def schedule(batch_size, **_):
        self.schedules += 1
        return torch.full(
            (1 + -(-batch_size // 4) * 16,),
            7,
            dtype=torch.int32,
        )

    none = "use_mla has_local_attention use_sliding_window_kv_pool is_encoder_decoder has_softcap"
    vars(self).update(
        **dict.fromkeys(none.split(), False),
        **{"max_context_len": CONTEXT, "page_size": page_size, "device": "cpu", "topk": 0},
        **{"speculative_num_steps": 0, "speculative_num_draft_tokens": 0, "has_swa": False},
        **{"num_attention_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_splits": 0},
        **{"kv_cache_dtype": torch.bfloat16, "req_to_token": pool(), "schedules": 0},
        **{"speculative_step_id": 1, "_get_scheduler_metadata": schedule},
    )
    self.init_cuda_graph_state(MAX_BS, MAX_BS)
    graph = self.decode_cuda_graph_metadata
    graph["page_table_draft_decode"] = graph["page_table"]


def _flashinfer(self, updaters, model_runner):
    self.decode_use_tensor_cores = True
    self.num_wrappers = 1
    self.enable_deterministic = False
    self.decode_backend = "fa2"
    self.max_context_len = CONTEXT
    self.disable_cuda_graph_kv_split = False
    vars(self).update(model_runner.backend)
    self.workspace_buffer = torch.zeros(2**24, dtype=torch.uint8)
    self.kv_indptr = [torch.zeros(MAX_BS + 1, dtype=torch.int32)]
    self.cuda_graph_kv_indices = [torch.zeros(MAX_BS * CONTEXT, dtype=torch.int32)]
    self.kv_last_page_len = torch.ones(MAX_BS, dtype=torch.int32)
    self.decode_wrappers = [PlannedWrapper(self.workspace_buffer, "NHD", "fa2", True)]
    self.decode_cuda_graph_metadata = {}
    updater = self.indices_updater_decode = object.__new__(updaters)
    vars(updater).update(
        **{"req_to_token": pool(), "head_dim": 128, "num_qo_heads": 32, "num_kv_heads": 8},
        **{"q_data_type": torch.bfloat16, "data_type": torch.bfloat16, "attn_backend": self},
        **{"kv_indptr": self.kv_indptr, "kv_last_page_len": self.kv_last_page_len},
        update=updater.update_single_wrapper,
    )


class _Indices:
    """In the place of `create_flashinfer_kv_indices_triton`."""

    def __getitem__(self, grid):
        return lambda *args: None


class ModelRunner:
    """A rank of Llama-3.1-8B."""

    page_size = 16
    is_draft_worker = False
    max_total_num_tokens = 400
    req_to_token_pool = SimpleNamespace(req_to_token=torch.arange(5 * 64).view(5, 64))
    dtype = torch.bfloat16
    kv_cache_dtype = torch.float8_e4m3fn
    model_config = SimpleNamespace(
        num_attention_heads=32,
        head_dim=128,
        get_num_kv_heads=lambda ranks: 8 // ranks,
        attention_arch=SimpleNamespace(name="MHA"),
    )

    def __init__(self, backend=(), **server_args):
        self.backend = dict(backend)
        given = {"attention_backend": "fa3", "disable_cuda_graph": False}
        self.server_args = SimpleNamespace(**given | {"speculative_algorithm": None} | server_args)

    def forward(self, forward_batch, skip_attn_backend_init=False):
        self.attend()
        return "logits"

    def attend(self):
        """What a test lets the layers do."""


def copies(*classes):
    return {real.__name__: type(real.__name__, (real,), {}) for real in classes}


def stand_in_guard(monkeypatch):
    """Put one in the guard's place; returns what it will be asked for, (engine, mode)."""

    def guard(engine, mode):
        asked.append((engine, mode))
        return SimpleNamespace(next_graph={}, checks=0)

    asked = []
    monkeypatch.setattr(guards, "guard", guard)
    return asked


def installed(monkeypatch, parts):
    """These parts where Python imports them from, and all their names at once; this process's state
    as a new one has it, on a small GPU."""
    for name, value in vars(arms.State()).items():
        monkeypatch.setattr(arms.STATE, name, value)
    monkeypatch.setattr(planner, "installed_version", lambda name: "0.6.8.post1")
    small = SimpleNamespace(multi_processor_count=4, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    for path, content in parts.items():
        names = path.split(".")
        for end in range(1, len(names) + 1):
            name = ".".join(names[:end])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(content)
    return SimpleNamespace(**{k: v for content in parts.values() for k, v in content.items()})
