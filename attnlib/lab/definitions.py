"""The definitions of a source file as texts without comments, docstrings and formatting.

Two releases have the same definition where the texts are equal. Python goes through its syntax
tree, C++ and CUDA through their tokens; anything else has a hash alone.
"""

import ast
import hashlib
import re
from collections.abc import Iterable
from typing import IO, NamedTuple

CPP = (".h", ".cuh", ".cu", ".cpp")
CHUNK = 2**20
WHOLE = "the file"
"""The name of what has no parts, a binary."""
STATEMENTS = "other statements"
"""The name of what stands at the top of a file, or in a class, and defines no name."""
TOKEN = re.compile(
    r"""
    (?P<comment> //[^\n]* | /\*.*?\*/ | \\\n )
    | R"(?P<mark>\w*)\( .*? \)(?P=mark)"
    | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])+'
    | [A-Za-z_]\w* | \d[\w.']*
    | :: | && | \|\| | -> | \+\+ | -- | [=!<>+*/-]= | \S
    """,
    re.VERBOSE | re.DOTALL,
)
TYPES = ("struct", "class", "union", "enum")
NO_NAMES = (
    "if",
    "for",
    "while",
    "switch",
    "return",
    "sizeof",
    "decltype",
    "constexpr",
    "alignas",
    "__align__",
    "__attribute__",
    "__launch_bounds__",
    *TYPES,
)
"""Words before a bracket or after `struct` that name nothing."""
CLOSING = {"(": ")", "{": "}"}
NO_BODY = (";", "}", "=", ")", "#")
"""What ends a declaration before a body begins."""


class Definition(NamedTuple):
    """The text of a definition, and its first and last line, which are 0 but in Python."""

    text: str
    first: int = 0
    last: int = 0
    is_import: bool = False

    def has_one_of(self, lines: str) -> bool:
        """Whether one of lines such as `7, 12-20` is its own."""
        for span in lines.split(", "):
            words = span.split("-")
            first = int(words[0])
            last = int(words[-1])
            if first <= self.last and self.first <= last:
                return True
        return False


NOTHING = Definition("")
Definitions = dict[str, Definition]


def definitions_of(path: str, file: IO[bytes]) -> Definitions:
    """Name -> definition of everything in a file; a method's name is `Class.method`.

    Raises SyntaxError for Python that this Python cannot read.
    """
    if path.endswith(".py"):
        tree = _WithoutTexts().visit(ast.parse(file.read()))
        found: Definitions = {}
        _collect(tree.body, "", "", found)
        return found
    if path.endswith(CPP):
        return of_cpp(file.read().decode("utf-8", "replace"))
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return {WHOLE: Definition(digest.hexdigest())}


class _WithoutTexts(ast.NodeTransformer):
    """Removes docstrings, and texts that stand alone."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if getattr(node, "body", None) == [] and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Nothing for a text."""
        value = node.value
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        return None if is_text else node


def _collect(
    body: Iterable[ast.AST],
    prefix: str,
    under: str,
    found: Definitions,
) -> None:
    """Add what statements define; `under` is the condition that they stand under."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            inner = node.body
            node.body = [ast.Pass()]
            _add(
                found=found,
                name=prefix + node.name,
                node=node,
                under=under,
            )
            _collect(inner, f"{prefix}{node.name}.", under, found)
        elif isinstance(node, ast.If):
            condition = f"{under}if {ast.unparse(node.test)}:\n"
            _collect(node.body, prefix, condition, found)
            _collect(node.orelse, prefix, f"{condition}else:\n", found)
        elif isinstance(node, ast.Try):
            _collect(node.body, prefix, f"{under}try:\n", found)
            for handler in node.handlers:
                caught = ""
                if handler.type:
                    caught = ast.unparse(handler.type)
                _collect(handler.body, prefix, f"{under}except {caught}:\n", found)
            _collect(
                body=[*node.orelse, *node.finalbody],
                prefix=prefix,
                under=f"{under}try:\n",
                found=found,
            )
        elif isinstance(node, ast.Import | ast.ImportFrom):
            _collect_imports(node, prefix, under, found)
        else:
            _add(found, prefix + _name_of(node), node, under)


def _collect_imports(
    node: ast.Import | ast.ImportFrom,
    prefix: str,
    under: str,
    found: Definitions,
) -> None:
    """Add an import for each name that it makes known."""
    names = node.names
    for alias in names:
        node.names = [alias]
        _add(found, prefix + (alias.asname or alias.name), node, under)


def _name_of(node: ast.AST) -> str:
    """The name that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    if isinstance(node, ast.Assign):
        target: ast.AST | None = node.targets[0]
    else:
        target = getattr(node, "target", None)
    if isinstance(target, ast.Name):
        return target.id
    return STATEMENTS


def _add(found: Definitions, name: str, node: ast.AST, under: str) -> None:
    """Add a statement; what is defined twice (overloads, setters, branches) has both texts."""
    text = under + ast.unparse(node)
    first: int = getattr(node, "lineno", 0)
    last: int = getattr(node, "end_lineno", 0)
    if name in found:
        before = found[name]
        text = f"{before.text}\n{text}"
        first = min(before.first, first)
    is_import = isinstance(node, ast.Import | ast.ImportFrom)
    found[name] = Definition(text, first, last, is_import)


def of_cpp(text: str) -> Definitions:
    """Functions, macros and types of C++ by their last names; namespaces are not said."""
    tokens = []
    for part in TOKEN.finditer(text):
        if not part["comment"]:
            tokens.append(part[0])
    found: Definitions = {}
    rest: list[str] = []
    start = at = 0
    while at < len(tokens):
        name, end = _definition_at(tokens, at)
        if name:
            text = _lines(tokens[start:end])
            if name in found:
                text = f"{found[name].text}\n{text}"
            found[name] = Definition(text)
        elif tokens[at] in (";", "{", "}"):
            rest += tokens[start : at + 1]
            end = at + 1
        else:
            at += 1
            continue
        start = at = end
    found[STATEMENTS] = Definition(_lines(rest + tokens[start:]))
    return found


def _definition_at(tokens: list[str], at: int) -> tuple[str, int]:
    """The name of the function or type that begins at a token, and where it ends; or none."""
    token = tokens[at]
    following = ""
    if at + 1 < len(tokens):
        following = tokens[at + 1]
    if token in TYPES and following.isidentifier() and following not in NO_NAMES:
        end = _find_body(tokens, at + 2)
        if end:
            return (following, end)
        return ("", 0)
    if token.isidentifier() and following == "(" and token not in NO_NAMES:
        end = _find_body(tokens, _closed(tokens, at + 1))
        if end:
            return (token, end)
        return ("", 0)
    return "", 0


def _find_body(tokens: list[str], at: int) -> int:
    """Where the braces end that follow, or 0 where something else comes first."""
    while at < len(tokens):
        token = tokens[at]
        if token in NO_BODY:
            return 0
        if token == "{":
            return _closed(tokens, at)
        if token == "(":
            at = _closed(tokens, at)
        else:
            at = at + 1
    return 0


def _closed(tokens: list[str], at: int) -> int:
    """The place after the bracket that closes the one at `at`."""
    opening = tokens[at]
    closing = CLOSING[opening]
    depth = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if token == opening:
            depth += 1
        elif token == closing:
            depth -= 1
        if not depth:
            break
    return at


def _lines(tokens: list[str]) -> str:
    """Tokens as a text, a line for each statement and each argument."""
    text = ""
    for token in tokens:
        text += f"\n{token}" if token == "#" else f" {token}"
        if token in (";", "{", "}", ","):
            text += "\n"
    return text.strip()
