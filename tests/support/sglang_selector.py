"""SGLang's own choice of backends on a CPU, as if on another GPU.

Asked by `engine_selectors`. The process needs torch and msgspec; other imports are stand-ins.
Patched is the compute capability; a model is its architecture and what a config.json says of it.
SGLang's own steps decide, in its order: a model's overrides, deterministic inference, the default,
diffusion, and what speculation refuses.
"""

import importlib
import os
import random
import re
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

from support.engine_selectors import Finder, find_as_if_on, forget, top_of

from attnlib.select.facts import GPUS, MODELS

STEPS = (
    "model_specific_adjustments",
    "deterministic_inference",
    "attention_backend_compatibility",
    "dllm_inference",
    "speculative_decoding",
)
HOOKS = {name: "attention_hook" for name in STEPS}
HOOKS |= {STEPS[0]: "model_hook"}
HOOKS |= {"dllm_inference": "dllm_hook", "speculative_decoding": "speculative_hook"}
REAL = (*sys.stdlib_module_names, "torch", "numpy", "packaging", "psutil", "msgspec", "sglang")
RESOLVERS = ("model_override_base", "overrides")
KERNELS = ("sglang.jit_kernel", "sglang.kernels.jit", "sglang.srt.layers.quantization")
"""Packages of SGLang that ask for a compiler or for kernels when they are imported."""
LENGTH_OF_DRAW = 600
MODES = ("decode", "prefill_paged") * 3 + ("dllm_extend", "mla", "mla", "sparse_mla")
LATENT = ("deepseek", "deepseek-v2", "glm-dsa", "glm5-next", "longcat", "kimi-k3", "other")
DSA = ("DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM", "Glm5NextForConditionalGeneration")
"""DeepSeek V3.2 is a V3 with `index_topk` once SGLang has read its config.json."""
READS_A_DRAFT = ("IQuestQ1ForCausalLM",)
"""Its step of speculation reads the files of a model."""
CACHES = ("auto", "auto", "auto", "bfloat16", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2")
REFUSED = (ValueError, AssertionError)


def models_of(folder):
    """Family -> those of its architectures that the release has a model of."""
    text = "".join(path.read_text() for path in (folder / "sglang/srt/models").glob("*.py"))
    known = {*re.findall(r"^class (\w+)", text, re.MULTILINE)}
    names = {family: sorted(known & {*words}) for family, words in MODELS.items()}
    return {family: words for family, words in names.items() if words}


def drawn_calls(folder, seed="seventh draw", count=LENGTH_OF_DRAW):
    """Calls of a release: what decides its backends, by our names."""
    release = folder.name
    names = models_of(folder)
    draw = random.Random(f"sglang {release}, {seed}")
    sparse = [name for name in DSA if name in sum(names.values(), [])]
    for _ in range(count):
        mode = draw.choice(MODES)
        if mode == "sparse_mla":
            model = draw.choice(sparse)
        elif mode == "dllm_extend":
            model = "other"
        else:
            family = draw.choice(("other", *names))
            if (mode == "mla") != (family in LATENT):
                family = "other"
            model = draw.choice(names.get(family, ["other"]))
        yield {
            "release": release,
            "gpu": draw.choice(tuple(GPUS)),
            "mode": mode,
            "model": model,
            "eagle_topk": 0 if mode == "dllm_extend" else draw.choice((0, 0, None, 1, 4)),
            "page_size": draw.choice((0, 0, 0, 1, 16, 64, 128)),
            "kv_dtype": draw.choice(CACHES),
            "sinks": mode not in ("mla", "dllm_extend") and draw.random() < 0.15,
            "wide_k": mode in ("decode", "prefill_paged") and draw.random() < 0.15,
            "batch_invariant": draw.random() < 0.15,
        }


def stands_in(name, asker):
    """Whether a stand-in is found: for all that SGLang's files ask for and that is not `REAL`."""
    return asker == "sglang" and (top_of(name) not in REAL or name.startswith(KERNELS))


def prepare(folder):
    """Import a release's `ServerArgs`, as if on a GPU; returns it, and what to set."""
    import torch

    gpu = {"capability": (9, 0)}
    cuda = torch.cuda
    find_as_if_on(gpu, "sglang", folder)
    cuda.get_device_name, cuda.mem_get_info = lambda *_: "x", lambda *_: (80 * 2**30, 80 * 2**30)
    sys.modules["dill"] = SimpleNamespace(dumps=lambda value: b"")
    sys.meta_path.insert(0, Finder(stands_in))
    args = importlib.import_module("sglang.srt.server_args").ServerArgs
    args.__post_init__ = lambda self: None
    block = MagicMock()
    block.from_server_args = lambda args: SimpleNamespace(block_size=64)
    importlib.import_module("sglang.srt.dllm.config").DllmConfig = block
    plain = MagicMock(required_attention_backend=None, supported_attention_backends=())
    diffusion = SimpleNamespace(get_algorithm_cls=lambda name: plain)
    sys.modules["sglang.srt.dllm.algorithm"] = diffusion
    no_file = lambda *_, **__: ({}, {})  # noqa: E731
    importlib.import_module("transformers").PretrainedConfig.get_config_dict = no_file
    return args, gpu


def model_of(call):
    """What SGLang reads of a model's config.json."""
    latent = call["mode"] in ("mla", "sparse_mla")
    plain = "MiniCPM3ForCausalLM" if latent else "Qwen3ForCausalLM"
    read_as = {"other": plain, "DeepseekV32ForCausalLM": DSA[0]}
    architecture = read_as.get(call["model"], call["model"])
    config = SimpleNamespace(
        architectures=[architecture],
        model_type={"Qwen3VLFor": "qwen3_vl", "Qwen3VLMoe": "qwen3_vl_moe"}.get(architecture[:10]),
        quantization_config=None,
        sliding_window_pattern=4,
        layer_types=["mamba"],
        hybrid_override_pattern="*",
        num_nextn_predict_layers=0,
        **({"index_topk": 2048} if call["mode"] == "sparse_mla" else {}),
        **({"learnable_sink": call["sinks"]} if call["mode"] == "sparse_mla" else {}),
    )
    arch = importlib.import_module("sglang.srt.configs.model_config").AttentionArch
    model = MagicMock(hf_config=config, hf_text_config=config)
    model.attention_arch = arch.MLA if latent else arch.MHA
    model.has_attention_sinks, model.has_asymmetric_kv = call["sinks"], call["wide_k"]
    model.is_encoder_decoder, model.decision_config, model.quantization = False, None, None
    model.context_len = 4096
    return model


def order_of(folder):
    """The steps in the order in which the release takes them."""
    places = [
        text
        for name in ("arg_groups/pipeline.py", "server_args.py")
        if (path := folder / "sglang/srt" / name).exists()
        and "handle_dllm_inference" in (text := path.read_text())
    ]
    calls = rf"(?:self\._handle_|run_hook\(handle_|^\s+handle_)({'|'.join(STEPS)})(?:\(|, )"
    return re.findall(calls, places[0], re.MULTILINE)


def answer(server_args, call, steps):
    """The backend of the call's mode, or why the engine does not start."""
    args = server_args(
        model_path="x",
        device="cuda",
        page_size=call["page_size"] or None,
        kv_cache_dtype=call["kv_dtype"].replace("bfloat16", "bf16"),
        speculative_algorithm=None if call["eagle_topk"] == 0 else "EAGLE",
        speculative_eagle_topk=call["eagle_topk"] or None,
        speculative_num_steps=3 if call["eagle_topk"] else None,
        speculative_num_draft_tokens=4 if call["eagle_topk"] else None,
        enable_deterministic_inference=call["batch_invariant"],
        dllm_algorithm="LowConfidence" if call["mode"] == "dllm_extend" else None,
    )
    args.model_config = args._model_config = model_of(call)
    args._model_config_built_from, args._resolved_overrides = None, []
    args.mem_fraction_static, args._quantization_explicitly_unset = 0.8, False
    graphs = "sglang.srt.model_executor.cuda_graph_config"
    if default := getattr(sys.modules.get(graphs), "default_cuda_graph_config", None):
        args.cuda_graph_config = default()
    try:
        for step in steps:
            if step == "speculative_decoding" and call["model"] in READS_A_DRAFT:
                continue
            if step in ("dllm_inference", "speculative_decoding"):
                args.page_size = args.page_size or 1
            if method := getattr(args, f"_handle_{step}", None):
                method()
            else:
                hook = importlib.import_module(f"sglang.srt.arg_groups.{HOOKS[step]}")
                getattr(hook, f"handle_{step}")(args)
    except REFUSED as error:
        return {"refused": str(error).split(".")[0][:90]}
    groups = [sys.modules.get(f"sglang.srt.arg_groups.{name}") for name in RESOLVERS]
    views = [group.resolved_view for group in groups if hasattr(group, "resolved_view")]
    view = views[0](args) if views else args
    kind = "nsa" if hasattr(view, "nsa_decode_backend") else "dsa"
    names = ("prefill_attention_backend", "decode_attention_backend")
    if call["mode"] == "sparse_mla":
        names = (f"{kind}_prefill_backend", f"{kind}_decode_backend")
    prefill, decode = (getattr(view, name) or view.attention_backend for name in names)
    return {"answer": prefill if call["mode"] in ("prefill_paged", "dllm_extend") else decode}


def answers(folder, calls):
    """A line for each call."""
    server_args, gpu = prepare(folder)
    steps = order_of(folder)
    usual = dict(os.environ)
    for call in calls:
        os.environ.clear()
        os.environ.update(usual)
        gpu["capability"] = divmod(int(call["gpu"][2:]), 10)
        forget("sglang")
        yield call | answer(server_args, call, steps)
