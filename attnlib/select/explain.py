"""`explain`: the backend a library picks for one call, with a reason for every row considered.

A user can pin a backend by environment variable: ATTNLIB_DECODE_BACKEND for decode and MLA,
ATTNLIB_PREFILL_BACKEND for all other modes, like SGLang's prefill_backend. The name is a backend
of the library in question (say SGLang), not of the FlashInfer that it calls.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..core.backends.limits import LATENT_MODES
from ..core.backends.table import TABLE
from ..core.spec import AttnSpec, require_word
from .facts import DECODE_MODES, GPUS, MODES, Call, Facts, facts_of, stated_facts
from .libraries import AUTO, MAIN, Library, find
from .rules import Reason, first_match

NO_CALL = Call()
PREFILL_VARIABLE, DECODE_VARIABLE = "ATTNLIB_PREFILL_BACKEND", "ATTNLIB_DECODE_BACKEND"


@dataclass(frozen=True)
class Picked:
    """Candidates, best first, the rows considered, and why the first cannot run (or nothing)."""

    order: tuple[str, ...]
    reasons: tuple[Reason, ...]
    problem: str = ""


@dataclass(frozen=True)
class Choice:
    """What `library` runs for one call.

    `backend` is the library's name for it ("" if none can run the call), `order` every candidate,
    best first, `reasons` every row that was considered. `problem` says why the chosen backend
    cannot run the call. `inner` is the choice of the library that the backend calls. `unused` are
    the fields of the call that were stated and that no rule on the way tests.
    """

    library: str
    mode: str
    gpu: str
    policy: str
    backend: str
    order: tuple[str, ...]
    reasons: tuple[Reason, ...]
    problem: str = ""
    inner: "Choice | None" = None
    unused: tuple[str, ...] = ()

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
        plans = ("mla",) if latent else ("decode",)
        names = (e.name for e in TABLE.values() if self.kernel in e.words and e.plans in plans)
        return next(names, "")

    @property
    def decided_by(self) -> Reason:
        """The row that decided: the last one that chose a backend (limits aside)."""
        return [r for r in self.reasons if r.matched and r.kind != "limit"][-1]


def explain(
    spec: AttnSpec,
    *,
    mode: str,
    gpu: str,
    library: str,
    policy: str = AUTO,
    call: Call = NO_CALL,
    env: Mapping[str, str] | None = None,
) -> Choice:
    """Which backend `library` (`flashinfer==0.6.3`, `vllm==0.33.0`, ...) picks for a fresh wrapper.

    `policy` is auto, an engine's rule, or a backend's name. `env` holds the overrides (default: the
    process's environment). Raises ValueError for an unknown name, listing the valid ones, and where
    a rule asks for lengths that `call` lacks; RuntimeError for a backend asked for by name that
    cannot run the call.
    """
    rules, release = find(library)
    require_word("mode", mode, MODES)
    require_word(f"mode of {rules.name}", mode, rules.modes)
    require_word("gpu", gpu, GPUS)
    require_word(f"policy of {rules.name} in mode {mode}", policy, rules.policies_for(mode))
    facts = facts_of(spec, call, mode=mode, gpu=gpu, release=release)
    pin = _pin(rules, mode, policy, os.environ if env is None else env)
    picked = _pinned(rules, pin, facts) if pin else _walked(rules, policy, facts)
    backend = picked.order[0] if picked.order else ""
    tested = rules.tests(mode, policy)
    unused = [name for name, decided in stated_facts(call).items() if not decided & tested]
    choice = Choice(
        library=rules.name if release is None else f"{rules.name}=={release}",
        mode=mode,
        gpu=gpu,
        policy=policy,
        backend=backend,
        order=picked.order,
        reasons=picked.reasons,
        problem=picked.problem,
        unused=tuple(unused),
    )
    target, policy = rules.calls.get((backend, str(release or MAIN)), ("", ""))
    if not target or mode not in find(target)[0].modes:
        return choice
    inner = explain(spec, mode=mode, gpu=gpu, library=target, policy=policy, call=call, env={})
    return replace(
        choice,
        inner=inner,
        reasons=choice.reasons + inner.reasons,
        problem=choice.problem or inner.problem,
        unused=tuple(name for name in unused if name in inner.unused),
    )


def _pin(library: Library, mode: str, policy: str, env: Mapping[str, str]) -> Reason | None:
    """The backend named by an environment variable or by the policy, as the first reason."""
    variable = DECODE_VARIABLE if mode in DECODE_MODES else PREFILL_VARIABLE
    if backend := env.get(variable, "").strip():
        require_word(variable, backend, library.backends[mode])
        return Reason("override", backend, True, f"{variable}={backend}", "environment")
    if policy in library.backends[mode] and policy not in library.policies:
        return Reason("policy", policy, True, f"policy {policy}: asked for by name", "policy")
    return None


def _pinned(library: Library, pin: Reason, facts: Facts) -> Picked:
    if limits := library.limits_of(pin.subject, facts):
        reasons = "; ".join(f"{limit.why} ({limit.source})" for limit in limits)
        raise RuntimeError(
            f"{pin.why}: {pin.subject} cannot run {facts['mode']} on {facts['gpu']}: {reasons}"
        )
    return Picked((pin.subject,), (pin,))


def _walked(library: Library, policy: str, facts: Facts) -> Picked:
    """A row that names one backend chooses it; a row that names several takes the first able."""
    rule, reasons = first_match(library.policies[policy][facts["mode"]], facts)
    facts = Facts({**facts, **rule.sets})
    if rule.then == (AUTO,):
        rule, more = first_match(library.policies[AUTO][facts["mode"]], facts)
        reasons += more
    limits = {name: library.limits_of(name, facts) for name in rule.then}
    able = tuple(name for name in rule.then if not limits[name])
    passed_over = rule.then[: rule.then.index(able[0])] if able else rule.then
    for name in passed_over:
        reasons += limits[name]
    if able:
        return Picked(able, reasons)
    if len(rule.then) == 1:
        (name,) = rule.then
        return Picked(rule.then, reasons, "; ".join(f"{name}: {row.why}" for row in limits[name]))
    return Picked((), reasons, "; ".join(f"{name}: {limits[name][0].why}" for name in rule.then))
