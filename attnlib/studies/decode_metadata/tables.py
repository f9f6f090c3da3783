"""The tables of the metadata studies: what a step's metadata must cost, and what it does cost.

Tables stand on graph replays unless they say otherwise; a design or size that was not measured
leaves its column or row out. In rows of this study `backend` holds the design's name, so that two
releases of one library are two designs.
"""

from collections.abc import Iterable

import pandas as pd

from ...kinds.cost import Ceilings, metadata_cost
from ...kinds.metadata.case import MetadataCase
from ...run.frame import by_design, good_rows, intervals, launches, over, times, whole_counts
from ..decode_metadata_eager.study import SOURCE_CASE

SIZES = ["batch_size", "page_size", "max_ctx"]
OPS, SERIAL, FUSED, ALONE = "op by op", "serial", "fused", "fused, no overlap"
MERGED, TODAY = "SGLang 0.5.14", "SGLang 0.5.23"
"""The fused kernels as SGLang merged them, and its newest."""
RIVALS = (SERIAL, MERGED, TODAY)
DESIGNS = {
    "metadata-eager": OPS,
    "metadata-serial": SERIAL,
    "metadata-fused": FUSED,
    "metadata-fused-alone": ALONE,
    "sglang-metadata": "SGLang",
    "flash-attn-3-step-eager": OPS,
    "flash-attn-3-step-serial": SERIAL,
    "flash-attn-3-step-fused": FUSED,
}
NEVER = "never"
BUILDERS = {
    "decode": "page table",
    "kv_indices": "page arrays",
    "draft": "draft tree",
    "verify": "target verify",
}


def metadata_records(
    frame: pd.DataFrame, builder: str = "decode", *, timer: str = "graph"
) -> pd.DataFrame:
    """Records of a builder and timer, whatever their status; `backend` is the design."""
    rows = whole_counts(frame[(frame.builder == builder) & (frame.timer == timer) & ~frame.repeat])
    return by_design(rows, DESIGNS).astype({"swa": bool})


def metadata_rows(
    frame: pd.DataFrame, builder: str = "decode", *, timer: str = "graph", windowed: bool = False
) -> pd.DataFrame:
    """The same that are ok and not left out, with a page table for a window or without."""
    rows = good_rows(metadata_records(frame, builder, timer=timer), timer)
    return rows[rows.swa == windowed]


def against_best(rows: pd.DataFrame) -> pd.DataFrame:
    """`FUSED` over the rival that comes closest to it or beats it, case by case, named."""
    there = [name for name in (OPS, *RIVALS) if name in set(rows.backend)]
    found = pd.concat([over(rows, FUSED, name).assign(rival=name) for name in there])
    worst = found.sort_values(["ratio", "rival"], ascending=False).drop_duplicates("case")
    return worst.sort_values(SIZES, kind="stable", ignore_index=True)


def findings(frame: pd.DataFrame) -> str:
    """`FUSED` over its best rival, over all sizes on record."""
    best = against_best(metadata_rows(frame))
    middle, most, clear = best.ratio.median(), best.ratio.max(), sum(best.high < 1)
    over_best = f"fused over its best rival {middle:.2f} in the median, {most:.2f} at most"
    return f"{len(best)} sizes: {over_best}, interval below 1 at {clear} of them"


def counted(cases: Iterable[MetadataCase], limit: Ceilings) -> pd.DataFrame:
    """What each case must move, from its lengths alone, and how long that takes at copy speed.

    `needed` counts live words, `sectors` what the L2 hands out for them, `fetched` what memory
    does, in MiB; `floor` is fetched over copy bandwidth, or one launch if that is longer.
    """
    found = []
    for case in cases:
        cost, mib = metadata_cost(case), 2.0**20
        found.append(
            {name: getattr(case, name) for name in SIZES}
            | {
                "words": cost.words,
                "needed": cost.needed_bytes / mib,
                "sectors": cost.sector_bytes / mib,
                "fetched": cost.fetch_bytes / mib,
                "fetched / copy": fetch_us(case, limit),
                "floor": floor_us(case, limit),
            }
        )
    return pd.DataFrame(found).round(2)


