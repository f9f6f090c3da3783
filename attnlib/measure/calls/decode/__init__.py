"""Decode attention: one query per request."""
