"""Plan for a FlashInfer wrapper of your own, on the GPU: `Fa2Planner`, which has an example.

`wrapper` is a BatchDecodeWithPagedKVCacheWrapper (tensor cores) or a
BatchPrefillWithPagedKVCacheWrapper of fa2 in CUDA-graph mode. FlashInfer's default query dtype is
float16, so name yours. Without `inputs` the wrapper's page arrays are not written: fill
`planner.page_arrays` for the same lengths before each replay.

`max_batch_size` is that of the wrapper: decode, the length of `paged_kv_last_page_len_buffer`;
prefill, of `qo_indptr_buf` less 1. `q` and `out` have rows of so many requests; one without tokens
gives zeros (-inf as lse).

It helps where lengths differ and requests x KV heads fill the GPU's slots, two per SM, so that
FlashInfer disables split-KV. Elsewhere it mostly keeps FlashInfer's chunk and gains nothing.
"""

import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..backends.base import installed_version
from ..gpu import FA2_MEASURED
from ..spec import ceil_div, require_int, require_page_size, require_word
from .choice import MAX_TOKENS, PlanShape
from .kernel import LAUNCHER, PlanTensors
from .library import FA2_INFO, HEAD_DIMS, RELEASES, ROWS_SINCE, by_name
from .words import WORD, PlanLayout

QUERY_DTYPES = (torch.float16, torch.bfloat16)
CACHE_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
"""What fa2 reads."""
OUR_INFO = "_attnlib_plan_info"
"""Attribute of a wrapper that holds the last planner's `_plan_info`."""
FIXED = (
    "_int_workspace_buffer",
    "_float_workspace_buffer",
    "_fixed_batch_size",
    "_num_qo_heads",
    "_num_kv_heads",
    "_window_left",
    "_cached_q_data_type",
    "_cached_kv_data_type",
)
"""Attributes that must be what they were when the planner took the wrapper over."""
PRIVATE = (
    "_plan_info",
    "_qo_indptr_buf",
    "_use_cuda_graph",
    "_backend",
    "_paged_kv_indptr_buf",
    "_paged_kv_indices_buf",
    "_paged_kv_last_page_len_buf",
    *FIXED,
)
"""Attributes of a planned wrapper that are not public, the same in all `RELEASES` that can run."""


