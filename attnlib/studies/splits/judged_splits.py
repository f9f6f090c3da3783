"""What better splits of FlashAttention-3 gain in MLA: 32 new batches of traffic, judged once.

`data/captures/judged_splits.jsonl.xz` has a line per batch and layout, with us of a call by each
arm in three rounds. sglang-kernel 0.4.10 on an H200, in a CUDA graph, page table of 131,072 tokens:

- `default`, `bounded` and `upstream` are caps of splits; each call prepares its own schedule;
- `bounded-once` has the splits of `bounded` by a schedule that was made once;
- `list` has, by such a schedule, the splits that a time model fitted on older records chose;
- `margin-1.2` and `margin-1.4` target so many even shares of KV blocks where the library takes 1.1;
- `flashmla-dense` is FlashMLA, over pages of 64 alone.
"""

import json
import lzma

import numpy as np
import pandas as pd

from ...run import store

CAPTURE = store.PUBLISHED / "captures" / "judged_splits.jsonl.xz"
IN_EACH, ONCE = "bounded", "bounded-once"
ARMS = {
    IN_EACH: "bounded, schedule in each call",
    ONCE: "bounded, schedule made once",
    "list": "splits by a time model",
    "margin-1.2": "target of 1.2 even shares",
    "flashmla-dense": "FlashMLA",
}
"""Arms as a table names them."""
PAIRS = (
    (1, IN_EACH, ONCE),
    (1, ONCE, "list"),
    (1, ONCE, "margin-1.2"),
    (64, ONCE, "flashmla-dense"),
)
"""Page size, and the arms whose times are divided."""


def judged() -> pd.DataFrame:
    """A row per batch and layout: `trace`, `in_flight`, `step`, `lengths`, `layout` (`mla128` is
    decode with 128 heads, `mla16x4` verification of four tokens with 16), `page_size`, and `us`,
    arm -> us of three rounds; over pages of 1 also `cap` and `splits` of `bounded` and `list`."""
    lines = lzma.decompress(CAPTURE.read_bytes()).splitlines()
    return pd.DataFrame([json.loads(line) for line in lines])


def ratios(rows: pd.DataFrame, arm: str, other: str) -> np.ndarray:
    """Time by `arm` over time by `other`, a value per row: the geometric mean of the rounds."""
    found = []
    for us in rows.us:
        rounds = np.log(us[arm]) - np.log(us[other])
        found.append(np.exp(rounds.mean()))
    return np.array(found)


def judged_table() -> pd.DataFrame:
    """Time over time, a row per pair of arms: over all batches of both layouts."""
    rows = judged()
    lines = []
    for page_size, arm, other in PAIRS:
        values = ratios(
            rows=rows[rows.page_size == page_size],
            arm=arm,
            other=other,
        )
        line = {
            "time by": ARMS[arm],
            "over time by": ARMS[other],
            "page size": page_size,
            "batches": len(values),
            "median": np.median(values),
            "least": values.min(),
            "most": values.max(),
            "above 1.03": int((values > 1.03).sum()),
            "below 0.97": int((values < 0.97).sum()),
        }
        lines.append(line)
    return pd.DataFrame(lines).round(3)
