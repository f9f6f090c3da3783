"""`attnlib.play_schedule()`: choose a layer, two builds and lengths; see which SM reads what when.

It needs no GPU: `lab.schedules` has the models. What cannot be shown is a sentence in the widget.
"""

import html
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import ipywidgets as w

from ..core.call_text import parse_lengths
from ..core.spec import require_int, require_texts, require_type, require_word
from ..studies.splits.split_cap import LAYOUTS, Layout
from ..studies.splits.traffic import IN_FLIGHT, STEPS, TRACES, batches
from .cards import as_html, as_text
from .schedules import BUILDS, FA3, KERNELS, USUAL, Schedules, schedules

CSS_CLASS = "attn-schedule"
"""Of the whole; its picture and its table have `-picture` and `-table` after it."""
MODELS = {
    "32/8": "Llama-3.1-8B",
    "16/2": "Llama-3.1-70B, TP 4",
    "8/1": "Llama-3.1-70B, TP 8",
    "16/1": "Qwen3-235B, TP 4",
    "MLA 128 heads": "DeepSeek-V3, DP attention",
    "MLA 16 heads": "DeepSeek-V3, TP 8",
}
"""Heads of a layer on one GPU -> who has them."""
MLA_HEADS = re.compile(r"MLA\s+(?P<heads>\d+)\s+heads")
BY_HAND, FROM_TRAFFIC = "sliders", "a step of traffic"
K = 1024
POWERS = tuple(2**power for power in range(16))
LONG = (
    *POWERS[10:],
    48 * K,
    64 * K,
    96 * K,
    128 * K,
    192 * K,
)
SHORT = POWERS[6:]
MANY = (0, 1, 3, 7, 15, 23, 31, 39, 47, 63, 95, 127, 159, 191, 255)
FEW = POWERS[:6]
"""Stops of the sliders: tokens of the long and of the short requests, and how many there are."""
Q_TOKENS = (1, 2, 4, 8)
CHOICES = ("kernel", "layout", "q_tokens", "build", "against", "source")
OF_SLIDERS = ("long", "long_count", "short", "short_count")
OF_TRAFFIC = ("trace", "in_flight", "step")
LABEL = {"description_width": "100px"}
ROW = {"display": "flex", "flex_flow": "row wrap", "align_items": "center"}


def play_schedule(
    layout: str = "8/1",
    lens: str = "131072+1024x127",
    *,
    q_tokens: int = 1,
    kernel: str = FA3,
    builds: Sequence[str] = (),
) -> "SchedulePlayer":
    """Controls over the schedule of one decode call, shown by a notebook. No GPU is needed.

    Two builds stand side by side: which SM reads which request when. A table has the splits by
    every build of the kernel, and the known problem that holds at this call.

    Parameters
    ----------
    layout : str
        Query and KV heads of a layer on one GPU, such as `8/1`; or `MLA 128 heads`.
    lens : str
        Tokens of each request, such as `131072+1024x127`. Sliders move one long and one short
        length; other lengths are shown until a slider moves.
    q_tokens : int
        Query tokens of each request: 1 in decode, more where drafts are verified.
    kernel : str
        `FlashAttention-3` or `FlashInfer's fa2`.
    builds : sequence of str
        The two builds that are drawn, by default the one with a known problem and its fix.

    Returns
    -------
    SchedulePlayer
        A widget. Its `shown` is what it shows now, with the table as a frame.

    Raises
    ------
    ValueError
        For a layout, lengths, a kernel or builds that there are not; the message lists those there
        are.

    Examples
    --------
    One request of 131,072 tokens beside 127 of 1,024, eight query heads and one KV head:

    >>> import attnlib
    >>> player = attnlib.play_schedule("8/1", "131072+1024x127")
    >>> player.shown.table[["build", "splits of the longest"]].tail(1).values.tolist()
    [['SGLang 0.5.23', 8]]
    """
    require_word("kernel", kernel, KERNELS)
    require_int(
        name="q_tokens",
        value=q_tokens,
        most=Q_TOKENS[-1],
    )
    require_type("layout", layout, str, such_as="8/1")
    require_texts("builds", builds)
    chosen = _layout_named(layout)
    tokens = parse_lengths("lens", lens)
    for name in builds:
        require_word("builds", name, _builds_of(kernel))
    if len(builds) not in (0, 2):
        raise ValueError(f"builds must be two names, got {len(builds)}")
    schedules(chosen, tokens, kernel=kernel)  # raises for what there is not
    return SchedulePlayer(chosen, tokens, q_tokens, kernel, builds or USUAL[kernel])


