"""Page table and FlashAttention-3's schedule in one launch."""
