"""A choice as text, and the arguments and answer of the command `explain`."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..core.layer import parse_layer, parse_lengths
from ..core.spec import MLA, MODELS
from .explain import Choice, explain
from .facts import GPUS, MODES, OTHER, Call
from .facts import MODELS as RULED
from .libraries import AUTO, LIBRARIES

COLUMNS = ("", "chosen", "why, or why not", "source")
REQUIRED: Mapping[str, str] = {
    "library": f"{', '.join(LIBRARIES)}, with ==RELEASE where it has releases",
    "gpu": ", ".join(GPUS),
    "mode": ", ".join(MODES),
    "heads": "query and KV heads, such as 32/8",
}
LAYER = ("heads", "head_dim", "page_size", "dtype", "kv_dtype")
"""The arguments of `parse_layer`."""
_FIELDS = {field.name: field.type for field in fields(Call)}
_EXPECTED: dict[Any, str] = {bool: "yes or no", int: "a number"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the arguments of `explain`; what is not given is not in its namespace."""
    parser.argument_default = argparse.SUPPRESS
    for name, meaning in REQUIRED.items():
        parser.add_argument(f"--{name}", metavar=name.upper(), help=meaning)
    words = "what changes from OLD to NEW, such as flashinfer==0.6.13; takes --gpu and --model"
    parser.add_argument("--diff", nargs=2, metavar=("OLD", "NEW"), help=words)
    words = f"with --diff, only {', '.join((*MODELS, MLA))}"
    parser.add_argument("--model", metavar="NAME", help=words)
    words = f"an engine's rule, or a backend's name; default: {AUTO}"
    parser.add_argument("--policy", help=words)
    parser.add_argument("--head-dim", type=int, metavar="N", help="default: 128")
    parser.add_argument("--page-size", type=int, metavar="N", help="default: 16")
    parser.add_argument("--dtype", help="the query's; default: bfloat16")
    parser.add_argument("--kv-dtype", help="the cache's; default: the query's")
    words = "a fact of the call, such as graph or kv_lens=8192x16; repeatable; fields: "
    words += ", ".join(_FIELDS)
    parser.add_argument("--call", action="append", metavar="FIELD[=VALUE]", help=words)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def answer(options: argparse.Namespace) -> str:
    """One choice, or what changes, as text or JSON; raises what `explain` and the parsers raise."""
    given = {name: value for name, value in vars(options).items() if name != "command"}
    as_json = given.pop("json", False)
    if "diff" in given:
        old, new = given.pop("diff")
        return _answer_diff(old, new, given, as_json)
    if missing := [f"--{name}" for name in REQUIRED if name not in given]:
        raise ValueError(f"{', '.join(missing)} must be given, or --diff OLD NEW")
    if "model" in given:
        model = given["model"]
        raise ValueError(f"--model must go with --diff, or be --call model=, got {model!r}")
    call = parse_call(given.pop("call", []))
    layer = {name: given.pop(name) for name in LAYER if name in given}
    choice = explain(parse_layer(**layer), call=call, **given)
    return json.dumps(to_dict(choice), indent=2) if as_json else render(choice)


def _answer_diff(old: str, new: str, given: Mapping[str, Any], as_json: bool) -> str:
    from .changes import changes, markdown

    if others := [name for name in given if name not in ("gpu", "model")]:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ValueError(f"--diff must go with --gpu, --model and --json alone, got {words}")
    gpus = given["gpu"].split(",") if "gpu" in given else tuple(GPUS)
    table = changes(old, new, model=given.get("model", ""), gpus=gpus)
    return str(table.to_json(orient="records", indent=2)) if as_json else markdown(table, old, new)


def render(choice: Choice) -> str:
    """The choice in a few lines, then every row considered, without repeats, matches first."""
    rows = [COLUMNS]
    for reason in sorted(choice.reasons, key=lambda reason: not reason.matched):
        taken = "yes" if reason.matched and reason.kind != "limit" else "no"
        rows.append((taken, _short(reason.subject), reason.why, reason.source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = dict.fromkeys("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    head = [headline(choice)]
    if len(choice.order) > 1:
        head.append(f"can run it, best first: {', '.join(choice.order)}")
    if choice.problem:
        head.append(f"but it cannot run: {choice.problem}")
    if choice.unused:
        head.append(f"not used by its rules: {', '.join(choice.unused)}")
    if any(reason.why.endswith(f"it is {OTHER}") for reason in choice.reasons):
        head.append(f"rules for one model did not apply: --call model={'|'.join(RULED)}")
    return "\n".join([*head, "", *lines])


def _short(order: str) -> str:
    names = order.split(" > ")
    return order if len(names) < 3 else f"{names[0]} > {names[1]} > {len(names) - 2} more"


def headline(choice: Choice) -> str:
    """`vllm==0.33.0, decode on sm100, policy auto: FLASHINFER, which runs trtllm-gen`.

    A pin by environment variable is shown in place of the policy.
    """
    pins = [reason.why for reason in choice.reasons if reason.kind == "override"]
    decided = pins[0] if pins else f"policy {choice.policy}"
    where = f"{choice.library}, {choice.mode} on {choice.gpu}, {decided}"
    inner = f", which runs {choice.kernel}" if choice.inner else ""
    return f"{where}: {choice.backend or 'none can run it'}{inner}"


def to_dict(choice: Choice) -> dict[str, Any]:
    """The choice as JSON data: its fields, its kernel, its reasons as objects."""
    names = ("library", "mode", "gpu", "policy", "backend", "order", "problem", "kernel", "unused")
    plain = {name: getattr(choice, name) for name in names}
    return {**plain, "reasons": [vars(reason) for reason in choice.reasons]}


def parse_call(settings: list[str]) -> Call:
    """A `Call` from `graph`, `topk=2048`, `model=gemma4` or `kv_lens=8192x16` (`parse_lengths`).

    Raises ValueError naming the fields there are.
    """
    return Call(**dict(_setting(text) for text in settings))


def _setting(text: str) -> tuple[str, Any]:
    name, given, value = text.partition("=")
    kind = _FIELDS.get(name)
    if kind is None:
        raise ValueError(f"a call's field must be one of {', '.join(_FIELDS)}, got {name!r}")
    if kind is bool and (value in ("yes", "no") or not given):
        return name, value != "no"
    if kind is str:
        return name, value
    if kind is int and value.isdecimal():
        return name, int(value)
    if kind in _EXPECTED:
        raise ValueError(f"{name} must be {_EXPECTED[kind]}, got {value!r}")
    return name, parse_lengths(name, value)
