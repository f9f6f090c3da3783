"""`attnlib.explore()`: controls over `view`, in one line of a notebook.

What cannot be shown or measured is a sentence in the view: no error leaves a callback.
"""

import html
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock, Thread
from typing import Any

try:
    import ipywidgets as w
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'attnlib.explore needs ipywidgets: pip install "ipywidgets>=8.1"; '
        "attnlib.view shows the same without it"
    ) from error

from ..core.spec import require_word
from ..draw.cards import STYLE, Shown, as_html, as_text
from ..run.record import strip_folders
from ..select import LIBRARIES
from ..studies.fa3_decode_regression import FIXED, NEWEST
from ..studies.upgrade import compare_releases
from .choices import AXES, LIVE, NAMES, ROUNDS
from .diagnose import diagnose
from .sources import Narrowed, Source, ThisGpu, narrow, source_of, studies_of, usual_records
from .sweep import Bar, Sweep
from .view import View, look

CONTROLS = ("model", "records", *AXES, "against")
DESCRIPTIONS = {name: name.replace("_", " ").capitalize() for name in CONTROLS}
DESCRIPTIONS |= {"variant": "Tensors", "kv_len": "KV length"}
CSS_CLASS = "attn-explorer"
"""Of the whole; the view's has `-view` after it, the figure's `-figure`, the status' `-status`."""
MAX_ROUNDS = 20
CONTROL_WIDTH, CHECKBOX_WIDTH = "300px", "210px"
LABEL = {"description_width": "76px"}
ROW = {"display": "flex", "flex_flow": "row wrap", "align_items": "center"}
WIDE = {"records": "604px"}
INTRODUCTION = (
    "Choose a case. Each control offers what there is for the choices before it. "
    "By keyboard: Tab goes to a control, Space opens its list or presses it."
)
"""JupyterLab keeps the bare arrow keys to itself, so a closed list does not get them."""


def explore(model: str = NAMES[0], **asked: Any) -> "Explorer":
    """Controls and a view, to be shown by a notebook. Arguments are those of `attnlib.view`.

    ValueError for an unknown model, study or argument; the view says if a size is not on record.
    """
    require_word("model", model, NAMES)
    known = (*DESCRIPTIONS, "backends", "rounds")
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f"explore takes {', '.join(known)}; got {unknown[0]!r}")
    if records := asked.get("records"):
        source_of(model, records)
    return Explorer({**asked, "model": model})


