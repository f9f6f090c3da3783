"""Models that engines have rules for, read from data/models.yaml."""

from pathlib import Path
from typing import Any

from ..core.yaml_file import read_yaml, require_fields

DATA = Path(__file__).resolve().parents[1] / "data"


(TABLE,) = read_yaml(DATA / "models.yaml")
OTHER = "other"
MODELS: dict[str, tuple[str, ...]] = {}
"""Model -> its architectures, by their names in config.json."""
LAYERS: dict[str, dict[str, dict[str, Any]]] = {}
"""Model -> its kinds of layers, and how each differs from the layer that is asked for."""
for _model, _row in TABLE.items():
    require_fields(
        _row,
        f"{TABLE.place}, {_model}",
        required={"architectures": str},
        optional={"whole": str, "layers": dict},
    )
    MODELS[_model] = tuple(_row["architectures"].split())
    if "layers" in _row:
        LAYERS[_model] = _row["layers"]
FAMILIES = {name: name for name in (OTHER, *MODELS)}
"""What `model` of a call may be, a model or an architecture -> a key of `MODELS`, or other."""
for _model, _names in MODELS.items():
    FAMILIES |= dict.fromkeys(_names, _model)
ARCHITECTURES = {name: name for name in FAMILIES}
"""What `model` of a call may be -> an architecture; of a model, its first."""
for _model, _names in MODELS.items():
    ARCHITECTURES[_model] = _names[0]
