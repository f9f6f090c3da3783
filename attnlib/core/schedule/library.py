"""Where FlashAttention-3 and FlashMLA come from: Python modules, and who supplied them.

SGLang's build of FlashAttention-3 is a library of its own, whatever else is installed.

Asking whether a module is there imports none.
"""

import importlib
import importlib.util
import re
from functools import lru_cache
from importlib import metadata
from typing import Any

from ..releases import read_releases

FLASH_ATTN_3 = "FlashAttention-3"
FLASHMLA = "FlashMLA"
SGLANG_FLASH_ATTN_3 = "SGLang's FlashAttention-3"
SGLANG_KERNEL = "sglang-kernel"
OLDEST_KERNEL, *_, NEWEST_KERNEL = read_releases(SGLANG_KERNEL)
"""The first and the last release of sglang-kernel whose cap of splits was read and tested."""
MODULES = {
    FLASH_ATTN_3: ("flash_attn_interface", "sgl_kernel.flash_attn"),
    FLASHMLA: ("flash_mla",),
    SGLANG_FLASH_ATTN_3: ("sgl_kernel.flash_attn",),
}
INSTALL = {
    FLASH_ATTN_3: "pip install tokenspeed-fa3 (or flash-attn-3, or sglang-kernel, which has MLA)",
    FLASHMLA: "pip install sgl-flash-mla",
    SGLANG_FLASH_ATTN_3: f"pip install {SGLANG_KERNEL}",
}


def find_module(library: str = FLASH_ATTN_3) -> str:
    """Name of the module that would be loaded, or the empty string."""
    for name in MODULES[library]:
        package, _, _ = name.partition(".")
        if _found(package):
            return name
    return ""


def supplier() -> str:
    """The distribution that supplies FlashAttention-3, by its index name; flash-attn-3 if none."""
    return _distribution(find_module().partition(".")[0])


@lru_cache
def _distribution(package: str) -> str:
    """Read once: every installed distribution's files are looked at, which takes seconds."""
    names = metadata.packages_distributions().get(package) if package else None
    if not names:
        return "flash-attn-3"
    return re.sub(r"[-_.]+", "-", names[0]).lower()


def missing(library: str) -> str:
    """What to install, or the empty string."""
    return "" if find_module(library) else f"{library} is not installed: {INSTALL[library]}"


def broken(library: str) -> str:
    """Why it does not load, or the empty string."""
    try:
        import_library(library)
    except RuntimeError as error:
        return str(error)
    return ""


@lru_cache(maxsize=len(MODULES))
def import_library(library: str = FLASH_ATTN_3) -> Any:
    """The module; RuntimeError saying what to install, or why the import failed."""
    if reason := missing(library):
        raise RuntimeError(reason)
    name = find_module(library)
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        owner = f" of {supplier()}" if library == FLASH_ATTN_3 else ""
        raise RuntimeError(f"{name}{owner} cannot be loaded: {error}") from error


def build() -> str:
    """Which of `facts.BUILDS` would be loaded: SGLang's kernel package, or upstream's code."""
    return sglang_build() if find_module().startswith("sgl_kernel") else "upstream"


def sglang_build() -> str:
    """Which of them SGLang's kernel package is: its cap of splits changed with 0.4.5."""
    from packaging.version import Version

    return "sglang" if Version(sglang_release()) >= Version("0.4.5") else "sglang-0.4.4"


def sglang_release() -> str:
    """The release of SGLang's kernel package; 0 where it has its name of before, sgl-kernel."""
    try:
        return metadata.version(SGLANG_KERNEL)
    except metadata.PackageNotFoundError:
        return "0"


def unread_release() -> str:
    """Why the cap of splits of this sglang-kernel is not known here, or the empty string."""
    from packaging.version import Version

    release = Version(sglang_release())
    if Version(OLDEST_KERNEL) <= release <= Version(NEWEST_KERNEL):
        return ""
    return (
        f"{SGLANG_KERNEL} must be {OLDEST_KERNEL} to {NEWEST_KERNEL}, whose cap of splits was "
        f"read, got {release}: take the cap `default`, or a number"
    )


def has_hdim96() -> bool:
    """Whether the build has kernels of head_dim 96; builds without a flag have them."""
    return not _build_flags().get("FLASHATTENTION_DISABLE_HDIM96", False)


def has_latent() -> bool:
    """Whether it has keys of 64 and values of 512 dims. Without, output is wrong, with no error."""
    return not _build_flags().get("FLASH_ATTENTION_DISABLE_HDIMDIFF64", False)


@lru_cache(maxsize=1)
def _build_flags() -> dict[str, bool]:
    try:
        return dict(importlib.import_module("flash_attn_config").CONFIG["build_flags"])
    except (ImportError, KeyError):
        return {}


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
