"""Stand-ins for the few parts of SGLang 0.5.11 that the plugin hooks: names, arguments, order of
calls. `installed` puts them where Python imports them from."""

import functools
import pkgutil
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import torch

ATTENTION = "sglang.srt.layers.attention"
CONTEXT, MAX_BS, POOL = 64, 4, 5
HEADS = {"num_attention_heads": 32, "num_kv_heads": 8, "head_dim": 128}


class HookType(Enum):
    BEFORE, AFTER, AROUND, REPLACE = "before", "after", "around", "replace"


class HookRegistry:
    """Registers hooks, and applies them as SGLang does: wrapper functions, in place."""

    def __init__(self):
        self.hooks = []

    def register(self, target, hook, hook_type=HookType.AFTER):
        self.hooks.append((target, hook, hook_type))

    def apply_hooks(self):
        for target, hook, how in self.hooks:
            owner, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(owner)
            setattr(owner, name, _wrapped(getattr(owner, name), hook, how))


def _wrapped(original, hook, how):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if how is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if how is HookType.BEFORE:
            args, kwargs = hook(*args, **kwargs) or (args, kwargs)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return wrapper


DECODE = SimpleNamespace(name="DECODE", is_decode_or_idle=lambda: True)
VERIFY = SimpleNamespace(name="TARGET_VERIFY", is_decode_or_idle=lambda: False)


def pool():
    """Each request's slots, [POOL, CONTEXT + 4] int32: no two rows alike."""
    return torch.randperm(POOL * (CONTEXT + 4), dtype=torch.int32).view(POOL, -1)


