"""The attention of a whole decode step: one schedule for all layers, or one in each."""

__all__ = [
    "scheduler_metadata",
]
