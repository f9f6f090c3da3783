"""Metadata of a step: what an engine, or a library, computes from lengths before the layers run.

All builders: one launch, in place, and no value is read on the host. Tensors are on one device and
contiguous; those with rows may be columns of a wider one. No output shares memory with another
tensor. A wrong argument raises ValueError or TypeError that names it, before anything is launched.
Words that a docstring does not name are left untouched. A new value of an integer compiles nothing.
Calls can be captured in a CUDA graph: a replay reads the inputs as they are then. What engines
pass: `data/engine_calls.yaml`.
"""
