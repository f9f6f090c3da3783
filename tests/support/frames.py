"""Frames of made-up records, as `store.frame` gives them."""

from collections import Counter

import pandas as pd

from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.run.record import Kernel

CASE = DecodeCase(AttnSpec(8, 2, 128, 16), batch_size=4, kv_len=1024)


def frame(*entries: dict, case: DecodeCase = CASE) -> pd.DataFrame:
    """Rows as `store.load` gives them: backend, round and run_us, the rest alike."""
    same = {
        "case": case,
        **case.to_dict(),
        "heads": case.spec.heads,
        "release": "0.6.3",
        "timer": "graph",
        "status": "ok",
        "round": 0,
        "num_sms": 132,
        "throttled": False,
        "gpu_id": "0badcafe",
        "power_limit_w": 700,
        "schema": 1,
    }
    return pd.DataFrame([{**same, **entry} for entry in entries])


def timed(backend: str, round_: int, run_us: float, **more: object) -> dict:
    return {"backend": backend, "round": round_, "run_us": run_us, **more}


def ran(*names: str) -> tuple[Kernel, ...]:
    """The kernels of a call that launched these: one per name, as often as it stands, 1 us."""
    return tuple(Kernel(name, float(count), 1.0) for name, count in Counter(names).items())
