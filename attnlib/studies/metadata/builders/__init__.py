"""What metadata is built: a module each, whose name is the `builder` of its cases. No torch here.

Nothing registers a module: `named` finds it, and its `BUILDER` says who builds and what is right.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

NAMES = tuple(module.name for module in pkgutil.iter_modules(__path__))
"""Words for `builder` of a case."""


class Builder(NamedTuple):
    """Who builds some metadata, ours and the rivals, and what is right.

    `designs` is backend -> function; the backend `metadata-fused-alone` starts after the previous
    kernel ended. `outputs` are named in the order of the oracle's results.
    """

    designs: Mapping[str, Callable[..., None]]
    outputs: tuple[str, ...]
    oracle: Callable[..., Any]


def named(name: str) -> Builder:
    """The builder of a module here, one of `NAMES`."""
    module = importlib.import_module(f"{__name__}.{name}")
    found: Builder = module.BUILDER
    return found
