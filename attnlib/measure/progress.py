"""A bar for what takes seconds: what is done, for how long, and how long the rest will take."""

from typing import Any


def progress_bar(**words: Any) -> Any:
    """tqdm's bar, gone once it is closed; an update of 0 items too shows the time so far.

    None in a file or a pipe, where each redraw would stay.
    """
    from tqdm.auto import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # no thread beside what is timed

    return Bar(
        **words,
        miniters=0,
        smoothing=0,
        leave=False,
        disable=None,
    )
