"""A library's word for a kernel becomes our backend's name, or none."""

from __future__ import annotations

import pytest

from attnlib.core.backends import BACKENDS, MLA_BACKENDS
from attnlib.select.names import backend_of


@pytest.mark.parametrize(
    ("library", "word", "latent", "backend"),
    [
        ("flashinfer==0.6.4", "fa2", False, "flashinfer-fa2"),
        ("flashinfer==0.6.4", "cuda-cores", False, "flashinfer-cuda-cores"),
        ("flashinfer==0.6.4", "fa3", True, "flashinfer-mla-fa3"),
        ("sglang==0.5.23", "fa3", False, "fa3"),
        ("vllm==0.33.0", "FLASH_ATTN", False, "fa3"),
        ("vllm==0.33.0", "FLASHMLA", True, "flashmla-dense"),
        ("vllm==0.33.0", "FLASHMLA_SPARSE", True, "flashmla-sparse-fp8"),
    ],
)
def test_words_of_kernels_that_we_have_name_a_backend_of_ours(library, word, latent, backend):
    assert backend_of(library, word, latent=latent) == backend
    assert backend in (MLA_BACKENDS if latent else BACKENDS)


def test_sglangs_fa3_for_mla_and_unknown_words_are_not_ours():
    assert backend_of("sglang==0.5.23", "fa3", latent=True) == ""
    assert backend_of("vllm==0.33.0", "TRITON_ATTN", latent=False) == ""
