"""What to use on Hopper, by kind of call: the backend that lost least to the fastest on record."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import pandas as pd

from ..core.backends.table import entry_of
from ..core.spec import require_texts, require_word
from ..run.frame import decode_rows
from ..run.store import load
from ..studies import engine_modes as modes
from ..studies import plan_rivals
from .cards import SHORT, Card, Shown, in_words
from .expected import neighbour_loss
from .recorded import recorded_batches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FA2, FA3, CUDA_CORES = "flashinfer-fa2", "flashinfer-fa3", "flashinfer-cuda-cores"
FLASH_ATTENTION = "flash-attn-3-precomputed"
RELEASED = (FA2, FA3, CUDA_CORES, FLASH_ATTENTION)
"""What all batches of `random_batches` were measured with, but for our own plan."""
FEW_HEADS = 2
"""Query heads per KV head up to which FlashInfer's CUDA cores are its fastest."""
LARGE_PAGES = "decode, 3 or more, pages of 16 or 64"
SHORT_TOKENS = 1000
"""Tokens of the longest request below which XQA is; chosen after seeing the times."""
LEAST_HEAD_DIM = 128
"""Below it our build of FlashAttention-3 is slower than those of engines."""
MODES = {
    "draft_extend": "draft extension, CUDA graph",
    "dllm_extend": "block extension of a diffusion model, CUDA graph",
    "prefill_paged": "prefill, paged",
    modes.PREFIX: "prefill behind a cached prefix",
    "prefill_ragged": "prefill, ragged",
}
SHORT_NAMES = {
    modes.FA2: FA2,
    modes.FA3: FA3,
    modes.LIBRARY: FLASH_ATTENTION,
    "flashinfer-prefill-fa2": FA2,
    "flashinfer-prefill-fa3": FA3,
    "flash-attn-3-extend": FLASH_ATTENTION,
    "flashinfer-batch-attention-extend": "flashinfer-batch-attention",
}
"""Backends of `engine_modes` -> how they are called in every row."""
TOLD = "fa2 with uniform_q_len"
OTHERS = "vLLM's Triton"
SHOWN = ("fa2", "fa3", "FlashAttention-3", "CUDA cores", "XQA", "BatchAttention", TOLD)
OF_VLLM = "vLLM's FlashAttention-3"
POD = "BatchPOD"
"""Names with a look of their own in the figure."""
TICKS = (1, 1.2, 1.5, 2, 3, 5)
SHIFT = 0.15
"""Of a mark from the middle of its row."""
OWN_WORDS = {
    FLASH_ATTENTION: "FlashAttention-3",
    modes.PROMISED[0]: TOLD,
    "flashinfer-batch-pod": POD,
}