class SchedulePlayer(w.VBox):
    """The widgets; `shown` is what they show now, None where it cannot be shown."""

    def __init__(
        self,
        layout: Layout,
        lens: tuple[int, ...],
        q_tokens: int,
        kernel: str,
        builds: Sequence[str],
    ) -> None:
        self.lens = lens
        self.shown: Schedules | None = None
        self.words = ""
        self.is_setting = True
        self.controls = _controls()
        for name, control in self.controls.items():
            control.observe(partial(self._change, name), "value")
        self._set("kernel", kernel)
        self._set("layout", f"{layout.heads}/{layout.kv_heads}")
        self._set("q_tokens", q_tokens)
        self._offer_builds(kernel, builds)
        self._take_lens(lens)
        self.picture = _html("picture")
        self.table = _html("table")
        self.sliders = self._row_of(OF_SLIDERS)
        self.traffic = self._row_of(OF_TRAFFIC)
        super().__init__(
            [
                self._row_of(CHOICES),
                self.sliders,
                self.traffic,
                self.picture,
                self.table,
            ]
        )
        self.add_class(CSS_CLASS)
        self.is_setting = False
        self.refresh()

    def _row_of(self, names: Sequence[str]) -> w.HBox:
        """These controls side by side."""
        controls = [self.controls[name] for name in names]
        return w.HBox(controls, layout=ROW)

    def _values(self) -> dict[str, Any]:
        """What each control says now."""
        return {name: control.value for name, control in self.controls.items()}

    def refresh(self) -> None:
        """Show the schedules of the controls, or a sentence on why that cannot be."""
        value = self._values()
        by_hand = value["source"] == BY_HAND
        self.sliders.layout.display = "flex" if by_hand else "none"
        self.traffic.layout.display = "none" if by_hand else "flex"
        heads, kv_heads = value["layout"].split("/")
        layout = Layout(
            heads=int(heads),
            kv_heads=int(kv_heads),
            q_len=value["q_tokens"],
        )
        self.shown = None
        try:
            shown = schedules(
                layout,
                self.lens,
                kernel=value["kernel"],
                shown=(value["build"], value["against"]),
            )
            card = shown.card()
            self.words = as_text(card)
            self.picture.value = shown.picture()
            self.table.value = as_html(card)
            self.shown = shown
        except ValueError as error:
            self.words = str(error)
            self.picture.value = ""
            self.table.value = f"<p role='alert'>{html.escape(self.words)}</p>"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # For whoever cannot show widgets: the schedules as they are now.
        bundle = dict(super()._repr_mimebundle_(**kwargs))
        bundle["text/plain"] = self.words
        bundle["text/html"] = self.picture.value + self.table.value
        return bundle

    def _change(self, name: str, change: dict[str, Any]) -> None:
        """Take what a user chose; controls that follow from it are set without a second drawing."""
        if self.is_setting:
            return
        self.is_setting = True
        if name == "kernel":
            self._offer_builds(change["new"], USUAL[change["new"]])
        if name in (*OF_SLIDERS, *OF_TRAFFIC, "source"):
            self.lens = self._lens_of_controls()
        self.is_setting = False
        self.refresh()

    def _lens_of_controls(self) -> tuple[int, ...]:
        value = self._values()
        if value["source"] == BY_HAND:
            long = (value["long"],) * value["long_count"]
            short = (value["short"],) * value["short_count"]
            return long + short
        wanted = [value[name] for name in OF_TRAFFIC]
        for batch in batches():
            if [batch.trace, batch.in_flight, batch.step] == wanted:
                return batch.tokens
        raise LookupError("every trace has these steps")

    def _take_lens(self, lens: tuple[int, ...]) -> None:
        """Put the sliders where one long and one short length are; others leave them."""
        sizes = set(lens)
        if len(sizes) > 2:
            return
        long = max(sizes)
        long_count = lens.count(long)
        self._set("long", long)
        self._set("long_count", long_count)
        self._set("short_count", len(lens) - long_count)
        if len(sizes) == 2:
            self._set("short", min(sizes))

    def _offer_builds(self, kernel: str, chosen: Sequence[str]) -> None:
        names = _builds_of(kernel)
        for name, value in zip(("build", "against"), chosen, strict=True):
            control = self.controls[name]
            control.options = names
            control.value = value

    def _set(self, name: str, value: Any) -> None:
        """Put a control to a value, which becomes one of its stops."""
        control = self.controls[name]
        values = [option for _, option in _pairs(control.options)]
        if value not in values:
            if name == "layout":
                control.options = [*control.options, (value, value)]
            else:
                control.options = _labelled(sorted([*values, value]))
        control.value = value


