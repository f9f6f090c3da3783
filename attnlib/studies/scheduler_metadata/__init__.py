"""FlashAttention-3 schedules once per step or per layer."""
