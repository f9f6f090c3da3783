"""What modules and classes of vLLM have: writes data/vectors/vllm_points.json anew, off a wheel.

python tests/support/vllm_points.py vllm-0.33.0-*.whl
"""

import ast
import json
import sys
from pathlib import Path
from zipfile import ZipFile

FILE = Path(__file__).parents[2] / "data" / "vectors" / "vllm_points.json"


def described(nodes):
    """A line per function: its name and parameters; a last one of all other names that are set."""
    functions = []
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            every = [
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ]
            functions.append(" ".join([node.name, *(each.arg for each in every if each)]))
            inner = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
            names |= {each.attr for each in inner if isinstance(each.ctx, ast.Store)}
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
    return [*functions, " ".join(sorted(names))]


if __name__ == "__main__":
    found = json.loads(FILE.read_text())
    with ZipFile(sys.argv[1]) as wheel:
        for path in found:
            module, _, owner = path.partition(":")
            body = ast.parse(wheel.read(f"{module.replace('.', '/')}.py")).body
            if owner:
                (body,) = (node.body for node in body if getattr(node, "name", "") == owner)
            found[path] = described(body)
    FILE.write_text(json.dumps(found, indent=1) + "\n")
