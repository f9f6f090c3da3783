"""`attnlib.explore()`: controls over `view`, in one line of a notebook.

What cannot be shown or measured is a sentence in the view: no error leaves a callback.
"""

import html
import time
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from typing import Any

import ipywidgets as w

from ..core.spec import require_int
from ..draw.cards import STYLE, as_html, as_text
from ..kinds.decode.case import DecodeCase
from ..run.jobs import StoppedError
from ..run.rows import strip_folders
from ..studies import STUDIES
from .advise import advise
from .source import (
    AXES,
    LIVE,
    NAMES,
    ROUNDS,
    choose,
    find_source,
    layer_named,
    measure_missing,
    require_kinds,
    sources_of,
    why_not_live,
)
from .view import View

MOST_ROUNDS = 100
DESCRIPTIONS = {"model": "Model", "records": "Records"}
DESCRIPTIONS |= {name: name.replace("_", " ").capitalize() for name in (*AXES, "against")}
DESCRIPTIONS |= {"variant": "Tensors", "kv_len": "KV length", "backends": "Backends"}
CSS_CLASS = "attn-explorer"
"""Of the whole; parts have `-view`, `-figure` and `-status` behind it."""
LABEL = {"description_width": "76px"}
WIDTHS = {"records": "min(100% - 4px, 908px)", "backends": "604px"}
MAKES = {"backends": w.SelectMultiple, "batch": w.SelectionSlider, "kv_len": w.SelectionSlider}
ROW = {"display": "flex", "flex_flow": "row wrap", "align_items": "center"}
INTRODUCTION = (
    "<style>.attn-explorer .widget-html-content { min-width: 0; }</style>"  # a wide table scrolls
    "Choose a case. Each control offers what there is for the choices before it. "
    "By keyboard: Tab goes to a control, Space opens its list or presses it."
)


def explore(model: str = "", **wishes: Any) -> "Explorer":
    """Controls and a view, to be shown by a notebook. Arguments are those of `attnlib.view`.

    ValueError for an unknown model, study or argument, for rounds beyond `MOST_ROUNDS` or where
    nothing can be measured; the view says if a size is not on record.
    """
    known = [*DESCRIPTIONS, "machine", "rounds", "tp", "heads", "head_dim"]
    if unknown := [name for name in wishes if name not in known]:
        raise ValueError(f"explore takes {', '.join(known)}; got {unknown[0]!r}")
    require_kinds({**wishes, "model": model})
    layer = {name: wishes.pop(name) for name in ("tp", "heads", "head_dim") if name in wishes}
    model = layer_named(model, **layer)
    if (rounds := wishes.get("rounds")) is not None:
        if reason := why_not_live(model):
            raise ValueError(f"rounds must be left out, got {rounds}: {reason}")
        require_int("rounds", rounds, most=MOST_ROUNDS)
    records, machine = wishes.get("records") or "", wishes.get("machine") or ""
    if machine or records not in ("", LIVE):
        find_source(model, records, machine)
    return Explorer({**wishes, "model": model})


