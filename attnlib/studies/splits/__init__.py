"""The cap of splits, over batches of published traffic."""

__all__ = [
    "split_cap",
    "split_cap_torch",
]
