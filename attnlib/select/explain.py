"""`explain`: the backend a library picks for one call, with a reason for every row considered."""

from dataclasses import dataclass, replace

from ..core.backends.limits import LATENT_MODES
from ..core.backends.table import TABLE
from ..core.spec import AttnSpec, require_type, require_word
from .asked import DECODE, asked, facts_stated
from .facts import Call, Facts, decided, facts_of, gpu_named
from .libraries import (
    AUTO,
    FLASHINFER,
    Called,
    Library,
    Names,
    find,
    holding,
    library_or_engine,
)
from .rules import Reason, Reasons, Rule, first_match

NO_CALL = Call()
DECISIVE = ("rule", "policy")
"""Kinds of reasons that choose a backend."""


@dataclass(frozen=True)
class Choice:
    """What `library` runs for one call.

    `order` is every candidate by the library's names, best first, `reasons` every row that was
    considered. `problem` says why the chosen backend cannot run the call. `inner` is the choice of
    the library that the backend calls. `tested` are the facts that a rule on the way tests,
    `unused` the fields of the call that were stated and decide none of them. `pages` are the tokens
    of a page that the library takes where the user gives none, or `refused_page`, which the backend
    does not take; 0 if the user's is taken, or the library's is not known.
    """

    library: str
    mode: str
    gpu: str
    policy: str
    order: Names = ()
    reasons: Reasons = ()
    problem: str = ""
    inner: "Choice | None" = None
    tested: frozenset[str] = frozenset()
    unused: Names = ()
    pages: int = 0
    refused_page: int = 0

    @property
    def backend(self) -> str:
        """The chosen candidate, or the empty string if none can run the call."""
        if self.order:
            return self.order[0]
        return ""

    @property
    def picked(self) -> str:
        """`FLASHINFER, which runs trtllm-gen`: the backend, and whose kernel it calls."""
        backend = self.backend or "none can run it"
        if self.inner is None:
            return backend
        return f"{backend}, which runs {self.kernel or 'none'}"

    @property
    def kernel(self) -> str:
        """The backend that computes: the innermost choice."""
        if self.inner:
            return self.inner.kernel
        return self.backend

    @property
    def ours(self) -> str:
        """Our backend name for `kernel`, or the empty string."""
        latent = self.mode in LATENT_MODES
        if self.library.startswith(FLASHINFER):
            return f"flashinfer-{'mla-' if latent else ''}{self.kernel}"
        if self.inner is not None:
            return self.inner.ours
        plans = "mla" if latent else "decode"
        for entry in TABLE.values():
            is_here = self.gpu == "sm90" or not entry.hopper
            if is_here and entry.plans == plans and self.kernel in entry.words:
                return entry.name
        return ""

    @property
    def whose(self) -> str:
        """The library of a kernel that engines call by a name of several, or the empty string."""
        if self.inner is None and self.ours == "flash-attn-3":
            return "FlashAttention-3, the library"
        if self.inner is not None and self.kernel in ("fa2", "fa3"):
            return f"FlashInfer's {self.kernel}"
        return ""

    @property
    def decided_by(self) -> Reason:
        """The row that decided: the last one that chose a backend (limits aside)."""
        chosen = []
        for row in self.reasons:
            if row.matched and row.kind in DECISIVE:
                chosen.append(row)
        return chosen[-1]