class Fa2Planner:
    """Plans by length on the GPU, for a wrapper of FlashInfer that it takes over.

    Warns once on a GPU that was not measured.

    Parameters
    ----------
    wrapper : BatchDecodeWithPagedKVCacheWrapper or BatchPrefillWithPagedKVCacheWrapper
        Of fa2 in CUDA-graph mode (decode: with tensor cores), planned once.
    head_dim : int
        64, 128 or 256, as the wrapper was planned.
    max_seq_len : int
        Tokens of the longest usual request. They size the grid, whose unused blocks take time;
        longer requests are right too, but cut into fewer chunks.
    q_len : int
        Queries per request.
    page_size : int
        Tokens of a page of the cache that `run` gets, for chunks of whole pages and for `plan` to
        write the page arrays; neither if 0.
    num_sms : int
        SMs that are planned for; all of the GPU's if 0.

    Attributes
    ----------
    shape : PlanShape
        What was fixed.
    layout : PlanLayout
        Where the words lie.
    page_arrays : dict of str to Tensor
        The wrapper's buffers by the names of `build_kv_indices`.
    overflow : Tensor
        [2] int32 on the GPU, 0 while every request was planned. A step that skips requests writes
        what is skipped, and it stays until you zero it.
        `overflow[0]`: tokens of its longest request above the limit. Each one above it has zeros as
        output, the others are right. The limit is what a row of the table or pool holds, at most
        2,097,152 tokens. The kernel names no request; the lengths that you gave `plan` do.
        `overflow[1]`: pages of a batch that `kv_indices` cannot hold. All its outputs are zeros.
        Copy it with the sampled tokens of the same step, before they go to a user. Where it is not
        0, drop the tokens of these requests and zero it. Then end the requests, or run them again
        outside the graph, by a wrapper without `use_cuda_graph` and its own `plan`.

    Raises
    ------
    RuntimeError
        For a wrapper or release that is not known, such as a build of one's own
        (`0.7.2.post1+mine`).
    ValueError
        For a wrapper that is not fa2 in CUDA-graph mode, was planned for another head_dim or other
        dtypes than fa2 reads, has a custom mask or too small buffers, and for a number that is out
        of range.

    Examples
    --------
    Needs a GPU and FlashInfer. Steps of up to `max_batch` requests, over pages of 16 tokens::

        def zeros(*size):
            return torch.zeros(size, dtype=torch.int32, device="cuda")

        # The wrapper of a graph keeps its buffers; it is planned once, a page per request.
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(2**28, dtype=torch.uint8, device="cuda"),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend="fa2",
            paged_kv_indptr_buffer=zeros(max_batch + 1),
            paged_kv_indices_buffer=zeros(num_pages),
            paged_kv_last_page_len_buffer=zeros(max_batch),
        )
        dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        first = torch.arange(max_batch + 1, dtype=torch.int32)
        last = torch.ones(max_batch, dtype=torch.int32)
        heads = (num_qo_heads, num_kv_heads, 128)
        wrapper.plan(first, zeros(max_batch), last, *heads, 16, **dtypes)
        planner = Fa2Planner(wrapper, head_dim=128, max_seq_len=16384, page_size=16)

        # What replays read. A graph keeps addresses: fill these in place, pass no other tensors.
        seq_lens = zeros(max_batch)
        block_table = zeros(max_batch, 1024)
        q = torch.zeros(max_batch, num_qo_heads, 128, dtype=torch.bfloat16, device="cuda")
        out = torch.empty_like(q)

        planner.plan(seq_lens, block_table=block_table)  # compiles, which a capture cannot
        wrapper.run(q, caches[0], out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            planner.plan(seq_lens, block_table=block_table)  # once per replay, for all layers
            for cache in caches:
                wrapper.run(q, cache, out=out)

        # A step of `lens`, whose pages are `table`; requests past them are empty.
        seq_lens.zero_()
        seq_lens[: len(lens)].copy_(lens)
        block_table[: len(lens), : table.shape[1]].copy_(table)
        graph.replay()
        skipped, lost = planner.overflow.tolist()  # see `overflow`

    >>> planner.plan(seq_lens, block_table=block_table)  # doctest: +SKIP
    """

    def __init__(
        self,
        wrapper: Any,
        *,
        head_dim: int,
        max_seq_len: int,
        q_len: int = 1,
        page_size: int = 0,
        num_sms: int = 0,
    ) -> None:
        release = _known_release()
        state = _private(wrapper)
        _require_fa2(state)
        _require_no_xqa(wrapper)
        require_int("max_seq_len", max_seq_len, most=MAX_TOKENS)
        require_word("head_dim", head_dim, HEAD_DIMS)
        is_theirs = state.plan_info is not getattr(wrapper, OUR_INFO, None)
        if is_theirs:
            _require_head_dim(state, head_dim, release)
        if page_size:
            require_page_size(page_size)
        device = state.int_workspace_buffer.device
        if device.type == "cuda":
            warn_if_not_measured(torch.cuda.get_device_name(device))
        self.shape = PlanShape(
            num_qo_heads=state.num_qo_heads,
            num_kv_heads=state.num_kv_heads,
            head_dim=head_dim,
            kv_bytes=state.cached_kv_data_type.itemsize,
            max_batch_size=state.fixed_batch_size,
            max_seq_len=max_seq_len,
            num_sms=num_sms or torch.cuda.get_device_properties(device).multi_processor_count,
            q_len=q_len,
            window=state.window_left,
            page_size=max(page_size, 1),
        )
        self.layout = PlanLayout.of(self.shape)
        self.page_arrays = {
            "kv_indptr": state.paged_kv_indptr_buf,
            "kv_indices": state.paged_kv_indices_buf,
            "kv_last_page_len": state.paged_kv_last_page_len_buf,
        }
        self.overflow = torch.zeros(2, dtype=torch.int32, device=device)
        self.wrapper = wrapper
        self.page_size = page_size
        self.info = list(self.layout.info)
        self._words = self._reserved(state)
        self._fixed = [getattr(wrapper, name) for name in FIXED]
        self._mark = torch.zeros(1, device=device)
        setattr(wrapper, OUR_INFO, self.info)
        state.qo_indptr_buf.copy_(torch.arange(self.shape.max_batch_size + 1) * q_len)

    def _reserved(self, state: Any) -> Tensor:
        """The words of the plan in the wrapper's workspace; ValueError for too small buffers."""
        room = state.int_workspace_buffer.view(torch.uint8).flatten()
        floats = state.float_workspace_buffer.view(torch.uint8).flatten()
        _require_room("int workspace", len(room), self.layout.int_bytes, "bytes")
        _require_room("float workspace", len(floats), self.layout.float_bytes, "bytes")
        if self.page_size:
            pages = ceil_div(self.shape.max_seq_len, self.page_size)
            _require_room("kv_indices buffer", len(self.page_arrays["kv_indices"]), pages, "pages")
        return room[: self.layout.int_bytes].view(torch.int32)

    def plan(
        self,
        seq_lens: Tensor,
        *,
        seq_len_delta: int = 0,
        req_pool_indices: Tensor | None = None,
        req_to_token: Tensor | None = None,
        block_table: Tensor | None = None,
        fence: bool = True,
    ) -> None:
        """Plan for `seq_lens` [bs] int32 or int64 on the GPU, `seq_len_delta` added: the tokens
        that queries see, those of this step included.

        One launch, capturable, nothing is read back. Fewer requests than the wrapper's are padded
        with empty ones. The same launch writes the wrapper's page arrays, as `build_kv_indices`
        does, if given one of
        - `req_pool_indices` [bs] and `req_to_token` [pool, max_ctx] int32, the slot of each token;
        - `block_table` [>= bs, max_pages] int32, pages of request i in row i, which may be part of
          a wider row. Words past a request's last page are not read.
        `wrapper.run` uses this plan until `wrapper.plan` is called again.

        Requests that do not fit are skipped, never cut short: their output is zeros, and `overflow`
        says so. Nothing is written past the end of `kv_indices`.

        A replay reads the tensors of the captured call, at their addresses. Call it once before the
        capture, with the same tensors: that compiles.

        FlashInfer's kernels read the plan before they wait for the kernel ahead of them
        (programmatic dependent launch), so another one must come in between: that is `fence`. A
        model whose projections come in between may go without.

        Raises ValueError, before the launch, for tensors that do not fit, or once the wrapper was
        planned for other heads, dtypes, window or workspaces.
        """
        self._require_same_wrapper()
        tensors = PlanTensors(seq_lens, self._words, self.overflow)
        page_size = 0
        tables = (req_pool_indices, req_to_token, block_table)
        if any(table is not None for table in tables):
            if not self.page_size:
                raise ValueError(
                    "page_size must be given to the planner that writes page arrays, got none"
                )
            page_size = self.page_size
            tensors = tensors._replace(
                req_pool_indices=req_pool_indices,
                req_to_token=req_to_token,
                block_table=block_table,
                **self.page_arrays,
            )
        LAUNCHER.launch(tensors, (self.shape, page_size), (seq_len_delta,))
        self.wrapper._plan_info = self.info
        if fence:
            self._mark.zero_()

    def _require_same_wrapper(self) -> None:
        for name, before in zip(FIXED, self._fixed, strict=True):
            now = getattr(self.wrapper, name)
            if now is not before and (name.endswith("buffer") or now != before):
                raise ValueError(
                    f"wrapper must be as it was taken over, make a new planner: {name} was "
                    f"{_short(before)}, is {_short(now)}"
                )


