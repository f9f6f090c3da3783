"""XQA, vLLM's decode on Hopper through FlashInfer, beside what else could run there."""
