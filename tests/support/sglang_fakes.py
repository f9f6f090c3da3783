"""Stand-ins for the few parts of SGLang 0.5.11 that the plugin hooks: names, arguments, order of
calls. `installed` puts them where Python imports them from."""

import functools
import pkgutil
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import torch

from attnlib.core.fa2 import planner
from attnlib.engines import arms

from .library_fakes import PlannedWrapper as Wrapper

FLASH = "sglang.srt.layers.attention.flashattention_backend"
INFER = "sglang.srt.layers.attention.flashinfer_backend"
REGISTRY = "sglang.srt.plugins.hook_registry"
RANKS = "sglang.srt.layers.dp_attention"
CONTEXT, MAX_BS, POOL = 64, 4, 5
LENS, ROWS = torch.tensor([33, 1, 60], dtype=torch.int32), torch.tensor([2, 0, 4])
DECODE = SimpleNamespace(name="DECODE", is_decode_or_idle=lambda: True)


def pool():
    """Each request's slots, [POOL, CONTEXT + 4] int32: no two rows alike."""
    return torch.randperm(POOL * (CONTEXT + 4), dtype=torch.int32).view(POOL, -1)


class HookType(Enum):
    BEFORE, AFTER, AROUND = "before", "after", "around"


class HookRegistry:
    """Registers hooks, and applies them as SGLang does: wrapper functions, in place."""

    def __init__(self):
        self._hooks, self._patched = {}, set()

    def register(self, target, hook, how):
        self._hooks[target] = hook, how

    def apply_hooks(self):
        for target, (hook, how) in self._hooks.items():
            owner, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(owner)
            setattr(owner, name, _wrapped(getattr(owner, name), hook, how))


def _wrapped(original, hook, how):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if how is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if how is HookType.BEFORE:
            hook(*args, **kwargs)
            return original(*args, **kwargs)
        return hook(original(*args, **kwargs), *args, **kwargs)

    return wrapper


