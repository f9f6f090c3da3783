"""The libraries whose choices can be explained: their releases, modes, backends and tables.

A policy is `auto`, the library's own rule; for FlashInfer also an engine's rule of how it calls
FlashInfer; or the name of a backend, asked for by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import Version

from . import flashinfer, flashinfer_limits, sglang, vllm, vllm_limits
from .rules import Condition, Rule, before, one_of, since

Tables = Mapping[str, tuple[Rule, ...]]
AUTO = "auto"


@dataclass(frozen=True)
class Library:
    """One library: `policies` maps a policy to its tables by mode, `backends` a mode to names.

    `limits` are rows of what a backend cannot run: where a rule names several, the next one that
    can is taken; where it names one, the library takes it all the same. `inner` rows name the
    library and the policy that a backend calls in turn.
    """

    name: str
    releases: tuple[str, ...]
    policies: Mapping[str, Tables]
    backends: Mapping[str, tuple[str, ...]]
    limits: tuple[Rule, ...] = ()
    inner: tuple[Rule, ...] = ()
    aliases: tuple[str, ...] = field(default=())

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that the library's rules speak of."""
        return tuple(self.policies[AUTO])

    def policies_for(self, mode: str) -> tuple[str, ...]:
        """Every policy there is in a mode, backends asked for by name included."""
        named = tuple(name for name, tables in self.policies.items() if mode in tables)
        return (*named, *self.backends[mode])


def _releases(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _calls(backend: str, library: str, policy: str, *when: Condition) -> Rule:
    return Rule((one_of("backend", backend), *when), (library, policy), "", library)


def _sglang_inner() -> tuple[Rule, ...]:
    rows, pins = [], sglang.PINS
    for place, (release, pinned) in enumerate(pins):
        policy = "sglang" if Version(release) >= Version(sglang.FIRST_PINNED) else OLD_SGLANG
        until = [before(pins[place + 1][0])] if place + 1 < len(pins) else []
        rows.append(_calls("flashinfer", f"flashinfer=={pinned}", policy, since(release), *until))
    return tuple(rows)


OLD_SGLANG = f"sglang<{sglang.FIRST_PINNED}"
FLASHINFER = Library(
    "flashinfer",
    _releases(
        "0.2.0.post1 0.2.0.post2 0.2.1 0.2.1.post1 0.2.1.post2 0.2.2 0.2.2.post1 0.2.3 0.2.4 "
        "0.2.5 0.2.6 0.2.6.post1 0.2.7 0.2.7.post1 0.2.8 0.2.9 0.2.10 0.2.11 0.2.11.post1 "
        "0.2.11.post2 0.2.11.post3 0.2.12 0.2.13 0.2.14 0.2.14.post1 0.3.0 0.3.0.post1 0.3.1 "
        "0.3.1.post1 0.4.0 0.4.1 0.5.0 0.5.1 0.5.2 0.5.3 0.6.0 0.6.1 0.6.2 0.6.3 0.6.4 0.6.5 "
        "0.6.6 0.6.7 0.6.7.post1 0.6.7.post2 0.6.7.post3 0.6.8 0.6.8.post1 0.6.9 0.6.10 "
        "0.6.10.post1 0.6.11 0.6.11.post1 0.6.11.post2 0.6.11.post3 0.6.12 0.6.13 0.6.14 0.6.15 "
        "0.6.15.post1 0.6.16 0.6.16.post1 0.6.16.post2 0.6.16.post3 0.6.16.post4 0.6.17 0.6.18 "
        "0.6.18.post1 0.7.0 0.7.0.post1 0.7.1 0.7.2 0.7.2.post1"
    ),
    {
        AUTO: flashinfer.AUTO,
        "sglang": sglang.PINNED_POLICY,
        OLD_SGLANG: sglang.UNPINNED_POLICY,
        "mini-sglang": sglang.MINI_POLICY,
        "vllm": vllm.POLICY,
    },
    flashinfer_limits.BACKENDS,
    flashinfer_limits.LIMITS,
    aliases=("flashinfer-python",),
)
NEWEST_FLASHINFER = FLASHINFER.releases[-1]
SGLANG = Library(
    "sglang",
    tuple(release for release, _ in sglang.PINS),
    {AUTO: sglang.AUTO},
    sglang.BACKENDS,
    sglang.LIMITS,
    inner=_sglang_inner(),
)
MINI_SGLANG = Library(
    "mini-sglang",
    (),
    {AUTO: sglang.MINI_AUTO},
    sglang.MINI_BACKENDS,
    sglang.MINI_LIMITS,
    inner=(_calls("fi", f"flashinfer=={NEWEST_FLASHINFER}", "mini-sglang"),),
)
VLLM = Library(
    "vllm",
    ("0.33.0",),
    {AUTO: vllm.AUTO},
    vllm.BACKENDS,
    vllm_limits.LIMITS,
    inner=(_calls("FLASHINFER", f"flashinfer=={vllm.FLASHINFER_RELEASE}", "vllm"),),
)
LIBRARIES = {library.name: library for library in (FLASHINFER, SGLANG, MINI_SGLANG, VLLM)}


def find(text: str) -> tuple[Library, Version | None]:
    """The library and release of `flashinfer==0.6.3`, `mini-sglang` and the like.

    Raises ValueError naming the libraries, or the releases, that there are.
    """
    name, _, release = text.partition("==")
    named = [lib for lib in LIBRARIES.values() if name in (lib.name, *lib.aliases)]
    if not named:
        known = ", ".join(LIBRARIES)
        raise ValueError(f"library must be one of {known} (with ==RELEASE), got {text!r}")
    (library,) = named
    known = {Version(r): r for r in library.releases}
    if not library.releases and not release:
        return library, None
    if not library.releases:
        raise ValueError(f"{name} has no releases: give library={name!r}, got {text!r}")
    wanted = release if _is_version(release) else "0"
    if Version(wanted) not in known:
        raise ValueError(
            f"release of {name} must be one of {', '.join(library.releases)}, got {release!r}"
        )
    return library, Version(wanted)


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except ValueError:
        return False
    return True