def _short(value: object) -> object:
    return f"at {value.data_ptr():#x}" if isinstance(value, Tensor) else value


@cache
def warn_if_not_measured(gpu: str) -> None:
    """Warn, once per name of a GPU, where the constants of `choice` were not judged on it."""
    if not any(name in gpu for name in FA2_MEASURED):
        warnings.warn(
            f"attnlib's constants of fa2's plan were measured on {' and '.join(FA2_MEASURED)}, not "
            f"on {gpu}: outputs are right there, but compare the time with wrapper.plan's",
            stacklevel=3,
        )


def _known_release() -> str:
    release = installed_version("flashinfer-python")
    if release not in RELEASES:
        raise RuntimeError(
            f"flashinfer-python must be a release whose plan is known, {RELEASES[0]} to "
            f"{RELEASES[-1]}, got {release or 'none'}"
        )
    return release


def _private(wrapper: Any) -> Any:
    """The `PRIVATE` attributes without their underscore; RuntimeError where one is missing,
    ValueError for a custom mask."""
    for name in PRIVATE:
        if not hasattr(wrapper, name):
            raise RuntimeError(
                f"wrapper must be a paged wrapper of FlashInfer that has been planned once, got "
                f"{type(wrapper).__name__} without {name}"
            )
    if getattr(wrapper, "_custom_mask_buf", None) is not None:
        raise ValueError("wrapper must not have a custom mask, whose bits its own plan would pack")
    state = {name[1:]: getattr(wrapper, name) for name in PRIVATE}
    return SimpleNamespace(**state)


