"""A step's metadata: one builder, one case; every live word checked, then traced and timed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from ..cases import MetadataCase
from ..cost import metadata_cost
from ..measure.timer import run_timer
from ..measure.trace import trace_kernels
from ..metadata import oracle
from ..metadata import sglang as sglang_kernel
from ..metadata.launch import without_overlap
from ..record import Item
from ..workload import build_request_pool
from .base import Bench, timed_fields

POISON = -77
BUILDERS = {
    "metadata-eager": "eager",
    "metadata-serial": "serial",
    "metadata-fused": "decode",
    "metadata-fused-alone": "decode",
    "sglang-metadata": "sglang",
}
"""Backend name -> module of `attnlib.metadata`; `alone` starts after its neighbour has ended."""


class MetadataSubject:
    """Measures one builder of `BUILDERS`; keeps the request pool of the last case."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._case: MetadataCase | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._wanted: tuple[Any, ...] = ()

    def measure(self, item: Item) -> dict[str, Any]:
        """Compare every live word with the oracle, then trace and time the call."""
        if item.backend not in BUILDERS:
            raise ValueError(
                f"backend must be one of {', '.join(BUILDERS)} for metadata, got {item.backend!r}"
            )
        reason = sglang_kernel.unavailable() if item.backend == "sglang-metadata" else ""
        if reason:
            return {"status": "refused", "reason": reason}
        self.bench.require_release(sglang_kernel.DISTRIBUTION, item.release)
        timer = run_timer(item.timer)
        with _overlap(item.backend):
            return self._timed(item, timer)

    def _timed(self, item: Item, timer: Callable[..., Any]) -> dict[str, Any]:
        self._prepare(item.case)
        call = self._call(item)
        call()
        wrong = self._wrong_words()
        verdict = {"oracle_error": float(wrong), "oracle_budget": 0.0}
        verdict["oracle_rows"] = item.case.batch_size
        if wrong:
            return {"status": "incorrect", "reason": f"{wrong} words differ", **verdict}
        kernels = trace_kernels(call) if self.bench.device == "cuda" else ()
        work = float(metadata_cost(item.case).fetch_bytes)
        return timed_fields(timer(call), kernels=kernels, work_per_call=work) | verdict

    def _prepare(self, case: MetadataCase) -> None:
        if case != self._case:
            self._case, self._tensors = case, {}
            pool = build_request_pool(case, device=self.bench.device)
            numbers = {"page_size": case.page_size, "max_pages": case.max_pages}
            self._wanted = oracle.decode_metadata(
                *(tensor.cpu().numpy() for tensor in pool.values()),
                **numbers,
                seq_len_delta=case.seq_len_delta,
            )
            sizes = {
                "cache_seqlens": (case.batch_size,),
                "cu_seqlens_k": (case.batch_size + 1,),
                "page_table": (case.batch_size, case.max_pages),
            }
            outputs = {
                name: torch.empty(size, dtype=torch.int32, device=self.bench.device)
                for name, size in sizes.items()
            }
            self._tensors = {**pool, **outputs}
        for name in ("cache_seqlens", "cu_seqlens_k", "page_table"):
            self._tensors[name].fill_(POISON)

    def _call(self, item: Item) -> Callable[[], None]:
        module = importlib.import_module(f"attnlib.metadata.{BUILDERS[item.backend]}")
        build, tensors, case = module.build_decode_metadata, self._tensors, item.case
        page_size, max_pages, delta = case.page_size, case.max_pages, case.seq_len_delta

        def call() -> None:
            build(**tensors, page_size=page_size, max_pages=max_pages, seq_len_delta=delta)

        return call

    def _wrong_words(self) -> int:
        cache_seqlens, cu_seqlens_k, rows, _ = self._wanted
        have = {name: self._tensors[name].cpu().numpy() for name in ("cache_seqlens", "page_table")}
        wrong = int((have["cache_seqlens"] != cache_seqlens).sum())
        wrong += int((self._tensors["cu_seqlens_k"].cpu().numpy() != cu_seqlens_k).sum())
        for row, pages in zip(have["page_table"], rows, strict=True):
            wrong += int(np.count_nonzero(row[: len(pages)] != pages))
        return wrong


def _overlap(backend: str) -> AbstractContextManager[None]:
    return without_overlap() if backend == "metadata-fused-alone" else nullcontext()
