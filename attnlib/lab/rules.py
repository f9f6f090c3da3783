"""Which rule would choose what: one question, asked of the tables of `select`."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.backends.table import named_by
from ..core.spec import MLA_HEAD_DIM, AttnSpec, MlaSpec
from ..select import Call, Choice, explain

NO_RULE = "no rule on record says"
ENGINES = ("sglang==0.5.23", "vllm==0.33.0")
"""The newest releases whose rules were read."""


@dataclass(frozen=True)
class Chosen:
    """What a library's rule picks for a call, and why.

    `word` is the library's own, `backend` ours; both are empty where no rule speaks of the call,
    `backend` also where we do not have it.
    """

    library: str
    word: str
    backend: str
    reason: str


def chosen_by(spec: AttnSpec | MlaSpec, *, library: str, gpu: str) -> Chosen:
    """What `library` (`flashinfer==0.6.3`, ...) runs by its own rule, on a GPU such as `sm90`."""
    try:
        choice = _explained(spec, library, gpu)
    except ValueError as error:
        return Chosen(library, "", "", f"{NO_RULE}: {error}")
    if choice.problem:
        return Chosen(library, "", "", f"cannot run it: {choice.problem}")
    rule = choice.decided_by
    backend = named_by(library, choice.kernel, latent=isinstance(spec, MlaSpec))
    return Chosen(library, choice.kernel, backend, f"{rule.why} ({rule.source})")


def _explained(spec: AttnSpec | MlaSpec, library: str, gpu: str) -> Choice:
    asked = {"gpu": gpu, "library": library, "env": {}}
    if isinstance(spec, AttnSpec):
        return explain(spec, mode="decode", **asked)
    kv_dtype = "bfloat16" if spec.kv_format == "bfloat16" else "float8_e4m3fn"
    seen = AttnSpec(spec.num_qo_heads, 1, MLA_HEAD_DIM, spec.page_size, kv_dtype=kv_dtype)
    mode = "sparse_mla" if spec.top_k else "mla"
    return explain(seen, mode=mode, call=Call(topk=spec.top_k), **asked)
