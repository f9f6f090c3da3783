"""The commands, `python -m attnlib COMMAND`. The exit status is 0 only on success.

A command is a function of the options that were given; those that were not have its defaults. It
imports what it needs: `explain` loads no pandas, `diagnose` no study.
"""

import argparse
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from . import doctor
from .core.layer import LENGTHS_HELP, WHOLE_MODELS, parse_layer, parse_lengths, sizes_given
from .core.spec import LENGTHS, MLA

if TYPE_CHECKING:
    from .run.study import Study

FAILED, USAGE = 1, 2
OUTCOMES = {"not slower": 0, "slower": FAILED, "not decided": 3}
"""Of `compare` -> its exit status."""
DEFAULT_REPORT = Path("build/report/index.html")
SIZES = ("tp", "head_dim", "page_size")
DTYPE_WORDS = {"bf16": "bfloat16", "fp16": "float16"}
DTYPE_WORDS |= dict.fromkeys(("fp8", "fp8_e4m3"), "float8_e4m3fn")
"""The engines' words for dtypes."""


class Command(NamedTuple):
    """What a command does, by its function and its docstring, and its arguments: name -> keywords
    of `add_argument`.

    `status` is its exit status where it fails as expected. `known` makes the last lines of its
    help, of what takes a while to load.
    """

    run: Callable[..., int | None]
    arguments: Mapping[str, Mapping[str, Any]] = {}
    status: int = FAILED
    known: Callable[[], str] = str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """What is wrong, without the usage; `main` prints it as it does every other error."""
        raise ValueError(f"{message}; see --help")


