"""The cell magic `%%attn_profile`, after `%load_ext attnlib`: the profile of a notebook's cell."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import CodeType, TracebackType
from typing import NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display
from IPython.utils.process import arg_split

from .profile import CALLS, DEVICES, WARM_UP, Profile, profile

NAME = "attn_profile"
HELP = f"""Profile the cell: its kernels or, where it uses no GPU, its CPU operators.

    %%{NAME} [--calls N] [--warmup N] [--device auto|cuda|cpu] [--graph]
                   [--timeline] [--trace FILE] [--into NAME]

The cell runs many times, as with %%timeit: `--warmup` times ({WARM_UP}), then `--calls` times
({CALLS}) for the clock and as often traced. Its names are those of the notebook.

    --graph          capture the cell in a CUDA graph and profile its replays
    --timeline       draw one call to scale as well
    --trace FILE     write the Chrome trace, for Perfetto
    --into NAME      keep the profile under this name, for attnlib.compare
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line that lists the options, and ends no kernel."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, which a notebook shows as one line."""
        options = ", ".join(action.option_strings[0] for action in self._actions)
        raise UsageError(f"%%{NAME}: {message}; valid options: {options}")


def register(shell: InteractiveShell) -> None:
    """Add the magic to a shell; `%%attn_profile?` shows its options."""

    def attn_profile(line: str, cell: str) -> Profile:
        __tracebackhide__ = True
        return profile_cell(shell, line, cell)

    attn_profile.__doc__ = HELP
    shell.register_magic_function(attn_profile, "cell", NAME)


def profile_cell(shell: InteractiveShell, line: str, cell: str) -> Profile:
    """The profile of `cell`, run in the shell's names; what the cell raises keeps its traceback.

    UsageError, one line, for a wrong option and for a choice that cannot be had here.
    """
    __tracebackhide__ = True
    options = _parse(line)
    if not cell.strip():
        raise UsageError(f"%%{NAME}: the cell must hold code, it is empty")
    try:
        code = _compile(shell, cell)
    except SyntaxError as error:
        raise error.with_traceback(None) from None
    try:
        taken = profile(
            lambda: exec(code, shell.user_ns),
            calls=options.calls,
            warmup=options.warmup,
            device=options.device,
            cuda_graph=options.graph,
            name="cell",
        )
    except Exception as error:
        own = _from_cell(error.__traceback__, code.co_filename)
        # What `profile` raises for a choice that cannot be had: one line is enough.
        if own is None and isinstance(error, ValueError | RuntimeError):
            raise UsageError(f"%%{NAME}: {error}") from None
        raise error.with_traceback(own) from error.__cause__
    if options.trace:
        taken.save_trace(options.trace)
    if options.into:
        shell.user_ns[options.into] = taken
    if options.timeline:
        display(taken.timeline())
    return taken


def _parse(line: str) -> argparse.Namespace:
    parser = _Parser(prog=f"%%{NAME}", add_help=False, allow_abbrev=False)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--warmup", type=int, default=WARM_UP)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--into")
    options = parser.parse_args(arg_split(line))
    # Found out now, not after the cell has run twenty times.
    if options.trace and not options.trace.absolute().parent.is_dir():
        parser.error(f"--trace must name a file in a folder that exists, got {options.trace}")
    if options.into is not None and not options.into.isidentifier():
        parser.error(f"--into must be a name of Python, got {options.into!r}")
    return options


def _compile(shell: InteractiveShell, cell: str) -> CodeType:
    """The cell's code, under a name and line numbers that let a traceback show its lines."""
    source = "\n" + shell.transform_cell(cell)
    number = len(shell.history_manager.input_hist_parsed) - 1
    filename = shell.compile.cache(source, number, raw_code=f"{NAME} {cell}")
    return shell.compile(source, filename, "exec")


def _from_cell(traceback: TracebackType | None, filename: str) -> TracebackType | None:
    """The part of a traceback that starts in the cell; None if the error came from elsewhere."""
    while traceback and traceback.tb_frame.f_code.co_filename != filename:
        traceback = traceback.tb_next
    return traceback
