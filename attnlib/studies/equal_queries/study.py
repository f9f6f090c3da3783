"""fa2's plan for a graph with and without the promise of equal queries, and FlashAttention-3.

A graph's plan does not know how many queries a request has, so its tile has room for all of them
but one for each other request. `uniform_q_len` (FlashInfer 0.7.2.post1) says it.
"""

from ...run.study import Grid, Study
from ..engine_modes.study import BLOCKS, LIBRARY, NOW, OTHER_VERIFIES, PIN_FA2, VERIFIES

PROMISED = ("flashinfer-prefill-fa2-uniform",)
BOTH = (*PIN_FA2, *PROMISED)
CASES = (*VERIFIES, *OTHER_VERIFIES, *BLOCKS)

STUDY = Study(
    name="equal_queries",
    question="What does it give to tell FlashInfer's plan for a graph that queries are equal?",
    grids=(
        Grid(CASES, BOTH, (NOW,), rounds=4),
        Grid(CASES, LIBRARY, rounds=4),
        Grid(CASES[::3], (), (NOW,), rounds=4, again=PROMISED),
        Grid(VERIFIES[3:6], BOTH, (NOW,), rounds=4, headline=True),
    ),
    reference_machine="nvidia-h200-f9835d78",
    ceilings=("copy", "matmul"),
)
