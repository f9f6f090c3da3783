"""Known problems of a trace: those that its patterns are, and those that its facts make hold.

A trace has no releases: a caller states them (`PACKAGES`). What it does not show is unknown.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from packaging.version import InvalidVersion, Version

from ..core.backends.limits import facts_for_limits
from ..core.backends.table import FAMILIES, family_of
from ..core.layer import parse_layer
from ..measure.marks import DECODE, VERIFY
from ..measure.steps import Step
from ..measure.trace_file import Trace
from ..select.facts import gpu_named
from ..select.known import HOLDS, Found, Problem, how_much, known_problems, truth
from ..select.libraries import find
from ..select.situation import USUALLY_OFF, Situation, card_named

ENGINES = ("sglang", "vllm")
PACKAGES = (*ENGINES, "flashinfer")
"""What a caller may state the release of."""
CONTEXT = "context"
"""What a caller may state of the server: the tokens that it is configured for."""
LAYER_FACTS = ("heads", "head_dim", "page_size", "dtype", "kv_dtype")
MODE_OF_STEP = {DECODE: "decode", VERIFY: "target_verify"}
OF_MLA = ("mla-fa2", "mla-fa3", "flashmla-dense", "flashmla-sparse", "flashmla-sparse-prefill")
"""Families that run MLA: whether it is sparse, and verification, is not told by a name."""
BACKEND_NAMES = {
    ("sglang", "flash-attn-3"): "fa3",
    ("sglang", "triton-decode"): "triton",
    ("vllm", "flash-attn-3"): "FLASH_ATTN",
    ("vllm", "triton-unified"): "TRITON_ATTN",
    ("vllm", "triton-paged"): "TRITON_ATTN",
}
"""Engine and kernel family -> the engine's name of the backend."""
OF_FLASHINFER = {"sglang": "flashinfer", "vllm": "FLASHINFER"}
"""Engine -> its name of the backend that is FlashInfer's."""
ANY_RELEASE = "any release: a setting"
PLANNER = re.compile(r"(attnlib\.core\.)?Fa2Planner")
PLUGIN_SINCE = {"sglang": Version("0.5.11"), "vllm": Version("0.33.0")}
"""Engine -> the oldest release that attnlib's plugin takes."""
Shape = Mapping[str, Any]


def require_release(name: str, release: Any) -> None:
    """ValueError for a release that is none, or that no rule is known of."""
    try:
        Version(str(release))
    except InvalidVersion:
        raise ValueError(f"{name} must be a release such as 0.6.3, got {release!r}") from None
    find(f"{name}=={release}")


def situation_in(trace: Trace, steps: Sequence[Step], shape: Shape) -> Situation:
    """The facts that steps of one kind show, and the releases that are stated."""
    stack = {}
    for name in PACKAGES:
        if name in shape:
            stack[name] = Version(str(shape[name]))
    facts: dict[str, Any] = _of_gpu(trace.gpu)
    if CONTEXT in shape:
        facts[CONTEXT] = shape[CONTEXT]
    step = steps[len(steps) // 2]
    families = [family_of(span.name) for span in step.attention]
    family = next(filter(None, families), "")
    engine = step.mark.engine.lower()
    if engine:
        facts["engine"] = engine
    if family:
        facts["kernel"] = family.removeprefix("mla-")
    backend = BACKEND_NAMES.get((engine, family), "")
    if family and FAMILIES[family].library == "FlashInfer":
        backend = OF_FLASHINFER.get(engine, "")
    if backend and family not in OF_MLA:
        facts["backend"] = backend
    if step.kind in MODE_OF_STEP and family not in OF_MLA:
        facts["mode"] = MODE_OF_STEP[step.kind]
    facts["graph"] = all(step.in_graph for step in steps)
    if step.batch_size:
        facts["batch_size"] = step.batch_size
        if step.mark.query_tokens:
            facts["max_q"] = step.mark.query_tokens // step.batch_size
    return Situation(stack, facts | _of_layer(shape))


def _of_gpu(name: str) -> dict[str, Any]:
    """The GPU and its card, as far as the trace's name of it is known."""
    facts = {}
    if card := card_named(name):
        facts["card"] = card
    try:
        facts["gpu"] = gpu_named(name)
    except ValueError:  # none of those that rules know, or no name
        pass
    return facts


def _of_layer(shape: Shape) -> dict[str, Any]:
    """What is stated of the layer; without heads only what stands for itself."""
    given = {name: shape[name] for name in LAYER_FACTS if name in shape}
    if "heads" not in given:
        return given
    facts = facts_for_limits(parse_layer(**given))
    guessed = {*LAYER_FACTS, "dtypes", "head_dims", "fp8_query", "fp8_kv", "one_dtype"} - {*given}
    return {name: value for name, value in facts.items() if name not in guessed}


def possible(problems: Sequence[Problem], situation: Situation) -> list[Problem]:
    """The problems that no fact and no stated release rules out; a pattern shows that one holds."""
    left = []
    for problem in problems:
        spans = []
        for name, span in problem.releases.items():
            if name in situation.stack:
                spans.append((name, span))
        has = []
        for name, span in spans[:1]:
            has.append(span.has(situation.stack[name]))
        holds = [truth(part, situation.facts) for part in problem.when]
        if False not in (*has, *holds):
            left.append(problem)
    return left


def holding_in(situation: Situation) -> list[Found]:
    """The problems that hold by the facts and stated releases; what is usually off is off."""
    facts = {**dict.fromkeys(USUALLY_OFF, False), **situation.facts}
    found = known_problems(Situation(situation.stack, facts))
    return [answer for answer in found if answer.verdict == HOLDS]


def releases_of(problems: Sequence[Problem]) -> str:
    """`flashinfer since 0.6.0, ended in 0.6.4`, of each problem."""
    words: dict[str, None] = {}
    for problem in problems:
        if not problem.releases:
            words[ANY_RELEASE] = None
        for package, span in problem.releases.items():
            words[f"{package} {span}"] = None
    return "; ".join(words)


def with_switch(fix: str, step: Step, shape: Shape) -> str:
    """A fix that is our planner, by the variable of the engine that marked a step or is stated;
    of no engine, or of a release without our plugin, by its class."""
    engines = {step.mark.engine.lower(), *shape} & {*PLUGIN_SINCE}
    for engine in engines:
        release = Version(str(shape.get(engine, PLUGIN_SINCE[engine])))
        if release >= PLUGIN_SINCE[engine]:
            switch = f"ATTNLIB_{engine.upper()}_DECODE=planned"
            return PLANNER.sub(f"{switch}, attnlib's plugin", fix)
    return fix


def fixes_of(problems: Sequence[Problem]) -> str:
    """What to do about the problem; of several with other fixes, each under its id."""
    fixes = dict.fromkeys(problem.do for problem in problems)
    if len(fixes) <= 1:
        return "".join(fixes)
    return "; ".join(f"{problem.id}: {problem.do}" for problem in problems)


def sizes_of(problems: Sequence[Problem]) -> str:
    """How much the problems cost, as `advise` says it; the empty string of none."""
    words: dict[str, None] = {}
    for problem in problems:
        words |= dict.fromkeys(how_much(problem))
    return "; ".join(words)
