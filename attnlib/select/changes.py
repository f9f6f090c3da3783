"""What changes between two releases of a library, for the calls of a model: `explain --diff`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ..core.backends.limits import LATENT_MODES
from ..core.layer import MODELS, name_of
from ..core.spec import MLA, MLA_HEAD_DIM, AttnSpec, require_word
from .explain import Choice, explain
from .facts import DECODE_MODES, GPUS, Call, decided
from .libraries import AUTO, find
from .rules import Reason

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["model", "dtype", "gpu", "mode", "before", "after", "why", "source"]
NO_FACTS: dict[str, Any] = {}
PAGE = 16
FAILS = " (cannot run)"
BF16, FP8 = "bfloat16", "float8_e4m3fn"
DTYPES = {"bf16": (BF16, BF16), "bf16, FP8 cache": (BF16, FP8), "FP8": (FP8, FP8)}
"""Name -> dtypes of query and cache. Engines do not pass an FP8 query of their own."""
LATENT_HEADS = {"128 heads": (128, 1), "16 heads": (16, 1)}
LATENT_PAGE, TOPK = 64, 2048
"""Defaults of MLA: tokens of a page, and the index_topk of DeepSeek V3.2 and GLM-5."""


def changes(
    old: str,
    new: str,
    *,
    model: str = "",
    layer: AttnSpec | None = None,
    fields: Mapping[str, Any] = NO_FACTS,
    modes: Sequence[str] = (),
    policy: str = AUTO,
    facts: Mapping[str, Any] = NO_FACTS,
    stated: Collection[str] | None = None,
    gpus: Sequence[str] = tuple(GPUS),
) -> "pd.DataFrame":
    """The calls for which `new` picks another backend, or calls another kernel, than `old`.

    `old` and `new` are two releases of one library (`flashinfer==0.7.2`). Tried are `layer`, or the
    layers of one model or of all (`MODELS`, `MLA`) with pages of 16 tokens and otherwise `fields`
    of `AttnSpec`, in `modes` or every mode of the library in which there is such a `policy`.
    `facts` are fields of `Call` that differ from a usual call. Calls with the same change share a
    row; `why` is that of `new`, or why `old` could not run the same pick. A call that neither can
    run has no row. Raises ValueError for an unknown library, release, model, mode or policy, and
    for `stated` facts or fields, by default all, of which no rule tests one.
    """
    import pandas as pd

    library = find(old)[0]
    if find(new)[0] is not library:
        raise ValueError(f"new must be a release of {library.name} as old is, got {new!r}")
    require_word("model", model or MLA, (*MODELS, MLA))
    fitting = [m for m in library.modes if not model or (m in LATENT_MODES) == (model == MLA)]
    for mode in modes:
        require_word(f"mode of {model or library.name}", mode, fitting)
        library.require_policy(policy, [mode])
    known = [mode for mode in fitting if not layer or mode not in LATENT_MODES]
    library.require_policy(policy, modes or known)
    tried = modes or [mode for mode in known if policy in library.policies_for(mode)]
    dtypes = {name: pair for name, pair in DTYPES.items() if name != "FP8" or not library.calls}
    if layer is not None or {"dtype", "kv_dtype"} & {*fields}:
        spec = layer or AttnSpec(1, 1, 1, 1, fields.get("dtype", BF16), fields.get("kv_dtype", ""))
        dtypes = {spec.dtypes: (spec.dtype, spec.kv_dtype)}
    sizes = {name: value for name, value in fields.items() if name in ("head_dim", "page_size")}
    dropped = {*facts, *fields} if stated is None else {*stated}
    rows = []
    for mode, dtype, gpu in product(tried, dtypes, gpus):
        # A usual call: a decode step of 16 requests, or four prompts.
        lens = (8192,) * 16 if mode in DECODE_MODES else (2048,) * 4
        topk = TOPK if mode == "sparse_mla" else 0
        call = replace(Call(kv_lens=lens, causal=mode not in LATENT_MODES, topk=topk), **facts)
        for name, usual in _layers(mode, model, dtypes[dtype], layer):
            spec = replace(usual, **sizes)
            how = {"mode": mode, "gpu": gpu, "policy": policy, "call": call}
            before, after = (_choice(spec, library=side, **how) for side in (old, new))
            tested = before.tested | after.tested
            dropped -= {name for name in dropped if decided(name, call) & tested}
            picks = [f"{c.picked}{FAILS if c.problem and c.order else ''}" for c in (before, after)]
            if picks[0] != picks[1] and not (before.problem and after.problem):
                mended = before.problem if picks[0] == f"{picks[1]}{FAILS}" else ""
                why = after.problem or mended or after.decided_by.why
                source = after.decided_by.source
                rows.append((name, dtype, gpu, mode, *picks, why, source))
    if dropped:
        words = ", ".join(sorted(dropped))
        raise ValueError(f"no rule of {library.name} tests {words} in these calls")
    table = pd.DataFrame(rows, columns=COLUMNS)
    for column in COLUMNS[:4]:
        same = [name for name in COLUMNS if name != column]
        table = table.groupby(same, sort=False)[column].agg(", ".join).reset_index()
    return table[COLUMNS]


def _choice(spec: AttnSpec, **how: Any) -> Choice:
    """The choice; of a backend asked for by name that cannot run the call, one that says so."""
    try:
        return explain(spec, **how)
    except RuntimeError as error:
        named = Reason("policy", how["policy"], True, "asked for by name", "policy")
        where = {name: how[name] for name in ("library", "mode", "gpu", "policy")}
        return Choice(**where, order=(how["policy"],), reasons=(named,), problem=str(error))


def _layers(
    mode: str, model: str, dtypes: tuple[str, str], layer: AttnSpec | None
) -> Iterator[tuple[str, AttnSpec]]:
    """`layer`, or the layers of a model, or of all models, that a mode is for."""
    if layer is not None:
        yield name_of(layer), layer
    elif mode not in LATENT_MODES:
        for name, sizes in MODELS.items():
            if model in ("", name):
                yield name, AttnSpec(*sizes, PAGE, *dtypes)
    elif model in ("", MLA):
        for name, heads in LATENT_HEADS.items():
            yield f"{MLA}, {name}", AttnSpec(*heads, MLA_HEAD_DIM, LATENT_PAGE, *dtypes)


def markdown(table: "pd.DataFrame", old: str, new: str, gpus: Sequence[str]) -> str:
    """The changes as Markdown for a pull request, what is slower (known on sm90), what times it."""
    library, first, last = *find(old), find(new)[1]
    timed = "diagnose TRACE AFTER" if library.calls else f"compare --base {old} --new {new}"
    same = "each of these calls gets the same backend and kernel, or still cannot run"
    lines = [f"From {old} to {new} no pick changes: {same}. Reasons and orders are not compared."]
    if len(table):
        rows = [COLUMNS, ["-"] * len(COLUMNS), *table.to_numpy().tolist()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ([word.ljust(n) for word, n in zip(row, widths, strict=True)] for row in rows)
        lines = [f"### From {old} to {new}", "", *(f"| {' | '.join(row)} |" for row in padded)]
    lines.append("")
    for since, words in library.slower.items():
        if "sm90" in gpus and first and last and first < Version(since) <= last:
            lines.append(f"- slower since {since}, without another pick: {words}")
    return "\n".join([*lines, f"- the times of both: python -m attnlib {timed}"])
