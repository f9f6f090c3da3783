"""What FlashInfer's own kernels cannot run, by release and GPU: one table for all who ask.

The library's `auto` asks nobody: it may pick what cannot run. A row: whether it keeps the kernel
from running the call, the fact that it is about, why, and the file or pull request of FlashInfer
that says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    from ..spec import AttnSpec

Facts = Mapping[str, Any]
Row = tuple[bool, str, str, str]
LATENT_MODES = ("mla", "sparse_mla")
HOPPER = ("", "sm90")
"""Where fa3 runs; a GPU that is not known is not held against a kernel."""
PLAIN: Facts = {"gpu": "", "max_q": 1, "one_head_dim": True} | dict.fromkeys(
    ("custom_mask", "positions", "fp16_qk", "fixed_split", "sinks"), False
)
"""How our wrappers call a layer, unless they say otherwise."""


def layer_facts(spec: AttnSpec) -> dict[str, Any]:
    """What a rule may ask of the layer alone."""
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


def why_not(kernel: str, spec: AttnSpec, *, mode: str, release: str, **more: Any) -> str:
    """Why `kernel` of FlashInfer's `release` cannot run a call of the layer, or the empty string.

    `kernel` is one of `TABLE`, or auto, which may take fa2 or fa3. `mode` is one of
    `select.MODES`, `more` are facts in which the call is not `PLAIN`. No `release` is the newest.
    """
    asked = {"mode": mode, "release": Version(release or "9999"), **more}
    facts = {**layer_facts(spec), **PLAIN, **asked}
    kernels = ("fa2", "fa3") if kernel == "auto" else (kernel,)
    rows = [next(limits_of(name, facts), None) for name in kernels]
    if rows[0] is None or None in rows:
        return ""
    _, fact, why, _ = rows[0]
    return f"{why}, got {facts[fact]}"


def limits_of(kernel: str, facts: Facts) -> Iterator[Row]:
    """The rows that keep `kernel` from running the call; none where the kernel has no rows."""
    rows = TABLE[kernel](facts) if kernel in TABLE else ()
    return (row for row in rows if row[0])


def _before(call: Facts, release: str) -> bool:
    return call["release"] < Version(release)


def _fa2(call: Facts) -> Iterator[Row]:
    latent, fp8_kv, head_dim = call["mode"] in LATENT_MODES, call["fp8_kv"], call["head_dim"]
    dense = not latent and call["one_head_dim"]
    yield latent and _before(call, "0.2.1"), "release", "not before 0.2.1", "wrapper"
    yield call["fp8_query"], "dtypes", "fa2 takes no FP8 query", "prefill.cuh"
    other = dense and head_dim not in (64, 128, 256) and _before(call, "0.6.14")
    yield other, "head_dim", "head_dim must be 64, 128 or 256 before 0.6.14", "prefill.cuh"
    other = dense and head_dim not in (64, 128, 256, 512)
    yield other, "head_dim", "head_dim must be 64, 128, 256, or from 0.6.14 512", "prefill.cuh"
    cannot = latent and fp8_kv and (_before(call, "0.6.18") or call["gpu"] not in HOPPER)
    why = "MLA over an FP8 cache needs Hopper, and 0.6.18"
    yield cannot, "dtypes", why, "mla/_core.py, 0.6.18"
    yield from _latent(call)


def _fa3(call: Facts) -> Iterator[Row]:
    latent, decode = call["mode"] in LATENT_MODES, call["mode"] == "decode"
    fp8_query, fp8_kv = call["fp8_query"], call["fp8_kv"]
    yield decode and _before(call, "0.6.0"), "release", "not before 0.6.0", "wrapper"
    yield latent and _before(call, "0.2.2"), "release", "not before 0.2.2", "wrapper"
    yield call["gpu"] not in HOPPER, "gpu", "needs compute capability 9.x (Hopper)", "utils.py"
    yield fp8_query and _before(call, "0.2.6"), "dtypes", "no FP8 before 0.2.6", "utils.py"
    if not latent:
        why = "an FP8 cache needs an FP8 query: the module does not compile"
        yield fp8_kv and not fp8_query, "dtypes", why, "#2348"
        why = "an FP8 query needs an FP8 cache"
        yield fp8_query and not fp8_kv, "dtypes", why, "prefill_sm90.cuh"
        mixed = not (call["one_dtype"] or fp8_query or fp8_kv)
        why = "query and cache must share a dtype"
        yield mixed, "dtypes", why, "hopper/kernel_traits.cuh"
        can = call["head_dims"] in ("64/64", "128/128", "256/256", "192/128")
        why = "head_dim must be 64, 128 or 256 (or 192 and 128)"
        yield not can, "head_dims", why, "#3739"
    yield call["custom_mask"], "custom_mask", "takes no custom mask", "utils.py"
    yield call["positions"], "positions", "applies no position encoding", "utils.py"
    yield call["fp16_qk"], "fp16_qk", "has no FP16 reduction of QK", "utils.py"
    why = "does not split the KV, so cannot fix it"
    yield call["fixed_split"], "fixed_split", why, "scheduler.cuh"
    many = decode and call["max_q"] > 1
    yield many, "max_q", "decodes one query token per request", "decode.py"
    yield latent and fp8_query, "dtypes", "MLA takes no FP8 query", "_fa_common.py"
    old, why = _before(call, "0.6.14"), "MLA over an FP8 cache needs 0.6.14"
    yield latent and fp8_kv and old, "dtypes", why, "mla/_core.py, 0.6.14"
    yield from _latent(call)


def _latent(call: Facts) -> Iterator[Row]:
    """Rows of MLA that fa2 and fa3 share."""
    if call["mode"] not in LATENT_MODES:
        return
    half, why = call["dtype"] == "float16", "MLA over an FP8 cache needs a bfloat16 query"
    yield call["fp8_kv"] and half, "dtypes", why, "_fa_common.py"
    other = _before(call, "0.6.18") and call["head_dim"] != 576
    yield other, "head_dim", "MLA needs 512 + 64 before 0.6.18", "mla/_core.py, 0.6.18"
    yield call["sinks"], "sinks", "no sinks", "_capabilities.py"


def _cuda_cores(call: Facts) -> Iterator[Row]:
    group, groups = call["group_size"], {1, 2, 3, 4, 8}  # DISPATCH_GQA_GROUP_SIZE of utils.cuh
    yield call["fp8_query"], "dtypes", "takes no FP8 query", "decode.cuh"
    yield call["max_q"] > 1, "max_q", "decodes one query token per request", "decode.py"
    other = call["head_dim"] not in (64, 128, 256, 512)
    yield other, "head_dim", "head_dim must be 64, 128, 256 or 512", "utils.cuh"
    other = group not in groups and _before(call, "0.6.18")
    why = "group size must be 1, 2, 3, 4 or 8 before 0.6.18"
    yield other, "group_size", why, "utils.cuh"
    other = group not in groups | {6} and _before(call, "0.7.1")
    why = "group size must be 1, 2, 3, 4, 6 or 8 before 0.7.1"
    yield other, "group_size", why, "utils.cuh, 0.6.18"
    why = "group size must be 1, 2, 3, 4, 6, 8 or 16"
    yield group not in groups | {6, 16}, "group_size", why, "utils.cuh, 0.7.1"


def _xqa(call: Facts) -> Iterator[Row]:
    """Of decode; what it cannot run of MLA, `select` has."""
    if call["mode"] in LATENT_MODES:
        return
    head_dim, group = call["head_dim"], call["group_size"]
    yield call["fp8_query"], "dtypes", "takes no FP8 query", "jit/xqa.py"
    mixed, why = not (call["one_dtype"] or call["fp8_kv"]), "a 16-bit cache has the query's dtype"
    yield mixed, "dtypes", why, "jit/xqa.py"
    why = "page size must be 16, 32, 64 or 128"
    yield call["page_size"] not in (16, 32, 64, 128), "page_size", why, "jit/xqa.py"
    most, why = 256 if _before(call, "0.7.2") else 512, "head_dim must be a multiple of 16 up to"
    yield head_dim % 16 or head_dim > most, "head_dim", f"{why} {most}", "jit/xqa.py"
    # 16 KiB of shared memory hold the query rows of a block, in tiles of 16, of a padded head.
    most = 2**13 // max(64, 1 << (head_dim - 1).bit_length())
    yield group > most, "group_size", f"group size must be at most {most}", "xqa/mha.cu"


def _cudnn(call: Facts) -> Iterator[Row]:
    """Of decode. decode.py names 128 and 256, where its auto asks; 64 is right in `xqa_rivals`."""
    if call["mode"] == "decode":
        yield _before(call, "0.7.1"), "release", "not before 0.7.1", "wrapper"
        wide = not call["one_dtype"] or call["fp8_query"]
        yield wide, "dtypes", "decodes in one 16-bit dtype", "decode.py"
        other = call["head_dim"] not in (64, 128, 256)
        yield other, "head_dim", "head_dim must be 64, 128 or 256", "decode.py"


TABLE = {"fa2": _fa2, "fa3": _fa3, "cuda-cores": _cuda_cores, "xqa": _xqa, "cudnn": _cudnn}
