"""The fastest decode backend for given lengths: plans, their times, the policy. NumPy alone."""
