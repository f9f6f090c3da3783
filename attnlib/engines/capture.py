"""What an engine's steps look like, one JSON object per line: sizes and lengths, no tokens.

A line has the call as text (`core.call_text`; its mode is the engine's word), and what no call
says: `{"call": "mode=decode heads=32/8 head_dim=128 page=16 lens=552x3", "batch_size": 3, ...}`.
Lines of older releases, which have a field for each number, are still read. `studies.captured`
turns steps into cases.
"""

import fcntl
import json
import os
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..core.call_text import CallText, Lens
from ..core.spec import AttnSpec, require_types

BESIDE = ("batch_size", "kind", "backend", "release", "draft")
"""The fields of a step that its call does not say."""
EVERY = 10
"""One of this many steps of each mode is captured, beginning with the first."""


@dataclass(frozen=True)
class Step:
    """One step of a model, as its attention layers see it.

    `mode` is the engine's word. `lengths` are the tokens of each request as records write them
    (`33+1+60`), with those of this step but without drafts to verify; empty where the host does not
    know them, and in a file also where a request has none. `q_lengths` are the query tokens, empty
    also where each request has one.
    `batch_size` is without a graph's padding. Heads are those of a layer on this GPU; dtypes are
    torch's names. `kind` is `mha` (grouped-query too) or `mla`, `backend` the engine's name of its
    attention backend, `release` the engine's; `draft` marks a draft model's step.
    """

    mode: str
    batch_size: int
    lengths: str
    q_lengths: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    kv_dtype: str
    kind: str
    backend: str
    release: str
    draft: bool

    @property
    def said(self) -> CallText:
        """What its text says."""
        return CallText(
            mode=self.mode,
            q_lens=_lens_of(self.q_lengths),
            heads=f"{self.num_qo_heads}/{self.num_kv_heads}",
            head_dim=self.head_dim,
            page=self.page_size,
            dtype=self.dtype if self.dtype != "bfloat16" else None,
            kv_dtype=self.kv_dtype if self.kv_dtype != self.dtype else None,
            lens=_lens_of(self.lengths),
        )

    @property
    def spec(self) -> AttnSpec:
        """The layer; ValueError if no backend here can have it (MLA, other dtypes)."""
        if self.kind != "mha":
            raise ValueError(f"kind must be mha, got {self.kind!r}")
        return AttnSpec(
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
        )


def _lens_of(lengths: str) -> Lens | None:
    """The lengths of a step as a text says them; None without any, or where a request has none."""
    tokens = [int(length) for length in filter(None, lengths.split("+"))]
    return Lens.of(tokens) if tokens and all(tokens) else None


def _fields_said(said: CallText) -> dict[str, Any]:
    """The fields of `Step` that a text says."""
    num_qo_heads, _, num_kv_heads = said.required("heads").partition("/")
    dtype = said.dtype or "bfloat16"
    return {
        "mode": said.required("mode"),
        "lengths": joined(said.lens and said.lens.tokens),
        "q_lengths": joined(said.q_lens and said.q_lens.tokens),
        "num_qo_heads": int(num_qo_heads),
        "num_kv_heads": int(num_kv_heads),
        "head_dim": said.required("head_dim"),
        "page_size": said.required("page"),
        "dtype": dtype,
        "kv_dtype": said.kv_dtype or dtype,
    }


class Capture:
    """Appends steps to `path`; OSError at once if it cannot be appended to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seen: Counter[str] = Counter()
        open(path, "ab").close()

    def due(self, mode: str) -> bool:
        """Count a step; True if it is one to write."""
        self.seen[mode] += 1
        return (self.seen[mode] - 1) % EVERY == 0

    def write(self, step: Step) -> None:
        """Append one whole line, or none and OSError; other processes may write the same file."""
        form = {"call": str(step.said)}
        form |= {name: getattr(step, name) for name in BESIDE}
        line = (json.dumps(form) + "\n").encode()
        with open(self.path, "ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = os.fstat(file.fileno()).st_size
            written = file.write(line)
            if written != len(line):
                file.truncate(before)
                raise OSError(f"{written} of {len(line)} bytes had room in {self.path}")


def joined(lengths: Any) -> str:
    """Lengths on the host (a tensor, an array, a list) as `Step.lengths`; empty for None."""
    if lengths is None:
        return ""
    return "+".join(map(str, np.asarray(lengths).tolist()))


def read(path: str | Path) -> list[Step]:
    """The steps of a file; blank lines are skipped, ValueError names the first invalid line."""
    steps = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            form = json.loads(line)
            if "call" in form:
                form |= _fields_said(CallText.read(form.pop("call")))
            steps.append(Step(**form))
            require_types(fields(Step), form)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}:{number} must be a captured step, got {error!r}") from None
    return steps
