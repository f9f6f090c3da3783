"""The records that `advise` looks up: of a call itself, and of batches drawn or said by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pandas as pd

from ..core.spec import MLA_HEAD_DIM, AttnSpec, require_word
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.mla.case import MlaCase
from ..run import store
from ..run.look_up import recorded_as, sizes_of
from ..run.releases import Version
from ..studies import STUDIES, plan_rivals, random_batches
from ..studies.splits import split_cap
from .source import width_of

NEAREST = 8
"""Batches that advice is by."""


class Draw(NamedTuple):
    """Recorded batches: the study, the GPU, the library and release, and whether the L2 is cold."""

    study: str
    gpu: str
    release: str
    library: str = "FlashInfer"
    l2: str = "cold"


RIVALS = plan_rivals.STUDY.name
LATENT_STUDY = split_cap.STUDY.name
DRAWS = {
    "all layers": Draw(random_batches.STUDY.name, "H200", "0.7.2"),
    "all rivals": Draw(RIVALS, "H200", plan_rivals.FLASHINFER_ON_H200),
    "h100": Draw(RIVALS, "H100", plan_rivals.FLASHINFER_ON_H100),
    "mla": Draw(LATENT_STUDY, "H200", split_cap.NOW, "sglang-kernel", "warm"),
    "mla h100": Draw(LATENT_STUDY, "H100", split_cap.NOW, "sglang-kernel", "warm"),
}
"""Batches on record by name. All rivals are there for head_dim 128 and 16 bits."""


def draws_for(layer: AttnSpec, gpu: str) -> Sequence[str]:
    """The draws that advice on a layer is by, those of the GPU where there are some; first the one
    with most rivals, then one with other backends."""
    is_h100 = "h100" in gpu.lower()
    if layer.head_dim == MLA_HEAD_DIM:
        return ["mla h100" if is_h100 else "mla"]
    if is_h100:
        return ["h100", "all layers"]
    is_usual = layer.head_dim == 128 and "float8" not in layer.dtypes
    if is_usual:
        return ["all rivals", "all layers"]
    return ["all layers"]


def batches_for(layer: AttnSpec, draw: str) -> pd.DataFrame:
    """The recorded batches of a draw, without backends that refuse the layer's pages."""
    batches = recorded_batches(draw)
    if layer.page_size % 16:
        return batches.drop(columns=[*plan_rivals.PAGES_OF_16], errors="ignore")
    return batches


def recorded_calls(case: DecodeCase | MlaCase) -> pd.DataFrame:
    """The records of a call in all studies: a row per study, GPU, timer, width of the page table
    and backend, fastest first of each; the median time (us) of the newest release, and its rounds
    on all machines.

    Records of a library that was installed have no release, and are the oldest.
    """
    by = ["study", "gpu", "timer", "page_table", "backend"]
    columns = [*by, "release", "run_us", "process", "status", "throttled", "repeat"]
    tables = [pd.DataFrame(columns=columns)]
    for study in STUDIES:
        for machine in store.machines(study):
            for recorded in recorded_as(case, study, machine):
                rows = store.load(study, machine, case=recorded)
                place = rows["round"].map(lambda number, machine=machine: (machine, number))
                tables.append(rows.assign(page_table=width_of(recorded), process=place))
    rows = pd.concat(tables, ignore_index=True)
    left_out = rows.throttled.astype(bool) | rows.repeat.astype(bool)
    rows = rows[(rows.status == "ok") & ~left_out]
    ages = rows.release.map(lambda release: Version(release or "0"))
    rows = rows.assign(age=ages).sort_values("age", kind="stable")
    newest = rows.groupby(by).release.transform("last")
    times = rows[rows.release == newest].groupby([*by, "release"])
    table = times.agg(us=("run_us", "median"), rounds=("process", "nunique")).reset_index()
    return table.sort_values([*by[:-1], "us"], ignore_index=True)


@cache
def recorded_batches(draw: str = "all layers") -> pd.DataFrame:
    """The recorded random batches: which backend decoded each in what time.

    Parameters
    ----------
    draw : {"all layers", "all rivals", "h100", "mla", "mla h100"}
        Which batches: of all layers, of fewer layers with all rivals, or those of an H100; of MLA
        on an H200 or an H100.

    Returns
    -------
    pandas.DataFrame
        A row per batch: `case`, sizes as logarithms, a column of median microseconds per backend,
        `rounds`, `spread` between them (a fraction), and where it was measured.

    Raises
    ------
    ValueError
        For another draw.

    Examples
    --------
    >>> import attnlib
    >>> batches = attnlib.recorded_batches("h100")
    >>> batches.gpu.unique().tolist()
    ['NVIDIA H100 80GB HBM3']
    """
    require_word("draw", draw, DRAWS)
    drawn = DRAWS[draw]
    if drawn.study == LATENT_STUDY:
        rows = _latent_rows(drawn)
    else:
        rows = random_batches.load_all(drawn.study)
    rows = rows[rows.gpu.str.contains(drawn.gpu)]
    keys = ["machine", "case"]
    wide = rows.pivot_table("run_us", keys, "backend", "median", sort=False)
    times = rows.groupby([*keys, "backend"], sort=False).run_us
    ends = times.agg(["min", "max", "size"])
    spreads = ends["max"] / ends["min"] - 1
    rounds = ends["size"].groupby(keys, sort=False).min()
    spread = spreads.groupby(keys, sort=False).max()
    table = wide.assign(rounds=rounds, spread=spread).reset_index()
    sizes = pd.DataFrame([sizes_of(case) for case in table.case])
    machines = rows.drop_duplicates("machine").set_index("machine")
    return pd.concat([table, sizes], axis=1).assign(
        heads=[case.spec.heads for case in table.case],
        gpu=table.machine.map(machines.gpu),
        day=table.machine.map(machines.started_at.str[:10]),
        release=drawn.release,
        library=drawn.library,
        l2=drawn.l2,
    )


def _latent_rows(drawn: Draw) -> pd.DataFrame:
    """Records of dense MLA with one query token, of today's release where a build has several."""
    rows = split_cap.load_all(drawn.gpu.lower())
    is_plain = rows.case.map(lambda case: isinstance(case, MlaCase) and case.q_len == 1)
    return rows[is_plain & rows.release.isin(["", drawn.release])]
