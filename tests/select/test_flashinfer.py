"""The tables of FlashInfer against the installed FlashInfer: its own wrappers are planned.

`flashinfer_wrappers` plans them on a CPU as if on another GPU; whatever they resolve to must be
what `explain` says. To check another release, give it a folder and put that first:

    pip install --no-deps --target DIR flashinfer-python==0.6.3
    PYTHONPATH=DIR pytest tests/select/test_flashinfer.py

Checked so, in agreement: all releases that `explain` knows but 0.2.6, 0.2.7.post1, 0.2.11.post1,
0.2.11.post3, 0.2.13, 0.2.14.post1, 0.3.0.post1, 0.3.1.post1, 0.6.7.post1, 0.6.7.post2, 0.6.16.post2
and 0.6.16.post3, which are taken for their neighbours.
"""

import random
from itertools import product

import pytest
from packaging.version import Version
from support.flashinfer_wrappers import as_if_on, installed, mla_order, resolve

from attnlib.core.spec import AttnSpec
from attnlib.select import GPUS, Call, explain

FP8 = "float8_e4m3fn"
DTYPES = [("bfloat16", ""), ("float16", ""), (FP8, FP8), ("bfloat16", FP8), (FP8, "bfloat16")]
HEAD_DIMS = (64, 96, 128, 256)
STEP = {"kv_lens": (8192,) * 16, "causal": False}
MLA_CALLS = (
    Call(kv_lens=(100,) * 4, causal=False),
    Call(**STEP),
    Call(**STEP | {"q_lens": (4,) * 16, "causal": True}),
    Call(**STEP, q_lens=(4,) * 16),
    Call(kv_lens=(2048,) * 8, q_lens=(2, 3) * 4),
    Call(**STEP, packed=False),
    Call(**STEP, base2_lse=True),
    Call(**STEP, graph=True),
    Call(**STEP, graph=True, block_tables=True),
)


@pytest.fixture(scope="session")
def release():
    """The FlashInfer that is installed, or first on PYTHONPATH; imported only for these tests."""
    version = installed()
    if not version:
        pytest.skip("needs FlashInfer: pip install flashinfer-python")
    return Version(version)


def since(first, release, why):
    """Skip a test of what came with a later release."""
    if release < Version(first):
        pytest.skip(why)


def agree(release, mode, gpu, cases):
    """The library resolves as `explain` says; a call that it refuses must have a `problem`."""
    where = {"library": f"flashinfer=={release}", "mode": mode, "gpu": gpu, "env": {}}
    with as_if_on(gpu):
        for spec, call in cases:
            choice = explain(spec, call=call, **where)
            try:
                taken = resolve(spec, call, mode=mode)
            except (ValueError, NotImplementedError) as error:
                taken = choice.backend if choice.problem else f"refused: {error}"
            assert taken == choice.backend, (spec, call)


def flags(*names):
    return [{name: True} for name in names]


LONG, SHORT = {"kv_lens": (300, 300)}, {"kv_lens": (200, 200)}
CALLS = {
    "decode": (Call(), Call(tensor_cores=False), Call(positions=True)),
    "prefill_paged": (Call(), *(Call(**f) for f in flags("custom_mask", "positions", "fp16_qk"))),
    "prefill_ragged": (
        *(Call(**LONG), Call(**LONG, q_lens=(1, 1)), Call(**SHORT, fp16_qk=True)),
        *(Call(**LONG, **f) for f in flags("fp16_qk", "graph", "window", "custom_mask", "sinks")),
    ),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("mode", CALLS)
def test_decode_and_prefill_resolve_as_the_table_says(mode, gpu, release):
    layers = product(((32, 8), (8, 8)), HEAD_DIMS, DTYPES)
    specs = [AttnSpec(*heads, head_dim, 16, *dtypes) for heads, head_dim, dtypes in layers]
    agree(release, mode, gpu, product(specs, CALLS[mode]))


@pytest.mark.parametrize("gpu", ["sm90", "sm100", "sm103"])
def test_decode_of_several_tokens_resolves_as_the_table_says(gpu, release):
    since("0.7.2", release, "auto does not look at the query tokens until 0.7.2")
    more = [{}, {"tensor_cores": False}, {"graph": True, "block_tables": True}]
    more += flags("graph", "window", "softcap", "fixed_split")
    shapes = product(((64, 4), (64, 8), (96, 8)), (64, 128, 256), (1, 16), DTYPES[:3])
    cases = (
        (AttnSpec(*heads, head_dim, page, *dtypes), Call(kv_lens=(40,) * n, q_lens=(q,) * n, **how))
        for heads, head_dim, page, dtypes in shapes
        for n, q, how in product((2, 16), (2, 4, 8), more)
        if not how or (page == 16 and head_dim == 128 and q == 4)
    )
    agree(release, "decode", gpu, cases)


@pytest.mark.parametrize("gpu", GPUS)
def test_ragged_prefill_of_mla_resolves_as_the_table_says(gpu, release):
    since("0.2.2", release, "K and V have one head_dim until 0.2.2")
    call = Call(kv_lens=(300,), head_dim_vo=128)
    agree(release, "prefill_ragged", gpu, [(AttnSpec(32, 32, 192, 16, *d), call) for d in DTYPES])


@pytest.mark.parametrize("gpu", GPUS)
def test_mla_resolves_as_the_table_says(gpu, release):
    since("0.2.2", release, "MLA has no auto until 0.2.2")
    calls = MLA_CALLS if release >= Version("0.7.1") else MLA_CALLS[:2]
    sizes = product((16, 96, 128), (1, 64, 128), DTYPES[:4])
    specs = (AttnSpec(heads, 1, 576, page, *dtypes) for heads, page, dtypes in sizes)
    agree(release, "mla", gpu, product(specs, calls))


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
    since("0.7.1" if gpu == "sm100" else "0.7.2", release, "no policy by work yet")
    library = f"flashinfer=={release}"
    for heads, call in random_steps(3000 if gpu == "sm100" else 100):
        spec = AttnSpec(heads, 1, 576, 64)
        choice = explain(spec, mode="mla", gpu=gpu, library=library, call=call, env={})
        row = choice.decided_by.subject
        assert row.split(" > ") == list(mla_order(spec, call, gpu=gpu)), (heads, call)
