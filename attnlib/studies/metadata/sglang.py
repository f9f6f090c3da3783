"""SGLang's own kernels, where a `sglang` distribution is installed: the rivals themselves.

Importing `sglang` starts with its server's dependencies; a file that defines a kernel needs torch
and Triton only, so that file is loaded alone. Of the fused kernel, read in the releases:

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

Page arrays of FlashInfer are a sum of the lengths, put into place, and a kernel with a program per
request (0.5.23: flashinfer_backend.py:1790, kv_index_translator.py:600). Pages are tokens there, so
`kv_last_page_len` is written once, when the server starts, and so is the first sum.
"""

import importlib.util
import inspect
import sys
from collections.abc import Collection
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from packaging.version import Version

from ...core.backends.table import installed_version
from ...core.metadata.require import DecodeTensors

DISTRIBUTION = "sglang"
BACKEND = "sglang-metadata"
FOLDERS = (
    "sglang/kernels/ops/attention",
    "sglang/kernels/ops/kvcache",
    "sglang/srt/layers/attention/triton_ops",
)
FUSED = "metadata.py"
PAGES = "kv_indices.py"
"""Files of the fused kernel and of page arrays, in one of the folders."""
POOLS = "sglang.srt.mem_cache.swa_memory_pool"
WHOLE_WIDTH_SINCE = Version("0.5.15")


def unavailable() -> str:
    """Why SGLang's kernel cannot be had here (and what to install), or the empty string."""
    version = installed_version(DISTRIBUTION)
    if not version:
        return f"{DISTRIBUTION} is not installed: pip install --no-deps {DISTRIBUTION}"
    if _file(FUSED):
        return ""
    return f"{DISTRIBUTION} {version} has no file of its own for the kernel: needs >= 0.5.14"


def pages_passed(longest: int, columns: int) -> int:
    """The installed release's `max_seq_pages`, for the longest request's pages and the table's."""
    whole = Version(installed_version(DISTRIBUTION)) >= WHOLE_WIDTH_SINCE
    return columns if whole else longest


def build_decode_metadata(
    *,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
    **tensors: torch.Tensor | None,
) -> None:
    """SGLang's `normal_decode_set_metadata` of the installed release."""
    given = DecodeTensors(**tensors)
    function = _module(FUSED).normal_decode_set_metadata
    names = inspect.signature(function).parameters
    strides = (None,) if "strided_indices" in names else ()
    window: tuple[object, ...] = ()
    if given.swa_page_table is not None:
        window = (given.swa_page_table, _pool(given.swa_slot_map, names))
    function(
        given.cache_seqlens,
        given.cu_seqlens_k,
        given.page_table,
        given.req_to_token,
        given.req_pool_indices,
        *strides,
        max_pages,
        given.seq_lens,
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


def build_kv_indices(
    *,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
    **tensors: torch.Tensor,
) -> None:
    """`kv_indptr` and `kv_indices` as SGLang's decode writes them; pages are tokens."""
    if page_size != 1 or seq_len_delta:
        got = f"{page_size} and {seq_len_delta}"
        raise ValueError(f"page_size must be 1 and seq_len_delta 0 for SGLang's kernel, got {got}")
    lens = tensors["seq_lens"]
    sums = tensors["kv_indptr"]
    pool = tensors["req_to_token"]
    sums[1:] = torch.cumsum(lens, dim=0)
    kernel = _module(PAGES).create_flashinfer_kv_indices_triton
    kernel[(len(lens),)](
        pool,
        tensors["req_pool_indices"],
        lens,
        sums,
        None,
        tensors["kv_indices"],
        pool.stride(0),
    )


def _file(name: str) -> Path | None:
    distribution = metadata.distribution(DISTRIBUTION)
    for folder in FOLDERS:
        path = Path(str(distribution.locate_file(f"{folder}/{name}")))
        if path.is_file():
            return path
    return None


@cache
def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"sglang_{name[:-3]}", _file(name))
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{_file(name)} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
