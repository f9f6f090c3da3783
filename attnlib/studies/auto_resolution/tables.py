"""Tables of the study `auto_resolution`: what the rule says, and what ran."""

from collections.abc import Sequence

import pandas as pd

from ...core.gpu import REFERENCE
from ...core.spec import AttnSpec
from ...run.frame import AUTO, release_order
from ...select import GPUS, Choice, explain


def rule_table(releases: Sequence[str], spec: AttnSpec) -> pd.DataFrame:
    """What `auto` means for decode of `spec`, by release and GPU generation (`select`)."""
    columns = {gpu: [auto(spec, release, gpu).backend for release in releases] for gpu in GPUS}
    decided = [auto(spec, release, REFERENCE).decided_by for release in releases]
    why = [f"{row.why} ({row.source.removeprefix('FlashInfer ')})" for row in decided]
    return pd.DataFrame({"release": releases, **columns, "why, on Hopper": why})


def auto(spec: AttnSpec, release: str, gpu: str) -> Choice:
    """What FlashInfer's own rule chooses for decode, whatever the environment says."""
    library = f"flashinfer=={release}"
    return explain(spec, mode="decode", gpu=gpu, library=library, env={})


def resolution(frame: pd.DataFrame) -> pd.DataFrame:
    """What the rule says, what the library said and what ran, by dtype and release."""
    rows = frame[frame.backend == AUTO]
    rows = rows.assign(place=rows.release.map(release_order(frame).index))
    rows = rows.sort_values(["dtype", "kv_dtype", "place"], ignore_index=True)
    rules = [auto(row.case.spec, row.release, REFERENCE) for row in rows.itertuples()]
    return pd.DataFrame(
        {
            "query": rows.dtype,
            "kv": rows.kv_dtype,
            "release": rows.release,
            "rule": [rule.backend for rule in rules],
            "said": rows.reported_backend,
            "ran": rows.kernel_family.where(rows.status == "ok", rows.status),
            "kernel": rows.kernels.map(lambda kernels: kernels[0].name if kernels else ""),
            "run_us": rows.run_us.round(1),
        }
    )