class Decisions(Shown):
    """Kinds of calls, and how much slower each backend is than the fastest of a call.

    `losses` has a row per kind (`call`), backend (`use`): `mean` and `worst`, fractions, and
    `calls`; the least mean first. `without` are the backends that were left out.
    """

    def __init__(
        self,
        losses: pd.DataFrame,
        without: Sequence[str] = (),
    ) -> None:
        self.losses = losses
        self.without = tuple(without)

    @cached_property
    def _by_call(self) -> dict[str, pd.DataFrame]:
        return dict(iter(self.losses.groupby("call", sort=False)))

    def table(self) -> pd.DataFrame:
        """A row per kind of call: what lost least, what comes next, and by how much, percent."""
        rows = []
        for call, part in self._by_call.items():
            best, *others = part.itertuples()
            row = {
                "your call": call,
                "use": best.use,
                "slower by, %": 100 * best.mean,
                "next best": "",
                "next slower by, %": float("nan"),
                "calls": best.calls,
            }
            for other in others[:1]:
                row["next best"] = other.use
                row["next slower by, %"] = 100 * other.mean
            rows.append(row)
        return pd.DataFrame(rows)

    def card(self) -> Card:
        """The table."""
        table = self.table()
        forms = dict.fromkeys(("slower by, %", "next slower by, %"), SHORT)
        return Card(
            title="What to use on Hopper, by kind of call",
            notes=[],
            facts=[],
            table=in_words(table, forms),
            caption="mean slowdown against the fastest backend of each call",
            footer="random_batches, plan_rivals and engine_modes: H200s, bfloat16",
        )

    def figure(self) -> Figure:
        """The mean slowdown of each backend, a row per kind of call; left is better."""
        from ..run.figures import charts, style

        calls = [*self._by_call]
        shown = self.losses.assign(
            place=self.losses.call.map(calls.index) + self._shifts(),
            times=1 + self.losses["mean"],
            name=self.losses.use.map(_name_shown),
        )
        figure, (axis,) = charts.panels(
            [""],
            (9, 1.2 + 0.3 * len(calls)),
            "random_batches, plan_rivals, engine_modes: NVIDIA H200, 2026-11-22 to 2026-11-27",
            ("mean time / time of the fastest backend of each call, log scale", ""),
        )
        looks = {
            **style.looks(SHOWN),
            OF_VLLM: style.Look("black", "s"),
            POD: style.Look("black", "*"),
        }
        charts.dots(axis, shown, "times", "place", by="name", looks=looks)
        charts.categories(axis, "y", calls)
        style.log_axes(axis, "x")
        axis.set_xticks(TICKS, map(str, TICKS))
        axis.axvline(1, **style.RULE)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        return figure

    def _shifts(self) -> pd.Series:
        """Of marks within their row, by rank: up and down in turns, so that none hides another."""
        rank = self.losses.groupby("call")["mean"].rank(method="first")
        return SHIFT * (2 * (rank % 2) - 1)

    def of_decode(self) -> pd.DataFrame:
        """Ways to choose for decode, and the slowdown of each, percent, over all random batches.

        `advise` chooses by the batches of other layers, and the first two rows of the
        table by heads. What was left out is no choice, and no fastest backend either.
        """
        kept = [name for name in RELEASED if name not in self.without]
        times = _drawn()
        fastest = times[kept].min(axis=1)
        ways = {f"always {_word(name)}": times[name] / fastest - 1 for name in kept}
        if {CUDA_CORES, FLASH_ATTENTION} <= {*kept}:
            is_few = _group_sizes(times) <= FEW_HEADS
            by_rows = times[CUDA_CORES].where(is_few, times[FLASH_ATTENTION])
            ways["this table"] = by_rows / fastest - 1
        losses = 100 * pd.DataFrame(ways)
        losses["advise"] = 100 * _nearest_loss(kept)
        ends = losses.quantile([0.5, 0.95, 1]).T
        ends.columns = ["median, %", "95th percentile, %", "worst, %"]
        ends.insert(0, "mean slowdown, %", losses.mean())
        return ends.sort_values("mean slowdown, %").rename_axis("choice").reset_index()


def decisions(without: Sequence[str] = ()) -> Decisions:
    """Which backend lost least to the fastest, for each kind of call on record for Hopper.

    Parameters
    ----------
    without : sequence of str, optional
        Backends that you cannot use, such as `flashinfer-cuda-cores`.

    Returns
    -------
    Decisions
        Shown as a table; `.figure()` has all backends, `.of_decode()` what each way to choose
        loses in decode.

    Raises
    ------
    ValueError
        For what is no list, and for a backend that no row has.

    Examples
    --------
    >>> import attnlib
    >>> attnlib.decisions().table().use[0]
    'CUDA cores'
    >>> attnlib.decisions(without=["flashinfer-cuda-cores"]).table().use[0]
    'FlashAttention-3'
    """
    require_texts("without", without)
    kinds = {**_decode_kinds(), **_mode_kinds()}
    known = sorted({name for times in kinds.values() for name in times})
    for name in without:
        require_word("without", name, known)
    rows = []
    for call, times in kinds.items():
        kept = times.drop(columns=[name for name in without if name in times])
        rows.append(_losses(call, kept.dropna()))
    return Decisions(pd.concat(rows, ignore_index=True), without)


