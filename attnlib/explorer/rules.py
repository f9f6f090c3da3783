"""Which rule would choose what: one question, asked of the tables of `select`."""

from __future__ import annotations

from dataclasses import dataclass

from ..batch import AttnSpec
from ..cases import MlaSpec
from ..select import flashinfer_decode_auto

NO_RULE = "no rule on record says"


@dataclass(frozen=True)
class Chosen:
    """What a library's rule picks for a call; `backend` is empty where no rule speaks of it."""

    library: str
    backend: str
    reason: str


def chosen_by(spec: AttnSpec | MlaSpec, *, release: str, gpu: str) -> Chosen:
    """What FlashInfer `release` runs for `auto` in decode, on a GPU such as `sm90`."""
    library = f"flashinfer=={release}"
    if isinstance(spec, MlaSpec):
        return Chosen(library, "", NO_RULE)
    try:
        rule = flashinfer_decode_auto(release, int(gpu.removeprefix("sm")) // 10, spec)
    except ValueError as error:
        return Chosen(library, "", f"{NO_RULE}: {error}")
    return Chosen(library, f"flashinfer-{rule.backend}", rule.reason)
