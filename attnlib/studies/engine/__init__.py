"""Decode steps of a model inside an engine, as published records have them."""

__all__ = [
    "engine_now",
    "engine_offline",
    "engine_step",
    "engine_width",
    "vllm_steps",
]
