"""`explain` answers what the selectors of vLLM, SGLang and FlashInfer answered themselves.

data/vectors has their answers for drawn calls; tests/support/engine_selectors.py made them. The
installed FlashInfer is asked for calls that nobody drew before; to ask another release, give it a
folder and put that first:

    pip install --no-deps --target DIR flashinfer-python==0.6.3
    PYTHONPATH=DIR pytest tests/select/test_selectors.py
"""

import json
import lzma
from collections import Counter
from pathlib import Path

import pytest
from support.flashinfer_selector import answer, drawn_calls, layer_and_call
from support.flashinfer_wrappers import as_if_on, installed

from attnlib.core import AttnSpec
from attnlib.select import Call, explain

VECTORS = Path(__file__).parents[2] / "data" / "vectors"
DTYPES = {"auto": "", "bfloat16": "bfloat16", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
CACHES = {"fp8_e5m2": "fp8_e5m2", "nvfp4": "nvfp4", "turboquant_k8v4": "turboquant"}
UNSEEN = ("fp8e4nv", "between 64 and 128 heads")
"""Problems of kernels, which no selector compiles."""
OF_VLLM = ("sinks", "window", "mm_prefix", "causal", "batch_invariant", "cubins", "model")
OF_SGLANG = ("model", "sinks", "batch_invariant")


def choice_of(engine, line, spec, call):
    """Our choice for a line of the vectors."""
    beside = f",flashinfer=={line['flashinfer']}" if "flashinfer" in line else ""
    return explain(
        spec,
        mode=line["mode"],
        gpu=line["gpu"],
        library=f"{engine}=={line['release']}{beside}",
        call=call,
    )


def facts_of(line, names):
    """The facts of a call that both engines are told, and those of `names`."""
    return {name: line[name] for name in names} | {
        "pinned_page": bool(line["page_size"]),
        "kv_lens": (4096,) * 8,
        "topk": line.get("topk", 2048) if line["mode"] == "sparse_mla" else 0,
        "cache": CACHES.get(line["kv_dtype"], "plain"),
        "pinned_kv_dtype": line["kv_dtype"] != "auto",
    }


def vllm_agrees(line):
    """Whether every backend that can run the call is named, best first; none where the pick fails
    when it is built."""
    heads = line["heads"]
    kv_heads = heads // line.get("group", 4) if line["mode"] == "decode" else 1
    sizes = (heads, kv_heads, line["head_dim"])
    kv_dtype = DTYPES.get(line["kv_dtype"], "")
    spec = AttnSpec(*sizes, line["page_size"] or 16, line["dtype"], kv_dtype)
    choice = choice_of("vllm", line, spec, Call(**facts_of(line, OF_VLLM)))
    is_seen = choice.inner is None and not any(word in choice.problem for word in UNSEEN)
    ordered = [] if is_seen and choice.problem else [*choice.order]
    return ordered == line["answer"]


def sglang_agrees(line):
    """Whether the backend is SGLang's, or SGLang does not start and a problem is named."""
    is_latent = line["mode"] in ("mla", "sparse_mla")
    sizes = (128, 1, 576) if is_latent else (32, 8, 128)
    page_size = line["page_size"] or 16
    spec = AttnSpec(*sizes, page_size, "bfloat16", DTYPES.get(line["kv_dtype"], ""))
    call = Call(
        **facts_of(line, OF_SGLANG),
        eagle_topk=line["eagle_topk"] or 0,
        speculative=line["eagle_topk"] != 0,
        head_dim_vo=64 * line["wide_k"],
    )
    choice = choice_of("sglang", line, spec, call)
    return bool(choice.problem) if "refused" in line else choice.backend == line["answer"]


def flashinfer_agrees(line):
    """Whether the backend is FlashInfer's, or its plan refuses and a problem is named; of a line
    with an order whether that is FlashInfer's, what can run aside."""
    choice = choice_of("flashinfer", line, *layer_and_call(line))
    if "order" in line:
        return choice.decided_by.subject == " > ".join(line["order"])
    return bool(choice.problem) if "refused" in line else choice.backend == line["answer"]


@pytest.mark.parametrize(
    "engine, agrees, releases, count, refused",
    [
        ("vllm", vllm_agrees, 15, 2873, 0),
        ("sglang", sglang_agrees, 21, 3178, 200),
        ("flashinfer", flashinfer_agrees, 29, 9352, 1000),
    ],
)
@pytest.mark.slow
def test_every_drawn_call_is_answered_as_by_the_engine(engine, agrees, releases, count, refused):
    text = lzma.decompress((VECTORS / f"{engine}_selectors.jsonl.xz").read_bytes())
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == count
    assert len({line["release"] for line in lines}) == releases
    assert sum("refused" in line for line in lines) >= refused
    wrong = [line for line in lines if not agrees(line)]
    releases_wrong = Counter(line["release"] for line in wrong)
    assert not wrong, (len(wrong), releases_wrong, wrong[:3])


@pytest.mark.slow
def test_the_installed_flashinfer_answers_new_calls_as_the_tables_do():
    if not (release := installed()):
        pytest.skip("needs FlashInfer: pip install flashinfer-python")
    for line in drawn_calls(Path(release), "installed", 40):
        with as_if_on(line["gpu"]):
            assert flashinfer_agrees(line | answer(line)), line
