"""The metadata of a step: our kernels, their rivals, and the oracle."""

__all__ = [
    "context_width",
    "decode_metadata",
    "page_arrays",
    "step_schedules",
]
