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
from ...measure.timer import ROTATING, run_timer
from ..base import Subject
from ..call import timed_call
from ..item import Item
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
        spec, decode, device = item.case.spec, item.case.decode, self.bench.device
        sizes = (decode.batch_size, spec.page_size, decode.kv_len, decode.lengths)
        pages = build_call(MetadataCase("kv_indices", *sizes, seed=decode.seed), device)
        lens = pages.inputs["seq_lens"]
        host, num_sms = lens.cpu().numpy(), self.bench.machine["num_sms"]
        shape = PlanShape.of(spec, host, num_sms, item.case.q_len)
        words = torch.full((PlanLayout.of(shape).int_bytes // WORD,), POISON, dtype=torch.int32)
        chunk = chosen_chunk(lens, words.to(device), shape)
        outputs = {"words": words.to(device)} | pages.outputs
        planned = plan_words(shape, host, chunk).image(len(words), POISON)
        call = replace(pages, outputs=outputs, wanted={"words": [planned]} | pages.wanted)
        tensors = pages.inputs | outputs
        run = partial(build_fa2_plan, **tensors, shape=shape, page_size=spec.page_size)
        return timed_call(
            run,
            call.check,
            timer=partial(timer, run),
            work_per_call=float(sum(out.nbytes for out in outputs.values())),
            gpu=device == "cuda",
        )


def chosen_chunk(lens: torch.Tensor, words: torch.Tensor, shape: PlanShape) -> int:
    """The chunk that a launch chooses; RuntimeError where it is worse than the twin's."""
    build_fa2_plan(seq_lens=lens, words=words, shape=shape)
    host = lens.cpu().numpy()
    chunk = chunk_in(words.cpu().numpy(), PlanLayout.of(shape))
    chunks = np.array([chunk, choose(shape, host).chunk])
    times = predicted_time(shape, counted(shape, host), chunks)
    if times[0] > times[1] * (1 + MOST_APART):
        raise RuntimeError(
            f"chunk must be about as good as the twin's, {chunks[1]}, was {chunks[0]}"
        )
    return int(chunks[0])
