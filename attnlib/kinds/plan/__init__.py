"""A plan of FlashInfer's fa2."""
