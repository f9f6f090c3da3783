"""What ATTNLIB_SGLANG_SPLITS does in SGLang: tokens, time per token, memory; one JSON file.

    for n in 0 1 2 3; do
        set -- gqa mla gqa-verify mla-verify; shift $n
        CUDA_VISIBLE_DEVICES=$n python3 tests/support/engine_splits.py $OUT/$1.json --models $1 &
    done; wait

SGLang 0.5.23 must be on PYTHONPATH. A process takes 60 to 130 s, most of it the start: two for a
model, so give each model a GPU, or less to do. Nothing is started in the last minute of `--limit`.
Weights are made up, the attention backend is not
named. Per model and arm a fresh process of the offline engine, which ends with all that it
started, answers twice (A/A) and then prefills many prompts at once, the case of sgl-flash-attn #46.
What fails is recorded with the end of its log, and the next process starts.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "tests")]

from support.process_group import EndedError, Group  # noqa: E402

from attnlib.engines.arms import PREFIX, RUNS  # noqa: E402
from attnlib.studies.serving.models import write_model  # noqa: E402

WIDTH, VOCAB, NEW = 131_072, 32_768, 64
DECODED = (24_000, *(1_000 + 16 * n for n in range(15)))
"""Prompts of a batch whose longest request needs splits; SGLang's cap counts all rows."""
PREFILLED = 64 * (2_048,)
TURNS = 3
START_S, ANSWER_S = 180.0, 60.0
"""Limits of a start, the first of which compiles, and of one answer."""
LEAST_S = 60.0
SAID = "attnlib: splits in "
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "vocab_size": VOCAB,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 5e5,
}
_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_size": 7_168,
    "intermediate_size": 18_432,
    "vocab_size": VOCAB,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1_536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    # All layers are dense: no expert has weights.
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
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
CONFIGS = {
    "llama": _LLAMA | {"num_hidden_layers": 4},
    "draft": _LLAMA | {"num_hidden_layers": 1},
    "deepseek": _DEEPSEEK,
}
DRAFTS = {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
# Name -> the target's config, and whether one Llama layer drafts for it. SGLang would make a draft
# of DeepSeek's own shape a layer of experts, 22 GiB.
MODELS = {
    "gqa": ("llama", False),
    "mla": ("deepseek", False),
    "gqa-verify": ("llama", True),
    "mla-verify": ("deepseek", True),
}


def options(name, folder):
    """Arguments of `sglang.Engine`."""
    target, drafts = MODELS[name]
    given = {
        "model_path": str(folder / target),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "sampling_backend": "pytorch",
        "context_length": WIDTH,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_bs_decode": [1, len(DECODED)],
        "cuda_graph_max_bs_decode": len(DECODED),
        # All prompts of a prefill in one forward; a small pool leaves it the memory.
        "chunked_prefill_size": 140_000,
        "max_prefill_tokens": 140_000,
        "max_total_tokens": 160_000,
        "max_running_requests": len(PREFILLED),
        "mem_fraction_static": 0.5,
        "random_seed": 0,
        "log_level": "info",  # the plugin's lines, and which backend SGLang picks
    }
    if drafts:
        given |= DRAFTS | {"speculative_draft_model_path": str(folder / "draft")}
    return given


def main():
    """Every model and arm; the file is written anew after each process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--arms", nargs="+", default=["default", "bounded"])
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all processes")
    asked = parser.parse_args()
    end = time.monotonic() + asked.limit
    report = {"machine": machine(), "runs": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_plugin(folder)
        for config, content in CONFIGS.items():
            (folder / config).mkdir()
            write_model(folder / config, content)
        for model in asked.models:
            for arm in asked.arms:
                report["runs"].append(run(model, arm, folder, end))
                compare(report["runs"])
                asked.out.write_text(json.dumps(without_tokens(report), indent=1) + "\n")
                print(model, arm, report["runs"][-1]["status"], flush=True)


def without_tokens(found):
    """A copy without the tokens themselves, whose hash is there."""
    if isinstance(found, list):
        return [without_tokens(each) for each in found]
    if not isinstance(found, dict):
        return found
    return {name: without_tokens(each) for name, each in found.items() if name != "tokens"}


def machine():
    """Versions, and the GPU."""
    found = {name: installed(name) for name in ("sglang", "sglang-kernel", "torch", "transformers")}
    return found | {"gpu": nvidia_smi("name"), "memory_mib": nvidia_smi("memory.total")}


def installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def nvidia_smi(field):
    """A field of the GPU that CUDA sees first, or why there is none."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def write_plugin(folder):
    """What says that attnlib is installed: SGLang finds plugins by a distribution's entry point."""
    info = folder / "attnlib-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attnlib\nVersion: 0\n")
    point = "[sglang.srt.plugins]\nattnlib = attnlib.engines.sglang:register\n"
    (info / "entry_points.txt").write_text(point)


