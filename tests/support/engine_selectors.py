"""What the selectors of vLLM, SGLang and FlashInfer answer on a CPU: the vectors of data/vectors.

`python tests/support/engine_selectors.py ENGINE FOLDER OUT [SEED]` asks every release of which
FOLDER has the Python files (`FOLDER/0.33.0/vllm/...`, as a wheel has them) for drawn calls and
writes OUT. Which calls, and what is patched, is in `vllm_selector`, `sglang_selector` and
`flashinfer_selector`. What an engine imports and is not there is a stand-in.
"""

import importlib.abc
import importlib.machinery
import json
import lzma
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

sys.path.append(str(Path(__file__).resolve().parents[1]))


class StandInClass(type):
    """A class that has every attribute and can be subscripted or joined by `|`."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)

    def __or__(cls, other):
        return cls

    def __ror__(cls, other):
        return cls

    def __getitem__(cls, item):
        return cls


def any_schema(cls, source, handler):
    from pydantic_core import core_schema

    return core_schema.any_schema()


class StandIn(types.ModuleType):
    """A module that has every name: a class for one in capitals, else a mock."""

    __path__ = ()

    def __getattr__(self, name):
        if name in ("__version__", "__file__"):
            return "9.9.9"
        if name.startswith("__"):
            raise AttributeError(name)
        members = {
            "__init__": lambda self, *values, **named: None,
            "__init_subclass__": classmethod(lambda cls, **named: None),
            "__get_pydantic_core_schema__": classmethod(any_schema),
        }
        value = (
            StandInClass(
                name,
                (),
                members,
            )
            if name[0].isupper()
            else MagicMock(name=name)
        )
        setattr(self, name, value)
        return value


def top_of(name):
    return name.partition(".")[0]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for the modules of which `stands_in(name, asker)` says so; the asker is the package
    whose file asks for it."""

    def __init__(self, stands_in):
        self.stands_in = stands_in

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while frame and "importlib" in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        if self.stands_in(name, top_of(frame.f_globals.get("__name__", ""))):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        """Nothing is run."""


def find_as_if_on(gpu, name, folder):
    """Make package `name` importable from a release's files, on a GPU of `gpu["capability"]`."""
    import torch
    import torch._dynamo
    import torch._inductor

    cuda = torch.cuda
    sizes = {"multi_processor_count": 132, "total_memory": 80 * 2**30, "name": "x"}
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(**sizes)
    cuda.get_device_capability = lambda *_: tuple(gpu["capability"])
    cuda.is_available, cuda.current_device, cuda.device_count = lambda: True, lambda: 0, lambda: 1
    torch.version.cuda = "13.0"
    sys.path.insert(0, str(folder))
    package = types.ModuleType(name)
    package.__path__, package.__version__ = [str(folder / name)], folder.name
    sys.modules[name] = package


def forget(name):
    """Empty every cache of package `name`, where answers about another GPU may lie."""
    for module_name, module in [*sys.modules.items()]:
        if module_name.startswith(f"{name}.") and not isinstance(module, StandIn):
            for value in [*vars(module).values()]:
                if type(value).__name__ == "_lru_cache_wrapper":
                    value.cache_clear()


def ask_each(engine, folder, out, *seed):
    """Ask each release in a process of its own; write all answers, a line each."""
    lines = []
    for release in sorted(Path(folder).iterdir()):
        command = [sys.executable, __file__, engine, str(release), "--one", *seed]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        lines += [line for line in text.splitlines() if line.startswith("{")]
    Path(out).write_bytes(lzma.compress("\n".join([*lines, ""]).encode(), preset=9))


if __name__ == "__main__":
    if sys.argv[3] == "--one":
        engine = importlib.import_module(f"support.{sys.argv[1]}_selector")
        place = Path(sys.argv[2])
        for line in engine.answers(place, engine.drawn_calls(place, *sys.argv[4:])):
            print(json.dumps(line), flush=True)
    else:
        ask_each(*sys.argv[1:])
