"""KV chunks of FlashInfer's fa2, one after another."""