def _losses(call: str, times: pd.DataFrame) -> pd.DataFrame:
    """The mean and worst loss of each backend over the fastest of each call, the least first."""
    loss = times.div(times.min(axis=1), axis=0) - 1
    table = pd.DataFrame({"mean": loss.mean(), "worst": loss.max()})
    table = table.sort_values("mean").rename_axis("backend").reset_index()
    return table.assign(
        call=call,
        use=table.backend.map(_word),
        calls=len(loss),
    )


def _drawn() -> pd.DataFrame:
    """Times of the released backends over the random batches that all can run, by case."""
    batches = recorded_batches().dropna(subset=[*RELEASED])
    batches = batches[batches.head_dim >= LEAST_HEAD_DIM]
    return batches.set_index("case")[[*RELEASED]]


def _nearest_loss(backends: Sequence[str]) -> pd.Series:
    """What the choice of `advise` among backends loses, by case."""
    batches = recorded_batches().dropna(subset=[*backends])
    return neighbour_loss(backends).set_axis(batches.case)


def _group_sizes(times: pd.DataFrame) -> pd.Series:
    """Query heads per KV head of each case of the index."""
    sizes = [case.spec.group_size for case in times.index]
    return pd.Series(sizes, index=times.index)


def _decode_kinds() -> dict[str, pd.DataFrame]:
    """Times of decode, by heads and length; XQA was measured with pages of 16 and 64."""
    drawn = _drawn()
    is_few = _group_sizes(drawn) <= FEW_HEADS
    recorded = recorded_batches("all rivals").set_index("case")
    rivals = recorded[[*plan_rivals.RIVALS]].dropna()
    lengths = [case.kv_len for case in rivals.index]
    longest = pd.Series(lengths, index=rivals.index)
    is_wide = _group_sizes(rivals) > FEW_HEADS
    return {
        "decode, 1 or 2 query heads per KV head": drawn[is_few],
        "decode, 3 or more": drawn[~is_few],
        f"{LARGE_PAGES}, all below 1,000 tokens": rivals[is_wide & (longest < SHORT_TOKENS)],
        f"{LARGE_PAGES}, longest 1,000 or more": rivals[is_wide & (longest >= SHORT_TOKENS)],
    }


def _mode_kinds() -> dict[str, pd.DataFrame]:
    """Times of verification, extension, prefill, and of a chunk among decoding requests."""
    promised = decode_rows(load(modes.STUDY.name, modes.PROMISES_ON))
    promised = promised[promised["mode"] == "target_verify"]
    kinds = {"verification of drafts, CUDA graph": _by_backend(promised)}
    rows = modes.mode_rows(load(modes.STUDY.name, modes.STUDY.reference_machine))
    for group, words in MODES.items():
        kinds[words] = _by_backend(rows[rows.group == group])
    records = load(modes.STUDY.name, modes.MIXED_ON)
    mixed = decode_rows(records, timer=modes.EAGER)
    mixed = mixed[mixed.case.isin(list(modes.MIXED))]
    kinds["a prompt chunk among decoding requests, one call"] = _by_backend(mixed)
    return kinds


def _by_backend(rows: pd.DataFrame) -> pd.DataFrame:
    """Median time by case and backend, of the cases that all have."""
    named = rows.assign(backend=rows.backend.replace(SHORT_NAMES))
    return named.pivot_table("run_us", "case", "backend", "median", sort=False).dropna()


def _word(backend: str) -> str:
    """How a backend is called in a table."""
    return OWN_WORDS.get(backend) or entry_of(backend).label


def _name_shown(word: str) -> str:
    """The name in the figure: what has no look of its own shares one."""
    if word in (*SHOWN, OF_VLLM, POD):
        return word
    return OTHERS
