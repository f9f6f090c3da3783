"""How dense the code is: tokens, code lines, and lines that are hard to skim, per folder.

    python tests/support/density.py [FOLDER ...]      by default the package, core and the tests
    python tests/support/density.py --at COMMIT ...   the same tokens at commits, a row each

Tokens are those of Python's tokenizer without comments, docstrings and line ends; a code line is
one that has a token. `comments` are lines with a comment, over all lines.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("attnlib", "attnlib/core", "tests")
LONG_LINE = 25
"""Tokens from which a line is hard to read at first sight."""
LONG_FUNCTION = 60
"""Lines that a function may have."""
LINK = "120000"
"""The mode of a symbolic link in git."""
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
        f"functions over {LONG_FUNCTION} lines": len(long_functions(folder)),
    }


def long_functions(folder: Path) -> list[str]:
    """The functions of a folder that are too long, with their lines."""
    found = []
    for path in modules(folder):
        for node, length in long_functions_in(path.read_text()):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {length}")
    return found


def long_functions_in(text: str):
    """Functions of more than `LONG_FUNCTION` lines without their docstring, but Triton kernels.

    Those are all that `triton.jit` decorates; what launches them is not exempt.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_kernel(node):
            continue
        length = lines_of(node)
        if ast.get_docstring(node) is not None:
            length -= lines_of(node.body[0])
        if length > LONG_FUNCTION:
            yield node, length


def lines_of(node) -> int:
    return node.end_lineno - node.lineno + 1


def is_kernel(function) -> bool:
    """Whether `@triton.jit` or `@triton.jit(...)` stands above a function."""
    decorators = [ast.unparse(each) for each in function.decorator_list]
    return any(text.partition("(")[0] == "triton.jit" for text in decorators)


def git(*words: str) -> str:
    """What git prints in this checkout."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def tokens_of_blob(blob: str) -> int:
    return Density.of(git("cat-file", "blob", blob)).tokens.total()


def tokens_at(commit: str) -> dict[str, int]:
    """Tokens of each of `FOLDERS` at a commit; links, such as the data's, are not followed."""
    total = dict.fromkeys(FOLDERS, 0)
    for line in git("ls-tree", "-r", commit, *FOLDERS).splitlines():
        about, _, path = line.partition("\t")
        mode, _, blob = about.split()
        if not path.endswith(".py") or mode == LINK:
            continue
        for folder in FOLDERS:
            if path.startswith(f"{folder}/"):
                total[folder] += tokens_of_blob(blob)
    return total


def print_commits(commits: list[str]) -> None:
    for commit in commits:
        about = git("log", "-1", "--format=%h %ad %s", "--date=format:%d %b %H:%M", commit)
        print(tokens_at(commit), about.strip())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--at"]:
        print_commits(sys.argv[2:])
    else:
        for name in sys.argv[1:] or FOLDERS:
            print(name, figures(ROOT / name))
