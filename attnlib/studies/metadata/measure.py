"""A step's metadata: one builder, one case; every word checked, then traced and timed."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...core.metadata.launch import without_overlap
from ...core.spec import require_word
from ...measure.calls.base import Subject
from ...measure.calls.call import timed_call
from ...measure.calls.check import OracleCheck
from ...measure.calls.form import Item
from ...measure.calls.lengths import sample_seq_lens
from ...measure.timer import run_timer
from . import builders, schedules, sglang
from .case import MetadataCase

POISON = -77
SLOTS = 2**20
"""KV slots that a request pool's tokens point into."""


@dataclass(frozen=True)
class BuilderCall:
    """A builder's tensors and numbers, and the first words that each row must have."""

    case: MetadataCase
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    numbers: dict[str, int]
    wanted: dict[str, list[np.ndarray]]

    def check(
        self,
        _: object = None,
        *,
        wrong_words: Callable[[], int] = lambda: 0,
    ) -> OracleCheck:
        """How many words differ from the oracle's, with those of schedules."""
        wrong = wrong_words()
        for name, rows in self.wanted.items():
            written = self.outputs[name].cpu().numpy()
            written = written.reshape(len(rows), -1)
            for row, words in zip(written, rows, strict=True):
                wrong += int(np.count_nonzero(row[: len(words)] != words))
        return OracleCheck(
            error=float(wrong),
            budget=0.0,
            rows=self.case.batch_size,
            counts="wrong words",
        )


class MetadataSubject(Subject):
    """Measures one design of a builder."""

    def measure(self, item: Item[MetadataCase]) -> dict[str, Any]:
        """Compare every live word with the oracle, then time and trace the call."""
        builder = item.case.builder
        backend = item.backend
        designs = builders.named(builder).designs
        able = [*designs]
        if builder == "decode":
            able += schedules.BACKENDS
        require_word(f"backend of {builder} metadata", backend, able)
        is_sglangs = backend == sglang.BACKEND
        if is_sglangs:
            reason = sglang.unavailable()
        else:
            reason = schedules.unavailable(backend)
        if reason:
            return {"status": "refused", "reason": reason}
        self.bench.require_release(sglang.DISTRIBUTION, item.release)
        timer = run_timer(item.timer)
        call = self.prepared(item.case)
        for output in call.outputs.values():
            output.fill_(POISON)
        numbers = _as_sglang_calls(call) if is_sglangs else call.numbers
        arguments = call.inputs | call.outputs | numbers
        check = call.check
        if backend in schedules.BACKENDS:
            run, wrong_words = schedules.step_of(backend, item.case, arguments)
            check = partial(call.check, wrong_words=wrong_words)
        else:
            run = partial(designs[backend], **arguments)
        is_alone = backend == "metadata-fused-alone"
        with without_overlap() if is_alone else nullcontext():
            return timed_call(
                run,
                check,
                timer=partial(timer, run),
                work_per_call=float(item.case.fetched_bytes),
                gpu=self.bench.device == "cuda",
            )

    def prepare(self, case: MetadataCase) -> BuilderCall:
        """The call of the case's builder."""
        return build_call(case, self.bench.device)


def _as_sglang_calls(call: BuilderCall) -> dict[str, int]:
    """The numbers that SGLang's kernel is called with; what its server wrote before is written."""
    if call.case.builder == "decode":
        longest = max(len(pages) for pages in call.wanted["page_table"])
        passed = sglang.pages_passed(longest, call.case.max_pages)
        return call.numbers | {"max_pages": passed}
    # Words that SGLang writes once, when its server starts.
    call.outputs["kv_indptr"][:1] = 0
    call.outputs["kv_last_page_len"].fill_(1)
    return call.numbers


def build_call(case: MetadataCase, device: str) -> BuilderCall:
    """The call of a case's builder; a page table is compared row by row, where it is live."""
    inputs = _request_pool(case, device)
    numbers = {
        "page_size": case.page_size,
        "max_pages": case.max_pages,
        "seq_len_delta": case.seq_len_delta,
    }
    arrays = {}
    for name, tensor in inputs.items():
        arrays[name] = tensor.cpu().numpy()
    builder = builders.named(case.builder)
    results = builder.oracle(**arrays, **numbers)
    wanted: dict[str, list[np.ndarray]] = {}
    outputs: dict[str, torch.Tensor] = {}
    for name, words in zip(builder.outputs, results, strict=True):
        if name == "swa_page_table" and not case.swa:
            continue
        size: tuple[int, ...] = (len(words),)
        if name.endswith("page_table"):
            wanted[name] = list(words)
            size = (len(words), case.max_pages)
        else:
            wanted[name] = [np.asarray(words)]
        outputs[name] = torch.full(
            size,
            POISON,
            dtype=torch.int32,
            device=device,
        )
    return BuilderCall(case, inputs, outputs, numbers, wanted)


def _request_pool(case: MetadataCase, device: str) -> dict[str, torch.Tensor]:
    """What a step's metadata is computed from, on `device`.

    `seq_lens` [bs] int64, `req_pool_indices` [bs] int64, a shuffled choice of the pool's rows,
    `req_to_token` [pool, width] int32, random KV slots, and with a window `swa_slot_map` [slots]
    int64, their places in the window's pool.
    """
    rows = max(case.batch_size, case.pool_size)
    shuffled = np.random.default_rng(case.seed + 1).permutation(rows)
    chosen = shuffled[: case.batch_size]
    generator = torch.Generator(device=device).manual_seed(case.seed)
    lens = sample_seq_lens(case).astype(np.int64)
    lens = np.maximum(lens - case.seq_len_delta, 1)
    pool = {
        "seq_lens": torch.from_numpy(lens).to(device),
        "req_pool_indices": torch.from_numpy(chosen).to(device),
        "req_to_token": torch.randint(
            SLOTS,
            size=(rows, case.width),
            dtype=torch.int32,
            generator=generator,
            device=device,
        ),
    }
    if case.swa:
        pool["swa_slot_map"] = torch.randperm(
            SLOTS,
            generator=generator,
            device=device,
        )
    return pool
