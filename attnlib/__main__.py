"""`python -m attnlib`, and the command `attnlib`."""

import atexit
import gc
import sys
import traceback

from . import CRASHED, install_advice


def main() -> int:
    """Run the command of this process; returns its exit status."""
    # A third of torch's import would go to seeking garbage, at its start and at its end.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    # Without it jsonschema does not compile the grammars of that package for 1 s.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    try:
        from .cli import main as run

        return run()
    except Exception as error:
        advice = ""
        if isinstance(error, ModuleNotFoundError):
            advice = install_advice(error)
        if advice:
            sys.stderr.write(f"python -m attnlib {advice}\n")
            return 2
        traceback.print_exc()  # `cli` itself cannot be loaded
        return CRASHED


if __name__ == "__main__":
    sys.exit(main())
