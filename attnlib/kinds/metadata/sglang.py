"""SGLang's own fused kernel, where a `sglang` distribution is installed: the rival itself.

Importing `sglang` starts with its server's dependencies; the file that defines the kernel needs
torch and Triton only, so that file is loaded alone. Read in the releases:

| release | file | arguments |
|---|---|---|
| to 0.5.15.post1 | srt/layers/attention/triton_ops/metadata.py | two kernels, as merged in 0.5.10 |
| from 0.5.16 | kernels/ops/attention/metadata.py | live pages only from 0.5.17 on |
| from 0.5.19 | the same | `strided_indices` is gone |
| 0.5.23 | the same | one kernel; the map of the window's slots, not the pool that holds it |

The engine's `max_seq_pages` before a CUDA graph of a decode step is replayed, read in
srt/layers/attention/flashattention_backend.py:

| release | line | pages of |
|---|---|---|
| 0.5.14 | 2248 | the step's longest request, from the lengths on the host |
| 0.5.15, 0.5.15.post1 | 2530 | the whole context: every row is copied to the table's width |
| 0.5.16 | 2731 | the same |
| 0.5.17, 0.5.20, 0.5.23 | 2771, 2745, 2973 | the same; a program past the live pages returns |
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from ...core.backends.table import installed_version
from ...core.metadata.require import DecodeTensors

DISTRIBUTION = "sglang"
FILES = (
    "sglang/kernels/ops/attention/metadata.py",
    "sglang/srt/layers/attention/triton_ops/metadata.py",
)
POOLS = "sglang.srt.mem_cache.swa_memory_pool"
WHOLE_WIDTH_SINCE = Version("0.5.15")


def unavailable() -> str:
    """Why SGLang's kernel cannot be had here (and what to install), or the empty string."""
    if not (version := installed_version(DISTRIBUTION)):
        return f"{DISTRIBUTION} is not installed: pip install --no-deps {DISTRIBUTION}"
    if _file():
        return ""
    return f"{DISTRIBUTION} {version} has no file of its own for the kernel: needs >= 0.5.14"


def pages_passed(longest: int, columns: int) -> int:
    """The installed release's `max_seq_pages`, for the longest request's pages and the table's."""
    whole = Version(installed_version(DISTRIBUTION)) >= WHOLE_WIDTH_SINCE
    return columns if whole else longest


def build_decode_metadata(
    *, page_size: int, max_pages: int, seq_len_delta: int = 0, **tensors: torch.Tensor | None
) -> None:
    """SGLang's `normal_decode_set_metadata` of the installed release."""
    t = DecodeTensors(**tensors)
    function, names = _function()
    strides = (None,) if "strided_indices" in names else ()
    window = () if t.swa_page_table is None else (t.swa_page_table, _pool(t.swa_slot_map, names))
    function(
        t.cache_seqlens,
        t.cu_seqlens_k,
        t.page_table,
        t.req_to_token,
        t.req_pool_indices,
        *strides,
        max_pages,
        t.seq_lens,
        seq_len_delta,
        page_size,
        *window,
    )


def _pool(slot_map: torch.Tensor | None, names: Collection[str]) -> object:
    """What a release takes for the window's slots: their map, or a pool that holds it.

    The older one asks for an `SWAKVPool`, whose module needs the server: a stand-in is its class.
    """
    if "token_to_kv_pool" not in names:
        return slot_map
    module = sys.modules.setdefault(POOLS, ModuleType(POOLS))
    vars(module).setdefault("SWAKVPool", SimpleNamespace)
    return SimpleNamespace(full_to_swa_index_mapping=slot_map)


def _file() -> Path | None:
    distribution = metadata.distribution(DISTRIBUTION)
    paths = (Path(str(distribution.locate_file(name))) for name in FILES)
    return next((path for path in paths if path.is_file()), None)


@cache
def _function() -> tuple[Callable[..., Any], Collection[str]]:
    if reason := unavailable():
        raise RuntimeError(reason)
    spec = importlib.util.spec_from_file_location("sglang_metadata", _file())
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{_file()} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = module.normal_decode_set_metadata
    return function, inspect.signature(function).parameters
