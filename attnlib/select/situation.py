"""What a known problem may ask: the releases that run together, and the facts of server and call.

Beside the facts of a call (`facts`) these are the library's pick, the card, how the server was
started, and what the models of `core` say of the lengths. A fact that nobody stated is left out:
it is unknown, not false.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from packaging.version import Version

from ..core.backends.limits import LATENT_MODES
from ..core.call_text import parse_lengths
from ..core.checkpoints import served
from ..core.fa2.choice import PlanShape, choose
from ..core.gpu import HOPPER_SMS
from ..core.layer import parse_layer
from ..core.schedule.caps import BOUNDED, DEFAULT, splits_under
from ..core.schedule.facts import SchedulerFacts, latent_facts, layer_facts
from ..core.spec import MLA_HEAD_DIM, AttnSpec, MlaSpec, require_int, require_type
from .explain import Choice, settles
from .facts import DRAFT_MODES, FLAGS, GPUS, NUMBERS, WORDS, Call, Facts, facts_of, gpu_named
from .libraries import AUTO, LIBRARIES
from .rules import Vocabulary

SERVED_CONTEXT = 131_072
"""Tokens of the page table's width where no context is stated, or the longest request."""
VLLM_CAP = "32"
"""vLLM's cap of splits in a CUDA graph (flash_attn_max_num_splits_for_cuda_graph)."""
CARDS = tuple(
    name.lower().replace(" ", "") for names in GPUS.values() for name in names.split(", ")
)
"""Cards by name, as a fact has them: h100, rtx4090."""
USUALLY_OFF = {
    "glue_graph": "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
    "context_parallel": "context parallelism",
    "prefill_context_parallel": "prefill context parallelism",
    "num_splits_pinned": "num_splits set for every call",
    "schedule_kept": "a schedule of FlashAttention-3 that is kept over steps",
    "plan_kept": "a plan of FlashInfer that is replayed over steps",
    "gpu_lengths": "lengths that the GPU alone has",
    "pageable_copies": "lengths copied to pageable memory",
}
"""Flags that tell how a server was started or is written, off unless they are stated."""
SERVER = {"dp_attention": "DP attention", **USUALLY_OFF}
"""All such flags, and how a reason names them."""
MODELLED = {
    "splits_lost": "splits lost to SGLang's cap",
    "vllm_splits_lost": "splits lost to vLLM's cap of 32",
    "fa2_plan_loses": "a plan of fa2 that the model of core.fa2 would leave",
    "near_context": "a request that the draft tokens take past the context",
    "by_name": "a backend asked for by name",
}
"""Flags that follow from the lengths by a model of `core`, or from the policy."""
SERVER_NUMBERS = ("context", "draft_tokens")
LENGTHS = "kv_lens"


def _backends() -> tuple[str, ...]:
    """Every name that a library has for a backend, each once."""
    names: dict[str, None] = {}
    for library in LIBRARIES.values():
        names |= dict.fromkeys(library.by_rule_only)
        for of_mode in library.backends.values():
            names |= dict.fromkeys(of_mode)
        for policies in library.policies.values():
            for rows in policies.values():
                for row in rows:
                    names |= dict.fromkeys(row.then)
    return tuple(name for name in names if name != AUTO)


ENGINE_BACKENDS = _backends()
OF_SITUATIONS = Vocabulary(
    flags={**FLAGS, **SERVER, **MODELLED},
    words={
        **WORDS,
        "engine": tuple(LIBRARIES),
        "backend": ENGINE_BACKENDS,
        "kernel": ENGINE_BACKENDS,
        "card": CARDS,
    },
    numbers=(*NUMBERS, *SERVER_NUMBERS, "longest_read", "longest_over_mean"),
)
"""What the conditions of a known problem may test."""
OF_LENGTHS = (
    "batch_size",
    "total_q",
    "total_kv",
    "min_kv",
    "max_kv",
    "kv_units",
    "longest_read",
    "longest_over_mean",
    "splits_lost",
    "vllm_splits_lost",
    "fa2_plan_loses",
)
"""Facts that the lengths of the requests decide: `kv_lens` is what a user has to give."""
UNSTATED = ("graph", "speculative", "eagle_topk", "model")
"""Facts of a call that are unknown unless they are stated; others have a plain call's value."""


@dataclass(frozen=True)
class Situation:
    """Releases that run together (package -> release), and the facts that are known."""

    stack: Mapping[str, Version]
    facts: Mapping[str, Any]


def parse_stack(text: str) -> dict[str, Version]:
    """Package -> release of `sglang==0.5.23,flashinfer==0.7.2`; ValueError for another text."""
    stack = {}
    for part in text.split(","):
        name, given, release = part.partition("==")
        if not given:
            raise ValueError(f"a stack must be such as sglang==0.5.23, got {text!r}")
        stack[name] = Version(release)
    return stack


def card_named(text: str) -> str:
    """The card that a text such as `h20` or `NVIDIA H200` names, or the empty string."""
    words = re.sub(r"[\s-]+", " ", text.lower())
    squeezed = words.replace(" ", "")
    named = []
    for card in CARDS:
        if card in words.split() or card == squeezed:
            named.append(card)
    named += [card for card in CARDS if card in squeezed and len(card) > 4]
    return named[0] if named else ""


