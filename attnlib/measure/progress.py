"""A bar for what takes seconds: what is done, for how long, and how long the rest will take."""

from typing import Any


def progress_bar(**words: Any) -> Any:
    """tqdm's bar: a widget in a notebook, a line on stderr elsewhere; gone once it is closed.

    Every update shows the time so far, one of 0 items too; the rest is by the mean so far.
    """
    from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread beside what is timed

    return Bar(**words, miniters=0, smoothing=0, leave=False)
