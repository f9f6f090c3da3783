"""Batches of layers that no policy learnt from."""
