"""Metadata that does not fit its call."""
