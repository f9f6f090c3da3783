"""What the guard costs per step: host time of its calls with and without it, and of its samples.

    python tests/support/guard_cost.py > guard_cost.jsonl

The calls are stand-ins of FlashAttention-3's functions, since the guard runs on the host alone; its
samples copy from the device, so they are timed where the tensors are: on a GPU, if there is one. A
line per number of layers, and one per sample; microseconds, raw.
"""

import json
import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

import attnlib
from attnlib.core import PlanLayout, PlanShape, plan_words, require_plan
from attnlib.core.schedule import guard as guards
from attnlib.core.schedule.pages import require_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS = 5
STEPS = 200
BATCH = 64
WIDTH = 8192
PAGE = 16
MODULE = "sgl_kernel.flash_attn"


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads,
    num_heads_k,
    headdim,
    cache_seqlens,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q=None,
    page_size=None,
    causal=False,
    window_size=(-1, -1),
    has_softcap=False,
    num_splits=0,
):
    return torch.zeros(1 + 4 * batch_size, dtype=torch.int32, device=DEVICE)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    page_table=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    scheduler_metadata=None,
    num_splits=0,
):
    return q


def step(module, tensors, layers):
    """A schedule and the attention call of each layer."""
    shared = {"cu_seqlens_q": tensors.sums, "causal": True}
    sizes = (BATCH, 1, WIDTH * PAGE, 32, 8, 128, tensors.lens)
    words = module.get_scheduler_metadata(*sizes, page_size=PAGE, **shared)
    for _ in range(layers):
        module.flash_attn_with_kvcache(
            tensors.q,
            tensors.cache,
            tensors.cache,
            page_table=tensors.table,
            max_seqlen_q=1,
            scheduler_metadata=words,
            **shared,
        )


def timed(call, times):
    """Microseconds of each of `times` calls, the device idle before and after."""
    taken = []
    for _ in range(times):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        before = time.perf_counter()
        call()
        taken.append((time.perf_counter() - before) * 1e6)
    return taken


def main():
    module = ModuleType(MODULE)
    vars(module).update(
        get_scheduler_metadata=get_scheduler_metadata,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    sys.modules[MODULE.partition(".")[0]] = ModuleType("sgl_kernel")
    sys.modules[MODULE] = module
    lens = torch.full((BATCH,), 8192, dtype=torch.int32, device=DEVICE)
    cache = torch.zeros(2, PAGE, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    tensors = SimpleNamespace(
        q=torch.zeros(BATCH, 32, 128, dtype=torch.bfloat16, device=DEVICE),
        cache=cache,
        lens=lens,
        sums=torch.arange(BATCH + 1, dtype=torch.int32, device=DEVICE),
        table=torch.zeros(BATCH, WIDTH, dtype=torch.int32, device=DEVICE),
    )
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "none"
    for layers in (32, 64):
        for number in range(ROUNDS):
            for guarded in (False, True) if number % 2 == 0 else (True, False):
                if guarded:
                    attnlib.guard("sglang", mode="log")
                step(module, tensors, layers)
                us = timed(lambda: step(module, tensors, layers), STEPS)  # noqa: B023
                for active in list(guards._active):
                    active.remove()
                row = {"gpu": gpu, "round": number, "layers": layers, "guarded": guarded}
                print(json.dumps(row | {"us": us}))
    shape = PlanShape(32, 8, 128, 2, BATCH, WIDTH * PAGE, 132, page_size=PAGE)
    image = plan_words(shape, np.full(BATCH, 8192)).image(PlanLayout.of(shape).int_bytes // 4, 0)
    wrapper = SimpleNamespace(_plan_info=PlanLayout.of(shape).info, _window_left=-1)
    wrapper._int_workspace_buffer = torch.tensor(image, device=DEVICE).view(torch.uint8)
    samples = {
        "plan": lambda: require_plan(wrapper, lens),
        "table": lambda: require_table(tensors.table, lens, page_size=PAGE, num_pages=9),
    }
    for name, call in samples.items():
        print(
            json.dumps(
                {
                    "gpu": gpu,
                    "sample": name,
                    "us": timed(call, STEPS),
                }
            )
        )


if __name__ == "__main__":
    main()
