"""The tables of FlashInfer against its own wrappers.

data/vectors has what the wrappers of 28 releases took for drawn calls
(tests/support/flashinfer_selector.py). Besides, the installed FlashInfer is asked for calls that
nobody drew before; to ask another release, give it a folder and put that first:

    pip install --no-deps --target DIR flashinfer-python==0.6.3
    PYTHONPATH=DIR pytest tests/select/test_flashinfer.py
"""

import json
import lzma
import random
from collections import Counter
from pathlib import Path

import pytest
from packaging.version import Version
from support.flashinfer_selector import answer, drawn_calls, layer_and_call
from support.flashinfer_wrappers import as_if_on, installed, mla_order

from attnlib.core.spec import AttnSpec
from attnlib.select import Call, explain

VECTORS = Path(__file__).parents[2] / "data" / "vectors" / "flashinfer_selectors.jsonl.xz"


def agrees(line):
    """Whether the backend is FlashInfer's, or its plan refuses and a problem is named."""
    spec, call = layer_and_call(line)
    where = {"library": f"flashinfer=={line['release']}", "mode": line["mode"], "gpu": line["gpu"]}
    choice = explain(spec, call=call, env={}, **where)
    return bool(choice.problem) if "refused" in line else choice.backend == line["answer"]


def test_every_drawn_call_is_answered_as_by_flashinfers_own_wrappers():
    lines = [json.loads(line) for line in lzma.decompress(VECTORS.read_bytes()).splitlines()]
    assert len({line["release"] for line in lines}) == 28 and len(lines) == 4200
    assert sum("refused" in line for line in lines) > 100
    wrong = [line for line in lines if not agrees(line)]
    assert not wrong, (len(wrong), Counter(line["release"] for line in wrong), wrong[:3])


@pytest.fixture(scope="session")
def release():
    """The FlashInfer that is installed, or first on PYTHONPATH; imported only for these tests."""
    version = installed()
    if not version:
        pytest.skip("needs FlashInfer: pip install flashinfer-python")
    return version


def test_the_installed_flashinfer_answers_new_calls_as_the_tables_do(release):
    for line in drawn_calls(Path(release), "installed", 100):
        with as_if_on(line["gpu"]):
            assert agrees(line | answer(line)), line


def random_steps(count):
    """Heads and calls near the policy's boundaries, seeded."""
    draw = random.Random(20261121)
    for _ in range(count):
        batch = draw.choice((1, 2, 7, 16, 31, 32, 100, 256))
        longest = draw.choice((16, 32, 200, 512, 1024, 2048, 4096, 4097, 8192, 32768, 131072))
        kv_lens = tuple(draw.choice((longest, max(1, longest // 2))) for _ in range(batch))
        longest_q = draw.choice((1, 1, 1, 2, 4, 8, 16, 32, 128, 512))
        q_lens = tuple(draw.choice((longest_q, max(1, longest_q - 1))) for _ in range(batch))
        how = {name: draw.random() < 0.5 for name in ("graph", "causal", "base2_lse")}
        call = Call(kv_lens=kv_lens, q_lens=q_lens, **how)
        yield draw.choice((4, 8, 16, 20, 32, 64, 128)), call


@pytest.mark.parametrize("gpu", ["sm80", "sm90", "sm100", "sm103", "sm120"])
def test_the_order_of_mla_backends_is_the_policys(gpu, release):
    if Version(release) < Version("0.7.1" if gpu == "sm100" else "0.7.2"):
        pytest.skip("no policy by work yet")
    library = f"flashinfer=={release}"
    for heads, call in random_steps(3000 if gpu == "sm100" else 100):
        spec = AttnSpec(heads, 1, 576, 64)
        choice = explain(spec, mode="mla", gpu=gpu, library=library, call=call, env={})
        row = choice.decided_by.subject
        assert row.split(" > ") == list(mla_order(spec, call, gpu=gpu)), (heads, call)
