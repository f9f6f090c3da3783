"""What an engine imports: backends, metadata kernels, schedules and the planner.

`spec`, `batch`, `extend` and `mla` are attention layers and the batches of a call; `gpu` is what is
assumed of a GPU.

| for | see |
|---|---|
| FlashAttention-3's schedules, made in a CUDA graph | `build_step_schedules`, `StepSchedules` |
| its schedule by the library's kernel, once per step | `precompute` |
| whether a schedule fits a call | `SchedulerFacts`, `SchedulerMetadata` |
| its splits and words in NumPy | `plan_splits`, `schedule_words` |
| a plan for a FlashInfer wrapper of fa2 | `Fa2Planner` |
| that plan alone: kernel, NumPy, check | `build_fa2_plan`, `plan_words`, `require_plan` |
| its shape, and where its words lie | `PlanShape`, `PlanLayout` |
| FlashAttention-3's page table from slots | `build_decode_metadata` |
| FlashInfer's page arrays from slots | `build_kv_indices` |
| a call of a backend by its name | `available`, `create` |
| its layer | `AttnSpec`, `MlaSpec` |
| its batch and cache | `DecodeBatch`, `ExtendBatch`, `MlaBatch`, `PagedKV` |
| a check of FlashMLA's schedule | `require_schedule` |
| launches of ours without overlap | `without_overlap` |

`help` of `build_step_schedules`, `precompute` and `Fa2Planner` has a complete example for an engine
of your own, with the capture of a CUDA graph.
"""

from .. import late

HOME = {
    "AttnSpec": "core.spec",
    "DecodeBatch": "core.batch",
    "ExtendBatch": "core.extend",
    "Fa2Planner": "core.fa2.planner",
    "MlaBatch": "core.mla",
    "MlaSpec": "core.spec",
    "PagedKV": "core.batch",
    "PlanLayout": "core.fa2.words",
    "PlanShape": "core.fa2.choice",
    "SchedulerFacts": "core.schedule.facts",
    "SchedulerMetadata": "core.schedule.flash_attn3",
    "StepSchedules": "core.schedule.kinds",
    "available": "core.backends",
    "build_decode_metadata": "core.metadata.decode",
    "build_fa2_plan": "core.fa2.kernel",
    "build_kv_indices": "core.metadata.kv_indices",
    "build_step_schedules": "core.metadata.schedules",
    "create": "core.backends",
    "plan_splits": "core.schedule.splits",
    "plan_words": "core.fa2.words",
    "precompute": "core.schedule.flash_attn3",
    "require_plan": "core.fa2.coverage",
    "require_schedule": "core.schedule.flashmla",
    "schedule_words": "core.schedule.words",
    "without_overlap": "core.metadata.launch",
}
"""Public name -> the module that has it."""

__all__ = sorted(HOME)
__getattr__, __dir__ = late(__name__, HOME)