class FlashAttentionBackend:
    """Decode through a graph: the buffers of a batch size at capture, its metadata at replay."""

    num_attention_heads, num_kv_heads, head_dim, has_softcap, num_splits = 32, 8, 128, False, 0
    kv_cache_dtype, use_mla, speculative_step_id = torch.bfloat16, False, 0

    def __init__(self, page_size=1):
        self.page_size, self.req_to_token = page_size, pool()
        columns = -(-CONTEXT // page_size)
        self.decode_cuda_graph_metadata = {
            "page_table": torch.zeros(MAX_BS, columns, dtype=torch.int32),
            "strided_indices": torch.arange(0, CONTEXT, page_size),
        }
        self._sched_meta_buf = torch.zeros(1 + 4 * MAX_BS, dtype=torch.int32)
        self.schedules = 0

    def _compute_scheduler_metadata(self, batch_size, max_seq_len_k, cache_seqlens, cu_seqlens_q):
        self.schedules += 1
        return torch.full((1 + 4 * -(-batch_size // 4) * 4,), 7, dtype=torch.int32)

    def init_forward_metadata_capture_cuda_graph(self, bs, seq_lens):
        step = self.decode_cuda_graph_metadata[bs] = SimpleNamespace(
            cache_seqlens_int32=seq_lens.to(torch.int32),
            cu_seqlens_k=torch.zeros(bs + 1, dtype=torch.int32),
            page_table=self.decode_cuda_graph_metadata["page_table"][:bs],
            scheduler_metadata=None,
        )
        words = self._compute_scheduler_metadata(bs, 1, step.cache_seqlens_int32, None)
        if words is not None:
            self._sched_meta_buf[: len(words)] = words
            step.scheduler_metadata = self._sched_meta_buf[: len(words)]

    def init_forward_metadata_replay_cuda_graph(self, bs, req_pool_indices, seq_lens, delta=0):
        step = self.decode_cuda_graph_metadata[bs]
        longest = int(seq_lens.max()) + delta
        module = sys.modules[f"{ATTENTION}.flashattention_backend"]
        module.normal_decode_set_metadata(
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


class Wrapper(SimpleNamespace):
    """What FlashInfer's decode wrapper holds: planned once, the private names of a planner."""

    def __init__(self, workspace, kv_layout, backend, use_tensor_cores, **graph):
        self._backend, self.use_tensor_cores, self.plans = backend, use_tensor_cores, 0
        self._use_cuda_graph = self.is_cuda_graph_enabled = bool(graph)
        for name, buffer in graph.items():
            setattr(self, f"_{name.removesuffix('fer')}", buffer)
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.zeros(2**20, dtype=torch.uint8)
        self._num_qo_heads, self._num_kv_heads, self._window_left = 32, 8, -1
        self._cached_q_data_type = self._cached_kv_data_type = torch.bfloat16
        self._plan_info = None
        if graph:
            self._fixed_batch_size = len(self._paged_kv_last_page_len_buf)
            self._qo_indptr_buf = torch.zeros(self._fixed_batch_size + 1, dtype=torch.int32)

    def begin_forward(self):
        self.plans += 1
        self._plan_info = list(range(15))


class FlashInferAttnBackend:
    decode_use_tensor_cores, num_wrappers, enable_deterministic = True, 1, False
    max_context_len = CONTEXT

    def __init__(self, model_runner, skip_prefill=False):
        self.decode_backend = "fa2"
        self.workspace_buffer = torch.zeros(2**24, dtype=torch.uint8)
        self.kv_indptr = torch.zeros(MAX_BS + 1, dtype=torch.int32)
        self.kv_indices = torch.zeros(MAX_BS * CONTEXT, dtype=torch.int32)
        self.kv_last_page_len = torch.ones(MAX_BS, dtype=torch.int32)
        self.decode_wrappers = [Wrapper(self.workspace_buffer, "NHD", "fa2", True)]
        module = sys.modules[f"{ATTENTION}.flashinfer_backend"]
        self.indices_updater_decode = module.FlashInferIndicesUpdaterDecode()
        self.decode_cuda_graph_metadata = {}

    def init_forward_metadata_capture_cuda_graph(
        self, bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info
    ):
        if not forward_mode.is_decode_or_idle():
            return
        made = Wrapper(
            *(self.workspace_buffer, "NHD", self.decode_backend, self.decode_use_tensor_cores),
            paged_kv_indptr_buffer=self.kv_indptr[: bs + 1],
            paged_kv_indices_buffer=self.kv_indices,
            paged_kv_last_page_len_buffer=self.kv_last_page_len[:bs],
        )
        self.decode_cuda_graph_metadata[bs] = [made]
        self._update(bs, req_pool_indices, seq_lens, spec_info)

    def init_forward_metadata_replay_cuda_graph(self, bs, req_pool_indices, seq_lens):
        self._update(bs, req_pool_indices, seq_lens, None)

    def _update(self, bs, rows, lens, spec_info):
        wrapper, total = self.decode_cuda_graph_metadata[bs][0], int(lens.sum())
        self.indices_updater_decode.call_begin_forward(
            *(wrapper, rows, lens, total, self.kv_indptr, None, spec_info, lens),
            fixed_split_size=None,
            disable_split_kv=False,
        )


class FlashInferIndicesUpdaterDecode:
    def __init__(self):
        self.req_to_token, self.head_dim = pool(), 128

    def call_begin_forward(
        self,
        wrapper,
        req_pool_indices,
        paged_kernel_lens,
        paged_kernel_lens_sum,
        kv_indptr,
        kv_start_idx,
        spec_info,
        seq_lens_cpu,
        use_sliding_window_kv_pool=False,
        fixed_split_size=None,
        disable_split_kv=None,
    ):
        wrapper.begin_forward()


class ModelRunner:
    """A rank of Llama-3.1-8B."""

    page_size, tp_rank, is_draft_worker = 16, 0, False
    dtype, kv_cache_dtype = torch.bfloat16, torch.float8_e4m3fn
    model_config = SimpleNamespace(
        **{name: HEADS[name] for name in ("num_attention_heads", "head_dim")},
        get_num_kv_heads=lambda ranks: HEADS["num_kv_heads"] // ranks,
        attention_arch=SimpleNamespace(name="MHA"),
    )
    server_args = SimpleNamespace(attention_backend="fa3", disable_cuda_graph=False)

    def forward(self, forward_batch, skip_attn_backend_init=False):
        return "logits"


def installed(monkeypatch):
    """The stand-ins as modules, each class its own copy; the registry of hooks."""
    registry = HookRegistry()
    parts = {
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
        f"{ATTENTION}.flashattention_backend": _copies(
            FlashAttentionBackend, normal_decode_set_metadata
        ),
        f"{ATTENTION}.flashinfer_backend": _copies(
            FlashInferAttnBackend, FlashInferIndicesUpdaterDecode
        ),
        "sglang.srt.model_executor.model_runner": _copies(ModelRunner),
        "sglang.srt.layers.dp_attention": {
            "get_attention_tp_rank": lambda: 0,
            "get_attention_tp_size": lambda: 1,
        },
    }
    for path, content in parts.items():
        names = path.split(".")
        for end in range(1, len(names) + 1):
            name = ".".join(names[:end])
            if not isinstance(sys.modules.get(name), _Module):
                monkeypatch.setitem(sys.modules, name, _Module(name))
                if end > 1:
                    parent = sys.modules[".".join(names[: end - 1])]
                    setattr(parent, names[end - 1], sys.modules[name])
        vars(sys.modules[path]).update(content)
    return registry


class _Module(ModuleType):
    __path__ = []


def _copies(*things):
    """Subclasses, which a hook may change without changing the next test's."""
    return {
        thing.__name__: type(thing.__name__, (thing,), {}) if isinstance(thing, type) else thing
        for thing in things
    }