def explain(
    spec: AttnSpec | str | object,
    *,
    mode: str = "",
    gpu: str,
    library: str = "",
    engine: str = "",
    policy: str = AUTO,
    call: Call = NO_CALL,
) -> Choice:
    """Which backend a library picks for a fresh call of a layer, and why, rule by rule.

    An engine's answer holds that of the FlashInfer which its backend calls (`Choice.inner`). It
    needs no GPU: releases whose source was read are answered from data/rules.

    Parameters
    ----------
    spec : AttnSpec, DecodeCase or str
        The layer; or the call, as a case or as its text, `heads=32/8 head_dim=128 lens=8192x16`
        (`core.call_text`). A page size or a cache dtype that a text says is pinned.
    mode : str, optional
        How it is called, by default as the text says, else decode: one of `attnlib.select.MODES`,
        decode, prefill_paged, target_verify, draft_extend, dllm_extend, prefill_ragged, mla,
        sparse_mla.
    gpu : str
        A card or its compute capability, of `attnlib.select.GPUS`: `h100`, `RTX 4090`, `sm90`.
    library : str
        A library and its release, `flashinfer==0.6.3`, `vllm==0.33.0`, or `mini-sglang`. An engine
        calls the FlashInfer that its release requires, or one that is installed beside it:
        `sglang==0.5.23,flashinfer==0.7.2.post1`.
    engine : str
        The same, where `library` is left out.
    policy : str, default "auto"
        The library's own rule (auto), an engine's rule, or a backend asked for by name.
    call : Call, optional
        How the layer is called; by default a plain call without lengths.

    Returns
    -------
    Choice
        The backend, the candidates that can run the call, and a reason for every row considered.

    Raises
    ------
    ValueError
        For an unknown name, listing the valid ones, and where a rule asks for lengths that `call`
        lacks.
    RuntimeError
        For a backend asked for by name that cannot run the call.

    Examples
    --------
    >>> import attnlib
    >>> layer = attnlib.AttnSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16)
    >>> choice = attnlib.explain(layer, mode="decode", gpu="sm90", library="flashinfer==0.6.3")
    >>> choice.backend
    'fa3'
    >>> choice.decided_by.source
    'FlashInfer #2148'
    >>> text = "heads=32/8 head_dim=128 page=16 lens=8192x16"
    >>> attnlib.explain(text, gpu="sm90", library="flashinfer==0.6.3").backend
    'fa3'
    """
    gpu = gpu_named(gpu)
    require_type("policy", policy, str, such_as=AUTO)
    require_type("call", call, Call)
    library = library_or_engine(library, engine)
    if not isinstance(spec, AttnSpec):
        spec, mode, call = asked(spec, mode, call)
    mode = mode or DECODE
    rules, release = find(library)
    beside = _installed_beside(rules, library)
    require_word(f"mode of {rules.name}", mode, rules.modes)
    policy = rules.policy_named(policy, mode)
    rules.require_policy(policy, [mode])
    facts = facts_of(spec, call, mode=mode, gpu=gpu, release=release)
    if flashinfer := rules.flashinfer_of(release, beside):
        facts["flashinfer"] = flashinfer
    facts, settled = _settled(rules, facts)
    tested = rules.tests(mode, policy, release)
    unused = []
    for name in facts_stated(call):
        if not decided(name, call) & tested:
            unused.append(name)
    choice = Choice(
        library=rules.name if release is None else f"{rules.name}=={release}",
        mode=mode,
        gpu=gpu,
        policy=policy,
        reasons=settled,
        tested=tested,
        unused=tuple(unused),
    )
    if policy in rules.backends[mode] and policy not in rules.policies:
        choice = _asked_for(choice, rules, facts)
    else:
        choice = _walked(choice, rules, facts)
    failing = holding(rules.problems, choice.backend, facts)
    if not choice.problem:
        problem = "; ".join(f"{row.why} ({row.source})" for row in failing)
        choice = replace(choice, problem=problem)
    choice = _with_pages(choice, rules, facts)
    called = rules.called(choice.backend, release)
    if called and called.policy in find(called.library)[0].policies_for(mode):
        return _calling(
            choice=choice,
            called=called.beside(beside),
            spec=spec,
            call=call,
        )
    if beside and "flashinfer" not in choice.tested:
        choice = replace(choice, unused=(*choice.unused, beside))
    return choice


def _installed_beside(rules: Library, library: str) -> str:
    """`flashinfer==0.7.2` of `sglang==0.5.23,flashinfer==0.7.2`, or the empty string."""
    _, comma, beside = library.partition(",")
    if comma:
        is_one = rules.calls and "," not in beside
        if not is_one or find(beside)[0].name != FLASHINFER:
            raise ValueError(f"library must be ENGINE,{FLASHINFER}==RELEASE, got {library!r}")
    return beside


