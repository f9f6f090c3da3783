"""vLLM's own selector on a CPU, as if on another GPU: the answers in data/vectors.

`python tests/support/vllm_selector.py FOLDER OUT` asks every release of which FOLDER has the Python
files (`FOLDER/0.33.0/vllm/...`, as a wheel has them) for drawn calls and writes OUT. The process
needs torch, triton and pydantic; what else vLLM imports and is not there is a stand-in. Patched are
the compute capability and the answers of what a CPU lacks: FlashInfer is there, its cubins can be
downloaded or not as the call says, FlashAttention's extensions load, FlashAttention 4 and DeepGEMM
are importable. The library's code decides: the hook of a model that has one, its list of backends,
and each backend's `validate_configuration`.
"""

import importlib.abc
import importlib.machinery
import json
import lzma
import random
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

GPUS = ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
STAND_INS = "flashinfer transformers huggingface_hub tokenizers openai openai_harmony requests "
STAND_INS += "mistral_common xgrammar gguf safetensors"
REAL = (*sys.stdlib_module_names, "torch", "triton", "numpy", "pydantic", "sympy")
LENGTH_OF_DRAW, GROUP = 150, 4
GEMMA, GLM = "Gemma4ForCausalLM", ("GlmMoeDsaForCausalLM", "Glm5NextForCausalLM")
GEMMA_HEAD_DIMS = {"sliding_attention": 256, "full_attention": 512}


def drawn_calls(release, count=LENGTH_OF_DRAW):
    """Calls of a release: what its selector is told, by our names."""
    draw = random.Random(f"vllm {release}, third draw")
    for _ in range(count):
        mode = draw.choice(("decode", "decode", "decode", "mla", "sparse_mla"))
        latent = mode != "decode"
        model = GEMMA if not latent and draw.random() < 0.25 else "other"
        if mode == "sparse_mla" and draw.random() < 0.3:
            model = draw.choice(GLM)
        head_dims = (256, 512) if model == GEMMA else (64, 80, 96, 128, 192, 256, 512)
        yield {
            "release": release,
            "gpu": draw.choice(GPUS),
            "mode": mode,
            "model": model,
            "heads": draw.choice((8, 16, 32, 64, 128)),
            "head_dim": 576 if latent else draw.choice(head_dims),
            "dtype": draw.choice(("bfloat16", "bfloat16", "float16")),
            "kv_dtype": draw.choice(("auto", "auto", "fp8")),
            "page_size": draw.choice((0, 0, 16, 32, 64, 128)),
            "sinks": not latent and draw.random() < 0.2,
            "window": not latent and draw.random() < 0.3,
            "mm_prefix": not latent and draw.random() < 0.25,
            "causal": latent or draw.random() < 0.9,
            "batch_invariant": draw.random() < 0.15,
            "cubins": draw.random() < 0.85,
        }


class StandInClass(type):
    """A class that has every attribute and can be subscripted or joined by `|`."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)

    def __or__(cls, other):
        return cls

    def __ror__(cls, other):
        return cls

    def __getitem__(cls, item):
        return cls


def any_schema(cls, source, handler):
    from pydantic_core import core_schema

    return core_schema.any_schema()


class StandIn(types.ModuleType):
    """A module that has every name: a class for one in capitals, else a mock."""

    __path__ = ()

    def __getattr__(self, name):
        if name in ("__version__", "__file__"):
            return "9.9.9"
        if name.startswith("__"):
            raise AttributeError(name)
        members = {
            "__init__": lambda self, *values, **named: None,
            "__init_subclass__": classmethod(lambda cls, **named: None),
            "__get_pydantic_core_schema__": classmethod(any_schema),
        }
        value = StandInClass(name, (), members) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


def top_of(name):
    return name.partition(".")[0]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for the modules of which `stands_in(name, asker)` says so; the asker is the package
    whose file asks for it."""

    def __init__(self, stands_in):
        self.stands_in = stands_in

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while frame and "importlib" in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        if self.stands_in(name, top_of(frame.f_globals.get("__name__", ""))):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        """Nothing is run."""


def find_as_if_on(gpu, name, folder):
    """Make package `name` importable from a release's files, on a GPU of `gpu["capability"]`."""
    import torch
    import torch._dynamo
    import torch._inductor

    cuda = torch.cuda
    sizes = {"multi_processor_count": 132, "total_memory": 80 * 2**30, "name": "x"}
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(**sizes)
    cuda.get_device_capability = lambda *_: tuple(gpu["capability"])
    cuda.is_available, cuda.current_device, cuda.device_count = lambda: True, lambda: 0, lambda: 1
    torch.version.cuda = "13.0"
    sys.path.insert(0, str(folder))
    package = types.ModuleType(name)
    package.__path__, package.__version__ = [str(folder / name)], folder.name
    sys.modules[name] = package


def forget(name):
    """Empty every cache of package `name`, where answers about another GPU may lie."""
    for module_name, module in [*sys.modules.items()]:
        if module_name.startswith(f"{name}.") and not isinstance(module, StandIn):
            for value in [*vars(module).values()]:
                if type(value).__name__ == "_lru_cache_wrapper":
                    value.cache_clear()


def ask_each(script, folder, out):
    """Ask each release in a process of its own; write all answers, a line each."""
    lines = []
    for release in sorted(Path(folder).iterdir()):
        command = [sys.executable, script, str(release), "--one"]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        lines += [line for line in text.splitlines() if line.startswith("{")]
    Path(out).write_bytes(lzma.compress("\n".join([*lines, ""]).encode(), preset=9))


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
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048}
    widths = {"qk_nope_head_dim": 128, "v_head_dim": 128, "model_type": "deepseek_v32"}
    config.model_config.hf_text_config = types.SimpleNamespace(**sizes, **widths)
    config.model_config.hf_config = config.model_config.hf_text_config
    if call["model"] == GEMMA:
        sizes = [*GEMMA_HEAD_DIMS.values()]
        gemma = {"head_dim": min(sizes), "global_head_dim": max(sizes)}
        vars(config.model_config.hf_text_config).update(gemma, layer_types=[*GEMMA_HEAD_DIMS])
        layers = config.model_config.model_arch_config
        layers.total_num_hidden_layers = len(sizes)
        layers.__getitem__.side_effect = lambda i: types.SimpleNamespace(head_size=sizes[i])
    config.model_config.get_num_attention_heads = lambda *_: call["heads"]
    kv_heads = call["heads"] // GROUP if call["mode"] == "decode" else 1
    config.model_config.get_num_kv_heads = lambda *_: kv_heads
    head_dim = min(GEMMA_HEAD_DIMS.values()) if call["model"] == GEMMA else call["head_dim"]
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
    for call in calls:
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


if __name__ == "__main__":
    if sys.argv[2] == "--one":
        place = Path(sys.argv[1])
        for answer in answers(place, drawn_calls(place.name)):
            print(json.dumps(answer))
    else:
        ask_each(__file__, *sys.argv[1:])
