"""Decode steps and a chunk of a prompt in one call, or in two."""
