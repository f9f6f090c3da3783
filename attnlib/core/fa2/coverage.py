"""Does the plan in a wrapper of FlashInfer's fa2 cover the lengths of a call, and no more?

A captured graph replays the plan that lies in its workspace. Where a request is longer than it was
planned, its blocks read a part of it, without an error: TensorRT-LLM #18769 captured 8,192 tokens
beside seven requests of one, replayed 8 x 4,096, and read 320 tokens of seven requests.

A graph launches as many blocks as were captured. A plan without split-KV has no mask of those in
use, so each reads its words: FlashInfer #4002 wrote 8 of 66, and the rest was what lay there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..spec import INT32_MAX, ceil_div, require_all_read
from .library import FA2_INFO, by_name
from .words import WORD

INDICES = ("request_indices", "qo_tile_indices", "kv_tile_indices")
READ = (*INDICES, "kv_chunk_size_ptr", "block_valid_mask")
"""The arrays that decide what is read; the workspace of 8 MiB is not copied whole."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of a plan that run: `INDICES` of each, their numbers in a grid of `count`, and the
    tokens of a chunk; 0: requests are not cut."""

    count: int
    numbers: np.ndarray
    indices: dict[str, np.ndarray]
    chunk: int

    @classmethod
    def of(cls, image: np.ndarray, info: Sequence[int]) -> "Blocks":
        """Of the int workspace `image` [words] int32 and `wrapper._plan_info`."""
        facts = by_name(info)

        def words(name: str, count: int) -> np.ndarray:
            at = facts[f"{name}_offset"] // WORD
            return image[at : at + count]

        count = facts["padded_batch_size"]
        numbers = np.arange(count)
        if facts["split_kv"] and facts["enable_cuda_graph"]:
            mask = words("block_valid_mask", ceil_div(count, WORD)).view(np.uint8)
            numbers = np.flatnonzero(mask[:count])
        indices = {name: words(name, count)[numbers] for name in INDICES}
        chunk = 0
        if facts["split_kv"]:
            chunk = int(words("kv_chunk_size_ptr", 1)[0])
        return cls(count, numbers, indices, chunk)

    def tokens_read(self, seq_lens: np.ndarray) -> np.ndarray:
        """Tokens of each request that the blocks read, [bs] int64, given those of the call.

        A block reads chunk number `kv_tile_indices` of request `request_indices`, as far as that
        goes.
        """
        lens = np.asarray(seq_lens, np.int64)
        requests = self.indices["request_indices"]
        if not self.chunk:
            is_read = np.isin(np.arange(len(lens)), requests)
            return np.where(is_read, lens, 0)
        stacked = np.stack([requests, self.indices["kv_tile_indices"]])
        pairs = np.unique(stacked, axis=1)
        requests, tiles = pairs[:, pairs[0] < len(lens)]
        left = lens[requests] - tiles * self.chunk
        tokens = np.clip(left, 0, self.chunk)
        return np.bincount(requests, tokens, len(lens)).astype(np.int64)

    def require_entries(self, batch_size: int) -> None:
        """RuntimeError where a block is for a request that the call does not have, or for a tile
        below 0."""
        for name, words in self.indices.items():
            most = batch_size - 1 if name == "request_indices" else INT32_MAX
            wrong = (words < 0) | (words > most)
            if wrong.any():
                first = int(wrong.argmax())
                limits = f"in 0..{most}" if most < INT32_MAX else ">= 0"
                raise RuntimeError(
                    f"the plan of the wrapper must have {name} {limits} in every block that runs, "
                    f"got {words[first]} in block {self.numbers[first]} of {self.count}: clear the "
                    "words behind the plan, or plan inside the graph (Fa2Planner)"
                )


def tokens_read(image: np.ndarray, info: Sequence[int], seq_lens: np.ndarray) -> np.ndarray:
    """`Blocks.tokens_read` of a plan."""
    return Blocks.of(image, info).tokens_read(seq_lens)


def require_plan(wrapper: Any, seq_lens: Tensor) -> None:
    """RuntimeError unless the plan in a wrapper of FlashInfer's fa2 reads every token of a call,
    by blocks that are all of its requests.

    With a window it must read window + tile tokens, as FlashInfer plans. Copies the words and the
    lengths to the host, so it synchronises.

    Parameters
    ----------
    wrapper : BatchDecodeWithPagedKVCacheWrapper or BatchPrefillWithPagedKVCacheWrapper
        Planned for fa2 (decode: with tensor cores).
    seq_lens : Tensor
        [bs] integers, tokens per request of the call.

    Raises
    ------
    RuntimeError
        If a request is cut short, or a block that runs is for none; names the first one.
    ValueError
        For a wrapper that has no such plan.

    Examples
    --------
    A plan for requests of 300 tokens, in what `require_plan` reads of a wrapper:

    >>> import numpy as np
    >>> import torch
    >>> from types import SimpleNamespace
    >>> from attnlib.core import PlanLayout, PlanShape, plan_words
    >>> shape = PlanShape(32, 8, 128, kv_bytes=2, max_batch_size=2, max_seq_len=512, num_sms=132)
    >>> plan = plan_words(shape, np.array([300, 300]), chunk=128)
    >>> image = plan.image(PlanLayout.of(shape).int_bytes // 4)
    >>> wrapper = SimpleNamespace(
    ...     _plan_info=plan.info, _int_workspace_buffer=torch.from_numpy(image), _window_left=-1
    ... )
    >>> require_plan(wrapper, torch.tensor([300, 200]))
    >>> require_plan(wrapper, torch.tensor([300, 400]))
    Traceback (most recent call last):
        ...
    RuntimeError: the plan of the wrapper must read all 400 tokens of request 1, it reads 384 ...
    """
    info = getattr(wrapper, "_plan_info", None)
    if info is None or len(info) != len(FA2_INFO):
        got = "none" if info is None else f"one of {len(info)} integers"
        raise ValueError(f"wrapper must have a plan of fa2 ({len(FA2_INFO)} integers), got {got}")
    facts = by_name(info)
    last_array = max(facts[f"{name}_offset"] for name in READ) // WORD
    end = last_array + facts["padded_batch_size"]
    image = wrapper._int_workspace_buffer.view(torch.int32)[:end].cpu().numpy()
    lens = seq_lens.cpu().numpy().astype(np.int64)
    blocks = Blocks.of(image, info)
    blocks.require_entries(len(lens))
    if wrapper._window_left >= 0:
        lens = np.minimum(lens, wrapper._window_left + facts["cta_tile_q"])
    require_all_read(
        "the plan of the wrapper",
        read=blocks.tokens_read(lens),
        lens=lens,
        when="before the replay, or inside the graph (Fa2Planner)",
    )
