"""Plan for a FlashInfer wrapper of your own, on the GPU.

    wrapper.plan(..., q_data_type=torch.bfloat16)   # once, as at capture: FlashInfer sets it up
    planner = Fa2Planner(wrapper, head_dim=128, max_seq_len=131072, page_size=16)
    inputs = {"req_pool_indices": rows, "req_to_token": pool}
    planner.plan(seq_lens, **inputs)                # compiles, which a capture cannot
    with torch.cuda.graph(graph):
        planner.plan(seq_lens, **inputs)            # plans in every replay
        for layer in layers:
            wrapper.run(q, cache)

`wrapper` is a BatchDecodeWithPagedKVCacheWrapper (tensor cores) or a
BatchPrefillWithPagedKVCacheWrapper of fa2 in CUDA-graph mode. Without `inputs` its page arrays are
not written: fill them for the same lengths before each replay.

What FlashInfer keeps private is named once, in `PRIVATE`.
"""

from types import SimpleNamespace
from typing import Any

import torch

from ..backends.base import installed_version
from ..spec import require_int, require_word
from .choice import PlanShape
from .kernel import LAUNCHER, PlanTensors
from .library import FA2_INFO, HEAD_DIMS, RELEASES, ROWS_SINCE
from .words import WORD, PlanLayout, plan_words

MAX_TOKENS = 2**21
"""Of a request: the kernel divides in float32."""
OUR_INFO = "_attnlib_plan_info"
"""Attribute of a wrapper that holds the last planner's `_plan_info`."""
FIXED = """
_int_workspace_buffer _float_workspace_buffer _fixed_batch_size _num_qo_heads _num_kv_heads
_window_left _cached_q_data_type _cached_kv_data_type
""".split()
"""Attributes that must be what they were when the planner took the wrapper over."""
PRIVATE = (
    """
_plan_info _qo_indptr_buf _use_cuda_graph _backend _paged_kv_indptr_buf _paged_kv_indices_buf
_paged_kv_last_page_len_buf
""".split()
    + FIXED
)
"""Attributes of a planned wrapper that are not public, the same in all `RELEASES` that can run."""


