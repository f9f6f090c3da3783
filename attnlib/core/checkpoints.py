"""Models that people name, and the kinds of their layers: data/checkpoints.yaml. No torch."""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .spec import MLA_HEAD_DIM, AttnSpec, require_int, require_word

FILE = Path(__file__).resolve().parents[1] / "data" / "checkpoints.yaml"
DENSE = ("full", "window", "chunked")
LATENT = {"latent": "mla"} | dict.fromkeys(
    ("sparse latent", "compressed", "window latent"), "sparse_mla"
)
"""Kind of a latent layer -> the mode in which its decode is asked."""
OWN = ("block-sparse", "linear")
"""Kinds of layers that take their own class."""
ROW = {
    "architecture": str,
    "source": str,
    "layers": dict,
}
FACTS = {
    "facts": dict,
}
"""Keys of a model, those that may be left out, and their types."""
SIZES = {
    "count": int,
    "heads": int | str,
    "head_dim": int,
    "window": int,
    "topk": int,
}
"""Keys of a kind of layers, and their types."""
AT_TP = re.compile(r"(.+?) at TP (\d+)")
WITH = " with "
DP = re.compile(r"DP attention(?: of (\d+))?")
SPECULATION = re.compile(r"speculation(?: of (\d+) branch(?:es)?)?")


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer of a whole model; `count` is how many there are, 0 if that was not read."""

    name: str
    count: int = 0
    heads: int = 0
    kv_heads: int = 1
    head_dim: int = MLA_HEAD_DIM
    window: int = 0
    topk: int = 0
    model: str = ""

    @property
    def mode(self) -> str:
        """The mode in which a latent layer is asked, or the empty string."""
        return LATENT.get(self.name, "")

    def on_one_gpu(self, ranks: int) -> tuple[int, int, int]:
        """Query heads, KV heads and head_dim of one of `ranks` GPUs that share the heads.

        With more GPUs than KV heads each holds one, as in the engines; each holds all of a latent
        cache. ValueError unless `ranks` divides the heads.
        """
        fits = self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0
        if self.heads % ranks or not (self.mode or fits):
            words = f"{self.heads}/{self.kv_heads}"
            raise ValueError(f"tp must divide the heads of {self.model}, {words}, got {ranks}")
        if self.mode:
            kv_heads = 1
        else:
            kv_heads = max(1, self.kv_heads // ranks)
        return self.heads // ranks, kv_heads, self.head_dim

    def spec(self, ranks: int, page_size: int, **fields: Any) -> AttnSpec:
        """The layer of one GPU; `fields` are those of `AttnSpec`."""
        sizes = self.on_one_gpu(ranks)
        return AttnSpec(*sizes, page_size, window=0 if self.mode else self.window, **fields)


@dataclass(frozen=True)
class Checkpoint:
    """A model: its architecture in config.json, where that was read, and its kinds of layers."""

    name: str
    architecture: str
    source: str
    kinds: tuple[LayerKind, ...]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """A model as it is served: `ranks` GPUs share the heads of a layer."""

    checkpoint: Checkpoint
    ranks: int = 1
    speculative: bool = False
    branches: int = 0
    dp_attention: bool = False


@cache
def checkpoints() -> dict[str, Checkpoint]:
    """Every model by name; ValueError names file, line and field of what is no model."""
    from .yaml_file import read_yaml, require_fields

    (written,) = read_yaml(FILE)
    models = {}
    for name, row in written.items():
        where = f"{getattr(row, 'place', FILE.name)}: {name}"
        require_fields(row, where, ROW, FACTS)
        for kind, sizes in row["layers"].items():
            require_word(
                name=f"{where}: kind of layers",
                value=kind,
                words=(*DENSE, *LATENT, *OWN),
            )
            require_fields(sizes, f"{where}, {kind}", {}, SIZES)
        models[name] = _checkpoint(name, row)
    return models


def _checkpoint(name: str, row: dict[str, Any]) -> Checkpoint:
    kinds = []
    for kind, written in row["layers"].items():
        sizes = dict(written)
        heads, _, kv_heads = str(sizes.pop("heads", 0)).partition("/")
        counts = {"heads": int(heads), "kv_heads": int(kv_heads or 1)}
        kinds.append(LayerKind(kind, model=name, **counts, **sizes))
    return Checkpoint(
        name=name,
        architecture=row["architecture"],
        source=row["source"],
        kinds=tuple(kinds),
        facts=row.get("facts", {}),
    )


def served(text: str, tp: int = 1, dp: int = 1) -> Served:
    """A model from words: `DeepSeek-V3 at TP 8 with DP attention and speculation of 1 branch`.

    `tp` and `dp` are for a text that does not say them. DP attention gives each of its groups
    whole requests, so that TP / DP GPUs share the heads; of no number it is as wide as TP. Case,
    blanks and underscores do not matter in a name. ValueError for what is not known.
    """
    name, _, more = text.partition(WITH)
    if split := AT_TP.fullmatch(name.strip()):
        if tp != 1:
            raise ValueError(f"tp must be left out with {text!r}, which contains it, got {tp}")
        name = split[1]
        tp = int(split[2])
    require_int("tp", tp)
    require_int("dp", dp)
    branches = 0
    speculative = False
    dp_attention = dp > 1
    for words in filter(None, more.split(" and ")):
        if found := DP.fullmatch(words):
            if dp != 1:
                raise ValueError(f"dp must be left out with {text!r}, which contains it, got {dp}")
            dp = int(found[1] or tp)
            dp_attention = True
        elif found := SPECULATION.fullmatch(words):
            speculative = True
            branches = int(found[1] or 0)
        else:
            known = "DP attention, DP attention of N, speculation, speculation of N branches"
            raise ValueError(f"a model must be served with {known}, got {words!r}")
    require_int("dp", dp)
    if tp % dp:
        raise ValueError(f"dp must divide tp ({tp}), got {dp}")
    return Served(
        checkpoint=find_checkpoint(name),
        ranks=tp // dp,
        speculative=speculative,
        branches=branches,
        dp_attention=dp_attention,
    )


def find_checkpoint(name: str) -> Checkpoint:
    """The model of a name, also after its owner's (`deepseek-ai/DeepSeek-V3`); ValueError names the
    nearest."""
    spelled = {_plain(known): checkpoint for known, checkpoint in checkpoints().items()}
    found = spelled.get(_plain(name.rpartition("/")[2]))
    if found is None:
        require_word("model", name, checkpoints())
    assert found is not None
    return found


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())
