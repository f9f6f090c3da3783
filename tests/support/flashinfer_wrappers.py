"""What FlashInfer's own wrappers resolve `auto` to, planned on a CPU as if on another GPU.

The library's code decides: its wrappers are made and planned with real arguments. Patched are the
compute capability, pinned memory (a CPU has none), and the loading of kernels, which stops the plan
and says which backend was asked for. Works with every release from 0.2.0 to 0.7.4; some of
them ask for a GPU's properties already at import, so `installed` imports them.
"""

import functools
import importlib.util
import inspect
import sys
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from unittest import mock

import torch

from attnlib.select import GPUS

CAPABILITY = {gpu: divmod(int(gpu[2:]), 10) for gpu in GPUS}
SHARED_MEMORY = {"sm75": 65536, "sm80": 167936} | dict.fromkeys(
    ("sm86", "sm89", "sm120", "sm121"), 102400
)
CUDA = "13.0"
CKV = 512
MODULES = (
    "decode",
    "prefill",
    "mla",
    "mla._batch_mla._wrapper",
    "cute_dsl.availability",
    "cute_dsl.attention.monolithic.mla_decode",
    "cute_dsl.attention.wrappers.batch_mla",
)
SUPPORTED = (
    *(f"cudnn_frontend_{what}" for what in ("serves_frost_decode", "leads_short_caches")),
    *("cudnn_frontend_frost_runtime_available", "_cudnn_supports_direct_seqlens"),
    *("cudnn_frontend_accepts_cuda_graph_replay_hint", "_cudnn_supports_paged_auto"),
    "is_cute_dsl_arch_supported",
)
"""Questions that are answered with yes."""


class Resolved(Exception):  # noqa: N818 - it is an answer, not an error
    """Stops a plan where it would load the kernels of the backend it has chosen."""


def installed():
    """The release of FlashInfer that is installed, or first on PYTHONPATH; "" without one.

    A machine with a GPU answers for itself at import; elsewhere an H200 stands in.
    """
    if importlib.util.find_spec("flashinfer") is None:
        return ""
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stand_in = {"current_device": 0, "get_device_capability": CAPABILITY["sm90"]}
            stand_in["get_device_properties"] = _properties("sm90")
            for name, value in stand_in.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, v=value: v))
        return importlib.import_module("flashinfer").__version__


def resolve(spec, call, *, mode):
    """The backend that the installed FlashInfer takes for this call, on the GPU of `as_if_on`."""
    planners = {"decode": _decode, "prefill_ragged": _ragged, "mla": _mla, "sparse_mla": _mla}
    wrapper, plan = planners.get(mode, _paged)(spec, call)
    try:
        plan()
    except Resolved as chosen:
        # Since 0.7.4 a decode plan that runs XQA loads fa2's kernels, too.
        return "xqa" if getattr(wrapper, "_use_xqa_mtp_decode", False) else str(chosen)
    except Exception:
        if wrapper._backend == "auto":
            raise
    return wrapper._backend


@contextmanager
def as_if_on(gpu):
    """Within, FlashInfer takes this machine for one with that GPU."""
    for name in MODULES:
        with suppress(ImportError, AttributeError):  # AttributeError: made for another CuTe DSL
            importlib.import_module(f"flashinfer.{name}")
    properties = _properties(gpu)
    replaced = {
        "get_compute_capability": lambda _: CAPABILITY[gpu],
        "_get_compute_capability": lambda _: CAPABILITY[gpu],
        "get_device_properties": lambda _: properties,
        "get_device_sm_count": lambda _: 132,
        "get_batch_prefill_module": _says(),
        "get_batch_prefill_sm90_module": _says("fa3"),  # 0.2.0.post1
        "get_batch_decode_module": _says("cuda-cores"),
        "get_fmha_module": _says("cutlass"),
        "get_batch_mla_module": _says(),
        "get_trtllm_gen_fmha_module": _says("trtllm-gen"),
        "_get_compiled_mla_kernel": _says("cute-dsl-monolithic"),
        "_compile_mla_kernel": _says("cute-dsl-modular"),
        "_CUDNN_GRAPH_AVAILABLE": True,
        **dict.fromkeys(SUPPORTED, lambda *_: True),
    }
    if gpu in ("sm120", "sm121"):  # XQA's check wants a CUDA device besides
        replaced["_validate_xqa_device_capability"] = lambda _: None
    with ExitStack() as stack:
        loaded = [m for name, m in sys.modules.items() if name.split(".")[0] == "flashinfer" and m]
        _forget(loaded)
        for module in loaded:
            for name in set(replaced) & set(vars(module)):
                stack.enter_context(mock.patch.object(module, name, replaced[name]))
        stack.enter_context(mock.patch.object(torch.version, "cuda", CUDA))
        empty = torch.empty
        unpinned = lambda *args, **more: empty(*args, **{**more, "pin_memory": False})  # noqa: E731
        stack.enter_context(mock.patch.object(torch, "empty", unpinned))
        _stop_mla_backends(stack)
        yield


