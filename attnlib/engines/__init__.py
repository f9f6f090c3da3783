"""Plugins for engines, and what they capture of an engine's steps."""
