"""How the server of each engine is started, asked and read.

| engine | command | asked at | arms |
|---|---|---|---|
| sglang | `python -m sglang.launch_server` | `/generate` | `ATTNLIB_SGLANG_*` |
| vllm | `python -m vllm.entrypoints.openai.api_server` | `/v1/completions` | `ATTNLIB_VLLM_*` |

Both take the prompt as token ids, ignore the end token and stream. An arm is a text, such as
`default`, `splits=bounded` or `decode=fa3 --attention-backend flashinfer`: variables of our plugin
(`engines.arms`), then options of the server.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...core.spec import require_word
from ...engines import arms as plugin

DEFAULT = "default"
Event = dict[str, Any]
"""What a server sends of a request, many times."""


class ServerError(RuntimeError):
    """A server that died, hangs, refuses, or runs something else than was asked for."""


@dataclass(frozen=True)
class Served:
    """An engine's server.

    `body` is a request for so many tokens; `new_tokens` are those of an event that came after
    so many. `backend` finds in the log which attention backend runs.
    """

    plugin: plugin.Engine
    module: str
    model_option: str
    options: tuple[str, ...]
    path: str
    body: Callable[[str, list[int], int], dict[str, Any]]
    new_tokens: Callable[[Event, int], list[int]]
    backend: re.Pattern[str]
    dummy: tuple[str, ...] = ("--load-format", "dummy")
    """Options where the model's folder has no weights."""
    inner_port: str = ""
    """The option that names a second port, so that servers which start at once share none."""


@dataclass(frozen=True)
class Arm:
    """One way to run a server: variables of the plugin by their arm, and options."""

    variables: tuple[tuple[str, str], ...]
    options: tuple[str, ...]

    @property
    def text(self) -> str:
        """As it was written; `default` for nothing at all."""
        words = [f"{name}={value}" for name, value in self.variables]
        return " ".join([*words, *self.options]) or DEFAULT

    def environment(self, engine: Served) -> dict[str, str]:
        """The variables of the environment."""
        prefix = engine.plugin.prefix
        return {f"{prefix}{name.upper()}": value for name, value in self.variables}

    @property
    def asked_backend(self) -> str:
        """The attention backend that its options name, or the empty string."""
        for option, value in zip(self.options, self.options[1:], strict=False):
            if option == "--attention-backend":
                return value
        return ""


def read_arm(text: str, engine: Served) -> Arm:
    """Inverse of `Arm.text`; ValueError names what is no arm of this engine."""
    words = shlex.split(text)
    if not words:
        raise ValueError(f"arm must be {DEFAULT}, NAME=VALUE or options, got {text!r}")
    variables = []
    while words and not words[0].startswith("-"):
        word = words.pop(0)
        if word == DEFAULT:
            continue
        name, given, value = word.partition("=")
        if not given:
            raise ValueError(f"arm must be {DEFAULT}, NAME=VALUE or options, got {word!r}")
        require_word("arm", name, engine.plugin.arms)
        plugin.require_value(name, value, engine.plugin.arms[name])
        variables.append((name, value))
    plugin.require_together(dict(variables))
    return Arm(tuple(variables), tuple(words))


def engine_named(name: str) -> Served:
    """The engine of this name; ValueError lists them."""
    require_word("engine", name, ENGINES)
    return ENGINES[name]


# ---- SGLang


def _sglang_body(model: str, prompt: list[int], output: int) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {
            "max_new_tokens": output,
            "temperature": 0.0,
            "ignore_eos": True,
        },
    }


def _sglang_tokens(event: Event, before: int) -> list[int]:
    """An event has all tokens of its request, or the new ones alone."""
    tokens = event["output_ids"]
    made = event["meta_info"]["completion_tokens"]
    return tokens[before:] if len(tokens) == made else tokens


# ---- vLLM


def _vllm_body(model: str, prompt: list[int], output: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "max_tokens": output,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _vllm_tokens(event: Event, before: int) -> list[int]:
    tokens: list[int] = []
    for choice in event["choices"]:
        tokens += choice.get("token_ids") or ()
    return tokens


ENGINES = {
    "sglang": Served(
        plugin=plugin.SGLANG,
        module="sglang.launch_server",
        model_option="--model-path",
        options=("--skip-tokenizer-init", "--incremental-streaming-output"),
        path="/generate",
        inner_port="--nccl-port",
        body=_sglang_body,
        new_tokens=_sglang_tokens,
        backend=re.compile(
            r"Use (\w+) backend by default"
            r"|(?<!\w)attention_backend'?[=:] ?'(\w+)'",
        ),
    ),
    "vllm": Served(
        plugin=plugin.VLLM,
        module="vllm.entrypoints.openai.api_server",
        model_option="--model",
        options=(),
        path="/v1/completions",
        body=_vllm_body,
        new_tokens=_vllm_tokens,
        backend=re.compile(
            r"Using (\w+) attention backend"
            r"|Using AttentionBackendEnum\.(\w+) backend",
        ),
    ),
}
"""Name of an engine -> its server."""