def _require_no_xqa(wrapper: Any) -> None:
    """ValueError where `run` would not read the plan: FlashInfer 0.7.4 has taken XQA instead."""
    if getattr(wrapper, "_use_xqa_mtp_decode", False):
        raise ValueError(
            "wrapper must run fa2, which reads the plan, got one that FlashInfer has planned for "
            "XQA: give it backend='fa2'"
        )


def _require_fa2(state: Any) -> None:
    words = len(state.plan_info or ())
    if not state.use_cuda_graph or state.backend != "fa2" or words != len(FA2_INFO):
        raise ValueError(
            "wrapper must be fa2 in CUDA-graph mode, planned once (use_cuda_graph=True and "
            f"backend='fa2'; decode: use_tensor_cores=True), got use_cuda_graph="
            f"{state.use_cuda_graph}, backend={state.backend!r}, a plan of {words} integers"
        )
    for name, dtypes in (("q", QUERY_DTYPES), ("kv", CACHE_DTYPES)):
        dtype = getattr(state, f"cached_{name}_data_type")
        if dtype not in dtypes:
            raise ValueError(f"{name}_data_type must be one of {dtypes} for fa2, got {dtype}")


def _require_head_dim(state: Any, head_dim: int, release: str) -> None:
    """ValueError where FlashInfer's plan reserved partial outputs of another head_dim."""
    info = by_name(state.plan_info)
    rows = info["padded_batch_size"] * info["cta_tile_q"]
    if RELEASES.index(release) >= RELEASES.index(ROWS_SINCE):
        rows = ceil_div(rows * state.num_kv_heads, state.num_qo_heads)
    for planned_for in HEAD_DIMS:
        room = rows * state.num_qo_heads * planned_for * WORD
        if room == info["s_offset"] and planned_for != head_dim:
            raise ValueError(f"head_dim must be the wrapper's, {planned_for}, got {head_dim}")


def _require_room(name: str, have: int, needed: int, unit: str) -> None:
    if have < needed:
        raise ValueError(
            f"the wrapper's {name} must have {needed:,} {unit} for this plan, got {have:,}: give "
            f"it a larger one, or plan for less"
        )
