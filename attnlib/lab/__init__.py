"""The verbs: a module for each thing that a user asks for, and their cards and report.

Nothing but taking a profile, `sweep` and `widgets` needs more than a laptop: no torch, no GPU.
"""
