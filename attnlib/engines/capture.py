"""What an engine's steps look like, one JSON object per line: sizes and lengths, no tokens.

A line has the call as text (`core.call_text`; its mode is the engine's word), and what no call
says: `{"call": "mode=decode heads=32/8 head_dim=128 page=16 lens=552x3", "batch_size": 3, ...}`.
`studies.captured` turns steps into cases.
"""

import io
import json
import logging
import os
import stat
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..core.call_text import CallText, Lens
from ..core.spec import AttnSpec, require_types

logger = logging.getLogger(__name__)
MOST_BYTES = 1 << 26
"""Most bytes of a file of captured steps that are read."""
BESIDE = ("batch_size", "kind", "backend", "release", "draft")
"""The fields of a step that its call does not say."""
EVERY = 10
"""One of this many steps of each mode is captured, beginning with the first."""
BEGINNING = b'{"call": '
"""Of each line."""


@dataclass(frozen=True)
class CapturedStep:
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
    tokens = []
    for length in filter(None, lengths.split("+")):
        tokens.append(int(length))
    if tokens and all(tokens):
        return Lens.of(tokens)
    return None


def _fields_said(said: CallText) -> dict[str, Any]:
    """The fields of `CapturedStep` that a text says."""
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
    """Appends steps to the regular file `path`; OSError at once if it cannot be appended to.

    It takes no lock and waits for nothing: the system appends a line of one write whole, on a local
    disk, whoever else writes. A line that a full disk or a killed process cut short costs that line
    alone, since the next one begins anew.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.seen: Counter[str] = Counter()
        os.close(self._open())

    def due(self, mode: str) -> bool:
        """Count a step; True if it is one to write."""
        self.seen[mode] += 1
        return (self.seen[mode] - 1) % EVERY == 0

    def write(self, step: CapturedStep) -> None:
        """Append a line; OSError if not all of it has room."""
        form = {"call": str(step.said)}
        form |= {name: getattr(step, name) for name in BESIDE}
        line = (json.dumps(form) + "\n").encode()
        file = self._open()
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line
            written = os.write(file, line)
        finally:
            os.close(file)
        if written != len(line):
            raise OSError(f"{written} of {len(line)} bytes had room in {self.path}")

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(self.path, flags, 0o666)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"{self.path} is no regular file")
        return file


def joined(lengths: Any) -> str:
    """Lengths on the host (a tensor, an array, a list) as a step has them; empty for None."""
    if lengths is None:
        return ""
    tokens = np.asarray(lengths).tolist()
    return "+".join(str(count) for count in tokens)


def read(path: str | Path) -> list[CapturedStep]:
    """The steps of a file. Blank lines are skipped, and with a warning lines that were cut short.

    ValueError names the first other line that is no step, or a file of more than `MOST_BYTES`.
    """
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path} must have at most {MOST_BYTES >> 20} MiB, it has more")
    steps = []
    for number, line in enumerate(io.BytesIO(data), 1):
        if not line.strip():
            continue
        try:
            form = json.loads(line)
            form |= _fields_said(CallText.read(form.pop("call")))
            steps.append(CapturedStep(**form))
            require_types(fields(CapturedStep), form)
        except json.JSONDecodeError as error:
            if not line.startswith(BEGINNING):
                raise _no_step(path, number, error) from None
            logger.warning("%s:%d was cut short and is left out", path, number)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _no_step(path, number, error) from None
    return steps


def _no_step(path: str | Path, number: int, error: Exception) -> ValueError:
    return ValueError(f"{path}:{number} must be a captured step, got {error!r}")
