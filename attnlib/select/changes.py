"""What changes between two releases of a library, for the calls of a model: `explain --diff`."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from ..core.backends.limits import LATENT_MODES
from ..core.spec import MLA, MODELS, AttnSpec, require_word
from .explain import explain
from .facts import GPUS
from .features import DTYPES, ENGINE_KINDS, KINDS, LATENT_HEADS, LATENT_SIZES, call_of, cell
from .libraries import find

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["model", "dtype", "gpu", "mode", "before", "after", "why", "source"]
PAGE = 16


def changes(
    old: str, new: str, *, model: str = "", gpus: Sequence[str] = tuple(GPUS)
) -> "pd.DataFrame":
    """What `auto` of a library picks otherwise in `new` than in `old` (both `flashinfer==0.7.2`).

    Of one model or all (`MODELS`, `MLA`) every mode that the library's rules speak of, with pages
    of 16 tokens, and the calls of data/backend_features.md. Calls that change alike share a row;
    why and source are those of `new`; a pick that cannot run says so (a call that neither can run
    is left out). ValueError names what there is. Rules that an engine has for a model's name are
    not looked at.
    """
    import pandas as pd

    library = find(old)[0]
    if find(new)[0] is not library:
        raise ValueError(f"new must be a release of {library.name} as old is, got {new!r}")
    require_word("model", model or MLA, (*MODELS, MLA))
    kinds = KINDS.get(library.name, ENGINE_KINDS)
    rows = []
    for mode, dtype, gpu in product(library.modes, kinds, gpus):
        for name, spec in _layers(mode, model, DTYPES[dtype]):
            asked: dict[str, Any] = {"mode": mode, "gpu": gpu, "call": call_of(mode), "env": {}}
            before, after = (explain(spec, library=release, **asked) for release in (old, new))
            picks = [cell(each, mark="(cannot run)") for each in (before, after)]
            if picks[0] != picks[1] and not (before.problem and after.problem):
                by = after.decided_by
                rows.append((name, dtype, gpu, mode, *picks, after.problem or by.why, by.source))
    found = pd.DataFrame(rows, columns=COLUMNS)
    for column in COLUMNS[:4]:
        same = [name for name in COLUMNS if name != column]
        found = found.groupby(same, sort=False)[column].agg(", ".join).reset_index()
    return found[COLUMNS]


def _layers(mode: str, model: str, dtypes: tuple[str, str]) -> Iterator[tuple[str, AttnSpec]]:
    """The layers of a model, or of all, that a mode is for."""
    if mode not in LATENT_MODES:
        for name, sizes in MODELS.items():
            if model in ("", name):
                yield name, AttnSpec(*sizes, PAGE, *dtypes)
    elif model in ("", MLA):
        for name, heads in LATENT_HEADS.items():
            yield f"{MLA}, {name}", AttnSpec(*heads, *LATENT_SIZES, *dtypes)


def markdown(found: "pd.DataFrame", old: str, new: str) -> str:
    """The changes as Markdown for a pull request, which reads as a table in a terminal too."""
    if not len(found):
        return f"From {old} to {new} nothing changes in these calls."
    rows = [COLUMNS, ["-"] * len(COLUMNS), *found.to_numpy().tolist()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([word.ljust(n) for word, n in zip(row, widths, strict=True)] for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in padded]
    return "\n".join([f"### From {old} to {new}", "", *lines])
