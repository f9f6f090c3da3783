"""How much a notebook says, and whether its cells call something: `python tests/support/prose.py`.

Words are those of the Markdown cells without fenced commands and the targets of links. A number is
a word that starts with a digit, releases and dates included; numbers in `code` and of issues (#12)
are names. A cell that calls a tool calls a name of `TOOLS` and has no plumbing of pandas.
"""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"\]\([^)]*\)")
QUOTED = re.compile(r"`[^`]*`")
NUMBER = re.compile(r"(?<![\w.#/=-])\d[\d,.]*")
MAGICS = ("%%attn_profile", "%attn_profile", "%run -m attnlib")
TOOLS = {
    "Fa2Planner",
    "advise",
    "bisect",
    "cache_sizes",
    "build_decode_metadata",
    "build_fa2_plan",
    "build_step_schedules",
    "captured_table",
    "changes",
    "compare",
    "compare_releases",
    "decisions",
    "diagnose",
    "draw_history",
    "explain",
    "by_rounds",
    "clocks",
    "explore",
    "fp8_over_bf16",
    "guard",
    "judge_ratios",
    "known_patterns",
    "plan_splits",
    "plan_words",
    "play_schedule",
    "profile",
    "reach_table",
    "shape_chart",
    "timers",
    "require_fits",
    "require_plan",
    "verdicts",
    "view",
}
"""Functions that answer for an input of one's own."""
PLUMBING = {"agg", "crosstab", "groupby", "merge", "pivot", "pivot_table", "query", "unstack"}
"""What a table needs belongs into the study."""


@dataclass(frozen=True)
class Prose:
    """What one notebook has."""

    name: str
    words: int
    numbers: int
    cells: int
    tools: int

    @property
    def words_per_number(self) -> float:
        """Words of prose to a number."""
        return self.words / max(1, self.numbers)


def prose_of(path: Path) -> Prose:
    """The counts of the notebook at `path`."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    return Prose(
        name=path.stem,
        words=len(words_of(text)),
        numbers=len(numbers_of(text)),
        cells=len(code),
        tools=sum(map(calls_a_tool, code)),
    )


def words_of(text: str) -> list[str]:
    """The words that a person reads."""
    read = TARGET.sub("]", FENCED.sub("", text))
    return [word for word in read.split() if re.search(r"\w", word)]


def numbers_of(text: str) -> list[str]:
    """The numbers in prose."""
    read = TARGET.sub("]", FENCED.sub("", text))
    return NUMBER.findall(QUOTED.sub("", read))


def calls_a_tool(source: str) -> bool:
    """Whether a cell calls a tool, and nothing of `PLUMBING`."""
    if any(line.startswith(MAGICS) for line in source.splitlines()):
        return True
    lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
    called = {name_of(node.func) for node in ast.walk(ast.parse("\n".join(lines))) if is_call(node)}
    return bool(called & TOOLS) and not called & PLUMBING


def is_call(node: ast.AST) -> bool:
    """Whether a node is a call with arguments."""
    return isinstance(node, ast.Call) and bool(node.args or node.keywords)


def name_of(function: ast.expr) -> str:
    """The last part of a called name."""
    return getattr(function, "attr", "") or getattr(function, "id", "")


def main() -> None:
    """Print a line for each notebook, and one for all."""
    paths = [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb"))
    found = [prose_of(path) for path in paths]
    print(f"{'notebook':<30}{'words':>7}{'words per number':>18}{'tool cells':>14}")
    for each in found:
        tools = f"{each.tools} of {each.cells}"
        print(f"{each.name:<30}{each.words:>7}{each.words_per_number:>18.1f}{tools:>14}")
    words = sum(each.words for each in found)
    numbers = sum(each.numbers for each in found)
    tools = f"{sum(each.tools for each in found)} of {sum(each.cells for each in found)}"
    print(f"{'all':<30}{words:>7}{words / max(1, numbers):>18.1f}{tools:>14}")


if __name__ == "__main__":
    main()
