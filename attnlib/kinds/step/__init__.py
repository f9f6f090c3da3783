"""A whole decode step."""
