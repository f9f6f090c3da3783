"""The policy of a GPU's own records: from the study `backend_policy` to `policy.Policy`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from . import store
from .batch import AttnSpec, DecodeCase
from .policy import Pick, Point, Policy
from .report.rows import CASE, case_of, decode_rows, medians
from .studies import STUDIES
from .study import record_machine
from .workload import sample_seq_lens

if TYPE_CHECKING:
    import pandas as pd

STUDY = "backend_policy"


def measured(
    spec: AttnSpec,
    seq_lens: Sequence[int],
    *,
    backends: Sequence[str] = (),
    policy: Policy | None = None,
) -> Pick:
    """The fastest of `backends` for decoding requests of `seq_lens` tokens, as measured here.

    `policy` defaults to `current()`. Raises as that and `Policy.choose` do.
    """
    return (policy or current()).choose(spec, seq_lens, backends=backends)


def current() -> Policy:
    """The policy of this GPU's records; without a GPU that of the published machine.

    Raises RuntimeError where there are no records, with the command that makes them.
    """
    machine = record_machine(STUDIES[STUDY])
    if machine not in store.machines(STUDY):
        raise RuntimeError(
            f"a measured policy needs records of {STUDY} on {machine}, there are none: "
            f"python -m attnlib measure {STUDY}"
        )
    return policy_of(store.load(STUDY, machine))


def policy_of(frame: pd.DataFrame, cases: Iterable[DecodeCase] = ()) -> Policy:
    """The policy of a study's frame: of `cases` if there are any, else of all its decode cases.

    Raises ValueError for rows of different GPUs, timers or schemas, or where no row is ok.
    """
    rows = decode_rows(frame)
    if rows.empty:
        raise ValueError("frame must hold a decode case that ran ok, it has none")
    wanted = set(cases)
    points: dict[AttnSpec, list[Point]] = {}
    for _, row in medians(rows).reset_index().iterrows():
        case = case_of(row)
        if not wanted or case in wanted:
            points.setdefault(case.spec, []).append(_point(case, row))
    first = rows.iloc[0]
    return Policy(
        gpu=str(first.gpu),
        gpu_id=str(first.gpu_id),
        study=str(first.study),
        timer=str(first.timer),
        releases=_releases(rows),
        points={spec: tuple(found) for spec, found in points.items()},
    )


def fastest_counts(policy: Policy) -> dict[AttnSpec, dict[str, int]]:
    """In how many measured cases of each spec each backend was the fastest, most often first."""
    counts = {}
    for spec, points in policy.points.items():
        won = [min(point.run_us, key=lambda name: point.run_us[name]) for point in points]
        counts[spec] = {n: won.count(n) for n in sorted(set(won), key=won.count, reverse=True)}
    return counts


def _point(case: DecodeCase, row: pd.Series) -> Point:
    lens = sample_seq_lens(case)
    times = row.drop(labels=list(CASE)).dropna().astype(float)
    mean = round(float(lens.mean()), 1)
    return Point(case.batch_size, mean, int(lens.max()), times.round(3).to_dict())


def _releases(rows: pd.DataFrame) -> dict[str, str]:
    """Release by backend; ValueError for a backend measured in two."""
    found = rows[["backend", "release"]].drop_duplicates()
    twice = found[found.backend.duplicated()].backend.unique().tolist()
    if twice:
        raise ValueError(f"frame must hold one release of each backend, it has two of {twice[0]}")
    return {row.backend: row.release for row in found.itertuples() if row.release}
