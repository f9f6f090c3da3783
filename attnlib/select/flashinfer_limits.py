"""What each of FlashInfer's backends cannot run: one row a reason, so that nothing falls back.

Read in the releases' headers and wrappers, or seen in the H200 records; `flashinfer_mla_limits` has
the rows of MLA. `auto` itself does not ask these tables (but for MLA from 0.7.1, whose order falls
through): where it picks a backend that a row here rules out, the choice says so.
"""

from __future__ import annotations

from .flashinfer_mla_limits import BLACKWELL_MLA, MLA_FIRST_RELEASES, MLA_LIMITS
from .rules import Condition, Group, Rule, above, before, either, no, none_of, one_of, yes
from .situation import LATENT_MODES, PAGED_PREFILL_MODES

DENSE = none_of("mode", *LATENT_MODES)
DECODE, RAGGED = one_of("mode", "decode"), one_of("mode", "prefill_ragged")
NOT_BLACKWELL = none_of("gpu", "sm100", "sm103")
FA3_HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
CUTLASS_HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
GROUPS = (1, 2, 3, 4, 8)


def _no(backend: str, when: tuple[Condition | Group, ...], why: str, source: str) -> Rule:
    return Rule(when, (backend,), why, f"FlashInfer {source}")


FA2 = (
    _no("fa2", (yes("fp8_query"),), "fa2 takes no FP8 query", "prefill.cuh"),
    _no(
        "fa2",
        (DENSE, yes("one_head_dim"), before("0.6.14"), none_of("head_dim", 64, 128, 256)),
        "head_dim must be 64, 128 or 256 before 0.6.14",
        "prefill.cuh",
    ),
    _no(
        "fa2",
        (DENSE, yes("one_head_dim"), none_of("head_dim", 64, 128, 256, 512)),
        "head_dim must be 64, 128, 256, or from 0.6.14 512",
        "prefill.cuh",
    ),
)
FA3 = (
    _no("fa3", (none_of("gpu", "sm90"),), "needs compute capability 9.x (Hopper)", "utils.py"),
    _no("fa3", (before("0.2.6"), yes("fp8_query")), "no FP8 before 0.2.6", "utils.py"),
    _no(
        "fa3",
        (DENSE, yes("fp8_kv"), no("fp8_query")),
        "an FP8 cache needs an FP8 query: the module does not compile",
        "#2348",
    ),
    _no(
        "fa3",
        (DENSE, yes("fp8_query"), no("fp8_kv")),
        "an FP8 query needs an FP8 cache",
        "prefill_sm90.cuh",
    ),
    _no(
        "fa3",
        (DENSE, none_of("head_dims", *FA3_HEAD_DIMS)),
        "head_dim must be 64, 128 or 256 (or 192 and 128)",
        "#3739",
    ),
    _no("fa3", (yes("custom_mask"),), "takes no custom mask", "utils.py"),
    _no("fa3", (yes("positions"),), "applies no position encoding", "utils.py"),
    _no("fa3", (yes("fp16_qk"),), "has no FP16 reduction of QK", "utils.py"),
    _no("fa3", (yes("fixed_split"),), "does not split the KV, so cannot fix it", "scheduler.cuh"),
    _no("fa3", (DECODE, above("max_q", 1)), "decodes one query token a request", "decode.py"),
)
CUDA_CORES = (
    _no("cuda-cores", (yes("fp8_query"),), "takes no FP8 query", "decode.cuh"),
    _no("cuda-cores", (above("max_q", 1),), "decodes one query token a request", "decode.py"),
    _no(
        "cuda-cores",
        (none_of("head_dim", 64, 128, 256, 512),),
        "head_dim must be 64, 128, 256 or 512",
        "utils.cuh",
    ),
    _no(
        "cuda-cores",
        (before("0.6.18"), none_of("group_size", *GROUPS)),
        "group size must be 1, 2, 3, 4 or 8 before 0.6.18",
        "utils.cuh",
    ),
    _no(
        "cuda-cores",
        (before("0.7.1"), none_of("group_size", *GROUPS, 6)),
        "group size must be 1, 2, 3, 4, 6 or 8 before 0.7.1",
        "utils.cuh, 0.6.18",
    ),
    _no(
        "cuda-cores",
        (none_of("group_size", *GROUPS, 6, 16),),
        "group size must be 1, 2, 3, 4, 6, 8 or 16",
        "utils.cuh, 0.7.1",
    ),
)
BLACKWELL = (
    _no("trtllm-gen", (NOT_BLACKWELL,), "needs SM100 or SM103", "trtllm_gen_backend.py"),
    _no("trtllm-gen", (no("cubins"),), "its cubins must be downloaded", "artifacts.py"),
    _no("trtllm-gen", (yes("softcap"),), "has no logits soft cap", "decode.py"),
    _no("cute-dsl", (NOT_BLACKWELL,), "needs SM100 or SM103", "decode.py"),
    _no(
        "cute-dsl",
        (DECODE, either(yes("softcap"), yes("positions"))),
        "decodes without soft cap and position encoding",
        "decode.py",
    ),
    _no("cutlass", (NOT_BLACKWELL,), "needs SM100 or SM103", "cutlass_backend.py"),
    _no("cutlass", (RAGGED, either(yes("fp8_query"), yes("fp8_kv"))), "no FP8", "utils.py"),
    _no(
        "cutlass",
        (RAGGED, none_of("head_dims", *CUTLASS_HEAD_DIMS)),
        "head_dim must be 64, 128, or 192 and 128",
        "fmha_cutlass_sm100.cu",
    ),
    _no(
        "cutlass",
        (RAGGED, either(yes("window"), yes("softcap"), yes("custom_mask"))),
        "no window, soft cap or custom mask",
        "prefill.py",
    ),
)
OTHERS = (
    _no("cudnn", (no("cudnn"),), "no cuDNN frontend", "cudnn"),
    _no(
        "cudnn",
        (DECODE, either(no("one_dtype"), yes("fp8_query"))),
        "decodes in one 16-bit dtype",
        "decode.py",
    ),
    _no("cudnn", (DECODE, none_of("head_dim", 128, 256)), "decodes 128 and 256", "decode.py"),
    _no("fmha_v2", (), "only auto picks it", "prefill.py"),
)
FIRST_RELEASES = (
    (("decode",), {"fa3": "0.6.0", "trtllm-gen": "0.2.9", "cute-dsl": "0.6.13", "cudnn": "0.7.1"}),
    (PAGED_PREFILL_MODES, {"trtllm-gen": "0.2.9", "cudnn": "0.2.12", "cute-dsl": "0.6.18"}),
    (("prefill_ragged",), {"cutlass": "0.2.6", "cudnn": "0.6.2", "cute-dsl": "0.6.8"}),
    (LATENT_MODES, MLA_FIRST_RELEASES),
)
"""From which release a wrapper takes a backend's name; unlisted: from the first one read."""
TOO_NEW = tuple(
    _no(backend, (one_of("mode", *modes), before(first)), f"not before {first}", "wrapper")
    for modes, firsts in FIRST_RELEASES
    for backend, first in firsts.items()
)
LIMITS = (*TOO_NEW, *FA2, *FA3, *CUDA_CORES, *BLACKWELL, *OTHERS, *MLA_LIMITS)
BACKENDS = {
    "decode": ("fa2", "fa3", "cuda-cores", "trtllm-gen", "cute-dsl", "cudnn"),
    **dict.fromkeys(PAGED_PREFILL_MODES, ("fa2", "fa3", "cudnn", "trtllm-gen", "cute-dsl")),
    "prefill_ragged": ("fa2", "fa3", "cudnn", "cutlass", "cute-dsl", "fmha_v2"),
    **dict.fromkeys(LATENT_MODES, ("fa2", "fa3", *BLACKWELL_MLA, "cutile")),
}
"""The names a wrapper knows, by mode; "cuda-cores" stands for use_tensor_cores=False."""
