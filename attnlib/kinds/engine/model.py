"""Models by their config alone, for engines that draw the weights themselves. No torch here."""

import json
from functools import cache
from pathlib import Path
from typing import Any

_COMMON = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 131072,
}
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "rms_norm_eps", "rope_theta"),
)
_MODELS = {
    "llama-3.1-8b": ("Llama", 4096, 14336, 32, 32, 8, 128256, 1e-5, 5e5),
    # What one GPU of four has of Qwen3-32B: all layers, a quarter of their width.
    "qwen3-32b-tp4": ("Qwen3", 5120, 6400, 64, 16, 2, 37984, 1e-6, 1e6),
    # Two GPUs of it have what two of those four have.
    "qwen3-half": ("Qwen3", 5120, 12800, 64, 32, 4, 75968, 1e-6, 1e6),
    "qwen3-0.6b": ("Qwen3", 1024, 3072, 28, 16, 8, 151936, 1e-6, 1e6),
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}
    | _COMMON
    | dict(zip(_SIZES, sizes, strict=True))
    for name, (kind, *sizes) in _MODELS.items()
}
"""Name in an engine's case -> config.json."""


def write_model(folder: Path, name: str) -> None:
    """A model's folder as an engine reads it: config, and a tokenizer of made-up words."""
    config = CONFIGS[name]
    tokens = {"unk_token": "t0", "bos_token": "t0", "eos_token": "t1"}
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "tokenizer.json").write_text(_tokenizer(config["vocab_size"]))


@cache
def _tokenizer(size: int) -> str:
    unused = "truncation", "padding", "normalizer", "post_processor", "decoder"
    splits = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    words = {f"t{number}": number for number in range(size)}
    model = {"model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"}}
    return json.dumps({**dict.fromkeys(unused), **splits, **model})
