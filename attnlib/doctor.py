"""The machine, library versions, backends and why each cannot run; as text or as a dict."""

import os
from typing import Any

NO_DRIVER = "needs a CUDA GPU (no driver is here: libcuda.so.1)"


def examine() -> dict[str, Any]:
    """Machine, versions, mode, each backend's reason (empty: it can run), records.

    Without a driver of NVIDIA's a backend that cannot run needs that before a library.
    """
    from .core.backends import available
    from .core.backends.table import RECORDED
    from .measure.machine import describe_machine, describe_versions, has_driver
    from .run.store import machines
    from .run.study import mode
    from .studies import STUDIES

    device = "cpu"
    backends = available()
    if has_driver():
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    else:
        backends = {name: reason and NO_DRIVER for name, reason in backends.items()}
    try:
        current = mode()
    except RuntimeError as error:
        current = f"none: {error}"
    return {
        "mode": current,
        "mode_asked": os.environ.get("ATTNLIB_MODE", "auto"),
        "machine": describe_machine(device),
        "versions": describe_versions(RECORDED),
        "backends": backends,
        "studies": {name: machines(name) for name in STUDIES},
    }


def render(facts: dict[str, Any]) -> str:
    """The facts of `examine` as aligned lines."""
    machine = facts["machine"]
    backends = facts["backends"].items()
    studies = facts["studies"].items()
    lines = [
        f"mode      {facts['mode']} (ATTNLIB_MODE={facts['mode_asked']})",
        f"machine   {machine['gpu'] or 'no CUDA GPU'} ({machine['gpu_id']})",
        "versions",
        *_aligned(facts["versions"]),
        "backends",
        *_aligned({name: reason or "ready" for name, reason in backends}),
        "records",
        *_aligned({name: ", ".join(machines) or "none" for name, machines in studies}),
    ]
    return "\n".join(lines)


def _aligned(pairs: dict[str, str]) -> list[str]:
    width = max(map(len, pairs), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in pairs.items()]
