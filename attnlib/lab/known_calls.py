"""Known problems at a recorded call: by the backend, release, kernel and card of its records."""

from collections.abc import Mapping
from typing import Any

from ..core.backends.table import entry_of
from ..core.spec import MlaSpec
from ..measure.calls.extend.case import ExtendCase, sample_extend_lens
from ..measure.calls.lengths import sample_seq_lens
from ..measure.calls.mla.case import MlaCase, sample_mla_lens
from ..select.facts import gpu_named
from ..select.known import HOLDS, Found, known_problems
from ..select.situation import situation_from

FLASHINFER = "flashinfer"
PACKAGE_OF_DISTRIBUTION = {"flashinfer-python": FLASHINFER}
"""Distribution -> the name of the package in data/known, where it is another."""
ASKED = {
    "flashinfer-auto": (FLASHINFER, "auto"),
    "flashinfer-fa2": (FLASHINFER, "fa2"),
    "flashinfer-fa3": (FLASHINFER, "fa3"),
    "flashinfer-cuda-cores": (FLASHINFER, "cuda-cores"),
    "flashinfer-xqa": (FLASHINFER, "xqa"),
    "flashinfer-graph-auto": (FLASHINFER, "auto"),
    "flashinfer-batch-attention": (FLASHINFER, "batch-attention"),
    "flashinfer-mla-fa2": (FLASHINFER, "fa2"),
    "flashinfer-mla-fa3": (FLASHINFER, "fa3"),
    "flashinfer-prefill-auto": (FLASHINFER, "auto"),
    "flashinfer-prefill-fa2": (FLASHINFER, "fa2"),
    "flashinfer-prefill-fa3": (FLASHINFER, "fa3"),
    "sglang-flash-attn-3": ("sglang", "fa3"),
    "sglang-flash-attn-3-mla": ("sglang", "fa3"),
    "sglang-flash-attn-3-extend": ("sglang", "fa3"),
    "sglang-triton-mla": ("sglang", "triton"),
    "vllm-triton": ("vllm", "TRITON_ATTN"),
    "vllm-flash-attn-3": ("vllm", "FLASH_ATTN"),
}
"""Backend -> who has it, and how it is asked for there.

What is ours, such as a plan or another cap of splits, is nobody's known problem.
"""


def known_at(
    case: Any,
    backend: str,
    *,
    release: str,
    gpu: str,
    timer: str,
    kernel: str = "",
) -> list[Found]:
    """The known problems that hold for a release of a backend at a call.

    Parameters
    ----------
    case : DecodeCase, MlaCase or ExtendCase
        The call.
    backend : str
        A name of `core.backends`; of those that are not in `ASKED` nothing is known.
    release : str
        The release of its library, of SGLang's fa3 that of sglang-kernel.
    gpu : str
        The card by its name.
    timer : str
        How it was timed, which tells whether in a CUDA graph.
    kernel : str, optional
        The kernel family that ran.
    """
    engine, asked = ASKED.get(backend, ("", ""))
    if not engine or not release:
        return []
    package = entry_of(backend).distribution
    try:
        generation = gpu_named(gpu)
    except ValueError:  # a card that no rule knows
        return []
    facts = {
        "stack": f"{PACKAGE_OF_DISTRIBUTION.get(package, package)}=={release}",
        "engine": engine,
        "by_name": asked != "auto",
        "graph": timer.startswith("graph"),
    }
    if engine != FLASHINFER:
        facts["backend"] = asked
    elif kernel:
        facts["kernel"] = kernel.removeprefix("mla-")
    situation = situation_from({**written(case), **facts, "gpu": generation})
    return [answer for answer in known_problems(situation) if answer.verdict == HOLDS]


def mode_of(case: Any) -> str:
    """The mode of a recorded call, as rules name it."""
    if isinstance(case, ExtendCase):
        return case.mode
    if isinstance(case, MlaCase):
        return "sparse_mla" if case.spec.top_k else "mla"
    return "decode"


def written(case: Any) -> Mapping[str, Any]:
    """A recorded call as an example writes it."""
    if isinstance(case, ExtendCase):
        q_lens, lens = sample_extend_lens(case)
        of_layer = _layer(case.cached.spec)
        q_tokens = int(q_lens.max())
    elif isinstance(case, MlaCase):
        lens = sample_mla_lens(case)
        of_layer = _latent(case.spec)
        q_tokens = case.q_len
    else:
        lens = sample_seq_lens(case)
        of_layer = _layer(case.spec)
        q_tokens = 1
    context = getattr(getattr(case, "cached", case), "context", 0)
    call = {
        "mode": mode_of(case),
        "lens": ",".join(str(length) for length in lens),
        "q_tokens": q_tokens,
    }
    if context:
        call["context"] = context
    return {**of_layer, **call}


def _layer(spec: Any) -> dict[str, Any]:
    return {
        "heads": spec.heads,
        "head_dim": spec.head_dim,
        "page_size": spec.page_size,
        "dtype": spec.dtype,
        "kv_dtype": spec.kv_dtype,
    }


def _latent(spec: MlaSpec) -> dict[str, Any]:
    layer: dict[str, Any] = {"heads": f"{spec.num_qo_heads}/1", "page_size": spec.page_size}
    if spec.top_k:
        layer["topk"] = spec.top_k
    return layer
