"""Frames of made-up records, as `columns.frame_of` gives them."""

from collections import Counter

import pandas as pd

from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.measure.spans import Kernel
from attnlib.run.columns import heads_of

CASE = DecodeCase(AttnSpec(8, 2, 128, 16), batch_size=4, kv_len=1024)

SAME = {"study": "demo", "release": "0.6.3", "timer": "graph", "status": "ok", "schema": 1}
SAME |= {"gpu": "Test GPU", "gpu_id": "0badcafe", "num_sms": 132, "power_limit_w": 700}
SAME |= {"kernel_family": "fa2", "kernels": (), "throttled": False, "repeat": False}
SAME |= {"started_at": "2026-01-02"}


def row(case, backend, round_, run_us, /, **told):
    """A record's row, as `columns.frame_of` has it, less what no test asks for."""
    fields = {"case": case, **case.to_dict(), "heads": heads_of(case)}
    return {**SAME, **fields, "backend": backend, "round": round_, "run_us": run_us, **told}


def timed(backend, round_, run_us, /, **told):
    return row(CASE, backend, round_, run_us, **told)


def frame(*rows):
    return pd.DataFrame(rows)


def ran(*names):
    """The kernels of a call that launched these: one per name, as often as it stands, 1 us."""
    return tuple(Kernel(name, float(count), 1.0) for name, count in Counter(names).items())