def _builds_of(kernel: str) -> list[str]:
    """The names of the builds of a kernel."""
    return [build.name for build in BUILDS if build.kernel == kernel]


def _controls() -> dict[str, Any]:
    """Every control, by name, with its options and no value of the user's yet."""
    layouts = []
    for layout in LAYOUTS:
        if layout.q_len == 1:
            label = f"{layout.name}: {MODELS[layout.name]}"
            layouts.append((label, f"{layout.heads}/{layout.kv_heads}"))
    return {
        "kernel": _dropdown("Kernel", KERNELS),
        "layout": _dropdown("Heads of a GPU", layouts),
        "q_tokens": _dropdown("Query tokens", _labelled(Q_TOKENS)),
        "build": _dropdown("Left", USUAL[FA3]),
        "against": _dropdown("Right", USUAL[FA3]),
        "source": _dropdown("Lengths from", (BY_HAND, FROM_TRAFFIC)),
        "long": _slider("Long, tokens", LONG),
        "long_count": _slider("How many", FEW),
        "short": _slider("Short, tokens", SHORT),
        "short_count": _slider("How many", MANY),
        "trace": _dropdown("Trace", TRACES),
        "in_flight": _dropdown("In flight", _labelled(IN_FLIGHT)),
        "step": _slider("Step", range(STEPS)),
    }


def _dropdown(label: str, options: Sequence[Any]) -> w.Dropdown:
    return w.Dropdown(
        options=options,
        description=label,
        style=LABEL,
        layout={"width": "310px"},
    )


def _slider(label: str, stops: Sequence[int]) -> w.SelectionSlider:
    return w.SelectionSlider(
        options=_labelled(stops),
        description=label,
        style=LABEL,
        layout={"width": "400px"},
    )


def _labelled(values: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"{value:,}", value) for value in values]


def _pairs(options: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Options as pairs of label and value."""
    pairs = []
    for option in options:
        is_pair = isinstance(option, tuple)
        pairs.append(option if is_pair else (option, option))
    return pairs


def _layout_named(text: str) -> Layout:
    """The layout of `8/1` or `MLA 128 heads`; ValueError lists the usual ones."""
    latent = MLA_HEADS.fullmatch(text.strip())
    if latent:
        return Layout(int(latent["heads"]), 0)
    heads, _, kv_heads = text.partition("/")
    if heads.isdecimal() and kv_heads.isdecimal() and int(kv_heads):
        return Layout(int(heads), int(kv_heads))
    raise ValueError(f"layout must be such as {', '.join(MODELS)}, got {text!r}")


def _html(part: str) -> w.HTML:
    """A text of the widget; `part` names it in the page."""
    text = w.HTML()
    text.add_class(f"{CSS_CLASS}-{part}")
    return text