class Fa2Planner:
    """See the module. `shape` is what was fixed, `layout` where the words lie, `page_arrays` the
    wrapper's buffers by the names of `core.metadata.build_kv_indices`."""

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
        """Take over a planned wrapper: `q_len` queries per request, requests of at most
        `max_seq_len` tokens. `page_size` is that of the page arrays, where `plan` shall write
        them. `num_sms` SMs are planned for, all of the GPU's if 0.

        Raises RuntimeError for a wrapper or release that is not known, ValueError for one that is
        not fa2 in CUDA-graph mode, was planned for another head_dim, has a custom mask or too
        small workspaces, and for a number that is no integer in its range.
        """
        release = _known_release()
        state = _private(wrapper)
        _require_fa2(state)
        require_int("max_seq_len", max_seq_len, most=MAX_TOKENS)
        require_word("head_dim", head_dim, HEAD_DIMS)
        if state.plan_info is not getattr(wrapper, OUR_INFO, None):
            _require_head_dim(state, head_dim, release)
        require_int("q_len", q_len)
        require_int("num_sms", num_sms or 1)
        device = state.int_workspace_buffer.device
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
        )
        self.layout = PlanLayout.of(self.shape)
        room = state.int_workspace_buffer.view(torch.uint8).flatten()
        _require_room("int", room, self.layout.int_bytes)
        floats = state.float_workspace_buffer.view(torch.uint8).flatten()
        _require_room("float", floats, self.layout.float_bytes)
        names = ("kv_indptr", "kv_indices", "kv_last_page_len")
        self.page_arrays = {name: getattr(state, f"paged_{name}_buf") for name in names}
        self.wrapper, self.page_size, self.info = wrapper, page_size, list(self.layout.info)
        setattr(wrapper, OUR_INFO, self.info)
        self._fixed = [getattr(wrapper, name) for name in FIXED]
        self._words = room[: self.layout.int_bytes].view(torch.int32)
        self._mark = torch.zeros(1, device=device)
        state.qo_indptr_buf.copy_(torch.arange(self.shape.max_batch_size + 1) * q_len)

    def plan(
        self,
        seq_lens: torch.Tensor,
        *,
        seq_len_delta: int = 0,
        req_pool_indices: torch.Tensor | None = None,
        req_to_token: torch.Tensor | None = None,
        fence: bool = True,
    ) -> None:
        """Plan for `seq_lens` [bs] int32 or int64 on the GPU, `seq_len_delta` added: the tokens in
        the cache, new ones included.

        One launch, capturable, nothing is read back. Fewer requests than the wrapper's are padded
        with empty ones. Of a request longer than `max_seq_len` the rest is not attended to, without
        an error. Given `req_pool_indices` [bs] and `req_to_token` [pool, max_ctx], the slot of each
        token, the same launch writes the wrapper's page arrays, as `build_kv_indices` does.
        `wrapper.run` uses this plan until `wrapper.plan` is called again.

        FlashInfer's kernels read the plan before they wait for the kernel ahead of them
        (programmatic dependent launch), so another one must come in between: that is `fence`. A
        model whose projections come in between may go without.

        Raises ValueError, before the launch, for tensors that do not fit, or once the wrapper was
        planned for other heads, dtypes, window or workspaces.
        """
        self._require_same_wrapper()
        if req_to_token is None and req_pool_indices is None:
            tensors, page_size = PlanTensors(seq_lens, self._words), 0
        else:
            page_size = self._page_size_for(req_to_token)
            paged = (req_pool_indices, req_to_token, *self.page_arrays.values())
            tensors = PlanTensors(seq_lens, self._words, *paged)
        LAUNCHER.launch(tensors, (self.shape, page_size), (seq_len_delta,))
        self.wrapper._plan_info = self.info
        if fence:
            self._mark.zero_()

    def plan_with(self, seq_lens: torch.Tensor, chunk: int) -> None:
        """A plan with KV chunks of `chunk` tokens, made on the host for `seq_lens` [bs] there: to
        try chunks. Raises as `plan_words` does."""
        self._require_same_wrapper()
        image = plan_words(self.shape, seq_lens.numpy(), chunk).image(len(self._words))
        self._words.copy_(torch.from_numpy(image))
        self.wrapper._plan_info = self.info

    def _page_size_for(self, req_to_token: torch.Tensor | None) -> int:
        if not self.page_size:
            raise ValueError("page_size must be given to the planner that writes page arrays")
        pages = -(-self.shape.max_seq_len // self.page_size)
        if req_to_token is not None and -(-req_to_token.shape[-1] // self.page_size) < pages:
            raise ValueError(
                f"req_to_token must have a column per token, for max_seq_len "
                f"{self.shape.max_seq_len}, got {list(req_to_token.shape)}: a block table, with a "
                f"column per page, does not do; fill the page arrays without this argument"
            )
        return self.page_size

    def _require_same_wrapper(self) -> None:
        for name, before in zip(FIXED, self._fixed, strict=True):
            now = getattr(self.wrapper, name)
            if now is not before and (name.endswith("buffer") or now != before):
                raise ValueError(
                    f"wrapper must be as it was taken over, make a new planner: {name} was "
                    f"{_short(before)}, is {_short(now)}"
                )


def _short(value: object) -> object:
    return f"at {value.data_ptr():#x}" if isinstance(value, torch.Tensor) else value


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
    return SimpleNamespace(**{name[1:]: getattr(wrapper, name) for name in PRIVATE})


def _require_fa2(state: Any) -> None:
    if not state.use_cuda_graph or state.backend != "fa2" or len(state.plan_info or ()) != 15:
        raise ValueError(
            "wrapper must be fa2 in CUDA-graph mode, planned once (use_cuda_graph=True and "
            f"backend='fa2'; decode: use_tensor_cores=True), got use_cuda_graph="
            f"{state.use_cuda_graph}, backend={state.backend!r}, "
            f"a plan of {len(state.plan_info or ())} integers"
        )


def _require_head_dim(state: Any, head_dim: int, release: str) -> None:
    """ValueError where FlashInfer's plan left room for partial outputs of another head_dim."""
    info = dict(zip(FA2_INFO, state.plan_info, strict=True))
    rows = info["padded_batch_size"] * info["cta_tile_q"]
    if RELEASES.index(release) >= RELEASES.index(ROWS_SINCE):
        rows = -(-rows * state.num_kv_heads // state.num_qo_heads)
    planned = {rows * state.num_qo_heads * other * WORD: other for other in HEAD_DIMS}
    planned_for = planned.get(info["s_offset"], head_dim)
    if planned_for != head_dim:
        raise ValueError(f"head_dim must be the wrapper's, {planned_for}, got {head_dim}")


def _require_room(name: str, buffer: torch.Tensor, needed: int) -> None:
    if buffer.numel() < needed:
        raise ValueError(
            f"the wrapper's {name} workspace must have {needed:,} bytes for this plan, got "
            f"{buffer.numel():,}: give it a larger one, or a smaller batch"
        )
