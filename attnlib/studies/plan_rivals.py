"""Our plan of fa2 beside its rivals, over batches that were drawn at random.

200 batches of 20 layers. A layer has KV heads of 1 to 32, a group of 1 to 16 and at most 128 query
heads, and is none of an earlier study; `drawn_cases` draws batch sizes, lengths and their kind.
head_dim is 128 and values are bfloat16: FlashInfer compiles for a minute per further one. The L2 is
cold. All backends take turns in one process, over the same tensors (A B B A). A plan's time is not
in a call's; on the host it is the record's `plan_us`. The planner's grid is sized for the longest
request of the batch. Tables are those of `random_batches`.
"""

from functools import partial

from ..core.spec import AttnSpec
from ..run.study import Grid, Study
from .random_batches import COLD, FA2, FLASH_ATTENTION, PLANNED, drawn_cases, first_of_each_layer

SIZES = (
    (96, 16, 128, 1),
    (16, 1, 128, 16),
    (8, 2, 128, 16),
    (2, 2, 128, 1),
    (12, 1, 128, 16),
    (96, 16, 128, 16),
    (64, 32, 128, 16),
    (64, 32, 128, 64),
    (24, 2, 128, 1),
    (32, 4, 128, 16),
    (48, 4, 128, 16),
    (3, 1, 128, 64),
    (2, 1, 128, 16),
    (3, 1, 128, 1),
    (24, 2, 128, 16),
    (112, 16, 128, 1),
    (56, 8, 128, 64),
    (4, 1, 128, 16),
    (8, 8, 128, 64),
    (1, 1, 128, 16),
)
"""Query heads, KV heads, head_dim and page size of the layers, drawn by `SEED`."""
LIVE_SIZES = (
    (96, 16, 128, 1),
    (96, 16, 128, 16),
    (48, 4, 128, 16),
    (112, 16, 128, 1),
)
SEED = "plan and rivals"
CASES = drawn_cases(tuple(AttnSpec(*sizes) for sizes in SIZES), 10, SEED)
FIRST = first_of_each_layer(CASES)
AGAIN = tuple(FIRST.values())
LIVE = tuple(FIRST[AttnSpec(*sizes)] for sizes in LIVE_SIZES)
BATCH_ATTENTION = "flashinfer-batch-attention"
PAGES_OF_16 = ("flashinfer-xqa", "vllm-flash-attn-3", "vllm-triton")
"""Rivals that refuse the layers with pages of one token. The H100's records have none of them."""
FLASHINFER_ON_H200 = "0.7.2.post1"
FLASHINFER_ON_H100 = "0.6.13"
RIVALS = (FA2, BATCH_ATTENTION, FLASH_ATTENTION, *PAGES_OF_16)
BACKENDS = (*RIVALS, PLANNED)
_cold = partial(Grid, timers=(COLD,))

STUDY = Study(
    name="plan_rivals",
    question="Does fa2 by our plan lead its rivals, for batches that were drawn at random?",
    grids=(
        _cold(CASES, BACKENDS, rounds=2),
        _cold(AGAIN, (), rounds=2, again=(PLANNED,)),
        _cold(LIVE, BACKENDS, headline=True),
    ),
    reference_machine="nvidia-h200-a1283d40",
    ceilings=("copy",),
)
