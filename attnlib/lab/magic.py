"""The cell magic `%%attn_profile`, after `%load_ext attnlib`: the profile of a notebook's cell."""

import argparse
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.process import arg_split

from .profile import CALLS, DEVICES, WARM_UP, Profile, profile

NAME = "attn_profile"
ABOUT = """Profile the cell: its kernels or, where it uses no GPU, its CPU operators. As with
%%timeit it runs many times; its names are those of the notebook."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise UsageError, which a notebook shows as one line, and which ends no kernel."""
        options = ", ".join(action.option_strings[0] for action in self._actions)
        raise UsageError(f"%%{NAME}: {message}; valid options: {options}")


OPTIONS = _Parser(f"%%{NAME}", description=ABOUT, add_help=False, allow_abbrev=False)
OPTIONS.add_argument(
    "--calls", type=int, default=CALLS, help="for the clock, and as often traced (%(default)s)"
)
OPTIONS.add_argument("--warmup", type=int, default=WARM_UP, help="calls before them (%(default)s)")
OPTIONS.add_argument("--device", choices=DEVICES, default="auto")
OPTIONS.add_argument("--graph", action="store_true", help="capture the cell, profile its replays")
OPTIONS.add_argument("--trace", type=Path, help="write the Chrome trace here, for Perfetto")
OPTIONS.add_argument("--into", help="keep the profile under this name, for attnlib.compare")


def register(shell: InteractiveShell) -> None:
    """Add the magic to a shell; `%%attn_profile?` shows its options.

    Without a CUDA GPU Triton's kernels run on the CPU, by its interpreter, which must be chosen
    before triton is imported.
    """
    import torch

    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        if "triton" in sys.modules:
            warnings.warn("load attnlib before triton: its kernels need a GPU now", stacklevel=3)
        else:
            os.environ["TRITON_INTERPRET"] = "1"
            print("no CUDA GPU: Triton kernels run in its interpreter, on the CPU")  # noqa: T201

    def attn_profile(line: str, cell: str) -> Profile:
        __tracebackhide__ = True
        return profile_cell(shell, line, cell)

    attn_profile.__doc__ = OPTIONS.format_help()
    shell.register_magic_function(attn_profile, "cell", NAME)


def profile_cell(shell: InteractiveShell, line: str, cell: str) -> Profile:
    """The profile of `cell`, run in the shell's names; what the cell raises keeps its traceback.

    UsageError, one line, for a wrong option and for a choice that cannot be had here.
    """
    __tracebackhide__ = True
    options = OPTIONS.parse_args(arg_split(line))
    # Found out now, not after the cell has run twenty times.
    if options.trace and not options.trace.absolute().parent.is_dir():
        OPTIONS.error(f"--trace must name a file in a folder that exists, got {options.trace}")
    if options.into is not None and not options.into.isidentifier():
        OPTIONS.error(f"--into must be a name of Python, got {options.into!r}")
    if not cell.strip():
        raise UsageError(f"%%{NAME}: the cell must hold code, it is empty")
    # Under a name and line numbers that let a traceback show its lines.
    source = "\n" + shell.transform_cell(cell)
    number = len(shell.history_manager.input_hist_parsed) - 1
    filename = shell.compile.cache(source, number, raw_code=f"{NAME} {cell}")
    try:
        code = shell.compile(source, filename, "exec")
    except SyntaxError as error:
        raise error.with_traceback(None) from None
    given = {
        "calls": options.calls,
        "warmup": options.warmup,
        "device": options.device,
    }
    try:
        run = partial(exec, code, shell.user_ns)
        taken = profile(
            run,
            **given,
            cuda_graph=options.graph,
            name="cell",
        )
    except Exception as error:
        frame = error.__traceback__
        while frame and frame.tb_frame.f_code.co_filename != code.co_filename:
            frame = frame.tb_next
        # What `profile` raises for a choice that cannot be had: one line is enough.
        if frame is None and isinstance(error, ValueError | RuntimeError):
            raise UsageError(f"%%{NAME}: {error}") from None
        raise error.with_traceback(frame) from error.__cause__
    if options.trace:
        taken.save_trace(options.trace)
    if options.into:
        shell.user_ns[options.into] = taken
    return taken
