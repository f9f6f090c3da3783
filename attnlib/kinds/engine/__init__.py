"""Decode steps of a model inside an engine."""
