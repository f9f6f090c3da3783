"""Planning of FlashInfer's fa2 on the GPU, without its attention.

`fa2-plan-alone` is one launch that writes a plan's words and the page arrays, and that starts after
its neighbour has ended: in a graph that repeats one call it would overlap its own copy. The
tensors are those that `build_kv_indices` takes; FlashInfer is not called.

The chunk that a launch chooses must be within 1 % of the NumPy twin's in predicted time; for that
chunk every word must be the twin's, and the page arrays the metadata oracle's.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...core.fa2.choice import PlanShape, choose, counted, predicted_time
from ...core.fa2.kernel import build_fa2_plan
from ...core.fa2.words import WORD, PlanLayout, chunk_in, plan_words
from ...core.metadata.launch import without_overlap
from ...core.spec import require_word
from ...measure.calls.base import Subject
from ...measure.calls.call import timed_call
from ...measure.calls.form import Item
from ...measure.timer import ROTATING, run_timer
from ..metadata.case import MetadataCase
from ..metadata.measure import POISON, build_call
from .case import PlanCase

ALONE = "fa2-plan-alone"
MOST_APART = 0.01
"""Of predicted time, between the choices of the GPU in float32 and of its twin."""


class PlanSubject(Subject):
    """Checks, times and traces the planning of a case."""

    @without_overlap()
    def measure(self, item: Item[PlanCase]) -> dict[str, Any]:
        """A record's fields; ValueError for another backend, or a timer that copies a cache."""
        require_word("backend of a plan", item.backend, (ALONE,))
        self.bench.require_release("flashinfer-python", item.release)
        if item.timer in ROTATING:
            raise ValueError(f"timer must not need copies of the cache, got {item.timer!r}")
        timer = run_timer(item.timer)
        spec = item.case.spec
        device = self.bench.device
        pages = build_call(_pages_of(item.case), device)
        lens = pages.inputs["seq_lens"]
        host = lens.cpu().numpy()
        num_sms = self.bench.machine["num_sms"]
        shape = PlanShape.of(
            spec,
            host,
            num_sms,
            item.case.q_len,
        )
        count = PlanLayout.of(shape).int_bytes // WORD
        words = torch.full(
            (count,),
            POISON,
            dtype=torch.int32,
        )
        chunk = chosen_chunk(lens, words.to(device), shape)
        planned = plan_words(shape, host, chunk).image(count, POISON)
        outputs = {"words": words.to(device)} | pages.outputs
        wanted = {"words": [planned]} | pages.wanted
        call = replace(pages, outputs=outputs, wanted=wanted)
        written = float(sum(output.nbytes for output in outputs.values()))
        run = partial(
            build_fa2_plan,
            **pages.inputs,
            **outputs,
            overflow=torch.zeros(2, dtype=torch.int32, device=device),
            shape=shape,
            page_size=spec.page_size,
        )
        return timed_call(
            run,
            call.check,
            timer=partial(timer, run),
            work_per_call=written,
            gpu=device == "cuda",
        )


def _pages_of(case: PlanCase) -> MetadataCase:
    """The page arrays of the plan's requests, as a case."""
    return MetadataCase(
        "kv_indices",
        batch_size=case.decode.batch_size,
        page_size=case.spec.page_size,
        max_ctx=case.decode.kv_len,
        lengths=case.decode.lengths,
        seed=case.decode.seed,
    )


def chosen_chunk(
    lens: torch.Tensor,
    words: torch.Tensor,
    shape: PlanShape,
) -> int:
    """The chunk that a launch chooses; RuntimeError where it is worse than the twin's."""
    build_fa2_plan(seq_lens=lens, words=words, shape=shape)
    host = lens.cpu().numpy()
    chunk = chunk_in(words.cpu().numpy(), PlanLayout.of(shape))
    twins = choose(shape, host).chunk
    chunks = np.array([chunk, twins])
    time, twins_time = predicted_time(shape, counted(shape, host), chunks)
    if time > twins_time * (1 + MOST_APART):
        raise RuntimeError(f"chunk must be about as good as the twin's, {twins}, was {chunk}")
    return int(chunk)