def fetch_us(case: MetadataCase, limit: Ceilings) -> float:
    """Microseconds that the fetched bytes take at the measured copy bandwidth."""
    return metadata_cost(case).fetch_bytes / (limit.copy_gbps * 1e3)


def floor_us(case: MetadataCase, limit: Ceilings) -> float:
    """`fetch_us`, or the time of an empty kernel if that is longer."""
    return max(limit.launch_us, fetch_us(case, limit))


def launch_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Launches per call of every builder and design, as traced: fewest and most over records."""
    rows = pd.concat([metadata_rows(frame, name) for name in BUILDERS])
    counts = rows.assign(count=launches(rows).round().astype(int))
    grouped = counts.groupby(["builder", "backend"])["count"].agg(["size", "min", "max"])
    shown = grouped.set_axis(["records", "fewest", "most"], axis=1).reset_index()
    return shown.assign(builder=shown.builder.map(BUILDERS)).rename(columns={"backend": "design"})


def side_by_side(
    frame: pd.DataFrame, cases: Iterable[MetadataCase], limit: Ceilings
) -> pd.DataFrame:
    """Time (us) of each design at `cases`, beside the floor, and fused over the floor."""
    rows = metadata_rows(frame)
    table = times(rows[rows.case.isin(cases)]).sort_values(SIZES, ignore_index=True)
    table["floor"] = [floor_us(case, limit) for case in table.case]
    shown = table.filter(items=[*SIZES, "floor", OPS, *RIVALS, FUSED])
    return shown.assign(**{"fused / floor": table[FUSED] / table.floor}).round(2)


def speedups(frame: pd.DataFrame, cases: Iterable[MetadataCase]) -> pd.DataFrame:
    """How many times as long as fused each other design takes, with its interval over rounds."""
    rows = metadata_rows(frame)
    rows = rows[rows.case.isin(cases)]
    table = rows[SIZES].drop_duplicates().sort_values(SIZES)
    for name in (OPS, *RIVALS):
        found = over(rows, name, FUSED)
        pairs = zip(found.ratio, intervals(found), strict=True)
        words = {name: [f"{ratio:.2f} ({said})" for ratio, said in pairs]}
        table = table.merge(found[SIZES].assign(**words), how="left") if len(found) else table
    return table.reset_index(drop=True)


def crossovers(frame: pd.DataFrame) -> pd.DataFrame:
    """Where fusing loses: the first batch whose interval lies above op by op, and the last ratio.

    A row per page size and context, a pair of columns per rival.
    """
    rows, table = metadata_rows(frame), pd.DataFrame()
    keys = ["page_size", "max_ctx"]
    for name in (rival for rival in RIVALS if rival in set(rows.backend)):
        found = over(rows, name, OPS).sort_values("batch_size")
        lost = found[(found.low > 1)].groupby(keys).batch_size.min()
        last = found.groupby(keys)[["batch_size", "ratio"]].last()
        last = last[last.batch_size == found.batch_size.max()].ratio.round(2)
        table[name] = lost.reindex(last.index).map(lambda n: f"{n:,.0f}", na_action="ignore")
        table[f"{name}: ratio at {found.batch_size.max()}"] = last
    texts = {name: table[name].fillna(NEVER) for name in RIVALS if name in table}
    return table.assign(**texts).reset_index()


def worst(frame: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """The cases where fused has the least advantage over its best rival, the least first."""
    rows = metadata_rows(frame)
    found = against_best(rows).merge(times(rows)[["case", FUSED]], on="case")
    found = found.sort_values("ratio", ascending=False).head(count).reset_index(drop=True)
    shown = found[[*SIZES, "rival", FUSED, "ratio"]].round({FUSED: 2, "ratio": 3})
    return shown.assign(**{"interval": intervals(found), "rounds": found.rounds})


def strided(frame: pd.DataFrame, limit: Ceilings) -> pd.DataFrame:
    """Cases of page_size >= 16 that outgrow the L2, against fetched bytes and a bare gather."""
    table = times(metadata_rows(frame))
    costs = [metadata_cost(case) for case in table.case]
    table["MiB"] = [cost.fetch_bytes / 2**20 for cost in costs]
    table["fetched / copy"] = [fetch_us(case, limit) for case in table.case]
    table["bare gather"] = [cost.words / limit.gather_per_us for cost in costs]
    table = table[(table.page_size >= 16) & (table.MiB > frame.l2_mib.max())]
    table = table.sort_values(["page_size", "MiB"], ignore_index=True)
    shown = [*SIZES, "MiB", "fetched / copy", "bare gather", TODAY, FUSED]
    over_copy, over_gather = (table[FUSED] / table[name] for name in shown[4:6])
    told = {"fused / copy": over_copy.round(2), "fused / gather": over_gather.round(2)}
    return table.filter(items=shown).round(1).assign(**told)


def other_builders(frame: pd.DataFrame) -> pd.DataFrame:
    """Page arrays, drafts and verification: fused us, and op by op over fused."""
    found = []
    for name in (n for n in BUILDERS if n != "decode" and n in set(frame.builder)):
        rows = metadata_rows(frame, name)
        ratio, table = over(rows, OPS, FUSED).ratio, times(rows)
        told = {"fused, us": _range(table[FUSED]), "op by op, us": _range(table[OPS])}
        span = {"least": ratio.min(), "median": ratio.median(), "most": ratio.max()}
        found.append({"builder": BUILDERS[name], "cases": len(ratio)} | told | span)
    return pd.DataFrame(found).round(1)


def windows(frame: pd.DataFrame) -> pd.DataFrame:
    """With a sliding window's table: each design (us) by page size, and fused over `TODAY`."""
    rows = metadata_rows(frame, windowed=True)
    table, found = times(rows).sort_values(SIZES), over(rows, FUSED, TODAY)
    told = {f"{FUSED} / {TODAY}": found.ratio.round(2), "interval": intervals(found)}
    told = found[["case"]].assign(**told, verdict=found.verdict)
    shown = table.filter(items=["case", *SIZES, MERGED, TODAY, FUSED]).round(2)
    return shown.merge(told, how="left").drop(columns="case").dropna(axis="columns", how="all")


