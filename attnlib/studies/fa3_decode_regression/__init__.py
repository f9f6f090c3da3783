"""How much slower fa3 decodes than fa2, and since when."""
