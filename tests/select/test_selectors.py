"""`explain` orders what vLLM's own selector ordered, for drawn calls of 15 releases.

data/vectors has the answers; tests/support/vllm_selector.py made them (SGLang: test_sglang.py).
"""

import json
import lzma
from collections import Counter
from pathlib import Path

from attnlib.core.spec import AttnSpec
from attnlib.select import Call, explain

VECTORS = Path(__file__).parents[2] / "data" / "vectors" / "vllm_selectors.jsonl.xz"
FLAGS = ("sinks", "window", "mm_prefix", "causal", "batch_invariant", "cubins", "model")


def ordered(call):
    """Every backend that can run a call, best first; none where the pick fails when it is built."""
    latent, heads = call["mode"] != "decode", call["heads"]
    kv_dtype = "float8_e4m3fn" if call["kv_dtype"] == "fp8" else ""
    sizes = (heads, 1 if latent else heads // 4, call["head_dim"])
    spec = AttnSpec(*sizes, call["page_size"] or 16, call["dtype"], kv_dtype)
    facts = {name: call[name] for name in FLAGS}
    facts |= {"pinned_page": bool(call["page_size"]), "kv_lens": (4096,) * 8}
    facts |= {"topk": 2048 if call["mode"] == "sparse_mla" else 0}
    where = {"mode": call["mode"], "gpu": call["gpu"], "library": f"vllm=={call['release']}"}
    choice = explain(spec, **where, call=Call(**facts), env={})
    return [] if choice.problem and choice.inner is None else [*choice.order]


def test_every_drawn_call_is_ordered_as_by_the_engines_own_selector():
    calls = [json.loads(line) for line in lzma.decompress(VECTORS.read_bytes()).splitlines()]
    assert len({call["release"] for call in calls}) == 15 and len(calls) == 2250
    wrong = [call for call in calls if ordered(call) != call["answer"]]
    assert not wrong, (Counter(call["release"] for call in wrong), wrong[:3])
