"""Metadata of a step: what an engine, or a library, computes from lengths before layers run.

What every builder here promises: one launch, in place, and no value is read on the host. Tensors
are contiguous and on one device; a wrong argument raises ValueError or TypeError naming it before
anything is launched. Words that a docstring does not name are left untouched. Another value of an
integer compiles nothing. Capturable: a replay reads the inputs as they are then.
"""
