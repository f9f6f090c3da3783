"""What an engine imports: backends, metadata kernels, schedules and the planner.

`spec`, `batch`, `extend` and `mla` are attention layers and the batches of a call; `gpu` is what is
assumed of a GPU.
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
