"""Measure what a view lacks on this GPU: in fresh processes, round by round, and stoppable.

A round is one process that measures all of the view's backends. Rounds of a case are numbered on:
one that was stopped, or that knew fewer backends, is never filled up later by another process. A
failed backend has a record and counts: asking for one more round measures it again.
"""

import shlex
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from threading import Event, Thread
from typing import Any

from ..kinds.item import Item
from ..run import study
from ..run.jobs import Job, StoppedError
from .choices import Choices
from .sources import STUDY, ThisGpu, release_of

Progress = Callable[[int, int], object]
Ended = Callable[[str], object]


def measure_missing(gpu: ThisGpu, choices: Choices, **options: Any) -> int:
    """Measure the rounds that `choices` lack; returns how many items were measured.

    `options` and what is raised are those of `study.Sweep`.
    """
    return study.Sweep(**options).run(missing_rounds(gpu, choices))


def missing_rounds(gpu: ThisGpu, choices: Choices) -> list[Job]:
    """A job for each round that is missing; odd rounds run in reverse order."""
    case = choices.case
    seen: defaultdict[int, set[str]] = defaultdict(set)
    for record in gpu.records:
        item = record.item
        release = release_of(item.backend, choices.release)
        if (item.case, item.timer, item.release) == (case, choices.timer, release):
            seen[record.round].add(item.backend)
    whole = sum(set(choices.backends) <= backends for backends in seen.values())
    first = 1 + max(seen, default=-1)
    items: list[Item[Any]] = [Item(name, "graph") for name in gpu.ceilings]
    for name in choices.backends:
        items.append(Item(name, choices.timer, case, release_of(name, choices.release)))
    call = " ".join(choices.call.split())
    same = {"device": gpu.device, "release": choices.release}
    same["command"] = f"python -c {shlex.quote(f'import attnlib; {call}')}"
    return [
        Job(STUDY, number, items=tuple(items[:: -1 if number % 2 else 1]), **same)
        for number in range(first, first + choices.rounds - whole)
    ]


class Bar:
    """What a sweep takes for a progress bar, as a callback."""

    def __init__(self, on_progress: Progress, *, total: int, **_: Any) -> None:
        self.total, self.done, self.on_progress = total, 0, on_progress
        on_progress(0, total)

    def update(self, count: int) -> None:
        """So many more items are done."""
        self.done += count
        self.on_progress(self.done, self.total)

    def close(self) -> None:
        """Nothing is held."""


class Sweep(Thread):
    """`measure_missing` in a thread of its own, which a notebook's kernel does not wait for.

    `on_progress` is called with the items done and all; `on_end` last, in that thread, with a
    sentence that says how it ended, or what went wrong: nothing is raised. `is_running` until then.
    """

    def __init__(
        self, gpu: ThisGpu, choices: Choices, *, on_progress: Progress, on_end: Ended
    ) -> None:
        super().__init__(daemon=True)
        self.is_running, self._asked_to_stop, self._on_end = True, Event(), on_end
        how = {"progress": partial(Bar, on_progress), "stop": self._asked_to_stop.is_set}
        self._measure = partial(measure_missing, gpu, choices, **how)

    def run(self) -> None:
        """Measure, then say how it ended; `start` calls it."""
        try:
            count = self._measure()
            words = f"Measured {count} items." if count else "All was on record already."
        except StoppedError:
            words = "Stopped. What was measured is kept; the rest is measured next time."
        except Exception as error:  # whatever it is: here nobody would see it
            words = f"Not measured: {type(error).__name__}: {error}"
        self.is_running = False
        self._on_end(words)

    def stop(self) -> None:
        """Ask it to end: the running worker is killed, what is on record stays."""
        self._asked_to_stop.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `on_end` has returned; whether it has."""
        self.join(timeout_s)
        return not self.is_alive()