def parse_server(settings: Collection[str]) -> dict[str, Any]:
    """Facts of a server: `dp_attention`, `context=131072`; ValueError lists those there are."""
    given: dict[str, Any] = {}
    for text in settings:
        name, _, value = text.partition("=")
        if name in SERVER and value in ("", "yes", "no"):
            given[name] = value != "no"
        elif name in SERVER_NUMBERS and value.isdecimal():
            given[name] = int(value)
        else:
            raise _not_of_server(text)
    return given


def _not_of_server(text: str) -> ValueError:
    """The error for what is no fact of a server: it lists those there are."""
    numbers = [f"{number}=N" for number in SERVER_NUMBERS]
    known = ", ".join((*SERVER, *numbers))
    return ValueError(f"a fact of the server must be one of {known}, got {text!r}")


def require_server(server: Mapping[str, Any]) -> None:
    """ValueError for what is no fact of a server, or for a value that it cannot have."""
    require_type("server", server, Mapping, such_as="{'dp_attention': True}")
    for name, value in server.items():
        if name in SERVER_NUMBERS:
            require_int(f"{name} of server", value)
        elif name not in SERVER:
            raise _not_of_server(str(name))
        elif not isinstance(value, bool):
            raise ValueError(f"{name} of server must be True or False, got {value!r}")


def with_dp_attention(
    server: Mapping[str, Any],
    model: str,
    tp: int = 1,
    dp: int = 1,
) -> dict[str, Any]:
    """The facts of a server, with DP attention where the words of a model or `dp` say it.

    ValueError where the server is said to be without.
    """
    if not served(model, tp, dp).dp_attention:
        return dict(server)
    if not server.get("dp_attention", True):
        raise ValueError(f"dp_attention must be left out, {model} is served with it, got no")
    return {**server, "dp_attention": True}


def situation_of(
    choice: Choice,
    spec: AttnSpec,
    call: Call,
    *,
    stated: Collection[str] = (),
    gpu: str = "",
    server: Mapping[str, Any] | None = None,
) -> Situation:
    """The situation of a choice of `explain`.

    Parameters
    ----------
    choice : Choice
        What the library picks.
    spec : AttnSpec
        The layer; its page is the library's where that is another.
    call : Call
        The call.
    stated : collection of str
        Fields of `call` that the user gave: of `UNSTATED` others are unknown.
    gpu : str
        How the user named the GPU: it may be a card.
    server : mapping, optional
        Facts of `SERVER` and `SERVER_NUMBERS`.
    """
    stack = _stack_of(choice)
    spec = replace(spec, page_size=choice.pages or spec.page_size)
    engine = choice.library.partition("==")[0]
    picked = {
        "engine": engine,
        "backend": choice.backend,
        "kernel": choice.kernel,
        "by_name": _is_by_name(choice),
        "mm_prefix": call.mm_prefix or _has_image_prefix(choice),
    }
    if card := card_named(gpu):
        picked["card"] = card
    facts = _facts(
        spec,
        call,
        mode=choice.mode,
        gpu=choice.gpu,
        stated=stated,
        server=server or {},
    )
    return Situation(stack, {**facts, **picked})


