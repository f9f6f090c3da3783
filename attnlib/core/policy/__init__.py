"""The fastest decode backend for given lengths: work plans, times, choice. NumPy alone."""
