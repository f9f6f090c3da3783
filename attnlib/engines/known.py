"""Known problems of the server that a plugin runs in, said in its log at the first step.

`select` is loaded only then: what an engine imports at its start is `core`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .arms import STATE, Engine

LATENT_MODES = ("mla", "sparse_mla")


Facts = Callable[[], Mapping[str, Any]]
"""What gives the facts of a server, once they are wanted."""


def warn_once(engine: Engine, of_what: str, facts: Facts) -> None:
    """Log each known problem of `of_what` once in this process, with what to do.

    `facts` returns what is known of the server, as an example in data/known says it; it is called
    once. A problem that the lengths of requests decide is said to hold for some of them. One whose
    remedy is a variable that is set is left out. What cannot be asked is logged, and the server
    goes on.
    """
    asked = f"known problems of {of_what}"
    if asked in STATE.said:
        return
    STATE.said.add(asked)
    try:
        for words in _problems(engine, facts()):
            STATE.say(f"attnlib: {words}")
    except Exception as error:
        STATE.say(f"attnlib: {asked} cannot be asked: {error!r}")


def decode_mode_of(engine: Engine, backend: str, is_latent: bool) -> str:
    """The mode of a layer's decode step, as rules name it; ValueError for an unknown backend."""
    from ..select.libraries import LIBRARIES

    modes = LATENT_MODES if is_latent else ("decode",)
    backends = LIBRARIES[engine.package].backends
    for mode in modes:
        if backend in backends.get(mode, ()):
            return mode
    raise ValueError(f"backend must be one that was read of {engine.title}, got {backend!r}")


def _problems(engine: Engine, facts: Mapping[str, Any]) -> list[str]:
    """Each known problem that holds, for some lengths or for all, in a line."""
    from ..select.facts import gpu_named
    from ..select.known import in_brief, known_problems
    from ..select.situation import LENGTHS, situation_from

    gpu_named(facts["gpu"])
    lines = []
    situation = situation_from({"engine": engine.package, **facts})
    for answer in known_problems(situation):
        settings = [f"{engine.prefix}{arm.upper()}=" for arm in STATE.arms]
        is_mended = any(setting in answer.problem.do for setting in settings)
        if is_mended or set(answer.missing) - {LENGTHS}:
            continue
        where = "for some lengths of requests, " if answer.missing else ""
        lines.append(f"{where}{in_brief(answer)}")
    return lines