def eager_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One call launched by Python: wall time, the GPU's part of it as traced, and over fused."""
    rows = metadata_rows(frame, timer="eager")
    rows = rows[rows.case.isin(SOURCE_CASE)]
    rows = rows.assign(launches=launches(rows))
    grouped = rows.groupby("backend")
    table = grouped.agg(rounds=("round", "size"), launches=("launches", "median"))
    table["wall"] = grouped.run_us.median()
    table["wall, rounds"] = grouped.run_us.agg(_range)
    table["GPU, traced"] = grouped.kernel_us.median()
    rivals = [name for name in table.index if name != FUSED]
    found = {name: ratio for name in rivals if len(ratio := over(rows, name, FUSED))}
    told = {
        "wall / fused": {FUSED: 1.0} | {name: ratio.ratio[0] for name, ratio in found.items()},
        "interval": {name: intervals(ratio)[0] for name, ratio in found.items()},
        "margin, %": {name: f"{100 * ratio.margin[0]:.1f}" for name, ratio in found.items()},
        "verdict": {name: ratio.verdict[0] for name, ratio in found.items()},
    }
    table = table.assign(**{name: table.index.map(each) for name, each in told.items()})
    table = table.fillna(dict.fromkeys([*told][1:], ""))
    table = table.sort_values("wall").round({"wall": 1, "GPU, traced": 1, "wall / fused": 2})
    return table.reset_index().rename(columns={"backend": "design"}).astype({"launches": int})


def _range(values: pd.Series) -> str:
    return f"{values.min():.1f} to {values.max():.1f}"
