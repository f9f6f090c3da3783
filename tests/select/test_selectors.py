"""`explain` picks what the engines' own selectors picked, for drawn calls of many releases.

data/vectors has the answers; tests/support/vllm_selector.py made them (SGLang: test_sglang.py).
"""

import json
import lzma
from collections import Counter
from pathlib import Path

import pytest

from attnlib.core.spec import AttnSpec
from attnlib.select import Call, explain

VECTORS = Path(__file__).parents[2] / "data" / "vectors"
FLAGS = ("sinks", "window", "mm_prefix", "causal", "batch_invariant")
LEAST = {"vllm": (15, 2250)}


def calls_of(engine):
    lines = lzma.decompress((VECTORS / f"{engine}_selectors.jsonl.xz").read_bytes())
    return [json.loads(line) for line in lines.splitlines()]


def picked(engine, call):
    """Our pick for a call, in the engine's word; the empty string if nothing can run."""
    latent, heads = call["mode"] != "decode", call.get("heads", 32)
    kv_dtype = "float8_e4m3fn" if call.get("kv_dtype") == "fp8" else ""
    sizes = (heads, 1 if latent else heads // 4, call.get("head_dim", 576 if latent else 128))
    spec = AttnSpec(*sizes, call["page_size"] or 16, call.get("dtype", "bfloat16"), kv_dtype)
    facts = {name: call[name] for name in FLAGS if name in call}
    facts |= {"pinned_page": bool(call["page_size"]), "eagle_topk": call.get("eagle_topk", 0)}
    topk = 2048 if call["mode"] == "sparse_mla" else 0
    where = {"mode": call["mode"], "gpu": call["gpu"], "library": f"{engine}=={call['release']}"}
    facts |= {"kv_lens": (4096,) * 8, "topk": topk}
    return explain(spec, **where, call=Call(**facts), env={}).backend


@pytest.mark.parametrize("engine", LEAST)
def test_every_drawn_call_is_picked_as_the_engines_own_selector_did(engine):
    calls = calls_of(engine)
    releases, least = LEAST[engine]
    assert len({call["release"] for call in calls}) >= releases and len(calls) >= least
    wrong = [call for call in calls if picked(engine, call) != "".join(call["answer"][:1])]
    assert not wrong, (Counter(call["release"] for call in wrong), wrong[:3])
