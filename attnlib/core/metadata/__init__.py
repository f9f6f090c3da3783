"""Metadata of a step: what an engine, or a library, computes from lengths before layers run.

What every builder here promises: one launch, in place, and no value is read on the host. Tensors
are on one device and contiguous, those with rows also columns of a wider one; a wrong argument
raises ValueError or TypeError naming it before anything is launched. Words that a docstring does
not name are left untouched. Another value of an integer compiles nothing. Capturable: a replay
reads the inputs as they are then. What an engine passes: `data/engine_calls.yaml`.
"""
