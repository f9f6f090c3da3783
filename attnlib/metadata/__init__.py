"""Metadata of attention calls: what libraries precompute from lengths, modelled and guarded."""
