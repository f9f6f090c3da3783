"""The models of FlashAttention-3's and FlashMLA's schedules, their guards and their libraries."""
