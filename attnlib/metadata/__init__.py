"""Metadata of a decode step: what an engine computes from lengths before its first layer runs."""
