"""The view of one case: who ran it how fast, against which ceiling, with which kernels, and why.

`view` is what the widgets call too: every view can be had again by its own `call`. A view holds
plain tables and shows itself as a card in JupyterLab, and as text elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..draw.cards import Card, as_html, as_text
from . import tables, words
from .choices import Choices
from .narrow import narrow
from .sources import Source, ThisGpu, source_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class View:
    """What is on record of `choices`: a table for each question, `notes` for what to mind.

    | table | a row | columns |
    |---|---|---|
    | `times` | a backend | time, share of the ceiling, what ran, launches, plan, rounds |
    | `kernels` | a kernel of a backend | launches a call, time each |
    | `comparison` | a backend against `choices.against` | ratio, interval, rounds, verdict |
    | `rules` | a library's release | what its rule picks, why, and how long that took |
    | `samples` | a round of a backend that is ok | its record's id, its median time |

    `floor_us` is the time at the ceiling, NaN where the records have none.
    """

    choices: Choices
    served: str
    notes: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    times: pd.DataFrame
    kernels: pd.DataFrame
    comparison: pd.DataFrame
    rules: pd.DataFrame
    samples: pd.DataFrame
    floor_us: float

    @property
    def call(self) -> str:
        """The Python call that gives this view again."""
        return self.choices.call

    def figure(self) -> Figure:
        """Time of each backend, a dot a round, and the ceiling: to save or to show."""
        import matplotlib.pyplot as plt

        from .picture import draw_times

        return draw_times(self, plt.figure)

    def card(self) -> Card:
        """The view as a card."""
        return Card(
            title=f"{self.choices.model}: {self.choices.case.label}",
            notes=(self.served, *self.notes),
            facts=self.facts,
            table=words.times_in_words(self.times),
            caption="Time of one call: median over the rounds, a fresh process each",
            bars=words.shares(self.times),
            footer=words.FOOTER,
            more=(
                ("Compared, paired round by round", words.comparison_in_words(self.comparison)),
                ("Kernels of one call, from the trace", words.kernels_in_words(self.kernels)),
                ("Which rule would choose what", words.rules_in_words(self.rules)),
            ),
            code=self.call,
        )

    def _repr_html_(self) -> str:
        return as_html(self.card())

    def __repr__(self) -> str:
        return as_text(self.card())


def view(
    model: str = "Llama-3.1-8B",
    *,
    backends: Sequence[str] = (),
    batch: int | None = None,
    kv_len: int | None = None,
    page_size: int | None = None,
    lengths: str | None = None,
    variant: str | None = None,
    release: str | None = None,
    timer: str | None = None,
    against: str | None = None,
    rounds: int | None = None,
    records: str = "",
) -> View:
    """The view of one decode case of `model` (`shapes.NAMES`); what is not said is usual.

    `records` is a study whose published records serve it, or `live`: measure on this GPU what is
    missing of `rounds` rounds, in fresh processes, then show it. By default it is `live` in live
    mode, and in replay mode the first study that has the model.

    ValueError names an argument that cannot be answered and lists what can; RuntimeError says why
    nothing can be measured here.
    """
    wanted = {
        "backends": backends,
        "batch": batch,
        "kv_len": kv_len,
        "page_size": page_size,
        "lengths": lengths,
        "variant": variant,
        "release": release,
        "timer": timer,
        "against": against,
        "rounds": rounds,
    }
    source = source_of(model, records)
    choices = narrow(source, model, wanted).choices
    if isinstance(source, ThisGpu):
        from .sweep import measure_missing

        if reason := source.unavailable():
            raise RuntimeError(f"records='live' must be measured on a CUDA GPU: {reason}")
        measure_missing(source, choices)
    return look(source, choices)


def look(source: Source, choices: Choices, notes: Sequence[str] = ()) -> View:
    """What is on record of `choices`, and nothing measured; ValueError for an impossible shape."""
    found = tables.gather(source, choices)
    return View(
        choices=choices,
        served=words.served(source, found),
        notes=(*notes, *words.notes(found, choices)),
        facts=words.facts(found),
        times=tables.times(found, choices),
        kernels=tables.kernels(found, choices),
        comparison=tables.comparison(found, choices),
        rules=tables.rules(found, choices),
        samples=found.good[[*tables.SAMPLE]].reset_index(drop=True),
        floor_us=found.floor_us,
    )
