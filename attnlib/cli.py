"""The commands, `python -m attnlib COMMAND`. The exit status is 0 only on success."""

import argparse
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import doctor
from .core.layer import LENGTHS_HELP, WHOLE_MODELS, parse_layer, parse_lengths, sizes_given
from .core.spec import LENGTHS
from .run import store, study
from .run.bisect import Bisection, bisect
from .run.record import machine_slug
from .run.releases import parse_overlay
from .select import text as explain
from .select.facts import facts_of_model
from .studies import STUDIES

FAILED, USAGE = 1, 2
OUTCOMES = {"not slower": 0, "slower": FAILED, "not decided": 3}
"""Of `compare` -> its exit status."""
DEFAULT_REPORT = Path("build/report/index.html")


class Command(NamedTuple):
    """What a command does, its help, and its arguments: name -> keywords of `add_argument`.

    `status` is its exit status where it fails as expected.
    """

    run: Callable[[argparse.Namespace], int | None]
    help: str
    arguments: Mapping[str, Mapping[str, Any]] = {}
    description: str | None = None
    status: int = FAILED


def build_parser() -> argparse.ArgumentParser:
    """The argument parser; `--help` explains each command."""
    parser = argparse.ArgumentParser(
        prog="python -m attnlib",
        description="Reproduce, explain and prove fixes of attention-backend regressions.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        description = command.description or command.help
        subparser = commands.add_parser(name, help=command.help, description=description)
        for argument, options in command.arguments.items():
            subparser.add_argument(argument, **options)
        if name == "explain":
            explain.add_arguments(subparser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an expected failure is one line on stderr and a non-zero status."""
    options = build_parser().parse_args(arguments)
    try:
        status = COMMANDS[options.command].run(options) or 0
        print(end="", flush=True)
        return status
    except BrokenPipeError:  # `| head` has read enough; what is left is flushed at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, RuntimeError, OSError) as error:
        print(f"attnlib {options.command}: {error}", file=sys.stderr)
        is_wrong_use = isinstance(error, ValueError | FileNotFoundError)
        return USAGE if is_wrong_use else COMMANDS[options.command].status


def _doctor(options: argparse.Namespace) -> None:
    diagnosis = doctor.diagnose()
    print(json.dumps(diagnosis, indent=2) if options.json else doctor.render(diagnosis))


def _diagnose(options: argparse.Namespace) -> None:
    from .lab.diagnose import diagnose

    pairs = [part.partition("=")[::2] for part in options.shape.split(",") if part]
    shape = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    if len(shape) < len(pairs):
        raise ValueError(f"--shape must name each fact once, got {options.shape!r}")
    answer = diagnose(options.trace, options.after, **shape)
    print(json.dumps(answer.to_dict(), indent=2) if options.json else answer)


def _study_named(name: str) -> study.Study:
    if name.endswith(".jsonl"):
        from .studies import captured

        chosen, left_out = captured.study_of(Path(name))
        if left_out:
            print(f"left out: {left_out}", file=sys.stderr)
        return chosen
    if name not in STUDIES:
        raise ValueError(f"STUDY must be one of {', '.join(STUDIES)}, got {name!r}")
    return STUDIES[name]


def _measure(options: argparse.Namespace) -> None:
    from tqdm.auto import tqdm

    chosen = _study_named(options.study)
    how = {name: getattr(options, name) for name in ("rounds", "retry")}
    sweep = study.Sweep(overlays=dict(map(parse_overlay, options.overlay)), progress=tqdm, **how)
    count = sweep.measure(chosen)
    machine = machine_slug(study.describe(chosen.device))
    print(f"{count} items measured; records in {store.journal_path(chosen.name, machine)}")
    torn = store.torn_path(chosen.name, machine)
    if torn.exists():
        print(f"lines that killed writers left cut short are in {torn}", file=sys.stderr)


def _publish(options: argparse.Namespace) -> None:
    path = store.publish(options.study, options.machine)
    count = len(store.read(path.stem, path.parent.name))
    print(f"{count} records published in {path}; the journal is in it, and removed")


def _bisect(options: argparse.Namespace) -> None:
    chosen = _study_named(options.study)
    bisection = bisect(
        chosen,
        chosen.case_named(options.case),
        package=options.package,
        good=options.good,
        bad=options.bad,
        backend=options.backend,
        rounds=options.rounds,
        releases=[part.strip() for part in options.releases.split(",") if part.strip()],
        overlays=dict(map(parse_overlay, options.overlay)),
        on_round=lambda words: print(words, file=sys.stderr, flush=True),
    )
    given = "".join(f" --overlay {shlex.quote(argument)}" for argument in options.overlay)
    print(
        json.dumps(bisection.to_dict(), indent=2)
        if options.json
        else _bisect_text(bisection, given)
    )


def _bisect_text(search: Bisection, given: str) -> str:
    from .studies.fa3_decode_regression import bisection

    reference = f"{search.releases[0]} ({search.steps[0].reference_family})"
    return f"""{search.backend} of {search.package}, {search.case.label}, on {search.machine}
searched {", ".join(search.releases)}; ratio: run time over that of {reference}

{bisection(search).to_string(index=False)}

first {search.word} release: {search.changed}
repeat with: {search.command}{given}"""


def _compare(options: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    from .studies.upgrade import compare_releases

    if not options.cases:
        cases = ""
    elif options.cases.suffix == ".jsonl":
        cases = "\n".join(case.key for case in _study_named(str(options.cases)).cases)
    else:  # An empty file is no wish for the usual calls.
        cases = options.cases.read_text("utf-8-sig", "replace") or "\n"
    names = (*LAYER, "models", "lens", "backend", "not_slower")
    how = {name: getattr(options, name) for name in names}
    upgrade = compare_releases(options.base, options.new, cases=cases, progress=tqdm, **how)
    print(json.dumps(upgrade.to_dict(), indent=2) if options.json else upgrade)
    print(upgrade.conclusion, file=sys.stderr if options.json else sys.stdout)
    return OUTCOMES[upgrade.outcome]


def _percent(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?%", text) or not float(text[:-1]):
        raise argparse.ArgumentTypeError(f"must be a percentage such as 2%, got {text!r}")
    return float(text[:-1]) / 100


def _claims(options: argparse.Namespace) -> None:
    from .studies import claims

    judged = claims.verdicts(options.ids)
    if options.json:
        print(json.dumps([row.to_dict() for row in judged], indent=2))
    elif options.ids:
        print("\n\n".join(map(claims.details, judged)))
    else:
        print(claims.as_frame(judged).to_string(index=False))


def _report(options: argparse.Namespace) -> None:
    from .report.build import build_report

    if options.out == DEFAULT_REPORT:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    path = build_report(options.out, only=options.only or (), on_notebook=print)
    print(f"report written to {path}")


def _advise(options: argparse.Namespace) -> None:
    from .lab.advise import advise
    from .lab.view import measure_call

    sizes = sizes_given(**{name: getattr(options, name) for name in SIZES})
    words = {name: getattr(options, name) for name in ("heads", "model", "dtype", "kv_dtype")}
    layer = parse_layer(**words, **sizes)
    lengths = parse_lengths("lens", options.lens, options.batch)
    if options.measure:
        print(measure_call(layer, lengths))
        return
    pins: dict[str, Any] = {
        fact: True for option, fact in explain.PINS.items() if getattr(options, option)
    }
    facts = explain.Call(**pins, **facts_of_model(options.model))
    how = {name: getattr(options, name) for name in ("library", "backend", "gpu")}
    print(advise(layer, lengths, facts=facts, **how))


def _refresh(_: argparse.Namespace) -> None:
    from .report.build import refresh
    from .studies import gains

    print("written", gains.write())
    print("written", "\nwritten ".join(map(str, refresh())))


def _of(help: str, **options: Any) -> dict[str, Any]:
    return {"help": help, **options}


JSON = {"--json": _of("print JSON instead of text", action="store_true")}
OVERLAY = {
    "--overlay": _of(
        "folder that holds this release; otherwise it is installed from the package index "
        "or from the folder of wheels that ATTNLIB_WHEELS names; repeatable",
        action="append",
        default=[],
        metavar="NAME==VERSION=DIR",
    )
}
SIZES = ("tp", "head_dim", "page_size")
LAYER = (*SIZES, "heads", "batch")
LAYER_ARGUMENTS = {
    "--tp": _of("GPUs that share the heads of a model", type=int, metavar="N"),
    "--heads": _of("query and KV heads of one GPU, such as 8/1", default="", metavar="Q/KV"),
    "--head-dim": _of("default: the model's, or 128", type=int, metavar="N"),
    "--page-size": _of("default: 16", type=int, metavar="N"),
    "--batch": _of("requests, if --lens is one length or range", type=int, metavar="N"),
}
MEASURE = {
    "study": _of(
        f"one of: {', '.join(STUDIES)}; or a file of captured steps, .jsonl", metavar="STUDY"
    ),
    "--rounds": _of("rounds of every grid", type=int, metavar="N"),
    "--retry": _of("measure again what is on record as failed", action="store_true"),
    **OVERLAY,
}
ASKED = {
    "package": "distribution whose releases are searched, such as flashinfer-python",
    "good": "a release that is fast",
    "bad": "a release that is slow",
    "study": "the study that has the case",
    "case": "a case by its key, such as 32/8,d128,p16,b16,k8192, or by its label",
}
DEFAULT = "default: %(default)s"
BISECT = {
    **{f"--{n}": _of(help, required=True, metavar=n.upper()) for n, help in ASKED.items()},
    "--backend": _of(DEFAULT, default="flashinfer-auto"),
    "--rounds": _of(f"at each step; {DEFAULT}", type=int, default=3, metavar="N"),
    "--releases": _of("search these instead of all there are", default="", metavar="V,V,..."),
    **OVERLAY,
    **JSON,
}
COMPARE = {
    "--base": _of("the release to compare with, or a wheel or folder", required=True),
    "--new": _of("the release in question, or a wheel or folder", required=True),
    "--model": _of(
        f"only the usual calls of these: {', '.join(WHOLE_MODELS)} (with --tp, or as "
        '"Llama-3.1-70B at TP 8"), DeepSeek MLA',
        nargs="+",
        default=(),
        dest="models",
        metavar="NAME",
    ),
    **LAYER_ARGUMENTS,
    "--lens": _of(f"one decode call of that layer: {LENGTHS_HELP}", default="", metavar="N,..."),
    "--backend": _of("what an engine pins, such as fa2, xqa, prefill-fa2", default=""),
    "--cases": _of(
        "a file of keys of cases, such as 32/8,d128,p16,b16,k8192,chat (lengths: "
        f"{', '.join(LENGTHS)}, or 33+1+60), or steps.jsonl",
        type=Path,
        metavar="FILE",
    ),
    "--not-slower": _of(
        "how much slower a call may be, default: 2%%", type=_percent, default=0.02, metavar="P"
    ),
    **JSON,
}
PUBLISH = {
    "study": _of("a study that was measured", metavar="STUDY"),
    "--machine": _of("a folder of data/records, if several have it", default="", metavar="M"),
}
REPORT = {
    "--out": _of(DEFAULT, type=Path, default=DEFAULT_REPORT, metavar="FILE"),
    "--only": _of(
        "only these notebooks, such as 02,05", type=lambda n: n.split(","), metavar="N,N,..."
    ),
}
CLAIMS = {"ids": _of("show all there is on these claims", nargs="*", metavar="ID"), **JSON}
ADVISE = {
    "--model": _of(f"or --heads: {', '.join(WHOLE_MODELS)}", default="", metavar="NAME"),
    **LAYER_ARGUMENTS,
    "--dtype": _of("the query's; default: bfloat16", default="bfloat16"),
    "--kv-dtype": _of("the cache's; default: the query's", default=""),
    "--lens": _of(LENGTHS_HELP, required=True, metavar="N,..."),
    "--engine": _of(
        f"sglang==0.5.23, vllm==0.33.0, or the library; {DEFAULT}",
        default="flashinfer==0.7.2",
        dest="library",
    ),
    "--backend": _of("the backend of it that is pinned, such as flashinfer", default="auto"),
    "--gpu": _of(f"such as h100, b200 or sm90; {DEFAULT}", default="sm90"),
    "--measure": _of("on a GPU: measure all backends at this call", action="store_true"),
}
DIAGNOSE = {
    "trace": _of("of torch.profiler (json, json.gz) or Nsight Systems (sqlite)", metavar="TRACE"),
    "after": _of(
        "a second trace: what got slower from the first to it",
        nargs="?",
        default="",
        metavar="AFTER",
    ),
    "--shape": _of("what it does not tell: heads=32/8,kv_len=8192", default="", metavar="N=V,..."),
    **JSON,
}
COMMANDS = {
    "doctor": Command(_doctor, "machine, versions, which backends can run here, and why not", JSON),
    "diagnose": Command(
        _diagnose,
        "attention and kernels of a server's trace, known patterns, or what two differ in",
        DIAGNOSE,
        status=USAGE,
    ),
    "measure": Command(
        _measure, "measure on this GPU what a study lacks, into data/records/", MEASURE
    ),
    "publish": Command(_publish, "turn a study's journal into its published Parquet file", PUBLISH),
    "bisect": Command(
        _bisect,
        "find the first release at which a case became slower, or fast again",
        BISECT,
        "Find the first release slower than --good; with --good after --bad, the first one faster "
        "than --bad. Records go to data/records/, and are replayed without a GPU.",
    ),
    "compare": Command(
        _compare,
        "whether a new release runs a call slower",
        COMPARE,
        "Measure two releases until each case has a verdict; without a GPU replay the records. "
        "Exit status: 0 if every call is proved not slower, 1 if one is slower or fails, 2 for "
        "wrong use, 3 if that is not decided.",
        status=USAGE,
    ),
    "claims": Command(_claims, "published claims, and what the published records say", CLAIMS),
    "report": Command(_report, "execute the notebooks, write one self-contained HTML file", REPORT),
    "advise": Command(
        _advise,
        "for a decode call: the rule, the nearest recorded batches, and how to measure it",
        ADVISE,
        status=USAGE,
    ),
    "refresh": Command(_refresh, "re-execute the notebooks, redraw README's figure (replay)"),
    "explain": Command(
        lambda options: print(explain.answer(options)),
        "which backend a library picks, and why, or what changes between releases; needs no GPU",
        status=USAGE,
    ),
}
