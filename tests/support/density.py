"""How dense the code is: tokens, code lines, and lines that are hard to skim, per folder.

    python tests/support/density.py [FOLDER ...]      by default the package, core and the tests

Tokens are those of Python's tokenizer without comments, docstrings and line ends; a code line is
one that has a token. `comments` are lines with a comment, over all lines.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("attnlib", "attnlib/core", "tests")
LONG_LINE = 25
"""Tokens from which a line is hard to read at first sight."""
BLANK = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Density:
    """The counts of a text: its lines, and tokens by line number."""

    lines: int
    tokens: Counter
    comments: int

    @classmethod
    def of(cls, text: str) -> "Density":
        """Count the tokens of a module, less its docstrings."""
        prose = docstring_lines(text)
        tokens: Counter = Counter()
        comments = 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            comments += token.type == tokenize.COMMENT
            is_prose = token.type == tokenize.STRING and token.start[0] in prose
            if token.type not in BLANK and not is_prose:
                tokens[token.start[0]] += 1
        return cls(len(text.splitlines()), tokens, comments)


def docstring_lines(text: str) -> set[int]:
    """Numbers of the lines on which a docstring begins, or a string that explains a name."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None)
            is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
            if isinstance(statement, ast.Expr) and is_text:
                found.add(statement.lineno)
    return found


def modules(folder: Path) -> list[Path]:
    """The Python files under a folder, sorted."""
    return sorted(folder.rglob("*.py"))


def figures(folder: Path) -> dict[str, float]:
    """The figures of all modules of a folder together."""
    counts = [Density.of(path.read_text()) for path in modules(folder)]
    per_line = [number for count in counts for number in count.tokens.values()]
    lines = sum(count.lines for count in counts)
    tokens = sum(per_line)
    return {
        "lines": lines,
        "tokens": tokens,
        "tokens a code line": round(tokens / len(per_line), 2),
        f"lines of {LONG_LINE} and more, %": round(
            100 * sum(number >= LONG_LINE for number in per_line) / len(per_line), 2
        ),
        "comments, %": round(100 * sum(count.comments for count in counts) / lines, 2),
        "functions over 60 lines": len(long_functions(folder)),
    }


def long_functions(folder: Path, most: int = 60) -> list[str]:
    """Functions of more than `most` lines without their docstring, Triton kernels aside."""
    found = []
    for path in modules(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = node.body[0]
            prose = 0
            if ast.get_docstring(node) is not None:
                prose = (first.end_lineno or 0) - first.lineno + 1
            length = (node.end_lineno or 0) - node.lineno + 1 - prose
            is_kernel = any("jit" in ast.unparse(each) for each in node.decorator_list)
            if length > most and not is_kernel:
                found.append(f"{path.relative_to(ROOT)}:{node.name} {length}")
    return found


if __name__ == "__main__":
    for name in sys.argv[1:] or FOLDERS:
        print(name, figures(ROOT / name))
