"""Models by their config alone, for engines that draw the weights themselves. No torch here."""

import json
from pathlib import Path
from typing import Any

_COMMON = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "head_dim": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 131072,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "mlp_bias": False,
    },
    # What one GPU of four has of Qwen3-32B: all layers, a quarter of their width.
    "qwen3-32b-tp4": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 6400,
        "num_hidden_layers": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 37984,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
}
"""Name, as in `kinds.lengths.MODELS` -> its config.json, less what all share."""


def write_model(folder: Path, name: str) -> None:
    """A model's folder as an engine reads it: config, and a tokenizer of made-up words."""
    config: dict[str, Any] = _COMMON | CONFIGS[name]
    words = {f"t{number}": number for number in range(config["vocab_size"])}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    told |= {"bos_token": "t0", "eos_token": "t1"}
    files = {"config": config, "tokenizer": tokenizer, "tokenizer_config": told}
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
