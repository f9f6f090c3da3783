"""fa2, fa3 and `auto` in every mode of an engine."""