def _forget(modules):
    """Empty the caches, where answers about another GPU may lie."""
    for module in modules:
        for value in vars(module).values():
            if type(value).__name__ == "_lru_cache_wrapper":
                value.cache_clear()


def _properties(gpu):
    shared = SHARED_MEMORY.get(gpu, 233472)
    return SimpleNamespace(
        major=CAPABILITY[gpu][0],
        minor=CAPABILITY[gpu][1],
        multi_processor_count=132,
        shared_memory_per_multiprocessor=shared,
        shared_memory_per_block_optin=shared - 1024,
    )


def _says(name=""):
    """Stops with this backend, or with the one that a getter is asked for."""

    # 0.2.0.post1 has a getter for each backend; fa2's is given the dtypes first.
    def stop(backend=None, *_, **__):
        raise Resolved(name or (backend if isinstance(backend, str) else "fa2"))

    return stop


@functools.cache
def _workspace(mib=1):
    return torch.zeros(mib * 2**20, dtype=torch.uint8)


def _words(values):
    return torch.tensor(values, dtype=torch.int32)


def _sums(lengths):
    return _words([0, *lengths]).cumsum(0, dtype=torch.int32)


def _lengths(spec, call, *, decode):
    kv = call.kv_lens
    q = call.q_lens or ((1,) * len(kv) if decode else kv)
    pages = tuple(-(-n // spec.page_size) for n in kv)
    last = [n - (p - 1) * spec.page_size for n, p in zip(kv, pages, strict=True)]
    indices = torch.arange(sum(pages), dtype=torch.int32)
    table = torch.nn.utils.rnn.pad_sequence(indices.split(pages), batch_first=True)
    mask = torch.zeros(sum(a * b for a, b in zip(q, kv, strict=True)), dtype=torch.uint8)
    return SimpleNamespace(
        q=q,
        kv=kv,
        qo_indptr=_sums(q),
        kv_indptr=_sums(kv),
        page_indptr=_sums(pages),
        indices=indices,
        last=_words(last),
        table=torch.nn.functional.pad(table, (0, -table.shape[1] % 128)),  # as cute-dsl asks
        masks={"packed_custom_mask": mask} if call.custom_mask else {},
        heads=(spec.num_qo_heads, spec.num_kv_heads, spec.head_dim),
    )


def _keywords(plan, spec, call, **more):
    """Keywords for a plan(), without those that this release does not know."""
    wanted = {
        "q_data_type": getattr(torch, spec.dtype),
        "kv_data_type": getattr(torch, spec.kv_dtype),
        "o_data_type": getattr(torch, spec.out_dtype),
        "pos_encoding_mode": "ROPE_LLAMA" if call.positions else "NONE",
        "window_left": 128 if call.window else -1,
        "logits_soft_cap": 30.0 if call.softcap else None,
        "use_fp16_qk_reduction": call.fp16_qk,
        "allow_fp16_qk_reduction": call.fp16_qk,  # 0.2.0.post1
        **more,
    }
    known = inspect.signature(plan).parameters
    return {name: value for name, value in wanted.items() if name in known}


def _decode(spec, call):
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    lens = _lengths(spec, call, decode=True)
    held = {"indptr": lens.page_indptr, "indices": lens.indices, "last_page_len": lens.last}
    buffers = {f"paged_kv_{name}_buffer": table.clone() for name, table in held.items()}
    options = {"use_tensor_cores": call.tensor_cores}
    options |= {"use_cuda_graph": True, **buffers} if call.graph else {}
    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", **options)
    if hasattr(wrapper, "_plan_cudnn"):
        wrapper._plan_cudnn = _says("cudnn")
    more = {"q_len_per_req": lens.q[0]}
    more |= {"fixed_split_size": 4} if call.fixed_split else {}
    more |= {"block_tables": lens.table} if call.block_tables else {}
    # From 0.6.18 plan() takes **kwargs and hands them on to _plan_impl().
    keywords = _keywords(getattr(wrapper, "_plan_impl", wrapper.plan), spec, call, **more)
    tables = (lens.page_indptr, lens.indices, lens.last)
    return wrapper, lambda: wrapper.plan(*tables, *lens.heads, spec.page_size, **keywords)


def _paged(spec, call):
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    lens = _lengths(spec, call, decode=False)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD")
    keywords = _keywords(wrapper.plan, spec, call, causal=True, **lens.masks)
    tables = (lens.qo_indptr, lens.page_indptr, lens.indices, lens.last)
    return wrapper, lambda: wrapper.plan(*tables, *lens.heads, spec.page_size, **keywords)


def _ragged(spec, call):
    from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

    lens = _lengths(spec, call, decode=False)
    buffers = {"qo_indptr_buf": lens.qo_indptr.clone(), "kv_indptr_buf": lens.kv_indptr.clone()}
    options = {"use_cuda_graph": True, **buffers} if call.graph else {}
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD", **options)
    more = {"head_dim_vo": call.head_dim_vo} if call.head_dim_vo else {}
    if call.sinks:
        wrapper._sinks = torch.zeros(spec.num_qo_heads)
    keywords = _keywords(wrapper.plan, spec, call, causal=True, **lens.masks, **more)
    tables = (lens.qo_indptr, lens.kv_indptr)
    return wrapper, lambda: wrapper.plan(*tables, *lens.heads, **keywords)


def _mla(spec, call):
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    lens = _lengths(spec, call, decode=True)
    tables = {
        "qo_indptr": lens.qo_indptr,
        "kv_indptr": lens.page_indptr,
        "kv_indices": lens.indices,
        "kv_len_arr": _words(lens.kv),
    }
    reserved = {name: table.clone() for name, table in tables.items()}
    graph = {"use_cuda_graph": True, **reserved} if call.graph else {}
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(130), **graph)  # XQA wants >= 128 MiB
    rope = spec.head_dim - CKV
    more = {"num_heads": spec.num_qo_heads, "head_dim_ckv": CKV, "head_dim_kpe": rope}
    more |= {
        "page_size": spec.page_size,
        "causal": call.causal,
        "sm_scale": (128 + rope) ** -0.5,
    }
    more |= {
        "q_data_type": getattr(torch, spec.dtype),
        "kv_data_type": getattr(torch, spec.kv_dtype),
    }
    with suppress(ImportError):
        more |= _policy_keywords(spec, call, tables, lens)
        tables = {}
    return wrapper, lambda: wrapper.plan(**tables, **more)


def _policy_keywords(spec, call, tables, lens):
    """What plan() of 0.7.1 and newer is told besides: its metadata object, layouts and dtypes."""
    from flashinfer.mla._batch_mla._contracts import MLAPlanMetadata

    dense = {"cum_seq_lens_q": lens.qo_indptr, "block_tables": lens.table}
    dense["seq_lens"] = tables["kv_len_arr"]
    dual = call.block_tables
    layout = "packed" if call.packed else "split"
    query, cache = (dtype.startswith("float8") for dtype in (spec.dtype, spec.kv_dtype))
    return {
        "metadata": MLAPlanMetadata.dual(**tables, **dense)
        if dual
        else MLAPlanMetadata.csr(**tables),
        "scale_mode": "bmm-scalar" if query else "kv-per-tensor" if cache else "default",
        "query_layout": layout,
        "kv_cache_layout": layout,
        "output_dtype": getattr(torch, spec.out_dtype),
        "lse_mode": "base2" if call.base2_lse else "none",
        "use_sinks": call.sinks,
    }


def _tried(name, backend, refusal):
    """An MLA backend whose preflight is the library's own, and which stops before it is planned."""

    def plan_from_wrapper(arguments):
        try:
            backend.plan_from_wrapper(arguments)
        except Exception as error:
            if isinstance(error, refusal):
                raise
        raise Resolved(name)

    capabilities = backend._plan_capabilities
    return SimpleNamespace(plan_from_wrapper=plan_from_wrapper, _plan_capabilities=capabilities)


def _stop_mla_backends(stack):
    with suppress(ImportError):
        from flashinfer.mla._batch_mla import _wrapper
        from flashinfer.mla._batch_mla._auto_policy import _BackendPlanUnsupportedError as refusal

        tried = {
            name: _tried(name, cls, refusal)
            for name, cls in _wrapper._BACKEND_TYPES.items()
            if hasattr(cls, "_plan_capabilities")
        }
        stack.enter_context(mock.patch.dict(_wrapper._BACKEND_TYPES, tried))
