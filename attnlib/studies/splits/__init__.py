"""The cap of splits, over batches of published traffic."""

__all__ = [
    "judged_splits",
    "split_cap",
    "split_cap_torch",
]
