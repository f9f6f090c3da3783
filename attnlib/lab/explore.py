"""`attnlib.explore()`: controls over `view`, in one line of a notebook.

What cannot be shown or measured is a sentence in the view: no error leaves a callback.
"""

import html
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from typing import Any

import ipywidgets as w

from ..core.spec import require_int
from ..measure.calls.decode.case import DecodeCase
from ..measure.calls.mla.case import MlaCase
from ..run.jobs import StoppedError
from ..run.rows import strip_folders
from ..studies import STUDIES
from .advise import advise
from .cards import STYLE, as_html, as_text
from .source import (
    AXES,
    LIVE,
    OFFERED_MODELS,
    ROUNDS,
    ChosenCase,
    Place,
    find_case,
    find_moving_case,
    layer_named,
    measure_missing,
    require_kinds,
    sources_of,
    why_not_live,
    words_of,
)
from .view import View, said_beside

MOST_ROUNDS = 100
LAYER_ARGUMENTS = ("tp", "heads", "head_dim")
"""Arguments of `view` that say a layer beside its model."""
DESCRIPTIONS = {
    "model": "Model",
    "records": "Records",
    "release": "Release",
    "timer": "Timer",
    "variant": "Tensors",
    "page_size": "Page size",
    "lengths": "Lengths",
    "batch": "Batch",
    "kv_len": "KV length",
    "against": "Against",
    "backends": "Backends",
}
"""Arguments of `view` that have a control, and its label."""
CSS_CLASS = "attn-explorer"
"""Of the whole; parts have `-view`, `-figure` and `-status` behind it."""
LABEL = {"description_width": "76px"}
WIDTHS = {"records": "min(100% - 4px, 908px)", "backends": "604px"}
MAKES = {
    "backends": w.SelectMultiple,
    "batch": w.SelectionSlider,
    "kv_len": w.SelectionSlider,
}
"""Controls that are no list to choose one from."""
ROW_LAYOUT = {"display": "flex", "flex_flow": "row wrap", "align_items": "center"}
INTRODUCTION = (
    "<style>.attn-explorer .widget-html-content { min-width: 0; }</style>"  # a wide table scrolls
    "Choose a case. Each control offers what there is for the choices before it. "
    "By keyboard: Tab goes to a control, Space opens its list or presses it."
)


def explore(model: str | DecodeCase | MlaCase = "", **wishes: Any) -> "Explorer":
    """Controls over a view, shown by a notebook: choose a case, see it, measure it.

    Without a release it opens at the newest one that has several batch sizes and KV lengths on
    record, so that its sliders move.

    Parameters
    ----------
    model : str, DecodeCase or MlaCase, optional
        The call, as a case or as its text; or a model, by default Llama-3.1-8B.
    **wishes : str, int or sequence of str
        Other arguments of `attnlib.view`, with which it opens; `rounds` up to 100.

    Returns
    -------
    Explorer
        A widget. What cannot be shown, such as a size that is not on record, is a sentence in it.

    Raises
    ------
    ValueError
        For an unknown model, study, machine or argument, and for rounds where nothing can be
        measured.

    Examples
    --------
    >>> import attnlib
    >>> explorer = attnlib.explore("Llama-3.1-8B", release="0.6.3")
    >>> explorer.view.choice.case.label
    'heads=32/8 head_dim=128 page=16 lens=8192x16'
    """
    known = [*DESCRIPTIONS, "machine", "rounds", *LAYER_ARGUMENTS]
    unknown = [name for name in wishes if name not in known]
    if unknown:
        raise ValueError(f"explore takes {', '.join(known)}; got {unknown[0]!r}")
    given = {**wishes, "model": model}
    wishes = {**given, **said_beside(given)}
    require_kinds(wishes)
    layer = {name: wishes.pop(name) for name in ("model", *LAYER_ARGUMENTS) if name in wishes}
    model = layer_named(**layer)
    rounds = wishes.get("rounds")
    if rounds is not None:
        if reason := why_not_live(model):
            raise ValueError(f"rounds must be left out, got {rounds}: {reason}")
        require_int("rounds", rounds, most=MOST_ROUNDS)
    records = wishes.get("records") or ""
    machine = wishes.get("machine") or ""
    if machine or records not in ("", LIVE):
        find_case(model, records, machine)  # raises for what there is not
    return Explorer({**wishes, "model": model})


