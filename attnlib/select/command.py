"""The command `explain`: what it takes and what it answers. `attnlib.cli` prints it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from .choice import explain
from .libraries import AUTO, LIBRARIES
from .situation import GPUS, MODES, Call
from .text import parse_call, parse_layer, render, to_dict

REQUIRED: Mapping[str, str] = {
    "library": f"{', '.join(LIBRARIES)}, with ==RELEASE where it has releases",
    "gpu": ", ".join(GPUS),
    "mode": ", ".join(MODES),
    "heads": "query and KV heads, such as 32/8",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `explain`."""
    for name, meaning in REQUIRED.items():
        parser.add_argument(f"--{name}", required=True, metavar=name.upper(), help=meaning)
    default = "default: %(default)s"
    parser.add_argument(
        "--policy", default=AUTO, help=f"an engine's rule, or a backend's name; {default}"
    )
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help=default)
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help=default)
    parser.add_argument("--dtype", default="bfloat16", help=f"the query's; {default}")
    parser.add_argument("--kv-dtype", default="", help="the cache's; default: the query's")
    parser.add_argument(
        "--call",
        action="append",
        default=[],
        metavar="FIELD[=VALUE]",
        help="what else is asked, such as graph, topk=2048, kv_lens=8192x16; repeatable; fields: "
        + ", ".join(vars(Call())),
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def answer(options: argparse.Namespace) -> str:
    """One choice explained, as text or JSON; raises what `explain` and the parsers raise."""
    sizes = {name: getattr(options, name) for name in ("head_dim", "page_size", "dtype")}
    choice = explain(
        parse_layer(options.heads, kv_dtype=options.kv_dtype, **sizes),
        mode=options.mode,
        gpu=options.gpu,
        library=options.library,
        policy=options.policy,
        call=parse_call(options.call),
    )
    return json.dumps(to_dict(choice), indent=2) if options.json else render(choice)
