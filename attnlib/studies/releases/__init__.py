"""Calls that serving makes, release by release."""

__all__ = [
    "suite",
]