class Explorer(w.VBox):
    """The widgets: a control for each name of `DESCRIPTIONS`, the view, advice for its layer.

    `wishes` are arguments of `view`, changed by the controls; `view` is what is shown now.
    """

    def __init__(self, wishes: dict[str, Any]) -> None:
        self.wishes = wishes
        self.view: View | None = None
        self.usual: dict[str, tuple[str, str, str | None]] = {}
        self.shown_axes: dict[str, Any] = {}
        self.shown_backends: list[str] = []
        self.thread: Thread | None = None
        self.is_refreshing = False
        self.must_stop = Event()
        self.words = ""
        self.controls = {name: self._control(name) for name in DESCRIPTIONS}
        self._add_buttons(wishes.get("rounds") or ROUNDS)
        self.status = _html("status")
        self.served = w.HTML()
        self.picture = _html("figure")
        self.shown = _html("view")
        self.advice = w.HTML()
        self.live_row = w.HBox(
            [self.rounds, self.measure, self.stop, self.bar, self.status],
            layout=ROW_LAYOUT,
        )
        super().__init__(
            [
                w.HTML(INTRODUCTION),
                w.HBox([*self.controls.values()], layout=ROW_LAYOUT),
                self.live_row,
                self.served,
                self.picture,
                self.shown,
                self.advise,
                self.advice,
            ]
        )
        self.add_class(CSS_CLASS)
        self.refresh()

    def _control(self, name: str) -> Any:
        """The control of an argument of `view`."""
        make = MAKES.get(name, w.Dropdown)
        control = make(
            options=[""],
            description=DESCRIPTIONS[name],
            style=LABEL,
            layout={"width": WIDTHS.get(name, "300px")},
        )
        control.observe(partial(self._change, name), "value")
        return control

    def _add_buttons(self, rounds: int) -> None:
        """What starts and stops a measurement and asks for advice, and its progress."""
        self.rounds = w.BoundedIntText(
            value=rounds,
            min=1,
            max=MOST_ROUNDS,
            description="Rounds",
            style=LABEL,
        )
        self.rounds.observe(partial(self._change, "rounds"), "value")
        self.measure = w.Button(description="Measure", button_style="primary", icon="play")
        self.measure.on_click(self.start)
        self.stop = w.Button(description="Stop", icon="stop", disabled=True)
        self.stop.on_click(lambda _: self.must_stop.set())
        self.bar = w.IntProgress(description="Progress", style=LABEL)
        self.advise = w.Button(description="Advice for this layer", layout={"width": "220px"})
        self.advise.on_click(self._advise)

    def refresh(self, changed: str = "") -> None:
        """Offer what there is for the wishes, and show the view; a problem is shown in it.

        `changed` is the control that was changed.
        """
        self.is_refreshing = True
        self.view = None
        try:
            view = self._choose_view(changed)
            card = view.card()
            self.words = as_text(card)
            notes = [html.escape(note) for note in view.choice.notes.values()]
            lines = [f"<strong>{note}</strong>" for note in notes]
            self.served.value = "<br>".join([*lines, html.escape(view.served)])
            self.shown.value = as_html(replace(card, notes=view.notes))
            self.picture.value = view.image() if len(view.good) else ""
            self.view = view
        except Exception as error:  # whatever it is: a callback that raises shows nothing
            self.words = _words_of(error)
            self.served.value = ""
            self.picture.value = ""
            self.shown.value = _problem(self.words)
        finally:
            self.measure.disabled = self.thread is not None or not self._can_measure()
            self.advise.disabled = self.view is None
            self.is_refreshing = False
            self.advice.value = ""

    def start(self, _: object = None) -> None:
        """Measure what the view lacks, in a thread that the button `stop` ends."""
        if self.thread is not None or self.view is None:
            return
        if reason := why_not_live(self.wishes["model"]):
            self._say(f"Not measured: {reason}.")
            return
        self.must_stop.clear()
        self.measure.disabled = True
        self.stop.disabled = False
        self._say("Starting: libraries are loaded; a kernel's first use compiles for a minute.")
        self.thread = Thread(target=self._measure, args=[self.view], daemon=True)
        self.thread.start()

    def _can_measure(self) -> bool:
        """Whether a view is shown, and its model can be measured here."""
        return self.view is not None and not why_not_live(self.wishes["model"])

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
        self.refresh(changed=name)

    def _choose_view(self, changed: str) -> View:
        """The view of the wishes; each control then offers its options and shows its value."""
        wishes = self.wishes
        model = wishes["model"]
        offered = self._records_offered(model)
        notes = self._drop_records(model, offered)
        records = wishes.get("records") or ""
        machine = wishes.get("machine") or ""
        self._offer("model", {name: name for name in (*OFFERED_MODELS, model)}, model)
        self._show_live_row(records == LIVE)
        if records == LIVE:  # shown as chosen even where it cannot be had
            self._offer("records", offered, (LIVE, ""))
        choice = self._find_case(model, records, machine)
        source = choice.source
        served_by = (source.records, "" if source.is_live else source.machine)
        self._show_live_row(source.is_live)
        self._offer("records", offered, served_by)
        for name, options in choice.options.items():
            value = choice.arguments[name]
            self._offer(name, {option: _label_of(option) for option in options}, value)
            if wishes.get(name):  # so that a wish that was not met is noted once
                wishes[name] = value
        for name, note in (notes | choice.notes).items():
            shown = words_of(choice.arguments[name])
            notes[name] = f"{note}; {shown} is shown"
        if others := self._others_changed(choice.arguments, {changed, *notes}):
            notes["others"] = f"changed with {changed}: {others}"
        if gone := self._backends_gone(choice.arguments["backends"], changed):
            notes["gone"] = f"not on record with this {changed}: {', '.join(gone)}"
        return View(replace(choice, notes=notes))

    def _find_case(
        self,
        model: str,
        records: str,
        machine: str,
    ) -> ChosenCase:
        """The case of the wishes; where no records are named, of the same ones and the same release
        while only sizes change."""
        wishes = self.wishes
        if records:
            return find_case(model, records, machine, wishes)
        if model in self.usual:
            records, machine, release = self.usual[model]
            return find_case(model, records, machine, {"release": release, **wishes})
        release = None
        if machine:
            choice = find_case(model, "", machine, wishes)
        else:
            choice = find_moving_case(model, wishes)
            if not wishes.get("release"):
                release = choice.arguments["release"]
        source = choice.source
        if not source.is_live:
            self.usual[model] = (source.records, source.machine, release)
        return choice

    def _others_changed(self, arguments: Mapping[str, Any], told: Collection[str]) -> str:
        """The axes that change although nobody asked for it, in words; all are then remembered."""
        words = []
        for axis, old in self.shown_axes.items():
            new = arguments[axis]
            if axis not in told and new != old:
                words.append(f"{axis} {words_of(old)} to {words_of(new)}")
        self.shown_axes = {axis: arguments[axis] for axis in AXES}
        return ", ".join(words)

    def _backends_gone(self, backends: list[str], changed: str) -> list[str]:
        """The backends that were shown and are not, where a size or another axis was changed."""
        before = self.shown_backends
        self.shown_backends = backends
        if changed not in AXES:
            return []
        return [name for name in before if name not in backends]

    def _records_offered(self, model: str) -> dict[Place, str]:
        """Study and machine that have a model -> how they are called; then this GPU, if the model
        can be measured on it or that was asked for."""
        offered = {}
        for study, machine in sources_of(model):
            offered[study, machine] = f"{machine}: {STUDIES[study].question}"
        if self.wishes.get("records") == LIVE or not why_not_live(model):
            offered[LIVE, ""] = "measure on this GPU"
        return offered

    def _drop_records(self, model: str, offered: Collection[Place]) -> dict[str, str]:
        """Forget a study or machine that a model has no records of; returns a note on it."""
        wishes = self.wishes
        records = wishes.get("records") or ""
        machine = wishes.get("machine") or ""
        if records and records not in [study for study, _ in offered]:
            wishes["records"] = ""
            wishes["machine"] = ""
            return {"records": f"study {records} has no records on {model}"}
        if machine and not any(machine.lower() in folder for _, folder in offered):
            wishes["machine"] = ""
            return {"records": f"machine {machine} has no records on {model}"}
        return {}

    def _show_live_row(self, is_live: bool) -> None:
        self.live_row.layout.display = "flex" if is_live else "none"

    def _offer(self, name: str, labels: dict[Any, str], value: Any) -> None:
        control = self.controls[name]
        options = tuple((label, option) for option, label in labels.items())
        with control.hold_sync():  # a page that gets options alone fails at what was chosen before
            if control.options != options:
                control.options = options
            control.disabled = len(options) < 2
            control.value = value

    def _measure(self, view: View) -> None:
        """Measure, show the result and say how it ended; runs in a thread of its own."""
        try:
            count = measure_missing(
                view.choice,
                progress=partial(_Progress, self),
                stop=self.must_stop.is_set,
            )
            words = f"Measured {count} items." if count else "All was on record already."
        except StoppedError:
            words = "Stopped. What was measured is kept; the rest is measured next time."
        except Exception as error:  # whatever it is: in a thread nobody would see it
            words = f"Not measured: {_words_of(error)}"
        self.refresh()
        self._say(words)
        self.measure.disabled = not self._can_measure()
        self.stop.disabled = True
        self.thread = None

    def _advise(self, _: object = None) -> None:
        """Show the rule and the nearest recorded batches of the case that is shown."""
        try:
            if self.view is None:
                raise ValueError("advice must be of a call that is shown; choose records")
            gpu = self.view.machine.get("gpu") or self.view.source.machine
            advice = advise(self.view.choice.case, gpu=gpu)
            self.advice.value = advice._repr_html_()
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
        total = self.explorer.bar.max
        took_s = time.monotonic() - self.started
        words = f"{self.done} of {total} items measured in {took_s:.0f} s"
        if self.done:
            left_s = took_s * (total - self.done) / self.done
            words += f", about {left_s:.0f} s left"
        self.explorer._say(f"{words}.")

    def close(self) -> None:
        """Nothing is held."""


def _html(part: str) -> w.HTML:
    """A text of the explorer; `part` names it in the page."""
    text = w.HTML()
    text.add_class(f"{CSS_CLASS}-{part}")
    return text


def _label_of(option: Any) -> str:
    """A choice in words."""
    if isinstance(option, int):
        return f"{option:,}"
    return words_of(option) or "as installed"


def _words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {strip_folders(str(error))}"


def _problem(words: str) -> str:
    return (
        f"<style>{STYLE}</style><div class='attnlib-card' role='alert'>"
        f"<h4>This cannot be shown</h4><p class='note'>{html.escape(words)}</p></div>"
    )
