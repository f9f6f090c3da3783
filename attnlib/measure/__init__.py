"""Measurement: timers, kernel traces, statistics, the machine. Knows no backend."""

from __future__ import annotations
