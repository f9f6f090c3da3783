"""Layers that judge the policy once."""
