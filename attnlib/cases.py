"""What is measured other than attention itself: named, seeded cases, and their JSON form.

| kind | case | what a call is |
|---|---|---|
| `decode` | `batch.DecodeCase` | one attention call over a paged cache |
| `metadata` | `MetadataCase` | one step's metadata, before its first layer |
| `step` | `StepCase` | the attention of a whole decode step, layer after layer |
| `mismatch` | `MismatchCase` | an attention call whose metadata does not fit it |
| `mla` | `MlaCase` | one multi-head latent attention call, dense or over chosen tokens |
| `extend` | `extend_case.ExtendCase` | one attention call with several queries a request |

A kind stands in the JSON of every case but `decode`, which came first. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from .batch import LENGTHS, DecodeCase
from .extend_case import ExtendCase

BUILDERS = ("decode", "kv_indices", "draft", "verify")
LATENT_DIM, ROPE_DIM = 512, 64
MLA_HEAD_DIM = LATENT_DIM + ROPE_DIM
MLA_TOKEN_BYTES = {"bfloat16": 2 * MLA_HEAD_DIM, "fp8-656": 656}
"""Bytes of a cached token by its format; `mla_format` has the layout of the second."""
DEEPSEEK_QK_DIM = 192
"""Width of a DeepSeek-V2/V3 query head before weight absorption: 128 plain, 64 rotary."""


@dataclass(frozen=True)
class MetadataCase:
    """The metadata of one step: which arrays (`builder`), for how many requests, how long.

    Requests have `lengths` as in `DecodeCase`, up to `max_ctx` tokens. Their pool of request rows
    has `pool_size` rows, or as many as there are requests if that is more; `max_pages` is the
    table's whole width, as under CUDA graphs. `swa` adds the sliding window's table. For drafts,
    `topk` branches of `draft_tokens` each.
    """

    builder: str
    batch_size: int
    page_size: int
    max_ctx: int
    lengths: str = "ragged"
    seq_len_delta: int = 0
    swa: bool = False
    pool_size: int = 1024
    topk: int = 1
    draft_tokens: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, valid in (("builder", BUILDERS), ("lengths", LENGTHS)):
            if getattr(self, name) not in valid:
                raise ValueError(
                    f"{name} must be one of {', '.join(valid)}, got {getattr(self, name)!r}"
                )
        for name in ("batch_size", "page_size", "max_ctx", "pool_size", "topk", "draft_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {getattr(self, name)!r}")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")

    @property
    def max_pages(self) -> int:
        """Columns of the page table."""
        return -(-self.max_ctx // self.page_size)

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        usual = MetadataCase(self.builder, self.batch_size, self.page_size, self.max_ctx)
        said = ("builder", "batch_size", "page_size", "max_ctx")
        rest = [
            f" {f.name} {getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in said and getattr(self, f.name) != getattr(usual, f.name)
        ]
        head = f"{self.builder} batch {self.batch_size} page {self.page_size} ctx {self.max_ctx}"
        return head + "".join(rest)

    @property
    def key(self) -> str:
        """`label` without spaces, for command lines."""
        return self.label.replace(" ", ",")

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case with its kind."""
        return {"kind": "metadata", **asdict(self)}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> MetadataCase:
        """Inverse of `to_dict`, less the kind."""
        return _from_fields(cls, form)


@dataclass(frozen=True)
class StepCase:
    """The attention calls of one decode step: `decode` in each of `layers` layers."""

    decode: DecodeCase
    layers: int

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers must be an integer >= 1, got {self.layers!r}")

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        return f"{self.layers} layers of {self.decode.label}"

    @property
    def key(self) -> str:
        """A name without spaces for command lines."""
        return f"{self.decode.key},l{self.layers}"

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case with its kind."""
        return {"kind": "step", **self.decode.to_dict(), "layers": self.layers}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> StepCase:
        """Inverse of `to_dict`, less the kind."""
        flat = dict(form)
        layers = flat.pop("layers", 0)
        return cls(DecodeCase.from_dict(flat), layers)


@dataclass(frozen=True)
class MismatchCase:
    """An entry of `mismatch.MISMATCHES`, with the guard or past it."""

    name: str
    guard: bool

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        return f"{self.name} {'guarded' if self.guard else 'unguarded'}"

    @property
    def key(self) -> str:
        """A name without spaces for command lines."""
        return self.label.replace(" ", ",")

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case with its kind."""
        return {"kind": "mismatch", **asdict(self)}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> MismatchCase:
        """Inverse of `to_dict`, less the kind."""
        return _from_fields(cls, form)