def run(model, arm, folder, end):
    """One process: what it answered until it was done, or ended, or time was up."""
    if end - time.monotonic() < LEAST_S:
        return {"model": model, "arm": arm, "status": "not started: --limit"}
    began, log = time.monotonic(), folder / f"{model}-{arm}.log"
    setup = {"options": options(model, folder), "log": str(log)}
    path = folder / f"{model}-{arm}.json"
    path.write_text(json.dumps(setup))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    paths = (str(folder), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if arm != "default":
        environment[f"{PREFIX}SPLITS"] = arm
    found = {"model": model, "arm": arm, "status": "ok"}
    engine = Group((sys.executable, __file__, "--worker", str(path)), environment)
    try:
        found["start_s"] = engine.answer(within(START_S, end))["start_s"]
        # Decode comes first: a prefill that runs out of memory ends the process.
        for key, kind in (("first", "decode"), ("again", "decode"), ("prefill", "prefill")):
            engine.send({"kind": kind})
            found[key] = engine.answer(within(ANSWER_S, end))
        engine.close()
    except EndedError as error:  # it is closed
        found |= {"status": error.status, "reason": str(error)}
    except RuntimeError as error:  # a process of it is left
        found |= {"status": "error", "reason": str(error)}
    text = log.read_text(errors="replace") if log.exists() else ""
    if found["status"] != "ok":
        found["log_end"] = text[-3_000:]
    found["runs"] = f"{RUNS} splits={arm}" in text
    found["said"] = [line.strip() for line in text.splitlines() if SAID in line]
    found["backend"] = [line for line in text.splitlines() if "backend by default" in line][:2]
    return found | {"wall_s": round(time.monotonic() - began, 1)}


def within(limit_s, end):
    """Seconds to wait: the limit, or what is left of all."""
    return max(1.0, min(limit_s, end - time.monotonic()))


def compare(runs):
    """Add to the last run how its tokens differ from the default arm's, and from its own."""
    last = runs[-1]
    if "again" in last:
        last["again_against_first"] = difference(last["again"]["tokens"], last["first"]["tokens"])
    of_model = [each for each in runs if each["model"] == last["model"] and "first" in each]
    default = next((each for each in of_model if each["arm"] == "default"), None)
    if default and "first" in last and last is not default:
        tokens = last["first"]["tokens"], default["first"]["tokens"]
        last["against_default"] = difference(*tokens)


def difference(mine, others):
    """Equal tokens of all, and per request the first position that differs (None: there is none).

    Splits change the rounding: after a near tie, greedy tokens of made-up weights go other ways.
    """
    pairs = [[*zip(a, b, strict=False)] for a, b in zip(mine, others, strict=True)]
    first = [next((n for n, (a, b) in enumerate(pair) if a != b), None) for pair in pairs]
    equal = sum(a == b for pair in pairs for a, b in pair)
    return {"equal": equal, "of": sum(map(len, pairs)), "first_difference": first}


class Worker:
    """The process of an engine: a JSON line per question in, one out."""

    def __init__(self, given):
        import sglang

        began = time.perf_counter()
        self.engine = sglang.Engine(**given)
        self.generate((64,), 8)
        self.start_s = time.perf_counter() - began

    def generate(self, lens, count):
        """Seconds of a call and its outputs; prompts are the same in every process."""
        prompts = [[(7 * n + 13 * at) % VOCAB for at in range(size)] for n, size in enumerate(lens)]
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        outputs = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - began, outputs

    def decode(self):
        """Tokens, and seconds per token: of a long call less a short one, so without prefill."""
        seconds = []
        for _ in range(TURNS):
            short_s, _ = self.generate(DECODED, 2)
            long_s, outputs = self.generate(DECODED, 2 + NEW)
            seconds.append((long_s - short_s) / NEW)
        tokens = [output["output_ids"] for output in outputs]
        accepted = [output["meta_info"].get("spec_accept_length") for output in outputs]
        return {
            "seconds_per_token": sorted(seconds)[TURNS // 2],
            "turns_s": seconds,
            "lost_tokens": sum(2 + NEW - len(ids) for ids in tokens),
            "sha256": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
            "accept_length": accepted if any(accepted) else None,
            "tokens": tokens,
        }

    def prefill(self):
        """Memory of the GPU, MiB: before, and the most while all prompts are prefilled at once.

        PyTorch keeps what it has reserved, so that nothing is missed between two looks.
        """
        before, most, done = used_mib(), [0], threading.Event()

        def look():
            while not done.wait(0.05):
                most[0] = max(most[0], used_mib())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            seconds, outputs = self.generate(PREFILLED, 1)
        finally:
            done.set()
            thread.join()
        peak = max(most[0], used_mib())
        answered = sum(len(output["output_ids"]) for output in outputs)
        found = {"before_mib": before, "peak_mib": peak, "rise_mib": peak - before}
        return found | {"peak_bytes": peak * 2**20, "seconds": seconds, "answered": answered}


def used_mib():
    """Memory in use on the GPU, by all processes."""
    said = nvidia_smi("memory.used")
    return int(said) if said.isdecimal() else 0


def work(path):
    """Serve until stdin ends; what SGLang prints goes to the log."""
    setup = json.loads(Path(path).read_text())
    with os.fdopen(os.dup(1), "w", buffering=1) as answers, open(setup["log"], "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            worker = Worker(setup["options"])
            answers.write(json.dumps({"start_s": worker.start_s}) + "\n")
            for line in sys.stdin:
                answers.write(json.dumps(getattr(worker, json.loads(line)["kind"])()) + "\n")
        except BaseException:
            traceback.print_exc()
            raise


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
