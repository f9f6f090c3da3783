"""A plan of FlashInfer's fa2, without its attention."""

__all__ = [
    "fa2_plan",
]