def build_parser(only: str = "") -> argparse.ArgumentParser:
    """The argument parser; `--help` explains each command. `only` one command has its arguments."""
    parser = _Parser(
        prog="python -m attnlib",
        description="Reproduce, explain and prove fixes of attention-backend regressions.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        words = command.run.__doc__ or ""
        subparser = commands.add_parser(
            name,
            help=words.partition("\n")[0].removesuffix("."),
            description=words,
            argument_default=argparse.SUPPRESS,
        )
        if only in ("", name):
            subparser.epilog = command.known()
            for argument, options in command.arguments.items():
                subparser.add_argument(argument, **options)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an expected failure is one line on stderr and a non-zero status."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    name = next((word for word in words[:1] if word in COMMANDS), "")
    try:
        given = vars(build_parser(*words[:1]).parse_args(words))
        name = given.pop("command")
        for argument, value in given.items():
            if value == "" or re.search(r"\d{99}", str(value)):
                raise ValueError(f"{argument} must not be empty or of 99 digits, got {value!r:.60}")
        for option in {"dtype", "kv_dtype"} & {*given}:
            given[option] = DTYPE_WORDS.get(given[option], given[option])
        if given.get("kv_dtype") == "auto":  # no wish
            del given["kv_dtype"]
        sizes_given(**{size: given[size] for size in SIZES if size in given})
        status = COMMANDS[name].run(**given) or 0
        print(end="", flush=True)
        return status
    except BrokenPipeError:  # `| head` has read enough; what is left is flushed at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, RuntimeError, OSError) as error:
        print(" ".join(["attnlib", name]).rstrip() + ":", *str(error).splitlines(), file=sys.stderr)
        is_wrong_use = isinstance(error, ValueError | FileNotFoundError)
        return USAGE if is_wrong_use else COMMANDS[name].status


def _doctor(as_json: bool = False) -> None:
    """Machine, versions, which backends can run here, and why not."""
    diagnosis = doctor.diagnose()
    print(json.dumps(diagnosis, indent=2) if as_json else doctor.render(diagnosis))


def _diagnose(trace: str, after: str = "", shape: str = "", as_json: bool = False) -> None:
    """Attention and kernels of a server's trace, known patterns, or what two differ in."""
    from .lab.diagnose import diagnose

    parts = [part for part in shape.split(",") if part]
    for part in parts:
        if "=" not in part:
            raise ValueError(f"--shape must be N=V, got {part!r}")
    pairs = [part.partition("=")[::2] for part in parts]
    facts = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    if len(facts) < len(pairs):
        raise ValueError(f"--shape must name each fact once, got {shape!r}")
    answer = diagnose(trace, after, **facts)
    print(json.dumps(answer.to_dict(), indent=2) if as_json else answer)


def _study_named(name: str) -> "Study":
    from .studies import STUDIES, captured

    if name.endswith(".jsonl"):
        chosen, left_out = captured.study_of(Path(name))
        if left_out:
            print(f"left out: {left_out}", file=sys.stderr)
        return chosen
    if name not in STUDIES:
        raise ValueError(f"STUDY must be one of {', '.join(STUDIES)}, got {name!r}")
    return STUDIES[name]


def _known_studies() -> str:
    from .studies import STUDIES

    return f"studies: {', '.join(STUDIES)}"


def _overlays(texts: Sequence[str]) -> dict[str, Path]:
    from .run.releases import parse_overlay

    return dict(map(parse_overlay, texts))


def _measure(study: str, overlay: Sequence[str] = (), **how: Any) -> None:
    """Measure on this GPU what a study lacks, into data/records/."""
    from .run import store
    from .run.rows import machine_slug
    from .run.study import Sweep, describe

    chosen = _study_named(study)
    count = Sweep(overlays=_overlays(overlay), **how).measure(chosen)
    machine = machine_slug(describe(chosen.device))
    print(f"{count} items measured; records in {store.measured_path(chosen.name, machine)}")


def _publish(study: str, machine: str = "") -> None:
    """Move a study's measured records into its published Parquet file."""
    from .run import store

    path = store.publish(study, machine)
    count = len(store.load(path.stem, path.parent.name))
    print(f"{count} records published in {path}; their own files are removed")


def _bisect(
    study: str,
    case: str,
    releases: str = "",
    overlay: Sequence[str] = (),
    as_json: bool = False,
    **how: Any,
) -> None:
    """Find the first release at which a case became slower, or fast again.

    That is the first one slower than --good; with --good after --bad, the first one faster than
    --bad. Records go to data/records/, and are replayed without a GPU.
    """
    from .run.bisect import bisect
    from .studies.fa3_decode_regression import bisection

    chosen = _study_named(study)
    search = bisect(
        chosen,
        chosen.case_named(case),
        releases=[part.strip() for part in releases.split(",") if part.strip()],
        overlays=_overlays(overlay),
        **how,
    )
    given = "".join(f" --overlay {shlex.quote(argument)}" for argument in overlay)
    reference = f"{search.releases[0]} ({search.steps[0].reference_family})"
    text = f"""{search.backend} of {search.package}, {search.case.label}, on {search.machine}
first {search.word} release: {search.changed}
searched {", ".join(search.releases)}; ratio: run time over that of {reference}

{bisection(search).to_string(index=False)}

repeat with: {search.command}{given}"""
    print(json.dumps(search.to_dict(), indent=2) if as_json else text)


def _compare(
    base: str, new: str, cases: Path | None = None, as_json: bool = False, **how: Any
) -> int:
    """Whether a new release runs a call slower.

    Measures two releases until each case has a verdict; without a GPU replays the records. Exit
    status: 0 if every call is proved not slower, 1 if one is slower or fails, 2 for wrong use, 3 if
    that is not decided.
    """
    from .studies.upgrade import compare_releases

    if cases is None:
        keys = ""
    elif cases.suffix == ".jsonl":
        keys = "\n".join(case.key for case in _study_named(str(cases)).cases)
    else:  # An empty file is no wish for the usual calls.
        keys = cases.read_text("utf-8-sig", "replace") or "\n"
    upgrade = compare_releases(base, new, cases=keys, **how)
    print(json.dumps(upgrade.to_dict(), indent=2) if as_json else upgrade)
    print(upgrade.conclusion, file=sys.stderr if as_json else sys.stdout)
    return OUTCOMES[upgrade.outcome]


def _percent(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?%", text) or not 0 < float(text[:-1]) < 100:
        raise argparse.ArgumentTypeError(f"must be above 0% and below 100%, as 2%, got {text!r}")
    return float(text[:-1]) / 100


def _claims(ids: Sequence[str] = (), as_json: bool = False) -> None:
    """Published claims, and what the published records say."""
    from .studies import claims

    judged = claims.verdicts(ids)
    if as_json:
        print(json.dumps([row.to_dict() for row in judged], indent=2))
    elif ids:
        print("\n\n".join(map(claims.details, judged)))
    else:
        print(claims.as_frame(judged).to_string(index=False))


def _report(out: Path = DEFAULT_REPORT) -> None:
    """Execute the notebooks, write one self-contained HTML file."""
    from .report.build import build_report

    if out == DEFAULT_REPORT:
        out.parent.mkdir(parents=True, exist_ok=True)
    path = build_report(out, on_notebook=print)
    print(f"report written to {path}")


def _advise(
    lens: str,
    batch: int | None = None,
    measure: bool = False,
    heads: str = "",
    model: str = "",
    **options: Any,
) -> None:
    """For a decode call (not of MLA): the rule, nearest recorded batches, how to measure it."""
    from .lab.advise import advise
    from .lab.view import measure_call
    from .select.facts import Call, facts_of_model
    from .select.text import PINS

    pinned: dict[str, Any] = {fact: True for option, fact in PINS.items() if option in options}
    named = [name for name in ("library", "backend", "gpu") if name in options]
    how: dict[str, Any] = {name: options.pop(name) for name in named}
    layer = parse_layer(heads, model=model, **options)
    lengths = parse_lengths("lens", lens, batch)
    if measure:
        if named:
            print(f"all backends are measured here; not used: {', '.join(named)}", file=sys.stderr)
        print(measure_call(layer, lengths))
    else:
        how["facts"] = Call(**pinned, **facts_of_model(model))
        print(advise(layer, lengths, **how))


def _refresh() -> None:
    """Execute the notebooks again, redraw README's figure (replay)."""
    from .report.build import refresh

    print("written", "\nwritten ".join(map(str, refresh())))


def _explain(as_json: bool = False, **given: Any) -> None:
    """Which backend a library picks, and why, or what changes between releases; needs no GPU."""
    from .select.text import answer

    print(answer(given, as_json))


def _known_facts() -> str:
    from dataclasses import fields

    from .select import GPUS, LIBRARIES, MODES, Call

    names = ", ".join(field.name for field in fields(Call))
    lists = f"libraries: {', '.join(LIBRARIES)}; GPUs: {', '.join(GPUS)}"
    return f"{lists}; modes: {', '.join(MODES)}; fields of --call: {names}"


def _repro(name: str) -> None:
    """Print a Python script that shows a regression with torch and the library alone.

    It needs no attnlib: `repro split_cap > split_cap.py`, for whoever maintains the library.
    """
    from .lab.repro import script

    print(script(name), end="")


def _known_scripts() -> str:
    from .lab.repro import names

    return f"scripts: {', '.join(names())}"


def _of(help: str, **options: Any) -> dict[str, Any]:
    return {"help": help, **options}


JSON = {"--json": _of("print JSON instead of text", action="store_true", dest="as_json")}
OVERLAY = {
    "--overlay": _of(
        "folder that holds this release; otherwise pip installs it (PIP_FIND_LINKS and other "
        "settings of pip hold); repeatable",
        action="append",
        metavar="NAME==VERSION=DIR",
    )
}
LAYER = {
    "--model": _of(f"a layer of: {', '.join(WHOLE_MODELS)}", metavar="NAME"),
    "--tp": _of("GPUs that share the heads of a model; default: 1", type=int, metavar="N"),
    "--heads": _of("in place of --model: query and KV heads: 8/1, of MLA 16/1", metavar="Q/KV"),
    "--head-dim": _of("default: the model's, 128, or 576 of MLA", type=int, metavar="N"),
    "--page-size": _of("default: 16; explain: the library's own", type=int, metavar="N"),
}
DTYPES = {
    "--dtype": _of("the query's; default: bfloat16"),
    "--kv-dtype": _of("the cache's; default: auto, the query's or as an engine resolves it"),
}
BATCH = {"--batch": _of("requests, if --lens is one length or range", type=int, metavar="N")}
MEASURE = {
    "study": _of("a study, or a file of captured steps, .jsonl", metavar="STUDY"),
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
BISECT = {
    **{f"--{n}": _of(help, required=True, metavar=n.upper()) for n, help in ASKED.items()},
    "--backend": _of("default: flashinfer-auto"),
    "--rounds": _of("at each step; default: 3", type=int, metavar="N"),
    "--releases": _of("search these instead of all there are", metavar="V,V,..."),
    **OVERLAY,
    **JSON,
}
COMPARE = {
    "--base": _of("the release to compare with, or a wheel or folder", required=True),
    "--new": _of("the release in question, or a wheel or folder", required=True),
    **LAYER,
    "--model": LAYER["--model"]
    | _of(f"layers of: {', '.join(WHOLE_MODELS)}; {MLA}", nargs="+", dest="models"),
    **BATCH,
    "--lens": _of(f"one decode call of that layer: {LENGTHS_HELP}", metavar="N,..."),
    "--backend": _of("what an engine pins, such as fa2, xqa, prefill-fa2"),
    "--cases": _of(
        "a file of keys of cases, such as 32/8,d128,p16,b16,k8192,chat (lengths: "
        f"{', '.join(LENGTHS)}, or 33+1+60), or steps.jsonl",
        type=Path,
        metavar="FILE",
    ),
    "--not-slower": _of("how much slower a call may be, default: 2%%", type=_percent, metavar="P"),
    **JSON,
}
PUBLISH = {
    "study": _of("a study that was measured", metavar="STUDY"),
    "--machine": _of("a folder of data/records, if several have it", metavar="M"),
}
REPORT = {"--out": _of(f"default: {DEFAULT_REPORT}", type=Path, metavar="FILE")}
CLAIMS = {"ids": _of("show all there is on these claims", nargs="*", metavar="ID"), **JSON}
ADVISE = {
    **LAYER,
    **BATCH,
    **DTYPES,
    "--lens": _of(LENGTHS_HELP, required=True, metavar="N,..."),
    "--engine": _of(
        "sglang==0.5.23, vllm==0.33.0, or the library; default: flashinfer==0.7.2",
        dest="library",
    ),
    "--backend": _of("the backend of it that is pinned, such as flashinfer"),
    "--gpu": _of("such as h100, b200 or sm90; default: sm90"),
    "--measure": _of("on a GPU: all backends; builds of kernels add minutes", action="store_true"),
}
EXPLAIN = {
    "--library": _of("sglang==0.5.23; sglang==0.5.23,flashinfer==0.7.2.post1 if that is installed"),
    "--gpu": _of("such as sm90 or h100; several with --diff: sm90,sm100"),
    "--mode": _of("such as decode; several with --diff"),
    **LAYER,
    **DTYPES,
    "--diff": _of(
        "what changes from OLD to NEW, such as flashinfer==0.6.13, for --gpu, --mode, --policy, "
        "--call and a layer (also DeepSeek MLA), as far as they are given",
        nargs=2,
        metavar=("OLD", "NEW"),
    ),
    "--policy": _of("an engine's rule, or a backend's name; default: auto"),
    "--call": _of(
        "a fact of the call, such as graph or kv_lens=8192x16; repeatable; topk is 2048 in "
        "sparse_mla unless it is given",
        action="append",
        metavar="FIELD[=VALUE]",
    ),
    **JSON,
}
DIAGNOSE = {
    "trace": _of("of torch.profiler (json, json.gz) or Nsight Systems (sqlite)", metavar="TRACE"),
    "after": _of(
        "a second trace: what got slower from the first to it", nargs="?", metavar="AFTER"
    ),
    "--shape": _of("what it does not tell: heads=32/8,kv_len=8192", metavar="N=V,..."),
    **JSON,
}
REPRO = {"name": _of("a script", metavar="NAME")}
COMMANDS = {
    "doctor": Command(_doctor, JSON),
    "diagnose": Command(_diagnose, DIAGNOSE, status=USAGE),
    "measure": Command(_measure, MEASURE, known=_known_studies),
    "publish": Command(_publish, PUBLISH),
    "bisect": Command(_bisect, BISECT),
    "compare": Command(_compare, COMPARE, status=USAGE),
    "claims": Command(_claims, CLAIMS),
    "report": Command(_report, REPORT),
    "advise": Command(_advise, ADVISE, status=USAGE),
    "refresh": Command(_refresh),
    "repro": Command(_repro, REPRO, known=_known_scripts),
    "explain": Command(_explain, EXPLAIN, status=USAGE, known=_known_facts),
}