def _settled(library: Library, facts: Facts) -> tuple[Facts, Reasons]:
    """The facts that the library settles before it asks for a backend, and why."""
    reasons = []
    for row in library.resolves:
        if row.failing(facts):
            continue
        facts = Facts({**facts, **row.sets})
        said = []
        for fact, value in row.sets.items():
            said.append(settles(fact, value))
        reason = Reason(
            kind="settled",
            subject=", ".join(said),
            why=row.why,
            source=row.source,
        )
        reasons.append(reason)
    return facts, tuple(reasons)


def settles(fact: str, value: bool) -> str:
    """`kv auto: no`, the subject of a reason that settles a fact."""
    return f"{fact.replace('_', ' ')}: {'yes' if value else 'no'}"


def _asked_for(choice: Choice, library: Library, facts: Facts) -> Choice:
    """The backend that is asked for by name; raises RuntimeError where it cannot run the call."""
    name = choice.policy
    limits = library.limits_of(name, facts)
    if limits:
        words = "; ".join(f"{limit.why} ({limit.source})" for limit in limits)
        raise RuntimeError(f"policy {name} cannot run {choice.mode} on {choice.gpu}: {words}")
    reasons = (*choice.reasons, by_name(name))
    return replace(choice, order=(name,), reasons=reasons)


def by_name(policy: str) -> Reason:
    """The reason of a backend that is asked for by name."""
    return Reason("policy", policy, "asked for by name", "policy")


def _walked(choice: Choice, library: Library, facts: Facts) -> Choice:
    """A row that names one backend chooses it; a row that names several takes the first able."""
    mode = choice.mode
    rule, reasons = first_match(library.policies[choice.policy][mode], facts)
    facts = Facts({**facts, **rule.sets})
    if rule.then == (AUTO,):
        rule, more = first_match(library.policies[AUTO][mode], facts)
        reasons += more
    replaced = _replacing(library, rule.then, facts)
    if replaced:
        rule = replaced
        reasons += (Reason("rule", rule.then[0], why=rule.why, source=rule.source),)
    able = []
    problems = []
    for name in rule.then:
        limits = library.limits_of(name, facts)
        if not limits:
            able.append(name)
            continue
        if not able:  # why it is not the one that is chosen
            reasons += limits
        if len(rule.then) > 1:
            limits = limits[:1]
        problems += [f"{name}: {limit.why}" for limit in limits]
    choice = replace(choice, reasons=choice.reasons + reasons)
    if able:
        return replace(choice, order=tuple(able))
    order = rule.then if len(rule.then) == 1 else ()  # one is taken at its word
    return replace(choice, order=order, problem="; ".join(problems))


def _replacing(library: Library, names: Names, facts: Facts) -> Rule | None:
    """The row by which the engine takes another backend than the one that was chosen."""
    for row in library.replaces:
        if names == (row.instead_of,) and not row.failing(facts):
            return row
    return None


def _with_pages(choice: Choice, library: Library, facts: Facts) -> Choice:
    """The choice with the page size that the backend takes in place of the user's, or of none."""
    asked = facts["block_size"]
    taken = holding(library.pages, choice.backend, facts)
    if taken:
        pages = taken[0].sets["page_size"]
    else:
        pages = asked
    if pages == asked:
        return choice
    return replace(choice, pages=pages, refused_page=asked)


def _calling(choice: Choice, called: Called, spec: AttnSpec, call: Call) -> Choice:
    """The choice, and in it that of the library which its backend calls."""
    if choice.pages:
        spec = replace(spec, page_size=choice.pages)
    if choice.gpu == "sm75":  # the engines run 16 bits as float16 there
        dtype = spec.dtype.replace("bfloat16", "float16")
        kv_dtype = spec.kv_dtype.replace("bfloat16", "float16")
        spec = replace(spec, dtype=dtype, kv_dtype=kv_dtype)
    inner = explain(
        spec,
        mode=choice.mode,
        gpu=choice.gpu,
        library=called.library,
        policy=called.policy,
        call=call,
    )
    row = Reason(
        kind="settled",
        subject=called.library,
        why=called.why,
        source=called.source,
    )
    unused = [name for name in choice.unused if name in inner.unused]
    return replace(
        choice,
        inner=inner,
        reasons=(*choice.reasons, row, *inner.reasons),
        problem=choice.problem or called.refused or inner.problem,
        tested=choice.tested | inner.tested,
        unused=tuple(unused),
    )
