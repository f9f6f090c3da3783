"""An engine's own server under load: the case, the server, the client, and what they measured."""

__all__ = [
    "served",
]
