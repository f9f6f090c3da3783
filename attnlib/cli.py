"""The commands, `python -m attnlib COMMAND`. Exit status 0 only on success."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .doctor import diagnose, render
from .run import cluster, store, study
from .run.bisect import Bisection, bisect
from .run.record import machine_slug
from .run.releases import parse_overlay
from .select import text as explain
from .studies import STUDIES

FAILED, USAGE = 1, 2
DEFAULT_REPORT = Path("build/report/index.html")
BISECT = {
    "package": "distribution whose releases are searched, such as flashinfer-python",
    "good": "a release that is fast",
    "bad": "a release that is slow",
    "study": "the study that has the case",
    "case": "a case by its key, such as 32/8,d128,p16,b16,k8192, or by its label",
}


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
    publishing = commands.add_parser(
        "publish", help="turn the journal of a study into its published Parquet file"
    )
    publishing.add_argument("study", metavar="STUDY", help="a study that was measured")
    publishing.add_argument(
        "--machine", default="", metavar="M", help="a folder of data/records, if several have it"
    )
    _add_bisect(commands)
    claims = commands.add_parser(
        "claims", help="published claims and what the records of the published GPU say of them"
    )
    claims.add_argument("ids", nargs="*", metavar="ID", help="show all there is on these claims")
    claims.add_argument("--json", action="store_true", help="print JSON instead of text")
    report = commands.add_parser(
        "report", help="execute every notebook and write one self-contained HTML file"
    )
    report.add_argument(
        "--out", type=Path, default=DEFAULT_REPORT, metavar="FILE", help="default: %(default)s"
    )
    report.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="N,N,...",
        help="only these notebooks, such as 02,05",
    )
    policy = commands.add_parser(
        "policy", help="write which decode backend is fastest, as measured, for an engine to load"
    )
    policy.add_argument(
        "--out", type=Path, default=Path("build/policy.json"), help="default: %(default)s"
    )
    new = commands.add_parser(
        "new-study", help="start a study: a module, and a notebook that already runs in replay"
    )
    new.add_argument("name", metavar="NAME", help="lower-case words joined by _")
    commands.add_parser(
        "refresh", help="re-execute the notebooks in place and redraw README's figure (replay)"
    )
    explaining = commands.add_parser(
        "explain",
        help="which backend a library picks for a call, and why, rule by rule",
        description="Explain the choice of a release read by this workbench; needs no GPU.",
    )
    explain.add_arguments(explaining)
    commands.add_parser("features", help="write the table of backends, data/backend_features.md")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an expected failure is one line on stderr and a non-zero status."""
    options = build_parser().parse_args(arguments)
    commands = {
        "doctor": _doctor,
        "measure": _measure,
        "publish": _publish,
        "bisect": _bisect,
        "claims": _claims,
        "report": _report,
        "policy": _policy,
        "new-study": _new_study,
        "refresh": _refresh,
        "explain": _explain,
        "features": _features,
    }
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
    _add_overlay(parser)


