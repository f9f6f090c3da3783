"""Models that engines have rules for, read from data/models.yaml."""

from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).resolve().parents[1] / "data"


def yaml_loader() -> Any:
    """PyYAML's C safe loader, which is ten times as fast, or the Python one if it is missing."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


TABLE = yaml.load((DATA / "models.yaml").read_text(), yaml_loader())
OTHER = "other"
MODELS = {name: tuple(row["architectures"].split()) for name, row in TABLE.items()}
"""Model -> its architectures, by their names in config.json."""
FAMILIES = {name: name for name in (OTHER, *MODELS)}
"""What `model` of a call may be, a model or an architecture -> a key of `MODELS`, or other."""
for _model, _architectures in MODELS.items():
    FAMILIES |= dict.fromkeys(_architectures, _model)
ARCHITECTURES = {name: MODELS.get(name, (name,))[0] for name in FAMILIES}
"""What `model` of a call may be -> an architecture; of a model, its first."""
LAYERS = {name: row["layers"] for name, row in TABLE.items() if "layers" in row}
"""Model -> its kinds of layers, and how each differs from the layer that is asked for."""
