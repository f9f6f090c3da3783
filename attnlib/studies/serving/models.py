"""Folders of models whose weights are made up: shapes that people serve, and a tokenizer of words.

The shapes are those of the public config.json of each model.
"""

import json
from pathlib import Path
from typing import Any

from ...core.spec import require_word

Config = dict[str, Any]
WORDS = {"unk_token": "t0", "bos_token": "t0", "eos_token": "t1"}
_COMMON: Config = {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA: Config = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "mlp_bias": False,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 5e5,
}
QWEN: Config = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "hidden_size": 5_120,
    "intermediate_size": 25_600,
    "vocab_size": 151_936,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 64,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
}
DEEPSEEK: Config = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rms_norm_eps": 1e-6,
    "hidden_size": 7_168,
    "intermediate_size": 18_432,
    "vocab_size": 129_280,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 8,
    "q_lora_rank": 1_536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    # All layers are dense: no expert has weights.
    "first_k_dense_replace": 8,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2_048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "ep_size": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4_096,
    },
}
# What one GPU of four holds under tensor parallelism: a quarter of the heads, the MLP and the
# vocabulary.
QWEN_TP4: Config = QWEN | {
    "intermediate_size": 6_400,
    "vocab_size": 37_984,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
# What one GPU of eight holds under tensor parallelism: an eighth of the heads and of the MLP. An
# eighth of the vocabulary is fewer words than a load draws, so it is a quarter.
LLAMA_TP8: Config = LLAMA | {
    "hidden_size": 8_192,
    "intermediate_size": 3_584,
    "vocab_size": 32_064,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_hidden_layers": 80,
}
# gpt-oss-120b's attention without sinks, in dense layers with as many weights as four experts: its
# own experts need kernels of their own, Cohere2's layers do not.
GPT_OSS: Config = _COMMON | {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
    "hidden_size": 4_096,
    "intermediate_size": 8_192,
    "vocab_size": 201_088,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000,
}
MODELS: dict[str, Config] = {
    "llama-3.1-8b": LLAMA,
    "llama-3.1-8b-8-layers": LLAMA | {"num_hidden_layers": 8},
    "qwen3-32b": QWEN,
    "qwen3-32b-tp4": QWEN_TP4,
    "llama-3.1-70b-tp8": LLAMA_TP8,
    "gpt-oss-120b-dense": GPT_OSS,
    "deepseek-v3-8-layers": DEEPSEEK,
}
"""Name of a model -> its config. DeepSeek-V3 has its attention, 8 layers, and no experts.
Of Llama-3.1-70B a GPU's part of eight, of Qwen3-32B of four; nothing is sent between GPUs."""


def make_model(folder: Path, name: str) -> Path:
    """The folder of a model of `MODELS` in `folder`; ValueError lists them for another name."""
    require_word("model", name, MODELS)
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    write_model(home, MODELS[name])
    return home


def write_model(folder: Path, config: Config) -> None:
    """Write what an engine reads with `--load-format dummy`, for a config.json."""
    tokenizer: Config = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"t{number}": number for number in range(config["vocab_size"])},
            "unk_token": "t0",
        },
    }
    options = {"tokenizer_class": "PreTrainedTokenizerFast", **WORDS}
    files = {"config": config, "tokenizer_config": options, "tokenizer": tokenizer}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
