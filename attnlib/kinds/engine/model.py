"""Models by their config alone, for engines that make up the weights. No torch here."""

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
_LLAMA = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
_QWEN3 = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}


def _sized(
    family: dict[str, Any],
    *,
    hidden: int,
    ffn: int,
    layers: int,
    heads: tuple[int, int],
    vocab: int,
) -> dict[str, Any]:
    """A config.json; `heads` are query and KV heads."""
    return {
        **family,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _sized(_LLAMA, hidden=4096, ffn=14336, layers=32, heads=(32, 8), vocab=128256),
    # The part of Qwen3-32B on one GPU of four: all layers, a quarter of their width.
    "qwen3-32b-tp4": _sized(_QWEN3, hidden=5120, ffn=6400, layers=64, heads=(16, 2), vocab=37984),
    # Split over two GPUs, each has what one GPU of those four has.
    "qwen3-half": _sized(_QWEN3, hidden=5120, ffn=12800, layers=64, heads=(32, 4), vocab=75968),
    "qwen3-0.6b": _sized(_QWEN3, hidden=1024, ffn=3072, layers=28, heads=(16, 8), vocab=151936),
}
"""Name in an engine's case -> config.json."""


def write_model(folder: Path, name: str) -> None:
    """A model's folder as SGLang reads it: config, and a tokenizer of made-up words."""
    config = CONFIGS[name]
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "t0",
        "bos_token": "t0",
        "eos_token": "t1",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer.json").write_text(_tokenizer(config["vocab_size"]))


@cache
def _tokenizer(size: int) -> str:
    words = {f"t{number}": number for number in range(size)}
    unused = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    return json.dumps(
        {
            **dict.fromkeys(unused),
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
        }
    )