class Explorer(w.VBox):
    """The widgets: a control for each name of `DESCRIPTIONS`, a checkbox for each backend.

    `view` is what is shown now; `gpu` measures in live mode.
    """

    def __init__(self, asked: dict[str, Any], gpu: ThisGpu | None = None) -> None:
        self.gpu = gpu or ThisGpu()
        self.view: View | None = None
        self._asked = dict(asked)
        self._narrowed: Narrowed | None = None
        self._sweep: Sweep | None = None
        self._quiet, self._words = False, ""
        self._lock = RLock()
        self.controls = {name: self._dropdown(name) for name in DESCRIPTIONS}
        self.backends = w.HBox(layout=ROW)
        self.live_row = self._make_live_row()
        self.served, self.shown, self.picture = w.HTML(), w.HTML(), w.HTML()
        self.shown.add_class(f"{CSS_CLASS}-view")
        self.picture.add_class(f"{CSS_CLASS}-figure")
        controls = w.HBox([*self.controls.values()], layout=ROW)
        rows = [w.HTML(INTRODUCTION), controls, self.backends, self.live_row]
        super().__init__([*rows, self.served, self.picture, self.shown, self._make_asking()])
        self.add_class(CSS_CLASS)
        self.refresh()

    def refresh(self) -> None:
        """Narrow the controls to what was chosen, and show the view; a problem is shown in it."""
        with self._lock:
            self._narrowed, self._quiet = None, True
            try:
                source, notes = self._choose_source()
                found = self._narrowed = narrow(source, self._asked, strict=False)
                self._offer_narrowed(found, source)
                if reason := source.unavailable():
                    model, why = self._asked["model"], f"Nothing is measured here: {reason}."
                    lacks = f"No records on {model}: measured live only, on a GPU. "
                    self._show_problem(why if studies_of(model) else lacks + why)
                else:
                    view = self.view = look(source, found.choices, notes + found.notes)
                    card = view.card()
                    self._words = as_text(card)
                    self.served.value = f"<b>{html.escape(view.served)}</b>"
                    self.shown.value = as_html(replace(card, notes=view.notes))
                    self.picture.value = view.image() if len(view.samples) else ""
            except Exception as error:  # whatever it is: a callback that raises shows nothing
                self._show_problem(f"{type(error).__name__}: {error}")
            finally:
                self._quiet = False

    def start(self, *_: object) -> None:
        """Measure what the view lacks, in a thread; `stop_now` ends it."""
        if self._is_measuring() or not self._narrowed:
            return
        choices = self._narrowed.choices
        self._sweep = Sweep(self.gpu, choices, on_progress=self._progress, on_end=self._ended)
        self.measure.disabled, self.stop.disabled = True, False
        self._say("Starting: the GPU is described and the libraries are loaded.")
        self._sweep.start()

    def stop_now(self, *_: object) -> None:
        """Stop measuring; what is on record stays."""
        if self._sweep:
            self._say("Stopping.")
            self._sweep.stop()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no measurement is under way and its result is shown; whether it is."""
        return self._sweep is None or self._sweep.wait(timeout_s)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # For whoever cannot show widgets: the view as it is now.
        shown = {"text/plain": self._words, "text/html": self.served.value + self.shown.value}
        return {**super()._repr_mimebundle_(**kwargs), **shown}

    def _dropdown(self, name: str) -> w.Dropdown:
        layout = {"width": WIDE.get(name, CONTROL_WIDTH)}
        control = w.Dropdown(description=DESCRIPTIONS[name], style=LABEL, layout=layout)
        control.observe(lambda change: self._choose(name, change["new"]), "value")
        return control

    def _make_live_row(self) -> w.HBox:
        rounds = self._asked.get("rounds") or ROUNDS
        sizes = {"value": rounds, "min": 1, "max": max(MAX_ROUNDS, rounds)}
        layout = {"width": "150px"}
        self.rounds = w.BoundedIntText(description="Rounds", style=LABEL, layout=layout, **sizes)
        self.measure = w.Button(description="Measure", button_style="primary", icon="play")
        self.stop = w.Button(description="Stop", icon="stop", disabled=True)
        self.bar = w.IntProgress(description="Progress", style=LABEL)
        self.status = w.HTML()
        self.status.add_class(f"{CSS_CLASS}-status")
        self.rounds.observe(lambda change: self._choose("rounds", change["new"]), "value")
        self.measure.on_click(self.start)
        self.stop.on_click(self.stop_now)
        return w.HBox([self.rounds, self.measure, self.stop, self.bar, self.status], layout=ROW)

    def _make_asking(self) -> w.VBox:
        releases = LIBRARIES["flashinfer"].releases
        ends = {"Base": FIXED, "New": NEWEST}
        same = {"options": releases, "style": LABEL}
        self.ends = [w.Combobox(description=n, value=value, **same) for n, value in ends.items()]
        self.compare = w.Button(description="Compare releases", icon="balance-scale")
        self.trace = w.FileUpload(description="Diagnose a trace", accept=".json,.gz,.sqlite")
        self.answer = w.HTML()
        self.compare.on_click(lambda _: Thread(target=self.compare_now, daemon=True).start())
        self.trace.observe(lambda _: self.diagnose_now(), "value")
        return w.VBox([w.HBox([*self.ends, self.compare, self.trace], layout=ROW), self.answer])

    def compare_now(self) -> None:
        """Compare the two releases over the model's calls: measured live, else replayed."""
        base, new = (end.value for end in self.ends)
        models, bar = [self._asked["model"]], partial(Bar, self._progress)
        self._answer(lambda: compare_releases(base, new, models=models, progress=bar))

    def diagnose_now(self) -> None:
        """Diagnose the trace that was dropped."""
        for file in self.trace.value:
            with TemporaryDirectory() as folder:
                path = Path(folder, Path(file["name"]).name)
                path.write_bytes(file["content"])
                self._answer(partial(diagnose, path))

    def _answer(self, ask: Callable[[], Shown]) -> None:
        self.answer.value = "<span role='status'>Under way.</span>"
        try:
            self.answer.value = as_html(ask().card())
        except Exception as error:  # whatever it is: a callback that raises shows nothing
            self.answer.value = _problem(f"{type(error).__name__}: {strip_folders(str(error))}")

    def _choose(self, name: str, value: Any) -> None:
        with self._lock:
            if not self._quiet:
                self._asked[name] = value
                self.refresh()

    def _choose_backends(self, _: object) -> None:
        with self._lock:
            picked = tuple(box.description for box in self.backends.children if box.value)
            if self._quiet:
                return
            if picked:
                if self._asked.get("against") not in picked:
                    self._asked["against"] = None
                self._choose("backends", picked)
            else:
                self._narrowed = None
                self._show_problem("Check at least one backend.")

    def _choose_source(self) -> tuple[Source, tuple[str, ...]]:
        """The source, and a note if it is not the one that was chosen for another model."""
        model, wish = self._asked["model"], self._asked.get("records")
        studies = studies_of(model)
        name = wish if wish in (LIVE, *studies) else usual_records(model)
        notes = (f"Study {wish} has no records on {model}.",) if wish and wish != name else ()
        self._asked["records"] = name if wish else None
        named = [(f"{study} ({machine})", study) for study, machine in studies.items()]
        self._offer("model", NAMES, model)
        self._offer("records", [*named, ("measure on this GPU", LIVE)], name)
        return (self.gpu if name == LIVE else source_of(model, name)), notes

    def _offer_narrowed(self, found: Narrowed, source: Source) -> None:
        for axis in (*AXES, "against"):
            options, value = found.options[axis], getattr(found.choices, axis)
            # Only a release may be empty: that of the library as it is installed.
            words = [f"{o:,}" if isinstance(o, int) else o or "as installed" for o in options]
            self._offer(axis, zip(words, options, strict=True), value)
            if self._asked.get(axis) is not None:
                self._asked[axis] = value
        names = found.options["backends"]
        if tuple(box.description for box in self.backends.children) != names:
            look = {"indent": False, "layout": {"width": CHECKBOX_WIDTH}}
            self.backends.children = [w.Checkbox(description=name, **look) for name in names]
            for box in self.backends.children:
                box.observe(self._choose_backends, "value")
        for box in self.backends.children:
            box.value = box.description in found.choices.backends
        self.live_row.layout.display = "flex" if source.name == LIVE else "none"
        self.measure.disabled = self._is_measuring() or bool(source.unavailable())

    def _is_measuring(self) -> bool:
        return self._sweep is not None and self._sweep.is_running

    def _offer(self, name: str, options: Any, value: Any) -> None:
        control = self.controls[name]
        if control.options != (options := tuple(options)):
            control.options = options
        control.value = value

    def _show_problem(self, words: str) -> None:
        self.view, self._words = None, words
        self.served.value = self.picture.value = ""
        self.measure.disabled = True
        call = html.escape(self._narrowed.choices.call) if self._narrowed else ""
        again = f"<p>This view again:</p><pre><code>{call}</code></pre>" if call else ""
        self.shown.value = _problem(words, again)

    def _progress(self, done: int, total: int) -> None:
        self.bar.max, self.bar.value = total, done
        self._say(f"{done} of {total} items measured.")

    def _ended(self, words: str) -> None:
        self.stop.disabled = True
        self.refresh()
        self._say(words)

    def _say(self, words: str) -> None:
        self.status.value = f"<span role='status'>{html.escape(words)}</span>"


def _problem(words: str, again: str = "") -> str:
    return (
        f"<style>{STYLE}</style><div class='attnlib-card' role='alert'>"
        f"<h4>This cannot be shown</h4><p class='note'>{html.escape(words)}</p>{again}</div>"
    )
