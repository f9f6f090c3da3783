"""SGLang's own choice of a default backend on a CPU, as if on another GPU: answers in data/vectors.

`python tests/support/sglang_selector.py FOLDER` prints the answers of every release of which FOLDER
has the Python files (`FOLDER/0.5.23/sglang/...`, as a wheel has them), a line each. The functions
that decide are cut out of the sources by their names and run: the default backend, deterministic
inference, and whether speculation has one branch. What they ask of the platform is answered here.
"""

import ast
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

GPUS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121")
CALLS = 70
NAMES = (
    "get_default_attn_backend",
    "_get_default_attn_backend",
    "is_no_spec_infer_or_topk_one",
    "_deterministic_attention_backend",
    "_handle_deterministic_inference",
)
FILES = ("server_args.py", "utils/common.py", "arg_groups/*.py")


def drawn_calls(release):
    """Calls of a release: what decides its default, by our names."""
    draw = random.Random(f"sglang {release}")
    for _ in range(CALLS):
        eagle_topk = draw.choice((0, 0, 1, 4))
        yield {
            "release": release,
            "gpu": draw.choice(GPUS),
            "mode": draw.choice(("decode", "decode", "mla")),
            "eagle_topk": eagle_topk,
            "page_size": draw.choice((0, 0, 1, 16, 64)),
            "sinks": draw.random() < 0.2,
            "batch_invariant": draw.random() < 0.25,
        }


class WithoutImports(ast.NodeTransformer):
    """What a function imports stands in its globals instead."""

    def visit_ImportFrom(self, node):
        return ast.Pass()


def settle(view, function):
    """What SGLang's run_post_process_pass does with a function's answer."""
    for name, value in function(view).items():
        setattr(view, name, value)


def functions_of(folder):
    """The functions of `NAMES` in a release's files, by name, with the globals they ask for."""
    found, world = {}, {}
    for pattern in FILES:
        for path in (folder / "sglang/srt").glob(pattern):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name in NAMES:
                    node.decorator_list, node.returns = [], None
                    for argument in node.args.args:
                        argument.annotation = None
                    module = ast.fix_missing_locations(
                        WithoutImports().visit(ast.Module([node], []))
                    )
                    code = compile(module, str(path), "exec")
                    exec(code, world)
                    found[node.name] = world[node.name]
    return found, world


def answer(functions, world, call):
    """The backend that the release takes by itself."""
    major, minor = divmod(int(call["gpu"][2:]), 10)
    latent = call["mode"] == "mla"
    is_gpu = {
        "is_hopper_with_cuda_12_3": major == 9,
        "is_sm100": major == 10,
        "is_sm120": major == 12,
        "is_hip": False,
        "has_flashinfer": True,
    }
    asked = {
        "is_hopper_with_cuda_12_3": major == 9,
        "is_sm100_supported": major == 10,
        "is_sm120_supported": major == 12,
        "is_flashinfer_available": True,
        **dict.fromkeys(("is_hip", "is_mps", "is_npu", "is_xpu"), False),
    }
    world |= {name: (lambda value=value: value) for name, value in asked.items()}
    view = MagicMock()
    view.speculative_eagle_topk = call["eagle_topk"] or None
    view.speculative_algorithm = "EAGLE" if call["eagle_topk"] else None
    view.page_size = call["page_size"] or None
    view.attention_backend = view.rl_on_policy_target = None
    view.enable_deterministic_inference, view.tp_size = call["batch_invariant"], 1
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        has_attention_sinks=call["sinks"],
        has_asymmetric_kv=False,
    )
    view.get_model_config = lambda: model
    world |= {
        "get_platform": lambda: SimpleNamespace(**is_gpu),
        "current_platform": SimpleNamespace(is_out_of_tree=lambda: False),
        "resolving_view": lambda value: value,
        "resolved_view": lambda value: value,
        "logger": MagicMock(),
        "envs": MagicMock(),
        "parse_connector_type": lambda path: "local",
        "ConnectorType": SimpleNamespace(INSTANCE="instance"),
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": ["flashinfer", "fa3", "triton"],
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": ["fa3", "triton"],
        "_forces_eagle_topk_one": lambda algorithm: False,
        "_deterministic_is_deepseek_model": lambda value: False,
        "_deterministic_sampling_backend": lambda value: {},
        "run_post_process_pass": settle,
    }
    if call["batch_invariant"]:
        if "_deterministic_attention_backend" in functions:
            return functions["_deterministic_attention_backend"](view)["attention_backend"]
        functions["_handle_deterministic_inference"](view)
        return view.attention_backend
    default = functions.get("get_default_attn_backend") or functions["_get_default_attn_backend"]
    return default(view, latent, model)


def main(folder):
    """Print an answer per line."""
    for release in sorted(Path(folder).iterdir()):
        if (release / "sglang").is_dir():
            functions, world = functions_of(release)
            for call in drawn_calls(release.name):
                print(json.dumps(call | {"answer": [answer(functions, world, call)]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
