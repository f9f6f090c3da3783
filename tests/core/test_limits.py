"""One table of limits: wrappers and `explain` give one answer, and it is the library's own."""

from itertools import product

import pytest

from attnlib.core.backends import TABLE, flashinfer, mla, planned, unsupported, xqa
from attnlib.core.spec import MLA_HEAD_DIM, AttnSpec, MlaSpec
from attnlib.select import Call, explain

FP8 = "float8_e4m3fn"
RELEASES = ("0.5.3", "0.6.3", "0.6.13", "0.6.18", "0.7.2.post1")
DTYPES = (
    ("bfloat16", ""),
    ("bfloat16", FP8),
    ("bfloat16", "float16"),
    (FP8, FP8),
)
HEADS = (
    (8, 8),
    (32, 8),
    (40, 8),
    (48, 8),
    (16, 1),
)
LAYERS = [
    AttnSpec(*heads, head_dim, 16, *dtypes)
    for heads, head_dim, dtypes in product(HEADS, (64, 96, 128, 256, 512), DTYPES)
]
LATENT_LAYERS = [MlaSpec(heads, top_k, 64) for heads in (16, 128) for top_k in (0, 64)]
OWN_WORD = ("fa2", "fa3", "cuda-cores")  # XQA is a call beside the wrapper
PINNED = [e for e in TABLE.values() if e.name.startswith("flashinfer") and e.asks in OWN_WORD]
MODES = {"decode": "decode", "extend": "prefill_paged", "mla": "mla"}


def refused_by_explain(kernel, layer, mode, release):
    """Whether a backend asked for by name raises."""
    asked = {"mode": mode, "gpu": "sm90", "library": f"flashinfer=={release}", "policy": kernel}
    try:
        explain(layer, call=Call(causal=mode != "mla"), **asked)
    except RuntimeError:
        return True
    return False


@pytest.fixture
def installed(monkeypatch):
    def pretend(release):
        for module in (flashinfer, mla, planned, xqa):
            monkeypatch.setattr(module, "installed_version", lambda _: release)

    return pretend


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("entry", PINNED, ids=lambda entry: entry.name)
def test_a_wrapper_refuses_what_explain_refuses(entry, release, installed):
    installed(release)
    for spec in LATENT_LAYERS if entry.plans == "mla" else LAYERS:
        layer = AttnSpec(spec.num_qo_heads, 1, MLA_HEAD_DIM, 64) if entry.plans == "mla" else spec
        if entry.plans == "extend" and "float8" in layer.dtype:
            assert unsupported(entry.name, spec).startswith("dtype must be")
            continue
        said = refused_by_explain(entry.asks, layer, MODES[entry.plans], release)
        said |= entry.name.endswith("planned") and spec.head_dim not in planned.HEAD_DIMS
        assert bool(unsupported(entry.name, spec)) == said, spec


SIZES = {
    "0.6.17": {1, 2, 3, 4, 8},
    "0.6.18": {1, 2, 3, 4, 6, 8},
    "0.7.1": {1, 2, 3, 4, 6, 8, 16},
}


@pytest.mark.parametrize("release", SIZES)
def test_cuda_cores_gain_group_sizes_with_releases(release, installed):
    installed(release)
    name = "flashinfer-cuda-cores"
    able = {n for n in range(1, 33) if not unsupported(name, AttnSpec(n, 1, 128, 16))}
    assert able == SIZES[release]


@pytest.mark.parametrize(
    "release, able",
    [
        ("0.6.13", set()),
        ("0.6.14", {"flashinfer-fa2", "flashinfer-prefill-fa2", "flashinfer-auto"}),
        (
            "0.7.2.post1",
            {"flashinfer-fa2", "flashinfer-auto", "flashinfer-cuda-cores", "flashinfer-xqa"},
        ),
    ],
)
def test_head_dim_512_is_for_fa2_cuda_cores_and_xqa(release, able, installed):
    installed(release)
    asked = able | {"flashinfer-fa2", "flashinfer-fa3", "flashinfer-xqa"}
    assert {n for n in asked if not unsupported(n, AttnSpec(8, 2, 512, 16))} == able
    widest = 512 if "flashinfer-xqa" in able else 256
    words = f"head_dim must be a multiple of 16 up to {widest}, got 72"
    assert unsupported("flashinfer-xqa", AttnSpec(8, 2, 72, 16)) == words


def test_auto_is_refused_only_what_neither_of_its_kernels_can_run(installed):
    installed("0.6.3")
    assert unsupported("flashinfer-auto", AttnSpec(8, 2, 128, 16, FP8)) == ""
    assert "head_dim must be" in unsupported("flashinfer-auto", AttnSpec(8, 2, 96, 16))
    installed("0.5.3")
    assert "no FP8 query" in unsupported("flashinfer-auto", AttnSpec(8, 2, 128, 16, FP8))
