"""vLLM's own selector on a CPU, as if on another GPU.

Asked by `engine_selectors`. The process needs torch, triton and pydantic. Patched are the compute
capability and the answers of what a CPU lacks: FlashInfer is there, its cubins can be downloaded or
not as the call says, FlashAttention's extensions load, FlashAttention 4 and DeepGEMM are
importable. The library's code decides: the hook of a model that has one, its list of backends, and
each backend's `validate_configuration`.
"""

import importlib
import random
import sys
import types
from typing import get_args
from unittest.mock import MagicMock

from support.engine_selectors import Finder, StandIn, find_as_if_on, forget, top_of

GPUS = ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
STAND_INS = "flashinfer transformers huggingface_hub tokenizers openai openai_harmony requests "
STAND_INS += "mistral_common xgrammar gguf safetensors"
REAL = (*sys.stdlib_module_names, "torch", "triton", "numpy", "pydantic", "sympy")
LENGTH_OF_DRAW = 600
GEMMAS = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
SPARSE_MODELS = ("GlmMoeDsaForCausalLM", "Glm5NextForCausalLM", "DeepseekV32ForCausalLM")
DENSE_HEAD_DIMS = (16, 64, 80, 96, 100, 128, 192, 256, 320, 512, 576)
LATENT_HEAD_DIMS = (576, 576, 512, 512, 320, 192)
"""The latent part and RoPE's: 512 + 64, 512 + 0, 256 + 64, 128 + 64."""
CACHES = (
    *("auto", "auto", "auto", "auto", "fp8", "fp8", "fp8", "bfloat16"),
    *("fp8_e5m2", "nvfp4", "turboquant_k8v4"),
)
INSTALLED = [0, 6, 18]
NOPE_MLA = [0, 6, 18]
"""The first FlashInfer whose MLA takes `ckv_scale_arr`: has_flashinfer_sm90_nope_mla."""
GEMMA_HEAD_DIMS = {"sliding_attention": 256, "full_attention": 512}


def has_nope_mla():
    """As vLLM asks it: modules bind the name when they are first imported."""
    return INSTALLED >= NOPE_MLA


def drawn_calls(folder, seed="fourth draw", count=LENGTH_OF_DRAW):
    """Calls of a release: what its selector is told, by our names."""
    draw = random.Random(f"vllm {folder.name}, {seed}")
    for _ in range(count):
        mode = draw.choice(("decode", "decode", "mla", "sparse_mla", "sparse_mla"))
        latent = mode != "decode"
        model = "other"
        if not latent and draw.random() < 0.25:
            model = draw.choice(GEMMAS)
        if mode == "sparse_mla" and draw.random() < 0.4:
            model = draw.choice(SPARSE_MODELS)
        head_dims = (256, 512) if model in GEMMAS else DENSE_HEAD_DIMS
        yield {
            "release": folder.name,
            "gpu": draw.choice(GPUS),
            "mode": mode,
            "model": model,
            "heads": draw.choice((8, 16, 24, 32, 64, 96, 128)),
            "group": draw.choice((1, 4, 8)),
            "head_dim": draw.choice(LATENT_HEAD_DIMS if latent else head_dims),
            "dtype": draw.choice(("bfloat16", "bfloat16", "float16")),
            "kv_dtype": draw.choice(CACHES),
            "page_size": draw.choice((0, 0, 0, 8, 16, 32, 64, 128)),
            "topk": draw.choice((2048, 2048, 1024, 192)) if mode == "sparse_mla" else 0,
            "sinks": draw.random() < 0.15,
            "window": not latent and draw.random() < 0.3,
            "mm_prefix": not latent and draw.random() < 0.25,
            "causal": latent or draw.random() < 0.9,
            "batch_invariant": draw.random() < 0.1,
            "cubins": draw.random() < 0.85,
            "flashinfer": draw.choice(("0.6.17", "0.6.18", "0.6.18")),
        }


def prepare(folder):
    """Make `vllm` importable from a release's files; returns its platform class and what to set."""
    import torch

    gpu = {}
    find_as_if_on(gpu, "vllm", folder)
    for name in ("zeros", "empty", "full", "arange", "tensor"):
        made = getattr(torch, name)

        def on_cpu(*values, made=made, device=None, **named):
            return made(*values, **named)

        setattr(torch, name, on_cpu)
    named = STAND_INS.split()
    sys.meta_path.insert(0, Finder(lambda name, _: top_of(name) in named))
    asked = Finder(lambda name, asker: asker == "vllm" and top_of(name) not in REAL)
    sys.meta_path.append(asked)
    third = importlib.import_module("vllm.third_party")
    third.pynvml = sys.modules["vllm.third_party.pynvml"] = StandIn("pynvml")
    third.pynvml.nvmlDeviceGetCount = lambda: 1
    platforms = importlib.import_module("vllm.platforms")
    cuda_platform = importlib.import_module("vllm.platforms.cuda").CudaPlatformBase

    class Platform(cuda_platform):
        get_device_capability = classmethod(lambda cls, device_id=0: gpu["capability"])
        get_device_name = classmethod(lambda cls, device_id=0: "x")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 * 2**30)

    platforms._current_platform = Platform()
    return Platform, gpu