class FlashAttentionBackend:
    """Decode through a graph: the buffers of a batch size at capture, its metadata at replay."""

    num_attention_heads, num_kv_heads, head_dim, has_softcap, num_splits = 32, 8, 128, False, 0
    kv_cache_dtype = torch.bfloat16

    def __init__(self, page_size=1):
        self.page_size, self.req_to_token, self.schedules = page_size, pool(), 0
        self.init_cuda_graph_state(MAX_BS, MAX_BS)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        columns = -(-CONTEXT // self.page_size)
        self.decode_cuda_graph_metadata = {
            "page_table": torch.zeros(max_bs, columns, dtype=torch.int32),
            "strided_indices": torch.arange(0, CONTEXT, self.page_size),
        }
        self._sched_meta_buf = torch.zeros(1 + 4 * max_bs, dtype=torch.int32)

    def _compute_scheduler_metadata(self, batch_size, max_seq_len_k, cache_seqlens, cu_seqlens_q):
        self.schedules += 1
        return torch.full((1 + 4 * -(-batch_size // 4) * 4,), 7, dtype=torch.int32)

    def init_forward_metadata_capture_cuda_graph(
        self, bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info
    ):
        step = self.decode_cuda_graph_metadata[bs] = SimpleNamespace(
            cache_seqlens_int32=seq_lens.to(torch.int32),
            cu_seqlens_k=torch.zeros(bs + 1, dtype=torch.int32),
            page_table=self.decode_cuda_graph_metadata["page_table"][:bs],
            scheduler_metadata=None,
        )
        if spec_info:
            step.cache_seqlens_int32 = seq_lens.clone()
        elif (words := self._compute_scheduler_metadata(bs, 1, seq_lens, None)) is not None:
            self._sched_meta_buf[: len(words)] = words
            step.scheduler_metadata = self._sched_meta_buf[: len(words)]

    def init_forward_metadata_replay_cuda_graph(self, bs, req_pool_indices, seq_lens, *rest):
        step, delta = self.decode_cuda_graph_metadata[bs], 2 if rest[3] else 0
        longest = int(seq_lens.max()) + delta
        sys.modules[FLASH].normal_decode_set_metadata(
            *(step.cache_seqlens_int32, step.cu_seqlens_k, step.page_table, self.req_to_token),
            *(req_pool_indices, self.decode_cuda_graph_metadata["strided_indices"]),
            *(-(-longest // self.page_size), seq_lens, delta, self.page_size, None, None),
        )
        if not delta and step.scheduler_metadata is not None:
            words = self._compute_scheduler_metadata(bs, longest, step.cache_seqlens_int32, None)
            if words is not None:
                self._sched_meta_buf[: len(words)] = words


def normal_decode_set_metadata(
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
    """Row by row, with Python's integers."""
    lens = [int(n) + seq_len_delta for n in seq_lens]
    for row, n in enumerate(lens):
        cache_seqlens_int32[row] = n
        cu_seqlens_k[row + 1] = sum(lens[: row + 1])
        slots = req_to_token[req_pool_indices[row]][: max_seq_pages * page_size : page_size]
        page_table[row, : len(slots)] = slots // page_size


class FlashInferAttnBackend:
    def __init__(self, model_runner):
        self.decode_use_tensor_cores, self.num_wrappers, self.enable_deterministic = True, 1, False
        self.decode_backend, self.max_context_len = "fa2", CONTEXT
        self.disable_cuda_graph_kv_split = False
        vars(self).update(model_runner.backend)
        self.workspace_buffer = torch.zeros(2**24, dtype=torch.uint8)
        self.kv_indptr = [torch.zeros(MAX_BS + 1, dtype=torch.int32)]
        self.cuda_graph_kv_indices = [torch.zeros(MAX_BS * CONTEXT, dtype=torch.int32)]
        self.kv_last_page_len = torch.ones(MAX_BS, dtype=torch.int32)
        self.decode_wrappers = [Wrapper(self.workspace_buffer, "NHD", "fa2", True)]
        self.indices_updater_decode = FlashInferIndicesUpdaterDecode(self)
        self.decode_cuda_graph_metadata = {}

    def init_forward_metadata_capture_cuda_graph(self, bs, num_tokens, rows, lens, *rest):
        made = Wrapper(
            *(self.workspace_buffer, "NHD", self.decode_backend, self.decode_use_tensor_cores),
            use_cuda_graph=True,
            paged_kv_indptr_buffer=self.kv_indptr[0][: bs + 1],
            paged_kv_indices_buffer=self.cuda_graph_kv_indices[0],
            paged_kv_last_page_len_buffer=self.kv_last_page_len[:bs],
        )
        self.decode_cuda_graph_metadata[bs] = [made]
        self.init_forward_metadata_replay_cuda_graph(bs, rows, lens)

    def init_forward_metadata_replay_cuda_graph(self, bs, rows, lens, *rest):
        begin = sys.modules[INFER].FlashInferIndicesUpdaterDecode.call_begin_forward
        (wrapper,) = self.decode_cuda_graph_metadata[bs]
        begin(self.indices_updater_decode, wrapper, rows, lens, 94, None, None, None, lens)


class FlashInferIndicesUpdaterDecode:
    def __init__(self, attn_backend):
        self.req_to_token, self.head_dim, self.attn_backend = pool(), 128, attn_backend

    def call_begin_forward(
        self,
        wrapper,
        req_pool_indices,
        paged_kernel_lens,
        paged_kernel_lens_sum=None,
        kv_indptr=None,
        kv_start_idx=None,
        spec_info=None,
        seq_lens_cpu=None,
    ):
        wrapper.begin_forward()


class ModelRunner:
    """A rank of Llama-3.1-8B."""

    page_size, is_draft_worker = 16, False
    dtype, kv_cache_dtype = torch.bfloat16, torch.float8_e4m3fn
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
        return "logits"


def parts():
    """What is imported of SGLang, by module; classes are copies, which a hook may change."""
    ranks = {"get_attention_tp_rank": lambda: 0, "get_attention_tp_size": lambda: 1}
    ranks["is_dp_attention_enabled"] = lambda: False
    return {
        REGISTRY: {"HookRegistry": HookRegistry(), "HookType": HookType},
        FLASH: {"normal_decode_set_metadata": normal_decode_set_metadata}
        | copies(FlashAttentionBackend),
        INFER: copies(FlashInferAttnBackend, FlashInferIndicesUpdaterDecode),
        "sglang.srt.model_executor.model_runner": copies(ModelRunner),
        RANKS: ranks,
    }


def copies(*classes):
    return {real.__name__: type(real.__name__, (real,), {}) for real in classes}


def installed(monkeypatch, parts):
    """These parts where Python imports them from, and all their names at once; this process's state
    as a new one has it, on a small GPU."""
    for name, value in vars(arms.State()).items():
        monkeypatch.setattr(arms.STATE, name, value)
    monkeypatch.setattr(planner, "installed_version", lambda name: "0.6.8.post1")
    small = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    for path, content in parts.items():
        names = path.split(".")
        for end in range(1, len(names) + 1):
            name = ".".join(names[:end])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(content)
    return SimpleNamespace(**{k: v for content in parts.values() for k, v in content.items()})
