"""What an engine imports: backends, metadata kernels, schedules and the policy.

| room | holds |
|---|---|
| `spec`, `batch`, `extend`, `mla` | attention layers and the batches of a call |
| `backends` | two verbs, `plan` and `run`; one table of what is known of each |
| `metadata` | a step's metadata in one Triton launch |
| `schedule` | models and guards of FlashAttention-3's and FlashMLA's schedules |
| `policy` | the fastest decode backend for given lengths; NumPy alone |
| `gpu` | what the code believes of a GPU |
"""

from .. import late

HOME = {
    "AttnSpec": "core.spec",
    "DecodeBatch": "core.batch",
    "ExtendBatch": "core.extend",
    "MlaBatch": "core.mla",
    "MlaSpec": "core.spec",
    "PagedKV": "core.batch",
    "Policy": "core.policy.policy",
    "SchedulerFacts": "core.schedule.facts",
    "SchedulerMetadata": "core.schedule.fa3",
    "available": "core.backends",
    "build_decode_metadata": "core.metadata.decode",
    "build_draft_metadata": "core.metadata.draft",
    "build_kv_indices": "core.metadata.kv_indices",
    "build_step_metadata": "core.metadata.step",
    "build_verify_metadata": "core.metadata.draft",
    "create": "core.backends",
    "plan_splits": "core.schedule.splits",
    "precompute": "core.schedule.fa3",
    "reserve": "core.schedule.fa3",
    "without_overlap": "core.metadata.launch",
}
"""Public name -> the module that has it."""

__getattr__ = late(__name__, HOME)
