"""What a library calls a kernel, and what our backends are called that run it."""

from __future__ import annotations

ENGINES = {
    "fa3": "fa3",
    "FLASH_ATTN": "fa3",
    "FLASHMLA": "flashmla-dense",
    "FLASHMLA_SPARSE": "flashmla-sparse-fp8",
}
"""An engine's word for a kernel -> our backend, where we have it."""


def backend_of(library: str, word: str, *, latent: bool) -> str:
    """Our backend for a `word` of `library` (`flashinfer==0.6.3`, ...); empty if we have none.

    FlashInfer's own words always have a name of ours, measured or not; `latent` is for MLA.
    """
    if library.startswith("flashinfer"):
        return f"flashinfer-mla-{word}" if latent else f"flashinfer-{word}"
    # SGLang's fa3 on MLA is another kernel of that library, which is not ours.
    return "" if latent and word == "fa3" else ENGINES.get(word, "")
