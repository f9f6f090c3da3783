"""Which decode backend is fastest, and a policy that knows."""