def config_of(call):
    """The engine's settings once the model's hook has run: DeepSeek's dimensions, one GPU."""
    config = MagicMock()
    config.attention_config = importlib.import_module("vllm.config.attention").AttentionConfig()
    rope = 0 if call["head_dim"] == 512 else 64
    sizes = {
        "kv_lora_rank": call["head_dim"] - rope,
        "qk_rope_head_dim": rope,
        "index_topk": call["topk"] or 2048,
    }
    widths = {
        "qk_nope_head_dim": 256 if rope == 0 else 128,
        "v_head_dim": 128,
        "model_type": "deepseek_v32",
    }
    config.model_config.hf_text_config = types.SimpleNamespace(**sizes, **widths)
    config.model_config.hf_config = config.model_config.hf_text_config
    if call["model"] in GEMMAS:
        sizes = [*GEMMA_HEAD_DIMS.values()]
        gemma = {"head_dim": min(sizes), "global_head_dim": max(sizes)}
        vars(config.model_config.hf_text_config).update(gemma, layer_types=[*GEMMA_HEAD_DIMS])
        layers = config.model_config.model_arch_config
        layers.total_num_hidden_layers = len(sizes)
        layers.__getitem__.side_effect = lambda i: types.SimpleNamespace(head_size=sizes[i])
    config.model_config.get_num_attention_heads = lambda *_: call["heads"]
    kv_heads = call["heads"] // call["group"] if call["mode"] == "decode" else 1
    config.model_config.get_num_kv_heads = lambda *_: kv_heads
    head_dim = min(GEMMA_HEAD_DIMS.values()) if call["model"] in GEMMAS else call["head_dim"]
    config.model_config.get_head_size = lambda *_: head_dim
    config.model_config.is_mm_prefix_lm, config.model_config.is_hybrid = call["mm_prefix"], False
    config.model_config.dtype = call["dtype"]
    config.model_config.rswa_window, config.model_config.is_diffusion = None, False
    config.speculative_config = config.kv_transfer_config = config.lora_config = None
    config.cache_config.cache_dtype = call["kv_dtype"]
    config.cache_config.block_size = call["page_size"] or 16
    if hasattr(config.attention_config, "use_non_causal"):
        config.attention_config.use_non_causal = not call["causal"]
    for name in ("tensor", "decode_context", "prefill_context"):
        setattr(config.parallel_config, f"{name}_parallel_size", 1)
    hooks = importlib.import_module("vllm.model_executor.models.config").MODELS_CONFIG_MAP
    if hook := hooks.get(call["model"]):
        hook.verify_and_update_config(config)
    return config


def patch_answers(call):
    """What a CPU cannot say: extensions and FlashInfer are there; returns the call's settings."""
    envs = importlib.import_module("vllm.envs")
    envs.VLLM_BATCH_INVARIANT = call["batch_invariant"]
    flashinfer = importlib.import_module("vllm.utils.flashinfer")
    for name in vars(flashinfer):
        if name.startswith("has_flashinfer"):
            setattr(flashinfer, name, lambda: True)
    for name in ("has_nvidia_artifactory", "has_flashinfer_cubin"):
        setattr(flashinfer, name, lambda: call["cubins"])
    INSTALLED[:] = map(int, call["flashinfer"].split("."))
    flashinfer.has_flashinfer_sm90_nope_mla = has_nope_mla
    forget("vllm")
    settings = config_of(call)
    importlib.import_module("vllm.config.vllm")._current_vllm_config = settings
    return settings


def answers(folder, calls):
    """The valid backends of each call, best first."""
    platform, gpu = prepare(folder)
    import torch

    interface = importlib.import_module("vllm.platforms.interface")
    selector = importlib.import_module("vllm.v1.attention.selector")
    known = selector.AttentionSelectorConfig._fields
    names_of_caches = importlib.import_module("vllm.config.cache").CacheDType
    for call in calls:
        if call["kv_dtype"] not in get_args(names_of_caches):
            yield call | {"answer": []}  # its command line refuses the word
            continue
        gpu["capability"] = interface.DeviceCapability(*divmod(int(call["gpu"][2:]), 10))
        settings = patch_answers(call)
        fields = {
            "head_size": call["head_dim"],
            "dtype": getattr(torch, call["dtype"]),
            "kv_cache_dtype": settings.cache_config.cache_dtype,
            "block_size": call["page_size"] or None,
            "use_mla": call["mode"] != "decode",
            "use_sparse": call["mode"] == "sparse_mla",
            "has_sink": call["sinks"],
            "has_sliding_window": call["window"],
            "use_mm_prefix": call["mm_prefix"],
            "use_non_causal": not call["causal"],
            "use_batch_invariant": call["batch_invariant"],
        }
        fields = {name: value for name, value in fields.items() if name in known}
        config = selector.AttentionSelectorConfig(**fields)
        valid, _ = platform.get_valid_backends(
            device_capability=gpu["capability"],
            attn_selector_config=config,
            num_heads=call["heads"],
        )
        names = [getattr(entry, "backend", entry[0]).name for entry in valid]
        if pinned := settings.attention_config.backend:
            names = [name for name in names if name == pinned.name]
        yield call | {"answer": names}