@dataclass(frozen=True)
class MlaSpec:
    """One MLA layer after weight absorption: all query heads read one latent KV head.

    A token is 512 latent values, which are key and value, and 64 rotary ones, key only. Query and
    output are bfloat16. `top_k` tokens of each request are attended to, all of them where it is 0.
    `num_qo_heads` is what one GPU has of the model's 128.
    """

    num_qo_heads: int
    top_k: int = 0
    page_size: int = 64
    kv_format: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, least in (("num_qo_heads", 1), ("top_k", 0), ("page_size", 1)):
            _require_int(name, getattr(self, name), least)
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        if self.kv_format not in MLA_TOKEN_BYTES:
            raise ValueError(
                f"kv_format must be one of {', '.join(MLA_TOKEN_BYTES)}, got {self.kv_format!r}"
            )

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(192): that of the query before absorption, not of the 576 values it has here."""
        return 1.0 / math.sqrt(DEEPSEEK_QK_DIM)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the cache."""
        return MLA_TOKEN_BYTES[self.kv_format]

    @property
    def heads(self) -> str:
        """Head counts as people write them, `128/1`."""
        return f"{self.num_qo_heads}/1"


@dataclass(frozen=True)
class MlaCase:
    """A seeded MLA decode step: requests of up to `kv_len` tokens, `lengths` as in `DecodeCase`."""

    spec: MlaSpec
    batch_size: int
    kv_len: int
    lengths: str = "fixed"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "kv_len"):
            _require_int(name, getattr(self, name), 1)
        if self.lengths not in LENGTHS:
            raise ValueError(f"lengths must be one of {', '.join(LENGTHS)}, got {self.lengths!r}")

    @property
    def label(self) -> str:
        """A short name for tables and progress bars."""
        s = self.spec
        chosen = f"top {s.top_k}" if s.top_k else "dense"
        tail = "" if self.lengths == "fixed" else f" {self.lengths}"
        tail += f" seed {self.seed}" if self.seed else ""
        return (
            f"mla {s.num_qo_heads} heads {chosen} {s.kv_format} page {s.page_size} "
            f"batch {self.batch_size} kv_len {self.kv_len}{tail}"
        )

    @property
    def key(self) -> str:
        """`label` without spaces, for command lines."""
        return self.label.replace(" ", ",")

    def to_dict(self) -> dict[str, Any]:
        """Flat dict of the case with its kind."""
        flat = asdict(self)
        return {"kind": "mla", **flat.pop("spec"), **flat}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> MlaCase:
        """Inverse of `to_dict`, less the kind."""
        names = {f.name for f in fields(MlaSpec)}
        own = {name: value for name, value in form.items() if name not in names}
        spec = _from_fields(MlaSpec, {name: form[name] for name in names & set(form)})
        return _from_fields(cls, {"spec": spec, **own})


Case = DecodeCase | MetadataCase | StepCase | MismatchCase | MlaCase | ExtendCase
KINDS: dict[str, Any] = {
    "metadata": MetadataCase,
    "step": StepCase,
    "mismatch": MismatchCase,
    "mla": MlaCase,
    "extend": ExtendCase,
}


def case_from_dict(form: dict[str, Any]) -> Case:
    """The case of a record's JSON; ValueError for an unknown kind or fields that do not fit."""
    if "kind" not in form:
        return DecodeCase.from_dict(form)
    flat = dict(form)
    kind = flat.pop("kind")
    if kind not in KINDS:
        raise ValueError(f"kind of a case must be one of {', '.join(KINDS)}, got {kind!r}")
    return KINDS[kind].from_dict(flat)


def _require_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def _from_fields(cls: Any, form: dict[str, Any]) -> Any:
    names = sorted(f.name for f in fields(cls))
    if sorted(form) != names:
        raise ValueError(f"a {cls.__name__} must have the fields {names}, got {sorted(form)}")
    return cls(**form)
