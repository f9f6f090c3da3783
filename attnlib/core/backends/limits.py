"""What FlashInfer's kernels cannot run, by release and GPU; wrappers and `select.explain` ask here.

FlashInfer's `auto` checks none of this: it may pick a kernel that cannot run the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..spec import AttnSpec

Facts = Mapping[str, Any]
LATENT_MODES = ("mla", "sparse_mla")
HOPPER = ("", "sm90")
"""Where fa3 runs. An unknown GPU ("") rules no kernel out."""
GROUP_SINCE = {
    1: "0",
    2: "0",
    3: "0",
    4: "0",
    6: "0.6.18",
    8: "0",
    16: "0.7.1",
}
"""Group size of a CUDA-core kernel -> the first release with it: DISPATCH_GQA_GROUP_SIZE."""
PLAIN: Facts = {
    "gpu": "",
    "max_q": 1,
    "one_head_dim": True,
    "custom_mask": False,
    "positions": False,
    "fp16_qk": False,
    "fixed_split": False,
    "sinks": False,
}
"""How our wrappers call a layer by default."""


@dataclass(frozen=True)
class Limit:
    """Why a kernel cannot run a call: the fact that breaks the rule, the rule, and the file or
    pull request of FlashInfer that has it."""

    fact: str
    why: str
    source: str


def facts_for_limits(spec: AttnSpec) -> dict[str, Any]:
    """The facts of a layer that a rule may test."""
    return {
        "dtype": spec.dtype,
        "kv_dtype": spec.kv_dtype,
        "dtypes": spec.dtypes,
        "fp8_query": spec.dtype.startswith("float8"),
        "fp8_kv": spec.kv_dtype.startswith("float8"),
        "one_dtype": spec.dtype == spec.kv_dtype,
        "heads": spec.num_qo_heads,
        "kv_heads": spec.num_kv_heads,
        "group_size": spec.group_size,
        "head_dim": spec.head_dim,
        "head_dims": f"{spec.head_dim}/{spec.head_dim}",
        "page_size": spec.page_size,
    }


def why_not(
    kernel: str,
    spec: AttnSpec,
    *,
    mode: str,
    release: str,
    **more: Any,
) -> str:
    """Why `kernel` of FlashInfer's `release` cannot run a call of the layer, or the empty string.

    `kernel` is one of `TABLE`, or auto, which may take fa2 or fa3. `mode` is one of
    `select.MODES`, `more` are facts in which the call is not `PLAIN`. No `release` is the newest.
    """
    from packaging.version import Version

    version = Version(release or "9999")
    facts = {**facts_for_limits(spec), **PLAIN, **more}
    facts["mode"] = mode
    facts["release"] = version
    kernels = ("fa2", "fa3") if kernel == "auto" else (kernel,)
    limits = []
    for name in kernels:
        limits.append(next(limits_of(name, facts), None))
    first = limits[0]
    if first is None or None in limits:
        return ""
    return f"{first.why}, got {facts[first.fact]}"


def limits_of(kernel: str, facts: Facts) -> Iterator[Limit]:
    """What keeps `kernel` from running the call; nothing for a kernel without rules."""
    if kernel in TABLE:
        yield from TABLE[kernel](facts)


def tested(mode: str) -> set[str]:
    """The facts of `PLAIN` and of a layer that these rules test in a mode."""
    if mode in LATENT_MODES:
        of_call = {"sinks"}
    else:
        of_call = {*PLAIN} - {"sinks"}
    of_layer = {
        "dtype",
        "dtypes",
        "fp8_query",
        "fp8_kv",
        "one_dtype",
        "head_dim",
        "head_dims",
        "group_size",
    }
    return of_call | of_layer


def _before(call: Facts, release: str) -> bool:
    return call["release"] < type(call["release"])(release)


def _fa2(call: Facts) -> Iterator[Limit]:
    latent = call["mode"] in LATENT_MODES
    head_dim = call["head_dim"]
    if latent and _before(call, "0.2.1"):
        yield Limit("release", "not before 0.2.1", "wrapper")
    if latent and call["gpu"] == "sm75":
        yield Limit("gpu", "MLA needs SM80 or newer", "mla/_capabilities.py")
    if call["fp8_query"]:
        yield Limit("dtypes", "fa2 takes no FP8 query", "prefill.cuh")
    if not latent and call["one_head_dim"]:
        since = "0.6.14" if head_dim == 512 else "0"
        if head_dim not in (64, 128, 256, 512) or _before(call, since):
            why = "head_dim must be 64, 128, 256, or from 0.6.14 512"
            yield Limit("head_dim", why, "prefill.cuh")
    if not latent and call["fixed_split"] and _before(call, "0.4.0"):
        yield Limit("fixed_split", "no fixed split before 0.4.0", "decode.py")
    reads_fp8 = call["gpu"] in HOPPER and not _before(call, "0.6.18")
    if latent and call["fp8_kv"] and not reads_fp8:
        why = "MLA over an FP8 cache needs Hopper, and 0.6.18"
        yield Limit("dtypes", why, "mla/_core.py, 0.6.18")
    if latent:
        yield from _latent(call)


def _fa3(call: Facts) -> Iterator[Limit]:
    latent = call["mode"] in LATENT_MODES
    decode = call["mode"] == "decode"
    if decode and _before(call, "0.6.0"):
        yield Limit("release", "not before 0.6.0", "wrapper")
    if latent and _before(call, "0.2.2"):
        yield Limit("release", "not before 0.2.2", "wrapper")
    if call["gpu"] not in HOPPER:
        yield Limit("gpu", "needs compute capability 9.x (Hopper)", "utils.py")
    if call["fp8_query"] and _before(call, "0.2.6"):
        yield Limit("dtypes", "no FP8 before 0.2.6", "utils.py")
    if not latent:
        yield from _fa3_dense(call)
    if decode and call["max_q"] > 1:
        yield Limit("max_q", "decodes one query token per request", "decode.py")
    if latent:
        if call["fp8_query"]:
            yield Limit("dtypes", "MLA takes no FP8 query", "_fa_common.py")
        if call["fp8_kv"] and _before(call, "0.6.14"):
            yield Limit("dtypes", "MLA over an FP8 cache needs 0.6.14", "mla/_core.py, 0.6.14")
        yield from _latent(call)


def _fa3_dense(call: Facts) -> Iterator[Limit]:
    fp8_query = call["fp8_query"]
    fp8_kv = call["fp8_kv"]
    if fp8_kv and not fp8_query:
        why = "an FP8 cache needs an FP8 query: the module does not compile"
        yield Limit("dtypes", why, "#2348")
    if fp8_query and not fp8_kv:
        yield Limit("dtypes", "an FP8 query needs an FP8 cache", "prefill_sm90.cuh")
    if not (call["one_dtype"] or fp8_query or fp8_kv):
        yield Limit("dtypes", "query and cache must share a dtype", "hopper/kernel_traits.cuh")
    if call["head_dims"] not in ("64/64", "128/128", "256/256", "192/128"):
        yield Limit("head_dims", "head_dim must be 64, 128 or 256 (or 192 and 128)", "#3739")
    for fact, why, source in (
        ("custom_mask", "takes no custom mask", "utils.py"),
        ("positions", "applies no position encoding", "utils.py"),
        ("fp16_qk", "has no FP16 reduction of QK", "utils.py"),
        ("fixed_split", "does not split the KV, so cannot fix it", "scheduler.cuh"),
    ):
        if call[fact]:
            yield Limit(fact, why, source)


def _latent(call: Facts) -> Iterator[Limit]:
    """Rules of MLA that fa2 and fa3 share."""
    if call["fp8_kv"] and call["dtype"] == "float16":
        yield Limit("dtypes", "MLA over an FP8 cache needs a bfloat16 query", "_fa_common.py")
    if call["head_dim"] != 576 and _before(call, "0.6.18"):
        yield Limit("head_dim", "MLA needs 512 + 64 before 0.6.18", "mla/_core.py, 0.6.18")
    if call["sinks"]:
        yield Limit("sinks", "no sinks", "_capabilities.py")


def _cuda_cores(call: Facts) -> Iterator[Limit]:
    if call["fp8_query"]:
        yield Limit("dtypes", "takes no FP8 query", "decode.cuh")
    if call["max_q"] > 1:
        yield Limit("max_q", "decodes one query token per request", "decode.py")
    if call["head_dim"] not in (64, 128, 256, 512):
        yield Limit("head_dim", "head_dim must be 64, 128, 256 or 512", "utils.cuh")
    if call["fixed_split"]:
        yield Limit("fixed_split", "only tensor cores take a fixed split", "decode.py")
    since = GROUP_SINCE.get(call["group_size"])
    if since is None or _before(call, since):
        why = "group size must be 1, 2, 3, 4 or 8, 6 from 0.6.18, or 16 from 0.7.1"
        yield Limit("group_size", why, "utils.cuh")


def _xqa(call: Facts) -> Iterator[Limit]:
    """Rules of decode; those of MLA are in data/rules."""
    if call["mode"] in LATENT_MODES:
        return
    head_dim = call["head_dim"]
    group = call["group_size"]
    if call["fp8_query"]:
        yield Limit("dtypes", "takes no FP8 query", "jit/xqa.py")
    if not (call["one_dtype"] or call["fp8_kv"]):
        yield Limit("dtypes", "a 16-bit cache has the query's dtype", "jit/xqa.py")
    if call["page_size"] not in (16, 32, 64, 128):
        yield Limit("page_size", "page size must be 16, 32, 64 or 128", "jit/xqa.py")
    widest = 256 if _before(call, "0.7.2") else 512
    if head_dim % 16 or head_dim > widest:
        yield Limit("head_dim", f"head_dim must be a multiple of 16 up to {widest}", "jit/xqa.py")
    # 16 KiB of shared memory hold the query rows of a block, in tiles of 16, of a padded head.
    largest = 2**13 // max(64, 1 << (head_dim - 1).bit_length())
    if group > largest:
        yield Limit("group_size", f"group size must be at most {largest}", "xqa/mha.cu")


def _cudnn(call: Facts) -> Iterator[Limit]:
    """Rules of decode, for `explain`: we have no wrapper of cuDNN."""
    if call["mode"] != "decode":
        return
    if _before(call, "0.7.1"):
        yield Limit("release", "not before 0.7.1", "wrapper")
    if not call["one_dtype"] or call["fp8_query"]:
        yield Limit("dtypes", "decodes in one 16-bit dtype", "decode.py")
    if call["head_dim"] not in (64, 128, 256):
        yield Limit("head_dim", "head_dim must be 64, 128 or 256", "decode.py")


TABLE = {
    "fa2": _fa2,
    "fa3": _fa3,
    "cuda-cores": _cuda_cores,
    "xqa": _xqa,
    "cudnn": _cudnn,
}
