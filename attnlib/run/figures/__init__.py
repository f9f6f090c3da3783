"""How tables and records become figures: style, chart shapes."""
