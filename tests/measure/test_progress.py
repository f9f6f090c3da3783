"""The bar of what takes seconds: on a terminal, and not in a log."""

import io

import pytest

from attnlib.measure.progress import progress_bar


class Terminal(io.StringIO):
    """A file that says whether it is a terminal."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_and_never_in_a_log(is_terminal):
    file = Terminal(is_terminal)
    bar = progress_bar(total=3, unit="item", desc="demo", file=file, mininterval=0)
    for _ in range(3):
        bar.update(1)
    bar.close()
    assert ("3/3" in file.getvalue()) == is_terminal
    assert bool(file.getvalue()) == is_terminal
