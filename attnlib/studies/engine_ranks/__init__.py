"""FlashAttention-3's schedule once a step, in SGLang's `Engine` over two GPUs of one group."""
