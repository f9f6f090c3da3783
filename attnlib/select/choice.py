"""`explain`: the backend a library picks for one call, with a reason for every row considered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import Version

from ..core.spec import AttnSpec
from .libraries import AUTO, Library, find
from .overrides import override_for
from .rules import Facts, Reason, Rule, first_match, limits_of
from .situation import GPUS, MODES, Call, describe

NO_CALL = Call()


@dataclass(frozen=True)
class Choice:
    """What `library` runs for one call.

    `backend` is its name for it ("" where none can run the call), `order` every candidate, best
    first, `reasons` every row that was looked at. `problem` says why the chosen backend cannot run
    the call after all. `inner` is the choice of the library that the backend calls in turn.
    """

    library: str
    mode: str
    gpu: str
    policy: str
    backend: str
    order: tuple[str, ...]
    reasons: tuple[Reason, ...]
    problem: str = ""
    inner: Choice | None = None

    @property
    def kernel(self) -> str:
        """The backend that computes in the end: the innermost choice."""
        return self.inner.kernel if self.inner else self.backend

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
    process's environment). Raises ValueError for an unknown library, release, mode, GPU, policy or
    backend, listing the valid ones, and where a rule asks for lengths that `call` lacks;
    RuntimeError for a backend asked for by name that cannot run the call.
    """
    found, release = find(library)
    _require("mode", mode, MODES)
    _require(f"mode of {found.name}", mode, found.modes)
    _require("gpu", gpu, tuple(GPUS))
    _require(f"policy of {found.name} in mode {mode}", policy, found.policies_for(mode))
    facts = facts_of(spec, call, mode=mode, gpu=gpu, release=release)
    asked = _asked_for(found, mode, policy, env)
    picked = _pinned(found, asked, facts) if asked else _walked(found, mode, policy, facts)
    backend = picked.order[0] if picked.order else ""
    inner = _inner(found, facts.but(backend=backend), spec, call)
    return Choice(
        library=found.name if release is None else f"{found.name}=={release}",
        mode=mode,
        gpu=gpu,
        policy=policy,
        backend=backend,
        order=picked.order,
        reasons=(*picked.reasons, *(inner.reasons if inner else ())),
        problem=picked.problem or (inner.problem if inner else ""),
        inner=inner,
    )


def facts_of(spec: AttnSpec, call: Call, *, mode: str, gpu: str, release: Version | None) -> Facts:
    """What the tables of a library's release may ask of the call."""
    return Facts({**describe(spec, call, mode=mode, gpu=gpu), "release": release, "backend": None})


def _asked_for(
    library: Library, mode: str, policy: str, env: Mapping[str, str] | None
) -> Reason | None:
    """The backend asked for by name, by an override or by the policy, as the first reason."""
    override = override_for(mode, env)
    if override:
        _require(override.variable, override.backend, library.backends[mode])
        why = f"{override.variable}={override.backend}"
        return Reason("override", override.backend, True, why, "environment")
    if policy in library.backends[mode] and policy not in library.policies:
        return Reason("policy", policy, True, f"policy {policy}: asked for by name", "policy")
    return None


@dataclass(frozen=True)
class _Picked:
    order: tuple[str, ...]
    reasons: tuple[Reason, ...]
    problem: str = ""


def _pinned(library: Library, asked: Reason, facts: Facts) -> _Picked:
    limits = limits_of(library.limits, asked.subject, facts)
    if limits:
        reasons = "; ".join(f"{limit.why} ({limit.source})" for limit in limits)
        raise RuntimeError(
            f"{asked.why}: {asked.subject} cannot run {facts['mode']} on {facts['gpu']}: {reasons}"
        )
    return _Picked((asked.subject,), (asked,))


def _walked(library: Library, mode: str, policy: str, facts: Facts) -> _Picked:
    rule, reasons = _match(library.policies[policy][mode], facts)
    facts = facts.but(**dict(rule.sets))
    if policy != AUTO and rule.then == (AUTO,):
        facts = facts.but(tensor_cores=True)
        rule, more = _match(library.policies[AUTO][mode], facts)
        reasons = (*reasons, *more)
    limits = {name: limits_of(library.limits, name, facts) for name in rule.then}
    able = tuple(name for name in rule.then if not limits[name])
    passed_over = rule.then[: rule.then.index(able[0])] if able else rule.then
    reasons = (*reasons, *(limit for name in passed_over for limit in limits[name]))
    if able:
        return _Picked(able, reasons)
    if len(rule.then) > 1:
        problem = "; ".join(f"{name}: {limits[name][0].why}" for name in rule.then)
        return _Picked((), reasons, problem)
    (name,) = rule.then
    return _Picked(rule.then, reasons, "; ".join(f"{name}: {row.why}" for row in limits[name]))


def _match(rules: tuple[Rule, ...], facts: Facts) -> tuple[Rule, tuple[Reason, ...]]:
    rule, reasons = first_match(rules, facts)
    if rule is None:
        raise AssertionError("a table must end with a row that always matches")
    return rule, reasons


def _inner(library: Library, facts: Facts, spec: AttnSpec, call: Call) -> Choice | None:
    """The choice of the library that the chosen backend calls, with what that one is told."""
    row, _ = first_match(library.inner, facts)
    if row is None or facts["mode"] not in find(row.then[0])[0].modes:
        return None
    target, policy = row.then
    asked = {"mode": facts["mode"], "gpu": facts["gpu"], "library": target, "policy": policy}
    return explain(spec, call=call, env={}, **asked)


def _require(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")
