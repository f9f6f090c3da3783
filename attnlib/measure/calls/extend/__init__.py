"""Attention with several queries per request."""
