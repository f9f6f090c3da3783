"""Layers whose kernels of CUDA cores no other layer runs, for the policy to learn from."""
