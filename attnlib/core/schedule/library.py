"""Where FlashAttention-3 comes from: its Python module, and the distribution that supplied it.

The module is `flash_attn_interface` (distributions flash-attn-3 and tokenspeed-fa3) or
`sgl_kernel.flash_attn` (sgl-kernel). Asking which one there is imports neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import lru_cache
from importlib import metadata
from typing import Any

MODULES = ("flash_attn_interface", "sgl_kernel.flash_attn")
INSTALL = "pip install tokenspeed-fa3 (or flash-attn-3, or sgl-kernel)"
NO_DISTRIBUTION = "flash-attn-3"
"""The name that stands where no distribution claims the module, or none is there."""


def find_module() -> str:
    """Name of the module that would be loaded, or the empty string."""
    return next((name for name in MODULES if _found(name.partition(".")[0])), "")


def supplier() -> str:
    """The distribution that supplies the module, as package indexes spell it: tokenspeed-fa3."""
    package = find_module().partition(".")[0]
    names = metadata.packages_distributions().get(package, []) if package else []
    return re.sub(r"[-_.]+", "-", names[0]).lower() if names else NO_DISTRIBUTION


@lru_cache(maxsize=1)
def load() -> Any:
    """The module; RuntimeError saying what to install, or why the import failed."""
    name = find_module()
    if not name:
        raise RuntimeError(f"FlashAttention-3 is not installed: {INSTALL}")
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise RuntimeError(f"{name} of {supplier()} cannot be loaded: {error}") from error


@lru_cache(maxsize=1)
def has_hdim96() -> bool:
    """Whether the build has kernels of head_dim 96; builds that do not say so have them."""
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except (ImportError, KeyError):
        return True
    return not flags.get("FLASHATTENTION_DISABLE_HDIM96", False)


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
