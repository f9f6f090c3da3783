"""`explain`: the backend a library picks for one call, with a reason for every row considered."""

from dataclasses import dataclass, replace
from itertools import takewhile

from ..core.backends.limits import LATENT_MODES
from ..core.backends.table import TABLE
from ..core.spec import AttnSpec, require_word
from .facts import GPUS, Call, Facts, decided, facts_of
from .libraries import AUTO, FLASHINFER, MAIN, Library, find
from .rules import Reason, first_match

NO_CALL = Call()


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
    order: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    problem: str = ""
    inner: "Choice | None" = None
    tested: frozenset[str] = frozenset()
    unused: tuple[str, ...] = ()
    pages: int = 0
    refused_page: int = 0

    @property
    def backend(self) -> str:
        """The chosen candidate, or the empty string if none can run the call."""
        return self.order[0] if self.order else ""

    @property
    def picked(self) -> str:
        """`FLASHINFER, which runs trtllm-gen`: the backend, and whose kernel it calls."""
        inner = f", which runs {self.kernel or 'none'}" if self.inner else ""
        return f"{self.backend or 'none can run it'}{inner}"

    @property
    def kernel(self) -> str:
        """The backend that computes: the innermost choice."""
        return self.inner.kernel if self.inner else self.backend

    @property
    def ours(self) -> str:
        """Our backend name for `kernel`, or the empty string."""
        latent = self.mode in LATENT_MODES
        if self.library.startswith("flashinfer"):
            return f"flashinfer-mla-{self.kernel}" if latent else f"flashinfer-{self.kernel}"
        plans = "mla" if latent else "decode"
        named = (e for e in TABLE.values() if self.kernel in e.words and e.plans == plans)
        return next((e.name for e in named if self.gpu == "sm90" or not e.hopper), "")

    @property
    def decided_by(self) -> Reason:
        """The row that decided: the last one that chose a backend (limits aside)."""
        return [r for r in self.reasons if r.matched and r.kind not in ("limit", "settled")][-1]


def explain(
    spec: AttnSpec,
    *,
    mode: str,
    gpu: str,
    library: str,
    policy: str = AUTO,
    call: Call = NO_CALL,
) -> Choice:
    """Which backend `library` (`flashinfer==0.6.3`, `vllm==0.33.0`, ...) picks for a fresh wrapper.

    An engine calls the FlashInfer that its release requires, or one that is installed beside it
    (`sglang==0.5.23,flashinfer==0.7.2.post1`). `policy` is auto, an engine's rule, or a backend's
    name. Raises ValueError for an unknown name, listing the valid ones, and where a rule asks for
    lengths that `call` lacks; RuntimeError for a backend asked for by name that cannot run it.
    """
    rules, release = find(library)
    _, comma, beside = library.partition(",")
    if comma and ("," in beside or not rules.calls or find(beside)[0].name != FLASHINFER):
        raise ValueError(f"library must be ENGINE,{FLASHINFER}==RELEASE, got {library!r}")
    require_word(f"mode of {rules.name}", mode, rules.modes)
    require_word("gpu", gpu, GPUS)
    rules.require_policy(policy, [mode])
    facts = facts_of(spec, call, mode=mode, gpu=gpu, release=release)
    tested = rules.tests(mode, policy, release)
    stated = [name for name, value in vars(call).items() if value != vars(NO_CALL)[name]]
    unused = [name for name in stated if not decided(name, call) & tested]
    name = rules.name if release is None else f"{rules.name}=={release}"
    facts, settled = _settled(rules, facts)
    choice = Choice(name, mode, gpu, policy, tested=tested, unused=tuple(unused))
    if policy in rules.backends[mode] and policy not in rules.policies:
        if limits := rules.limits_of(policy, facts):
            words = "; ".join(f"{limit.why} ({limit.source})" for limit in limits)
            raise RuntimeError(f"policy {policy} cannot run {mode} on {gpu}: {words}")
        named = Reason("policy", policy, True, "asked for by name", "policy")
        choice = replace(choice, order=(policy,), reasons=(named,))
    else:
        choice = _walked(choice, rules, facts)
    failing = rules.holding(rules.problems, choice.backend, facts)
    problem = choice.problem or "; ".join(f"{row.why} ({row.source})" for row in failing)
    choice = replace(choice, reasons=settled + choice.reasons, problem=problem)
    taken = rules.holding(rules.pages, choice.backend, facts)
    pages = taken[0].sets["page_size"] if taken else 0
    if pages not in (0, facts["block_size"]):
        choice = replace(choice, pages=pages, refused_page=facts["block_size"])
        spec = replace(spec, page_size=pages)
    called = rules.calls.get((choice.backend, str(release or MAIN)))
    if called is None or called.policy not in find(called.library)[0].policies_for(mode):
        return replace(choice, unused=(*choice.unused, beside)) if beside else choice
    if gpu == "sm75":  # the engines run 16 bits as float16 there
        spec = replace(spec, dtype=spec.dtype.replace("bfloat16", "float16"))
        spec = replace(spec, kv_dtype=spec.kv_dtype.replace("bfloat16", "float16"))
    called = called.beside(beside) if beside else called
    how = {"library": called.library, "policy": called.policy}
    inner = explain(spec, mode=mode, gpu=gpu, call=call, **how)
    row = Reason("settled", called.library, True, called.why, called.source)
    return replace(
        choice,
        inner=inner,
        reasons=(*choice.reasons, row, *inner.reasons),
        problem=choice.problem or called.refused or inner.problem,
        tested=tested | inner.tested,
        unused=tuple(name for name in unused if name in inner.unused),
    )


def _settled(library: Library, facts: Facts) -> tuple[Facts, tuple[Reason, ...]]:
    """The facts that the library settles before it asks for a backend, and why."""
    reasons: tuple[Reason, ...] = ()
    for row in library.resolves:
        if row.failing(facts) is None:
            facts = Facts({**facts, **row.sets})
            said = {True: "yes", False: "no"}
            settled = [f"{fact.replace('_', ' ')}: {said[row.sets[fact]]}" for fact in row.sets]
            reasons += (Reason("settled", ", ".join(settled), True, row.why, row.source),)
    return facts, reasons


def _walked(choice: Choice, library: Library, facts: Facts) -> Choice:
    """A row that names one backend chooses it; a row that names several takes the first able."""
    rule, reasons = first_match(library.policies[choice.policy][choice.mode], facts)
    facts = Facts({**facts, **rule.sets})
    if rule.then == (AUTO,):
        rule, more = first_match(library.policies[AUTO][choice.mode], facts)
        reasons += more
    limits = {name: library.limits_of(name, facts) for name in rule.then}
    able = tuple(name for name in rule.then if not limits[name])
    for name in takewhile(limits.get, rule.then):
        reasons += limits[name]
    if able:
        return replace(choice, order=able, reasons=reasons)
    only = len(rule.then) == 1
    rows = [(name, row) for name in rule.then for row in limits[name][: None if only else 1]]
    problem = "; ".join(f"{name}: {row.why}" for name, row in rows)
    return replace(choice, order=rule.then if only else (), reasons=reasons, problem=problem)
