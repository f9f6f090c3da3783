"""What is here: machine, versions, backends and why not. Text for people, a dict for scripts."""

import os
from typing import Any

from .core.backends import available
from .core.backends.table import RECORDED
from .core.gpu import FA2_RATES_OF
from .measure.machine import describe_machine, describe_versions
from .run.store import machines
from .run.study import mode
from .studies import STUDIES


def diagnose() -> dict[str, Any]:
    """Machine, versions, mode, each backend's reason (empty: it can run), records."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found_mode = mode()
    except RuntimeError as error:
        found_mode = f"none: {error}"  # the mode asked for cannot be had here
    return {
        "mode": found_mode,
        "mode_asked": os.environ.get("ATTNLIB_MODE", "auto"),
        "machine": describe_machine(device),
        "fa2_rates_of": FA2_RATES_OF,
        "versions": describe_versions(RECORDED),
        "backends": available(),
        "studies": {name: machines(name) for name in STUDIES},
    }


def render(found: dict[str, Any]) -> str:
    """The findings of `diagnose` as aligned lines."""
    machine = found["machine"]
    lines = [
        f"mode      {found['mode']} (ATTNLIB_MODE={found['mode_asked']})",
        f"machine   {machine['gpu'] or 'no CUDA GPU'} ({machine['gpu_id']})",
        *_rates_line(machine["gpu"], found["fa2_rates_of"]),
        "versions",
        *_aligned(found["versions"]),
        "backends",
        *_aligned({name: reason or "ready" for name, reason in found["backends"].items()}),
        "records",
        *_aligned({name: ", ".join(have) or "none" for name, have in found["studies"].items()}),
    ]
    return "\n".join(lines)


def _rates_line(gpu: str, rates_of: str) -> list[str]:
    if gpu in ("", rates_of):
        return []
    told = f"plans of fa2 use the constants of an {rates_of}"
    return [f"rates     {told}; `python -m attnlib rates` learns this GPU's own"]


def _aligned(pairs: dict[str, str]) -> list[str]:
    width = max(map(len, pairs), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in pairs.items()]
