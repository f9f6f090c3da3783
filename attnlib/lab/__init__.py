"""By hand, in JupyterLab: profile any callable; choose a case and see what is known of it.

Nothing but taking a profile, `sweep` and `widgets` needs more than a laptop: no torch, no GPU.
"""
