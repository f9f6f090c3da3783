"""Measurement: timers, kernel traces, statistics, the machine. Knows no backend."""
