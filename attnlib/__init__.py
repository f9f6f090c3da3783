"""attnlib: reproduce, explain and prove fixes of attention-backend regressions.

The names of `HOME` here, in `attnlib.core` and in `attnlib.studies` are the public ones. Each is
imported on first use, so that `import attnlib` needs neither torch nor matplotlib.
"""

import importlib
from collections.abc import Callable
from typing import Any

__version__ = "0.1.0"

HOME = {
    "AttnSpec": "core.spec",
    "Call": "select.facts",
    "DecodeCase": "measure.calls.decode.case",
    "STUDIES": "studies",
    "Study": "run.study",
    "aa_check": "run.frame",
    "advise": "lab.advise",
    "bisect": "lab.bisect",
    "ceilings": "run.frame",
    "changes": "select.changes",
    "compare": "lab.compare",
    "compare_releases": "lab.upgrade",
    "decisions": "lab.decide",
    "decode_call": "measure.calls.decode.measure",
    "decode_rows": "run.frame",
    "diagnose": "lab.diagnose",
    "explain": "select.explain",
    "explore": "lab.explore",
    "good_rows": "run.frame",
    "guard": "core.schedule.guard",
    "judge_ratios": "measure.stats",
    "known_patterns": "lab.pattern_table",
    "load": "run.store",
    "load_or_measure": "run.study",
    "mode": "run.study",
    "neighbour_loss": "lab.expected",
    "over": "run.frame",
    "play_schedule": "lab.play_schedule",
    "profile": "lab.profile",
    "recorded_batches": "lab.recorded",
    "sample_seq_lens": "measure.calls.lengths",
    "save": "run.figures.style",
    "savings": "run.frame",
    "show": "lab.show",
    "tally": "run.frame",
    "view": "lab.view",
}
"""Public name -> the module that has it."""
LAB = {
    "IPython",
    "bs4",
    "ipykernel",
    "ipywidgets",
    "jinja2",
    "jupyterlab",
    "matplotlib",
    "nbclient",
    "nbconvert",
    "nbformat",
    "pandas",
    "pyarrow",
    "pynvml",
    "scipy",
    "seaborn",
    "tqdm",
}
"""Modules of the extra `lab`."""
CRASHED = 5
"""Exit status of a command of ours that crashed, which says nothing about any call."""
Find = Callable[[str], Any]
Names = Callable[[], list[str]]


def late(
    package: str,
    homes: dict[str, str],
    *more: str,
) -> tuple[Find, Names]:
    """`__getattr__` and `__dir__` of `package`: a name's module is imported when it is asked for.

    `more` are names that it has besides.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(sorted(homes))}")
        try:
            module = importlib.import_module(f"{__name__}.{homes[name]}")
            return getattr(module, name)
        except ModuleNotFoundError as error:
            if advice := install_advice(error):
                raise ModuleNotFoundError(f"{package}.{name}: {advice}", name=error.name) from error
            raise

    return find, lambda: [*sorted(homes), *more]


def install_advice(error: ModuleNotFoundError) -> str:
    """What to install for a module that the workbench needs, `core` not; "" for any other."""
    module = (error.name or "").partition(".")[0]
    return f"needs {module}: {install_with('lab')}" if module in LAB else ""


def install_with(extra: str) -> str:
    """How to install an extra: attnlib is on no index, so a copy of its repository is needed."""
    return f'pip install -e ".[{extra}]", in a copy of attnlib\'s repository'


__getattr__, __dir__ = late(__name__, HOME, "__version__")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext attnlib`: the cell magic `%%attn_profile` (`lab.magic`), and cards for choices."""
    from .lab import choice_card, magic

    magic.register(shell)
    choice_card.register(shell)
