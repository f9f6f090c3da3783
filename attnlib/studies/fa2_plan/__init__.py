"""How much FlashInfer's fa2 gains from a plan that is made on the GPU."""
