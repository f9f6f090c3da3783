"""Figures of the study `xqa_rivals`."""

from __future__ import annotations

SPREAD = 0.5
"""Of a shape's height that its layers are spread over, so that dots do not cover others."""
LEGEND = 0.5
"""Inches of a legend of two lines."""
