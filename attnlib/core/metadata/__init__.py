"""Metadata of a step: what an engine, or a library, computes from lengths before layers run."""
