"""The table of columns in data/README.md, made from the schema.

python tests/support/schema.py      writes it
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # not the package of another checkout

from attnlib.run.schema import COLUMNS  # noqa: E402

README = ROOT / "data" / "README.md"
TABLE_HEAD = "| column | type | meaning |\n|---|---|---|\n"


def readme_table():
    """A row per column."""
    rows = []
    for column in COLUMNS:
        # What an item of a list is called depends on the release of pyarrow.
        kind = str(column.type).replace("<item: ", "<").replace("<element: ", "<")
        rows.append(f"| `{column.name}` | {kind} | {column.meaning} |\n")
    return TABLE_HEAD + "".join(rows)


if __name__ == "__main__":
    before = README.read_text().partition(TABLE_HEAD)[0]
    README.write_text(before + readme_table())