def _add_bisect(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bisect",
        help="find the first release at which a case became slower, or fast again",
        description="Find the first release slower than --good; with --good after --bad, the "
        "first one faster than --bad. Records go to data/records/, and are replayed without a GPU.",
    )
    for name in ("package", "good", "bad", "study", "case"):
        parser.add_argument(f"--{name}", required=True, metavar=name.upper(), help=BISECT[name])
    parser.add_argument("--backend", default="flashinfer-auto", help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="at each step; default: %(default)s"
    )
    parser.add_argument(
        "--releases", default="", metavar="V,V,...", help="search these instead of all there are"
    )
    _add_overlay(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_overlay(parser: argparse.ArgumentParser) -> None:
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

    chosen = _study_named(options.study)
    sweep = study.Sweep(
        headline=options.headline,
        rounds=options.rounds,
        overlays=dict(parse_overlay(argument) for argument in options.overlay),
        retry=options.retry,
        progress=tqdm,
    )
    if options.cluster:
        with cluster.connect(options.cluster) as client:
            found = cluster.measure_on_cluster(chosen, client, sweep)
        told = ", ".join(f"{count} {status}" for status, count in sorted(found.items()))
        print(f"on record in the data folders of the workers: {told}")
        return 0
    count = sweep.measure(chosen)
    machine = machine_slug(study.describe(chosen.device))
    print(f"{count} items measured; records in {store.journal_path(chosen.name, machine)}")
    torn = store.torn_path(chosen.name, machine)
    if torn.exists():
        print(f"lines that killed writers left cut short are in {torn}", file=sys.stderr)
    return 0


def _publish(options: argparse.Namespace) -> int:
    path = store.publish(options.study, options.machine)
    count = len(store.read(path.stem, path.parent.name))
    print(f"{count} records published in {path}; the journal is in it, and removed")
    return 0


def _bisect(options: argparse.Namespace) -> int:
    chosen = _study_named(options.study)
    overlays = dict(parse_overlay(argument) for argument in options.overlay)
    found = bisect(
        chosen,
        chosen.case_named(options.case),
        package=options.package,
        good=options.good,
        bad=options.bad,
        backend=options.backend,
        rounds=options.rounds,
        releases=[part.strip() for part in options.releases.split(",") if part.strip()],
        overlays=overlays,
        on_round=lambda words: print(words, file=sys.stderr, flush=True),
    )
    given = "".join(f" --overlay {shlex.quote(argument)}" for argument in options.overlay)
    print(json.dumps(found.to_dict(), indent=2) if options.json else _bisect_text(found, given))
    return 0


def _bisect_text(found: Bisection, given: str) -> str:
    from .studies.fa3_decode_regression.tables import bisection

    reference = f"{found.releases[0]} ({found.steps[0].reference_family})"
    lines = [
        f"{found.backend} of {found.package}, {found.case.label}, on {found.machine}",
        f"searched {', '.join(found.releases)}; ratio: run time over that of {reference}",
        "",
        bisection(found).to_string(index=False),
        "",
        f"first {found.word} release: {found.changed}",
        f"repeat with: {found.command}{given}",
    ]
    return "\n".join(lines)


def _study_named(name: str) -> study.Study:
    if name not in STUDIES:
        raise ValueError(f"STUDY must be one of {', '.join(STUDIES)}, got {name!r}")
    return STUDIES[name]


def _claims(options: argparse.Namespace) -> int:
    from .studies import claims

    checked = claims.verdicts(ids=options.ids)
    if options.json:
        print(json.dumps([claim.to_dict() for claim in checked], indent=2, allow_nan=False))
    elif options.ids:
        print("\n\n".join(claims.render_details(claim) for claim in checked))
    else:
        print(claims.render_table(checked))
    return 0


def _report(options: argparse.Namespace) -> int:
    from .report.build import build_report

    if options.out == DEFAULT_REPORT:
        DEFAULT_REPORT.parent.mkdir(parents=True, exist_ok=True)
    print(f"report written to {build_report(options.out, only=options.only or ())}")
    return 0


def _policy(options: argparse.Namespace) -> int:
    from .core.policy import policy
    from .studies.backend_policy import learn as measured

    found = measured.current()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    path = policy.save(found, options.out)
    cases = sum(map(len, found.points.values()))
    print(f"{cases} cases of {len(found.points)} layers on {found.gpu_id} written to {path}")
    return 0


def _new_study(options: argparse.Namespace) -> int:
    from .report.new_study import new_study

    written = [os.path.relpath(path) for path in new_study(options.name)]
    for path in written:
        print(f"written {path}")
    print(f"what is left to do: grep -n TODO {shlex.join(written)}")
    return 0


def _refresh(_: argparse.Namespace) -> int:
    from .report.build import refresh

    for path in refresh():
        print(f"written {path}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    print(explain.answer(options))
    return 0


def _features(_: argparse.Namespace) -> int:
    from .select.features import write

    print(f"written {write()}")
    return 0
