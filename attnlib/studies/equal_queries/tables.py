"""What the promise of equal queries gives, call by call."""

import pandas as pd

from ...kinds.cost import fa2_tile_rows
from ...kinds.extend.case import ExtendCase
from ...run.frame import decode_rows, intervals, over, tally, times
from .study import LIBRARY, PIN_FA2, PROMISED

COLUMNS = dict(zip((*PIN_FA2, *PROMISED, *LIBRARY), ("fa2", "promised", "library"), strict=True))
SIZES = ["mode", "heads", "page_size", "q_len", "batch_size", "kv_len"]


def promised(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per call: times (us), rows of fa2's tile without and with the promise, their ratio."""
    rows = decode_rows(frame)
    found = over(rows, *PROMISED, *PIN_FA2)
    us = times(rows).rename(columns=COLUMNS)
    table = found.merge(us[["case", *us.columns.intersection([*COLUMNS.values()])]], on="case")
    rival = over(rows, *PROMISED, *LIBRARY).set_index("case").verdict
    ratio = {"promised / fa2": table.ratio.round(2), "interval": intervals(table)}
    words = {"verdict": table.verdict, "over library": table.case.map(rival)}
    shown = table.filter(items=[*SIZES, *COLUMNS.values()]).round(1)
    return shown.assign(tile=table.case.map(_tiles), **ratio, **words)


def _tiles(case: ExtendCase) -> str:
    """Query rows of fa2's tile, and what they become by the promise."""
    rows = dict.fromkeys(fa2_tile_rows(case, cuda_graph=graph) for graph in (True, False))
    return " to ".join(map(str, rows))


def findings(frame: pd.DataFrame) -> str:
    """Calls by verdict and the ratio's range, where the tile changes and where it does not."""
    table = promised(frame)
    changes = table.tile.str.contains(" to ").map({True: "smaller", False: "the same"})
    found = table.assign(ratio=table["promised / fa2"], tile=changes)
    lines = []
    for row in tally(found, "tile").to_dict("records"):
        words = (f"{row.get(w, 0)} {w}" for w in ("faster", "slower", "same", "ambiguous"))
        lines.append(
            f"tile {row['tile']}: {row['shapes']} shapes, {', '.join(words)}; "
            f"{row['least']:.2f} to {row['most']:.2f} of the time"
        )
    return "\n".join(lines)
