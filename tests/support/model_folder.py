"""The folder of a model whose weights are made up: its config, and a tokenizer of made-up words."""

import json

WORDS = {"unk_token": "t0", "bos_token": "t0", "eos_token": "t1"}


def write_model(folder, config):
    """Write what SGLang reads with `--load-format dummy`, for a dict of config.json."""
    tokenizer = {
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
