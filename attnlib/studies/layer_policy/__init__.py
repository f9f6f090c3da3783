"""A policy for every layer, learnt cold."""
