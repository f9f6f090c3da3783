"""FlashInfer against FlashMLA, with FP8 and 16-bit caches."""
