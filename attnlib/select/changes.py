"""What changes between two releases of a library, for the calls of a model: `explain --diff`."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from ..core.backends.limits import LATENT_MODES
from ..core.spec import MLA, MODELS, AttnSpec, require_word
from .explain import Choice, explain
from .facts import DECODE_MODES, GPUS, Call
from .libraries import find

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["model", "dtype", "gpu", "mode", "before", "after", "why", "source"]
PAGE = 16
BF16, FP8 = "bfloat16", "float8_e4m3fn"
DTYPES = {"bf16": (BF16, BF16), "bf16, FP8 cache": (BF16, FP8), "FP8": (FP8, FP8)}
"""Name -> dtypes of query and cache. Engines do not pass an FP8 query of their own."""
LATENT_HEADS = {"128 heads": (128, 1), "16 heads": (16, 1)}
LATENT_HEAD_DIM, LATENT_PAGE, TOPK = 576, 64, 2048


def changes(
    old: str, new: str, *, model: str = "", gpus: Sequence[str] = tuple(GPUS)
) -> "pd.DataFrame":
    """The calls for which `auto` picks another backend in `new` than in `old`.

    `old` and `new` are two releases of one library (`flashinfer==0.7.2`). For one model or all
    (`MODELS`, `MLA`) every mode of the library is tried with pages of 16 tokens. Calls with the
    same change share a row; `why` and `source` are those of `new`. A pick that cannot run says so;
    a call that neither release can run has no row. Rules for a model's name are not applied.
    Raises ValueError for an unknown library, release or model.
    """
    import pandas as pd

    library = find(old)[0]
    if find(new)[0] is not library:
        raise ValueError(f"new must be a release of {library.name} as old is, got {new!r}")
    require_word("model", model or MLA, (*MODELS, MLA))
    dtypes = {name: pair for name, pair in DTYPES.items() if name != "FP8" or not library.calls}
    rows = []
    for mode, dtype, gpu in product(library.modes, dtypes, gpus):
        for name, spec in _layers(mode, model, dtypes[dtype]):
            call = usual_call(mode)
            before = explain(spec, library=old, mode=mode, gpu=gpu, call=call, env={})
            after = explain(spec, library=new, mode=mode, gpu=gpu, call=call, env={})
            picks = [_pick(before), _pick(after)]
            if picks[0] != picks[1] and not (before.problem and after.problem):
                rule = after.decided_by
                why = after.problem or rule.why
                rows.append((name, dtype, gpu, mode, *picks, why, rule.source))
    table = pd.DataFrame(rows, columns=COLUMNS)
    for column in COLUMNS[:4]:
        same = [name for name in COLUMNS if name != column]
        table = table.groupby(same, sort=False)[column].agg(", ".join).reset_index()
    return table[COLUMNS]


def usual_call(mode: str) -> Call:
    """A usual call of a mode: a decode step of 16 requests, or four prompts."""
    lens = (8192,) * 16 if mode in DECODE_MODES else (2048,) * 4
    topk = TOPK if mode == "sparse_mla" else 0
    return Call(kv_lens=lens, causal=mode not in LATENT_MODES, topk=topk)


def _pick(choice: Choice) -> str:
    """The backend, the kernel that it calls in another library, and whether it cannot run."""
    inner = f" ({choice.kernel or 'none'})" if choice.inner else ""
    failed = " (cannot run)" if choice.problem and choice.backend else ""
    return f"{choice.backend or 'none'}{inner}{failed}"


def _layers(mode: str, model: str, dtypes: tuple[str, str]) -> Iterator[tuple[str, AttnSpec]]:
    """The layers of a model, or of all models, that a mode is for."""
    if mode not in LATENT_MODES:
        for name, sizes in MODELS.items():
            if model in ("", name):
                yield name, AttnSpec(*sizes, PAGE, *dtypes)
    elif model in ("", MLA):
        for name, heads in LATENT_HEADS.items():
            yield f"{MLA}, {name}", AttnSpec(*heads, LATENT_HEAD_DIM, LATENT_PAGE, *dtypes)


def markdown(table: "pd.DataFrame", old: str, new: str) -> str:
    """The changes as a Markdown table for a pull request; it reads well in a terminal too."""
    if not len(table):
        return f"From {old} to {new} nothing changes in these calls."
    rows = [COLUMNS, ["-"] * len(COLUMNS), *table.to_numpy().tolist()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([word.ljust(n) for word, n in zip(row, widths, strict=True)] for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in padded]
    return "\n".join([f"### From {old} to {new}", "", *lines])
