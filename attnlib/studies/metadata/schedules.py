"""A step's metadata with the schedules of a model's layers: in one launch, or layer by layer.

`once` is `core.build_step_schedules`. `each` is what SGLang 0.5.23 launches: one kernel for the
metadata, then FlashAttention-3's prepare kernel once for all layers with full attention of one
query token, and in every other layer again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...core.gpu import HOPPER_SMS
from ...core.metadata.decode import build_decode_metadata
from ...core.metadata.schedules import build_step_schedules
from ...core.schedule import library
from ...core.schedule.facts import FULL, SchedulerFacts, latent_facts, layer_facts
from ...core.schedule.flash_attn3 import ask_library, sm_count
from ...core.schedule.kinds import StepSchedules
from ...core.schedule.words import schedule_words
from ...core.spec import AttnSpec, MlaSpec, require_word
from .case import DECODE_MODELS, EACH, VERIFY_MODELS, MetadataCase, ways


@dataclass(frozen=True)
class Model:
    """Kinds of layers, and how often SGLang prepares the schedule of each kind in a step."""

    layers: Mapping[str, AttnSpec | MlaSpec]
    prepared: Mapping[str, int]


_GPT_OSS = AttnSpec(64, 8, 64, 1)
MODELS = {
    "gpt-oss-120b": Model(
        layers={"full": _GPT_OSS, "window": replace(_GPT_OSS, window=128)},
        prepared={"full": 1, "window": 18},
    ),
    "deepseek-v3": Model(
        layers={"mla": MlaSpec(128, page_size=1)},
        prepared={"mla": 61},
    ),
    "llama-3.1-8b-verify": Model(
        layers={"full": AttnSpec(32, 8, 128, 1)},
        prepared={"full": 32},
    ),
}
"""DeepSeek's with all heads on a GPU; the last one in verification of drafts."""
BACKENDS = ways(DECODE_MODELS + VERIFY_MODELS)


def unavailable(backend: str) -> str:
    """Why a backend cannot run here, or the empty string."""
    if not backend.startswith(EACH):
        return ""
    if library.build().startswith("sglang"):
        return ""
    return f"FlashAttention-3 must be {library.SGLANG_KERNEL}'s, got {library.supplier()}"


def facts_of(
    model: Model,
    case: MetadataCase,
    device: torch.device,
) -> dict[str, SchedulerFacts]:
    """The attention calls of a step, by kind; `seq_len_delta` are the drafts of a verification."""
    call: dict[str, Any] = {
        "columns": case.max_pages,
        "batch_size": case.batch_size,
        "max_seqlen_q": max(1, case.seq_len_delta),
        "num_sms": sm_count(device) if device.type == "cuda" else HOPPER_SMS,
        "causal": True,
        "varlen_q": True,
        "build": "sglang",
    }
    facts = {}
    for kind, layer in model.layers.items():
        spec = replace(layer, page_size=case.page_size)
        if isinstance(spec, MlaSpec):
            facts[kind] = latent_facts(spec, **call)
        else:
            if spec.window:
                window = (spec.window - 1, 0)
            else:
                window = FULL
            facts[kind] = layer_facts(spec, window=window, **call)
    return facts


def step_of(
    backend: str,
    case: MetadataCase,
    arguments: Mapping[str, Any],
) -> tuple[Callable[[], None], Callable[[], int]]:
    """A step by a backend: the call, and what counts its wrong words of a schedule.

    `arguments` are those of `build_decode_metadata`.
    """
    require_word("backend", backend, BACKENDS)
    way, _, name = backend.partition("-")
    model = MODELS[name]
    device = arguments["seq_lens"].device
    facts = facts_of(model, case, device)
    if way == EACH:
        requests = torch.arange(
            case.batch_size + 1,
            dtype=torch.int32,
            device=device,
        )
        tokens = max(1, case.seq_len_delta)
        calls = []
        for kind, times in model.prepared.items():
            calls += [facts[kind]] * times
        return partial(_each, calls, tokens * requests, arguments), lambda: 0
    schedules = StepSchedules.reserve(facts, device)
    run = partial(build_step_schedules, **arguments, schedules=schedules)
    return run, partial(_wrong_words, schedules, arguments["cache_seqlens"])


def _each(
    calls: Sequence[SchedulerFacts],
    cu_seqlens_q: torch.Tensor,
    arguments: Mapping[str, Any],
) -> None:
    build_decode_metadata(**arguments)
    for call in calls:
        ask_library(call, arguments["cache_seqlens"], cu_seqlens_q)


def _wrong_words(schedules: StepSchedules, lens: torch.Tensor) -> int:
    """Words that differ from the twin's."""
    wrong = 0
    seq_lens = lens.cpu().numpy()
    for kind in schedules.kinds.values():
        twin = schedule_words(kind.facts, seq_lens)
        words = kind.words.cpu().numpy()
        wrong += int(np.count_nonzero(words != twin))
    return wrong
