"""Measurement: timers, kernel traces, statistics, the machine, and the calls that are timed."""
