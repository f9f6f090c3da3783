"""Decode steps of a model inside an engine, as published records have them."""