def _taken(given: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The named facts, which `given` has no longer."""
    taken = {}
    for name in names:
        if name in given:
            taken[name] = given.pop(name)
    return taken


def _is_by_name(choice: Choice) -> bool:
    """Whether the library of the kernel was asked for a backend by its name."""
    while choice.inner is not None:
        choice = choice.inner
    library = choice.library.partition("==")[0]
    return choice.policy in LIBRARIES[library].backends.get(choice.mode, ())


def _has_image_prefix(choice: Choice) -> bool:
    """Whether the library settles that tokens of an image attend to each other."""
    words = settles("mm_prefix", True)
    return any(words in reason.subject for reason in choice.reasons)


def _stack_of(choice: Choice) -> dict[str, Version]:
    """The releases of a choice and of what it calls."""
    stack = {}
    inner: Choice | None = choice
    while inner is not None:
        name, _, release = inner.library.partition("==")
        if release:
            stack[name] = Version(release)
        inner = inner.inner
    return stack


LAYER_WORDS = ("heads", "head_dim", "page_size", "dtype", "kv_dtype")
PICKED_WORDS = ("engine", "backend", "kernel")


def situation_from(written: Mapping[str, Any]) -> Situation:
    """The situation that an entry's `example` writes down.

    `stack`, `mode` and `gpu` must be given. `lens` are tokens per request as of `parse_lengths`,
    `q_tokens` the query tokens of each. What else there is are facts by name.
    """
    given = dict(written)
    stack = parse_stack(given.pop("stack"))
    mode = given.pop("mode")
    named = given.pop("gpu")
    latent = mode in LATENT_MODES
    layer: dict[str, Any] = {"heads": "16/1" if latent else "32/8"}
    if latent:
        layer["head_dim"] = MLA_HEAD_DIM
    layer |= {name: given.pop(name) for name in LAYER_WORDS if name in given}
    if "lens" in given:
        lens = parse_lengths("lens", str(given.pop("lens")))
    else:
        lens = ()
    q_tokens = given.pop("q_tokens", 0)
    if q_tokens:
        q_lens = (q_tokens,) * len(lens)
    else:
        q_lens = ()
    of_call = {field.name for field in fields(Call)} & {*given}
    stated = {name: given.pop(name) for name in of_call}
    if mode == "sparse_mla":
        stated.setdefault("topk", 2048)
    call = Call(kv_lens=lens, q_lens=q_lens, **stated)
    server = _taken(given, (*SERVER, *SERVER_NUMBERS))
    picked = _taken(given, (*PICKED_WORDS, "by_name"))
    if card := card_named(named):
        picked["card"] = card
    if given:
        raise ValueError(f"no such fact: {', '.join(given)}")
    spec = parse_layer(**layer)
    facts = _facts(
        spec,
        call,
        mode=mode,
        gpu=gpu_named(named),
        stated=stated,
        server=server,
    )
    return Situation(stack, {**facts, **picked})


def _facts(
    spec: AttnSpec,
    call: Call,
    *,
    mode: str,
    gpu: str,
    stated: Collection[str],
    server: Mapping[str, Any],
) -> dict[str, Any]:
    """The facts of a call that are known, those of the server, and what models say of the rest."""
    of_call = facts_of(
        spec=spec,
        call=call,
        mode=mode,
        gpu=gpu,
        release=None,
    )
    facts: dict[str, Any] = dict(of_call)
    for name in UNSTATED:
        if name not in stated:
            del facts[name]
    if "model" not in stated:
        del facts["architecture"]
    if mode in DRAFT_MODES or call.eagle_topk or call.speculative:
        facts["speculative"] = True
    if call.kv_lens:
        window = spec.window or max(call.kv_lens)
        read = np.minimum(call.kv_lens, window)
        facts["longest_read"] = int(read.max())
        facts["longest_over_mean"] = float(read.max() / read.mean())
        facts |= _by_models(spec, call, Facts(facts), server)
    return {**facts, **dict.fromkeys(USUALLY_OFF, False), **server}


def _by_models(
    spec: AttnSpec,
    call: Call,
    facts: Facts,
    server: Mapping[str, Any],
) -> dict[str, bool]:
    """What the models of `core` say of the lengths, where they know such a call."""
    said = {}
    lens = np.asarray(call.kv_lens)
    if "context" in server:
        if lens.max() > server["context"]:
            words = f"context must hold the longest request ({lens.max()})"
            raise ValueError(f"{words}, got {server['context']}")
        ahead = max(facts["max_q"], server.get("draft_tokens", 0))
        said["near_context"] = bool(lens.max() + ahead > server["context"])
    context = max(server.get("context", SERVED_CONTEXT), int(lens.max()))
    with_model: dict[str, Any] = {"lens": lens, "facts": facts, "context": context}
    sglang = _schedule(
        spec=replace(spec, dtype=spec.kv_dtype),
        build="sglang",
        **with_model,
    )
    if sglang is not None:
        default = _splits(sglang, lens, DEFAULT)
        bounded = _splits(sglang, lens, BOUNDED)
        said["splits_lost"] = bool((default < bounded).any())
    vllm = _schedule(spec, "vllm", **with_model)
    if vllm is not None:
        free = _splits(vllm, lens, DEFAULT)
        capped = _splits(vllm, lens, VLLM_CAP)
        said["vllm_splits_lost"] = bool((capped < free).any())
    if spec.head_dim in (64, 128, 256):
        shape = PlanShape.of(spec, lens, HOPPER_SMS, facts["max_q"])
        choice = choose(shape, lens)
        said["fa2_plan_loses"] = choice.chunk != int(choice.chunks[-1])
    return said


def _schedule(
    spec: AttnSpec,
    build: str,
    *,
    lens: np.ndarray,
    facts: Facts,
    context: int,
) -> SchedulerFacts | None:
    """The call as a build of FlashAttention-3 sees it; None where it has no such kernel."""
    latent = facts["mode"] in LATENT_MODES
    call: dict[str, Any] = {
        "columns": -(-context // spec.page_size),
        "batch_size": len(lens),
        "max_seqlen_q": facts["max_q"],
        "num_sms": HOPPER_SMS,
        "causal": True,
        "varlen_q": True,
        "build": build,
    }
    try:
        if latent:
            mla = MlaSpec(spec.num_qo_heads, page_size=spec.page_size)
            return latent_facts(mla, **call)
        return layer_facts(spec, **call)
    except ValueError:
        return None


def _splits(
    facts: SchedulerFacts,
    lens: np.ndarray,
    cap: str,
) -> np.ndarray:
    """Splits of each request [bs] under a cap."""
    q_lens = np.full(len(lens), facts.max_seqlen_q)
    return splits_under(facts, lens, q_lens, cap)
