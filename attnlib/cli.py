"""The commands, `python -m attnlib COMMAND`. Exit status 0 only on success."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import cluster, store, study
from .doctor import diagnose, render
from .overlay import parse_overlay
from .record import machine_slug
from .studies import STUDIES

FAILED, USAGE = 1, 2


def build_parser() -> argparse.ArgumentParser:
    """The argument parser; `--help` explains each command."""
    parser = argparse.ArgumentParser(
        prog="python -m attnlib",
        description="Reproduce, explain and prove fixes of attention-backend regressions.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="machine, versions, and which backends can run here (and why not)"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    _add_measure(commands)
    report = commands.add_parser(
        "report", help="execute every notebook and write one self-contained HTML file"
    )
    report.add_argument(
        "--out", type=Path, default=Path("build/report/index.html"), help="default: %(default)s"
    )
    commands.add_parser(
        "refresh", help="re-execute the notebooks in place and redraw README's figure (replay)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an expected failure is one line on stderr and a non-zero status."""
    options = build_parser().parse_args(arguments)
    commands = {"doctor": _doctor, "measure": _measure, "report": _report, "refresh": _refresh}
    try:
        return commands[options.command](options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"attnlib {options.command}: {error}", file=sys.stderr)
        return FAILED


def _add_measure(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "measure",
        help="measure a study on this GPU, resuming where an earlier run stopped",
        description="Measure what a study lacks on this machine; records go to data/records/.",
    )
    parser.add_argument("study", metavar="STUDY", help=f"one of: {', '.join(STUDIES)}")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of every grid")
    parser.add_argument(
        "--headline", action="store_true", help="only the cases that live notebooks measure"
    )
    parser.add_argument(
        "--retry", action="store_true", help="measure again what is on record as failed"
    )
    parser.add_argument(
        "--cluster", metavar="ADDRESS", help="measure on the workers of this Dask scheduler instead"
    )
    parser.add_argument(
        "--overlay",
        action="append",
        default=[],
        metavar="NAME==VERSION=DIR",
        help="folder that holds this release; otherwise it is installed from the package index "
        "or from the folder of wheels that ATTNLIB_WHEELS names; repeatable",
    )


def _doctor(options: argparse.Namespace) -> int:
    found = diagnose()
    print(json.dumps(found, indent=2) if options.json else render(found))
    return 0


def _measure(options: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    if options.study not in STUDIES:
        raise ValueError(f"STUDY must be one of {', '.join(STUDIES)}, got {options.study!r}")
    chosen = STUDIES[options.study]
    how = {
        "headline": options.headline,
        "rounds": options.rounds,
        "overlays": dict(parse_overlay(argument) for argument in options.overlay),
        "retry": options.retry,
        "progress": tqdm,
    }
    if options.cluster:
        with cluster.connect(options.cluster) as client:
            found = cluster.measure_on_cluster(chosen, client, **how)
        told = ", ".join(f"{count} {status}" for status, count in sorted(found.items()))
        print(f"on record in the data folders of the workers: {told}")
        return 0
    count = study.measure(chosen, **how)
    machine = machine_slug(study.describe(chosen.device))
    print(f"{count} items measured; records in {store.record_path(chosen.name, machine)}")
    torn = store.torn_path(chosen.name, machine)
    if torn.exists():
        print(f"lines that killed writers left cut short are in {torn}", file=sys.stderr)
    return 0


def _report(options: argparse.Namespace) -> int:
    from .report.html import build_report

    print(f"report written to {build_report(options.out)}")
    return 0


def _refresh(_: argparse.Namespace) -> int:
    from .report.refresh import refresh

    for path in refresh():
        print(f"written {path}")
    return 0
