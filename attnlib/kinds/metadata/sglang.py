"""SGLang's own fused kernel, where a `sglang` distribution is installed: the rival itself.

Importing `sglang` starts with its server's dependencies; the file that defines the kernel needs
torch and Triton only, so that file is loaded alone. Read in the releases:

| release | file | arguments |
|---|---|---|
| 0.5.14 | srt/layers/attention/triton_ops/metadata.py | the two kernels as merged in 0.5.10 |
| 0.5.16 and 0.5.18 | kernels/ops/attention/metadata.py | live pages only from 0.5.18 on |
| from 0.5.21 | the same | `strided_indices` is gone; one kernel from 0.5.23 on |
"""

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...core.backends.table import installed_version

DISTRIBUTION = "sglang"
FILES = (
    "sglang/kernels/ops/attention/metadata.py",
    "sglang/srt/layers/attention/triton_ops/metadata.py",
)


def unavailable() -> str:
    """Why SGLang's kernel cannot be had here (and what to install), or the empty string."""
    if not (version := installed_version(DISTRIBUTION)):
        return f"{DISTRIBUTION} is not installed: pip install --no-deps {DISTRIBUTION}"
    if _file():
        return ""
    return f"{DISTRIBUTION} {version} has no file of its own for the kernel: needs >= 0.5.14"


def build_decode_metadata(
    *,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    max_pages: int,
    seq_len_delta: int = 0,
) -> None:
    """SGLang's `normal_decode_set_metadata` of the installed release, without a sliding window."""
    function, takes_strides = _function()
    strides = (None,) if takes_strides else ()
    function(
        cache_seqlens,
        cu_seqlens_k,
        page_table,
        req_to_token,
        req_pool_indices,
        *strides,
        max_pages,
        seq_lens,
        seq_len_delta,
        page_size,
    )


def _file() -> Path | None:
    found = metadata.distribution(DISTRIBUTION)
    paths = (Path(str(found.locate_file(name))) for name in FILES)
    return next((path for path in paths if path.is_file()), None)


@cache
def _function() -> tuple[Callable[..., Any], bool]:
    if reason := unavailable():
        raise RuntimeError(reason)
    spec = importlib.util.spec_from_file_location("sglang_metadata", _file())
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{_file()} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = module.normal_decode_set_metadata
    return function, "strided_indices" in inspect.signature(function).parameters