class Explorer(w.VBox):
    """The widgets: a control for each name of `DESCRIPTIONS`, the view, advice for its layer.

    `wishes` are arguments of `view`, changed by the controls; `view` is what is shown now.
    """

    def __init__(self, wishes: dict[str, Any]) -> None:
        self.wishes = wishes
        self.view: View | None = None
        self.usual: dict[str, tuple[str, str]] = {}
        self.thread: Thread | None = None
        self.is_refreshing, self.must_stop, self.words = False, Event(), ""
        self.controls: dict[str, Any] = {}
        for name, description in DESCRIPTIONS.items():
            look = {"style": LABEL, "layout": {"width": WIDTHS.get(name, "300px")}}
            make = MAKES.get(name, w.Dropdown)
            self.controls[name] = make(options=[""], description=description, **look)
            self.controls[name].observe(partial(self._change, name), "value")
        rounds = wishes.get("rounds") or ROUNDS
        self.rounds = w.BoundedIntText(
            rounds, min=1, max=MOST_ROUNDS, description="Rounds", style=LABEL
        )
        self.rounds.observe(partial(self._change, "rounds"), "value")
        self.measure = w.Button(description="Measure", button_style="primary", icon="play")
        self.measure.on_click(self.start)
        self.stop = w.Button(description="Stop", icon="stop", disabled=True)
        self.stop.on_click(lambda _: self.must_stop.set())
        self.bar = w.IntProgress(description="Progress", style=LABEL)
        self.advise = w.Button(description="Advice for this layer", layout={"width": "220px"})
        self.advise.on_click(self._advise)
        self.status, self.served, self.shown, self.picture, self.advice = (
            w.HTML() for _ in range(5)
        )
        self.status.add_class(f"{CSS_CLASS}-status")
        self.shown.add_class(f"{CSS_CLASS}-view")
        self.picture.add_class(f"{CSS_CLASS}-figure")
        live = [self.rounds, self.measure, self.stop, self.bar, self.status]
        self.live_row = w.HBox(live, layout=ROW)
        controls = w.HBox([*self.controls.values()], layout=ROW)
        above = [w.HTML(INTRODUCTION), controls, self.live_row, self.served]
        super().__init__([*above, self.picture, self.shown, self.advise, self.advice])
        self.add_class(CSS_CLASS)
        self.refresh()

    def refresh(self) -> None:
        """Offer what there is for the wishes, and show the view; a problem is shown in it."""
        self.is_refreshing, self.view = True, None
        try:
            view = self._choose_view()
            card = view.card()
            self.words = as_text(card)
            changed = [
                f"<strong>{html.escape(note)}</strong>" for note in view.choice.notes.values()
            ]
            self.served.value = "<br>".join([*changed, html.escape(view.served)])
            self.shown.value = as_html(replace(card, notes=view.notes))
            self.picture.value = view.image() if len(view.good) else ""
            self.view = view
        except Exception as error:  # whatever it is: a callback that raises shows nothing
            self.words = _words_of(error)
            self.served.value = self.picture.value = ""
            self.shown.value = _problem(self.words)
        finally:
            self.measure.disabled = self.thread is not None or self.view is None
            self.is_refreshing = False
            self.advice.value = ""

    def start(self, _: object = None) -> None:
        """Measure what the view lacks, in a thread that the button `stop` ends."""
        if self.thread is not None or self.view is None:
            return
        self.must_stop.clear()
        self.measure.disabled, self.stop.disabled = True, False
        self._say("Starting: libraries are loaded; a kernel's first use compiles for a minute.")
        self.thread = Thread(target=self._measure, args=[self.view], daemon=True)
        self.thread.start()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # For whoever cannot show widgets: the view as it is now.
        texts = {"text/plain": self.words, "text/html": self.served.value + self.shown.value}
        return {**super()._repr_mimebundle_(**kwargs), **texts}

    def _change(self, name: str, change: dict[str, Any]) -> None:
        """Take the value of a control as a wish, and show what follows."""
        if self.is_refreshing:
            return
        if name == "records":
            self.wishes["records"], self.wishes["machine"] = change["new"]
        else:
            self.wishes[name] = change["new"]
        self.refresh()

    def _choose_view(self) -> View:
        """The view of the wishes; each control then offers its options and shows its value."""
        wishes, model, notes = self.wishes, self.wishes["model"], {}
        offered = {}
        for study, folder in sources_of(model):
            offered[study, folder] = f"{folder}: {STUDIES[study].question}"
        offered[LIVE, ""] = "measure on this GPU"
        records, machine = wishes.get("records") or "", wishes.get("machine") or ""
        if records and records not in [study for study, _ in offered]:
            notes["records"] = f"study {records} has no records on {model}"
            records = machine = wishes["records"] = wishes["machine"] = ""
        if machine and not any(machine.lower() in folder for _, folder in offered):
            notes["records"] = f"machine {machine} has no records on {model}"
            machine = wishes["machine"] = ""
        self._offer("model", {name: name for name in (*NAMES, model)}, model)
        self.live_row.layout.display = "flex" if records == LIVE else "none"
        if records == LIVE:  # shown as chosen even where it cannot be had
            self._offer("records", offered, (LIVE, ""))
        if not records:
            records, machine = self.usual.get(model, ("", machine))
        source = find_source(model, records, machine, wishes)
        if not source.is_live:  # The same one while only sizes change.
            self.usual.setdefault(model, (source.records, source.machine))
        self.live_row.layout.display = "flex" if source.is_live else "none"
        self._offer("records", offered, (source.records, "" if source.is_live else source.machine))
        choice = choose(source, model, wishes)
        notes |= choice.notes
        notes = {name: f"{note}; {choice.arguments[name]} is shown" for name, note in notes.items()}
        for name, options in choice.options.items():
            value = choice.arguments[name]
            labels = {o: f"{o:,}" if isinstance(o, int) else o or "as installed" for o in options}
            self._offer(name, labels, value)
            if wishes.get(name):  # so that a wish that was not met is noted once
                wishes[name] = value
        return View(source, replace(choice, notes=notes))

    def _offer(self, name: str, labels: dict[Any, str], value: Any) -> None:
        control, options = self.controls[name], tuple((text, o) for o, text in labels.items())
        with control.hold_sync():  # a page that gets options alone fails at what was chosen before
            if control.options != options:
                control.options = options
            control.value = value

    def _measure(self, view: View) -> None:
        """Measure, show the result and say how it ended; runs in a thread of its own."""
        progress, stop = partial(_Progress, self), self.must_stop.is_set
        try:
            count = measure_missing(view.choice, progress=progress, stop=stop)
            words = f"Measured {count} items." if count else "All was on record already."
        except StoppedError:
            words = "Stopped. What was measured is kept; the rest is measured next time."
        except Exception as error:  # whatever it is: in a thread nobody would see it
            words = f"Not measured: {_words_of(error)}"
        self.refresh()
        self._say(words)
        self.measure.disabled, self.stop.disabled = self.view is None, True
        self.thread = None

    def _advise(self, _: object = None) -> None:
        """Show the rule and the nearest recorded batches of the case that is shown."""
        try:
            if self.view is None or not isinstance(self.view.choice.case, DecodeCase):
                raise ValueError("advice must be of a decode call that is shown; of MLA none is")
            self.advice.value = as_html(advise(self.view.choice.case, gpu=self.view.gpu).card())
        except Exception as error:  # whatever it is: a callback that raises shows nothing
            self.advice.value = _problem(_words_of(error))

    def _say(self, words: str) -> None:
        self.status.value = f"<span role='status'>{html.escape(words)}</span>"


class _Progress:
    """What `run.study.Sweep` takes for a progress bar, shown by an explorer."""

    def __init__(self, explorer: Explorer, *, total: int, **_: Any) -> None:
        self.explorer, self.done, self.started = explorer, 0, time.monotonic()
        explorer.bar.max = total

    def update(self, count: int) -> None:
        self.done += count
        self.explorer.bar.value = self.done
        total, took = self.explorer.bar.max, time.monotonic() - self.started
        left = f", about {took * (total - self.done) / self.done:.0f} s left" if self.done else ""
        self.explorer._say(f"{self.done} of {total} items measured in {took:.0f} s{left}.")

    def close(self) -> None:
        """Nothing is held."""


def _words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {strip_folders(str(error))}"


def _problem(words: str) -> str:
    return (
        f"<style>{STYLE}</style><div class='attnlib-card' role='alert'>"
        f"<h4>This cannot be shown</h4><p class='note'>{html.escape(words)}</p></div>"
    )
