"""What changes between two releases of a library, for the calls of a model: `explain --diff`."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ..core.backends.limits import LATENT_MODES
from ..core.layer import MODELS, name_of
from ..core.spec import MLA, MLA_HEAD_DIM, AttnSpec, require_type, require_word
from .asked import LATENT_PAGE
from .explain import Choice, by_name, explain
from .facts import DECODE_MODES, GPUS, Call, decided
from .known import SLOWER, Found, how_much, known_problems, truth, what_to_do
from .libraries import AUTO, Library, Names, find
from .situation import situation_of

if TYPE_CHECKING:
    import pandas as pd

CALL_COLUMNS = ["model", "dtype", "gpu", "mode"]
"""Columns that name a call; calls with the same change share a row."""
CHANGE_COLUMNS = [*CALL_COLUMNS, "before", "after", "why", "source"]
NO_FACTS: Mapping[str, Any] = {}
PAGE = 16
CANNOT_RUN = " (cannot run)"
THAN_IT_COULD_BE = "than the new pick could be"
BF16 = "bfloat16"
FP8 = "float8_e4m3fn"
DTYPES = {
    "bf16": (BF16, BF16),
    "bf16, FP8 cache": (BF16, FP8),
    "FP8": (FP8, FP8),
}
"""Name -> dtypes of query and cache. Engines do not pass an FP8 query of their own."""
DECODE_LENS = (8192,) * 16
PREFILL_LENS = (2048,) * 4
"""Tokens of each request, unless told otherwise."""
LATENT_HEADS = {"128 heads": 128, "16 heads": 16}
"""Tokens of a page of MLA, unless told otherwise."""
TOPK = 2048
"""The index_topk of DeepSeek V3.2 and GLM-5."""


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
    """The calls for which a release of a library picks another backend, or calls another kernel.

    Tried are `layer`, or the layers of one model or of all, on every GPU of `gpus`, with 16
    requests of 8,192 tokens (decode, MLA) or four prompts of 2,048. Pages have 16 tokens, those of
    MLA 64. Calls with the same change share a row.

    Parameters
    ----------
    old, new : str
        Two releases of one library, such as `flashinfer==0.6.3`.
    model : str, optional
        A model of `attnlib.core.layer.MODELS`, or `DeepSeek MLA`; by default all of them.
    layer : AttnSpec, optional
        The one layer that is tried, in place of models.
    fields : dict, optional
        Fields of `AttnSpec` in which the layers of models differ: head_dim, page_size (tokens),
        dtype, kv_dtype.
    modes : sequence of str, optional
        Modes of the library; by default every one in which there is such a policy.
    policy : str, default "auto"
        As of `explain`.
    facts : dict, optional
        Fields of `Call` in which the calls differ from a plain call.
    stated : collection of str, optional
        Facts and fields of which a rule must test each; by default all that are given.
    gpus : sequence of str, optional
        Names of `attnlib.select.GPUS`; by default all.

    Returns
    -------
    pandas.DataFrame
        A row for each change: model, dtype, gpu, mode, before, after, why, source. `why` is that
        of `new`, or why `old` could not run the same pick. A call that neither can run has no row.

    Raises
    ------
    ValueError
        For an unknown library, release, model, mode or policy, and for `stated` facts or fields of
        which no rule tests one.

    Examples
    --------
    >>> import attnlib
    >>> table = attnlib.changes("flashinfer==0.6.3", "flashinfer==0.6.4", gpus=["sm90"])
    >>> first = table.iloc[0]
    >>> first["mode"], first.before, first.after, first.source
    ('decode', 'fa3', 'fa2', 'FlashInfer #2530')
    """
    tried = tried_calls(
        old,
        new,
        model=model,
        layer=layer,
        fields=fields,
        modes=modes,
        policy=policy,
        facts=facts,
        stated=stated,
        gpus=gpus,
    )
    return table_of(tried)


@dataclass(frozen=True)
class Tried:
    """A call that both releases were asked for, and what each picks."""

    model: str
    dtype: str
    spec: AttnSpec
    call: Call
    before: Choice
    after: Choice
    stated: Mapping[str, Any]
    """The facts of the call that the user or the model states."""


def tried_calls(
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
    every_dtype: bool = False,
) -> list[Tried]:
    """Both choices of every call that `changes` tries; its arguments and errors.

    `every_dtype` tries a `layer` in the usual dtypes in place of its own.
    """
    library = _library_of("old", old)
    if _library_of("new", new) is not library:
        raise ValueError(f"new must be a release of {library.name} as old is, got {new!r}")
    if old == new:
        raise ValueError(f"old and new must be two releases, both are {new}")
    require_word(
        name="model",
        value=model or MLA,
        words=(*MODELS, MLA),
    )
    wanted = _modes_tried(
        library=library,
        model=model,
        layer=layer,
        modes=modes,
        policy=policy,
    )
    dtypes = _dtypes_tried(
        library=library,
        layer=None if every_dtype else layer,
        fields=fields,
    )
    sizes = {name: fields[name] for name in ("head_dim", "page_size") if name in fields}
    tried = []
    for mode, dtype, gpu in product(wanted, dtypes, gpus):
        call = _usual_call(mode, facts)
        for name, usual in _layers(mode, model, dtypes[dtype], layer):
            spec = replace(usual, **sizes)
            how = {
                "mode": mode,
                "gpu": gpu,
                "policy": policy,
                "call": call,
            }
            before = _choice(spec, library=old, **how)
            after = _choice(spec, library=new, **how)
            tried.append(Tried(name, dtype, spec, call, before, after, facts))
    require_tested(
        library=library.name,
        stated={*facts, *fields} if stated is None else stated,
        tried=tried,
    )
    return tried


def require_tested(library: str, stated: Collection[str], tried: Iterable[Tried]) -> None:
    """ValueError for facts or fields that no rule tests in any of the calls."""
    untested = set(stated)
    for each in tried:
        tested = each.before.tested | each.after.tested
        untested = {name for name in untested if not decided(name, each.call) & tested}
    if untested:
        words = ", ".join(sorted(untested))
        raise ValueError(f"no rule of {library} tests {words} in these calls")


def _library_of(name: str, text: str) -> Library:
    """The library of a release; the error names the argument that it was given as."""
    require_type(name, text, str, such_as="flashinfer==0.6.3")
    try:
        return find(text)[0]
    except ValueError as error:
        words = str(error).removeprefix("library ")
        raise ValueError(f"{name} {words}" if words != str(error) else words) from None


def table_of(tried: Iterable[Tried]) -> "pd.DataFrame":
    """The calls whose pick changes; those with the same change share a row."""
    import pandas as pd

    rows = []
    for call in tried:
        change = _change(call.before, call.after)
        if change:
            choice = call.after
            rows.append((call.model, call.dtype, choice.gpu, choice.mode, *change))
    return _merged(pd.DataFrame(rows, columns=CHANGE_COLUMNS))


def _merged(table: "pd.DataFrame") -> "pd.DataFrame":
    """Calls with the same change in one row, their words joined by commas."""
    for column in CALL_COLUMNS:
        same = [name for name in CHANGE_COLUMNS if name != column]
        groups = table.groupby(same, sort=False)
        table = groups[column].agg(", ".join).reset_index()
    return table[CHANGE_COLUMNS]


def _modes_tried(
    library: Library,
    model: str,
    layer: AttnSpec | None,
    modes: Sequence[str],
    policy: str,
) -> Sequence[str]:
    """The modes that are asked for, or those of the library that fit and have the policy."""
    fitting = list(library.modes)
    if model == MLA:
        fitting = [mode for mode in fitting if mode in LATENT_MODES]
    elif model:
        fitting = [mode for mode in fitting if mode not in LATENT_MODES]
    for mode in modes:
        require_word(f"mode of {model or library.name}", mode, fitting)
        library.require_policy(policy, [mode])
    if modes:
        return modes
    if layer is not None:
        fitting = [mode for mode in fitting if mode not in LATENT_MODES]
    library.require_policy(policy, fitting)
    return [mode for mode in fitting if policy in library.policies_for(mode)]


def _dtypes_tried(
    library: Library,
    layer: AttnSpec | None,
    fields: Mapping[str, Any],
) -> dict[str, tuple[str, str]]:
    """Name -> dtypes of query and cache: those of the layer, those given, or the usual ones."""
    if layer is None and ("dtype" in fields or "kv_dtype" in fields):
        dtype = fields.get("dtype", BF16)
        layer = AttnSpec(1, 1, 1, 1, dtype, fields.get("kv_dtype", ""))
    if layer is not None:
        return {layer.dtypes: (layer.dtype, layer.kv_dtype)}
    usual = dict(DTYPES)
    if library.calls:
        del usual["FP8"]
    return usual


def _usual_call(mode: str, facts: Mapping[str, Any]) -> Call:
    """A decode step of 16 requests, or four prompts, but for `facts`."""
    usual = Call(
        kv_lens=DECODE_LENS if mode in DECODE_MODES else PREFILL_LENS,
        causal=mode not in LATENT_MODES,
        topk=TOPK if mode == "sparse_mla" else 0,
    )
    return replace(usual, **facts)


def _choice(spec: AttnSpec, **how: Any) -> Choice:
    """The choice; of a backend asked for by name that cannot run the call, one that says so."""
    try:
        return explain(spec, **how)
    except RuntimeError as error:
        policy = how["policy"]
        return Choice(
            library=how["library"],
            mode=how["mode"],
            gpu=how["gpu"],
            policy=policy,
            order=(policy,),
            reasons=(by_name(policy),),
            problem=str(error),
        )


def _change(before: Choice, after: Choice) -> Names:
    """Picks before and after, why and by which source; empty where they are equal or none runs."""
    old, new = _pick(before), _pick(after)
    if old == new or (before.problem and after.problem):
        return ()
    mended = before.problem if old == f"{new}{CANNOT_RUN}" else ""
    why = after.problem or mended or after.decided_by.why
    return old, new, why, after.decided_by.source


def _pick(choice: Choice) -> str:
    return f"{choice.picked}{CANNOT_RUN if choice.problem and choice.order else ''}"


def _layers(
    mode: str,
    model: str,
    dtypes: tuple[str, str],
    layer: AttnSpec | None,
) -> Iterator[tuple[str, AttnSpec]]:
    """`layer`, or the layers of a model, or of all models, that a mode is for."""
    if layer is not None:
        dtype, kv_dtype = dtypes
        yield name_of(layer), replace(layer, dtype=dtype, kv_dtype=kv_dtype)
    elif mode not in LATENT_MODES:
        for name, sizes in MODELS.items():
            if model in ("", name):
                yield name, AttnSpec(*sizes, PAGE, *dtypes)
    elif model in ("", MLA):
        for name, heads in LATENT_HEADS.items():
            yield f"{MLA}, {name}", AttnSpec(heads, 1, MLA_HEAD_DIM, LATENT_PAGE, *dtypes)


def padded(rows: Sequence[Sequence[str]]) -> list[Names]:
    """The rows, each column padded to the width of its longest word."""
    columns = []
    for column in zip(*rows, strict=True):
        width = max(map(len, column))
        columns.append([word.ljust(width) for word in column])
    return list(zip(*columns, strict=True))


@dataclass
class ProblemChange:
    """A known problem that one of two releases has and the other has not, and where.

    `new_pick` says that the pick is another there, `outweighed` that it is none of the upgrade
    all the same, `open_conditions` what decides whether one that may hold does.
    """

    answer: Found
    comes: bool
    where: dict[str, None]
    new_pick: bool = False
    outweighed: bool = False
    open_conditions: tuple[str, ...] = ()


ProblemChanges = dict[tuple[str, bool, bool], ProblemChange]
"""Id of a problem, whether it comes, and whether it costs the call nothing -> what is told of it.
"""


def add_changes(
    changes: ProblemChanges,
    before: Iterable[Found],
    after: Iterable[Found],
    *,
    stack: Mapping[str, Version],
    where: str,
) -> list[ProblemChange]:
    """Add the problems of a call that come or end, and return them; one that may be in the newer
    `stack` does not end."""
    added = []
    old = {answer.problem.id: answer for answer in before}
    new = {answer.problem.id: answer for answer in after}
    for name in sorted(old.keys() ^ new.keys()):
        comes = name in new
        answer = new[name] if comes else old[name]
        if comes or not answer.is_open_in(stack):
            key = (name, comes, answer.is_harmless)
            change = changes.setdefault(key, ProblemChange(answer, comes, {}))
            change.where[where] = None
            added.append(change)
    return added


def known_changes(
    tried: Iterable[Tried],
    cards: Mapping[str, str],
    server: Mapping[str, Any],
) -> list[ProblemChange]:
    """The known problems that come or end between the releases, for the calls that were tried.

    The lengths that `changes` takes for granted are not the user's, so a problem of lengths comes
    with the condition that decides it, after those that hold. `cards` says how a GPU was
    named, `server` has the facts of the server.
    """
    found: ProblemChanges = {}
    for each in tried:
        if "kv_lens" in each.stated:
            call = each.call
        else:
            call = replace(each.call, kv_lens=(), q_lens=())
        sides = []
        stack: Mapping[str, Version] = {}
        new_pick = _pick(each.before) != _pick(each.after)
        for choice in (each.before, each.after):
            situation = situation_of(
                choice,
                each.spec,
                call,
                stated=each.stated,
                gpu=cards.get(choice.gpu, ""),
                server=server,
            )
            stack = situation.stack
            sides.append(known_problems(situation))
        before, after = sides
        where = f"{each.after.mode} on {each.after.gpu}"
        came = add_changes(
            changes=found,
            before=before,
            after=after,
            stack=stack,
            where=where,
        )
        for change in came:
            change.new_pick |= new_pick
            change.open_conditions = _open_conditions(change.answer, situation.facts)
    return sorted(
        found.values(),
        key=lambda change: change.comes and bool(change.answer.missing),
    )


def _open_conditions(answer: Found, facts: Mapping[str, Any]) -> Names:
    """The conditions of a problem that the facts leave open."""
    words = []
    for part in answer.problem.when:
        if truth(part, facts) is None:
            words.append(str(part))
    return tuple(re.sub("^with ", "it has ", condition) for condition in words)


def change_in_words(change: ProblemChange) -> list[str]:
    """A known problem that comes, in a few lines, or one that ends, in one."""
    problem = change.answer.problem
    where = ", ".join(change.where)
    if not change.comes:
        return [f"- ended, {problem.what} ({where}): {problem.says} [{problem.id}]"]
    since = THAN_IT_COULD_BE if change.outweighed else _since(change)
    head = f"{problem.what} {since} ({where})"
    if change.answer.missing:
        head = f"may be {head}, {_what_decides(change)}"
    if change.answer.is_harmless:
        head = f"not {problem.what} at this call, at others {_since(change)} ({where})"
    if change.answer.is_open:
        head = f"inconclusive at this call, {problem.what} at others {_since(change)} ({where})"
    lines = [f"- {head}: {problem.says} [{problem.id}]"]
    lines += [f"  - {line}" for line in how_much(problem)]
    if not change.answer.is_harmless:
        lines.append(f"  - {what_to_do(problem)}")
    return lines


def _what_decides(change: ProblemChange) -> str:
    """`if context (pass --server context=N)`, or that the newer release is not known to have it."""
    answer = change.answer
    if answer.is_newer:
        until = answer.problem.releases[answer.package].until
        return f"known to {until}, of later releases nobody has said"
    conditions = change.open_conditions or answer.missing
    return f"if {' and '.join(conditions)} ({answer.confirmed_by})"


def _since(change: ProblemChange) -> str:
    """`since sglang 0.5.16`, or that the new pick or the new release brings it."""
    span = change.answer.problem.releases.get(change.answer.package)
    if span and span.since:
        return f"since {change.answer.package} {span.since}"
    if not change.new_pick:
        return "in the new release"
    return THAN_IT_COULD_BE if change.answer.problem.what == SLOWER else "by the new pick"


def markdown(
    table: "pd.DataFrame",
    old: str,
    new: str,
    known: Iterable[ProblemChange] = (),
    left_out: str = "",
) -> str:
    """The changes as Markdown for a pull request, known problems that come or end, what was left
    out, and what times them."""
    library = find(old)[0]
    if len(table):
        lines = [f"### From {old} to {new}", ""]
        rule = ["-"] * len(CHANGE_COLUMNS)
        rows = [CHANGE_COLUMNS, rule, *table.to_numpy().tolist()]
        for row in padded(rows):
            lines.append(f"| {' | '.join(row)} |")
    else:
        lines = [f"{new} picks the same backend and kernel as {old} for each call."]
    lines.append("")
    for change in known:
        lines += change_in_words(change)
    if left_out:
        lines.append(f"- left out: {left_out}")
    timed = "diagnose TRACE AFTER" if library.calls else f"compare --base {old} --new {new}"
    lines.append(f"- the times of both: python -m attnlib {timed}")
    return "\n".join(lines)
