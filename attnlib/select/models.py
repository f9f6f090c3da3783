"""Models that engines have rules for, read from data/models.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).resolve().parents[1] / "data"


def yaml_loader() -> Any:
    """PyYAML's C safe loader, which is ten times as fast, or the Python one if it is missing."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


TABLE = yaml.load((DATA / "models.yaml").read_text(), yaml_loader())
OTHER = "other"
MODELS: Mapping[str, tuple[str, ...]] = {
    name: tuple(row["architectures"].split()) for name, row in TABLE.items()
}
"""Model -> its architectures, by their names in config.json."""
FAMILIES = {name: name for name in (OTHER, *MODELS)} | {
    architecture: name for name, names in MODELS.items() for architecture in names
}
"""What `model` of a call may be -> a key of `MODELS`, or other."""
ARCHITECTURES = {name: MODELS.get(name, (name,))[0] for name in FAMILIES}
"""What `model` of a call may be -> an architecture; of a family, its first."""
LAYERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    name: row["layers"] for name, row in TABLE.items() if "layers" in row
}
"""Model -> its kinds of layers, and what each is otherwise than the layer that is asked for."""
