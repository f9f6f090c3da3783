"""One call of multi-head latent attention, dense or over chosen tokens, as a case. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ...core.spec import LENGTHS, MlaSpec, require_int, require_word
from ..form import _from_fields


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
            require_int(name, getattr(self, name))
        require_word("lengths", self.lengths, LENGTHS)

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
