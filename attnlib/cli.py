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
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

from . import CRASHED, __version__, doctor, install_advice
from .core.call_text import (
    DTYPE_WORDS,
    EXAMPLE,
    LENS_HELP,
    OTHER_NAMES,
    CallText,
    Lens,
    did_you_mean,
)
from .core.layer import parse_layer, sizes_given
from .core.spec import MLA, MLA_HEAD_DIM
from .measure.files import read_limited
from .measure.printable import printable
from .run.missing import UNANSWERED
from .select.lines import fitted

if TYPE_CHECKING:
    from .lab.advise import Advice
    from .lab.stacks import Stacks
    from .run.study import Study, Sweep
    from .select.facts import Call

FAILED = 1
USAGE = 2
KNOWN_PROBLEM = 4
"""A known problem, its size measured or reported, costs the call of `advise`, or what the library
picks cannot run the call."""
CHANGED = 6
"""A release of another package changed what was read of it."""
UNDECIDED = 3
"""A question that no record answers, without a GPU to measure; also where rounds decide nothing."""
OUTCOMES = {"not slower": 0, "slower": FAILED, "not decided": UNDECIDED}
"""Outcome of `compare`, and of `diagnose` with two traces -> exit status."""
CRASH_MESSAGE = "crashed, which is a fault of attnlib and no result: please report the lines above"
MOST_OF_ERROR = 2000
"""Characters of an error that are printed."""
STATUSES = f"""exit status: 0 on success; {FAILED} if a call is slower or the command failed,
or with diagnose --fail-on pattern if AFTER shows a new one;
{USAGE} for wrong use;
{UNDECIDED} if a call is not decided, or if no record answers and there is no GPU;
{KNOWN_PROBLEM} if advise says a known problem that holds, its size measured or reported,
or that the pick cannot run the call (with --diff: what comes, or cannot run any more);
{CRASHED} if attnlib itself crashed, which says nothing about any call;
{CHANGED} if watch names what must be read again, or a call that is slower;
{128 + signal.SIGINT} after Ctrl-C."""
DEFAULT_REPORT = Path("build/report/index.html")
PACKAGES = ("sglang", "vllm", "flashinfer")
"""Releases that --shape may state, SGLang's as sglang=0.5.23."""
SIZES = ("tp", "head_dim", "page_size")
SPELLINGS = {
    "--engine": "--library",
    "--library": "--engine",
    "--policy": "--backend",
    "--backend": "--policy",
}
"""Option -> its other name, which every command with the option takes too."""
Options = dict[str, dict[str, Any]]
"""Argument of a command -> keywords of `add_argument`."""
Subject = tuple[Any, ...]
"""A call as the first arguments of `advise` and `measure_call`."""


class Command(NamedTuple):
    """A command: its function, whose docstring is its help, and its arguments.

    `status` is its exit status where it fails as expected. `known` returns the last lines of its
    help, which take a while to build; only this command itself calls it.
    """

    run: Callable[..., int | None]
    arguments: Options = {}
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
        epilog=STATUSES,
    )
    parser.add_argument("--version", action="version", version=f"attnlib {__version__}")
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
                _add_other_name(subparser, argument, options)
    return parser


def _add_other_name(
    parser: argparse.ArgumentParser,
    argument: str,
    options: dict[str, Any],
) -> None:
    """Add the other name of an option, which --help does not show."""
    if argument in SPELLINGS:
        hidden = {
            "dest": argument.removeprefix("--"),
            **options,
            "help": argparse.SUPPRESS,
        }
        parser.add_argument(SPELLINGS[argument], **hidden)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an expected failure is one line on stderr and a non-zero status.

    Any other exception is printed with its traceback and has status `CRASHED`, so that a crash is
    never taken for a verdict. Raises ModuleNotFoundError where the workbench is not installed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    first = words[0] if words else ""
    name = first if first in COMMANDS else ""
    try:
        _require_command(first)
        given = vars(build_parser(first).parse_args(words))
        name = given.pop("command")
        _check(given)
        status = COMMANDS[name].run(**given) or 0
        print(end="", flush=True)
        return status
    except BrokenPipeError:  # `| head` has read enough; what is left is flushed at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, RuntimeError, OSError) as error:
        one_line = " ".join(str(error).splitlines())
        message = _as_typed(one_line, words)
        _say(f"{_program(name)}:", _cut(message), file=sys.stderr)
        if isinstance(error, UNANSWERED):
            return UNDECIDED
        is_wrong_use = isinstance(error, ValueError | FileNotFoundError)
        return USAGE if is_wrong_use else COMMANDS[name].status
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and install_advice(error):
            raise
        _say(traceback.format_exc(), file=sys.stderr)
        _say(_program(name), CRASH_MESSAGE, file=sys.stderr)
        return CRASHED


def _require_command(word: str) -> None:
    """ValueError, which names the nearest, for a first word that is neither command nor option."""
    if word not in COMMANDS and not word.startswith("-") and word:
        near = did_you_mean(word, COMMANDS)
        raise ValueError(
            f"command must be one of {', '.join(COMMANDS)}, got {word!r}{near}; see --help"
        )


def _as_typed(told: str, words: Sequence[str]) -> str:
    """An error that begins with an option's other name begins with the one that was typed."""
    for word in words:
        option = word.partition("=")[0]
        other = SPELLINGS.get(option, "").removeprefix("--")
        if other and told.startswith(f"{other} "):
            return option.removeprefix("--") + told.removeprefix(other)
    return told


def _program(name: str) -> str:
    """How a line on stderr begins."""
    return f"attnlib {name}".rstrip()


def _cut(text: str) -> str:
    """Both ends of an error that quotes a value without end."""
    if len(text) <= MOST_OF_ERROR:
        return text
    half = MOST_OF_ERROR // 2
    return f"{text[:half]} ... {text[-half:]}"


def _say(*words: object, file: TextIO | None = None) -> None:
    """Print what a terminal may show: names in files can hold what steers one."""
    text = " ".join(map(str, words))
    print(printable(text), file=file)


def _check(given: dict[str, Any]) -> None:
    """ValueError for a value that no option takes; the engines' words for dtypes become ours."""
    for argument, value in given.items():
        if value == "" or re.search(r"\d{99}", str(value)):
            raise ValueError(f"{argument} must not be empty or of 99 digits, got {value!r:.60}")
    for option in ("dtype", "kv_dtype"):
        if option in given:
            given[option] = DTYPE_WORDS.get(given[option], given[option])
    if given.get("kv_dtype") == "auto":  # the default, under its name in the engines
        del given["kv_dtype"]
    sizes = {size: given[size] for size in SIZES if size in given}
    sizes_given(**sizes)


def _in_json(data: Any) -> str:
    return json.dumps(data, indent=2)


def _doctor(as_json: bool = False) -> None:
    """Show the machine, library versions, and which backends can run here, or why not."""
    facts = doctor.examine()
    _say(_in_json(facts) if as_json else doctor.render(facts))


def _diagnose(
    trace: str,
    after: str = "",
    shape: str = "",
    fail_on: str = "",
    as_json: bool = False,
    details: bool = False,
) -> int:
    """Find attention kernels and known problems in a server's trace, or compare two traces.

    With --fail-on slower the exit status is 1 where steps of some kind are slower: over 5 % longer
    in the mean, and each usual step of AFTER longer than each before. It is 3 where that is not
    decided: over 5 % longer but ranges overlap, under three steps count, or layers, GPUs, batches
    or lengths differ.
    With --fail-on pattern it is 1 where AFTER shows a known pattern that TRACE does not.
    """
    from .lab.diagnose import TraceChange, diagnose
    from .lab.diagnosis import Diagnosis

    if fail_on and not after:
        raise ValueError(f"--fail-on {fail_on} must have two traces, TRACE and AFTER, got one")
    answer = diagnose(
        path=trace,
        after=after,
        **_facts_of_shape(shape),
    )
    if as_json:
        _say(_in_json(answer.to_dict()))
    elif details and isinstance(answer, Diagnosis):
        _say(answer.details)
    else:
        _say(answer)
    if not isinstance(answer, TraceChange):
        return 0
    if fail_on == "pattern":
        return FAILED if answer.new_patterns else 0
    return OUTCOMES[answer.outcome] if fail_on else 0


def _facts_of_shape(shape: str) -> dict[str, int | str]:
    """The words of a call, and releases such as `sglang=0.5.23` beside them; or the facts of
    `heads=32/8,kv_len=8192` as older releases had them."""
    if not re.search(r"\b(lens|page)=", shape):
        return _listed_facts(filter(None, re.split("[, ]", shape)))
    words = shape.split()
    releases = []
    for word in words:
        if word.partition("=")[0] in PACKAGES:
            releases.append(word)
    call = [word for word in words if word not in releases]
    return CallText.read(" ".join(call)).given | _listed_facts(releases)


def _listed_facts(words: Iterable[str]) -> dict[str, int | str]:
    """The facts of words NAME=VALUE, each once."""
    facts: dict[str, int | str] = {}
    for word in words:
        name, given, value = word.partition("=")
        if not given:
            raise ValueError(f"--shape must be N=V, got {word!r}")
        if name in facts:
            raise ValueError(f"--shape must name each fact once, got {name!r} again")
        facts[name] = int(value) if value.isdecimal() else value
    return facts


def _study_named(name: str) -> "Study":
    from .studies import STUDIES, captured, require_sound

    if name.endswith(".jsonl"):
        chosen, left_out = captured.study_of(Path(name))
        if left_out:
            _say(f"left out: {left_out}", file=sys.stderr)
        return chosen
    require_sound(name)
    if name not in STUDIES:
        raise ValueError(f"STUDY must be one of {', '.join(_measurable())}, got {name!r}")
    return STUDIES[name]


def _measurable() -> list[str]:
    from .studies import STUDIES

    return [name for name, study in STUDIES.items() if not study.retired]


def _known_studies() -> str:
    return f"studies: {', '.join(_measurable())}"


def _overlays(texts: Sequence[str]) -> dict[str, Path]:
    from .run.releases import parse_overlay

    return dict(map(parse_overlay, texts))


def _measure(
    study: str,
    overlay: Sequence[str] = (),
    gpus: str = "",
    dask: str = "",
    releases: str = "",
    minutes: float = 0.0,
    **how: Any,
) -> None:
    """Measure on this GPU, or on several, what a study lacks; records go to data/records/."""
    from .run.jobs import StoppedError
    from .run.releases import parse_releases
    from .run.study import Sweep

    chosen = _study_named(study)
    if releases:
        package, listed = parse_releases(releases)
        chosen = chosen.over_releases(package, listed)
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    sweep = Sweep(
        overlays=_overlays(overlay),
        stop=lambda: time.monotonic() > until,
        **how,
    )
    try:
        _sweep(chosen, sweep, gpus, dask)
    except StoppedError:
        _say(f"stopped after {minutes:g} minutes; the same command measures the rest")


def _sweep(
    chosen: "Study",
    sweep: "Sweep",
    gpus: str,
    dask: str,
) -> None:
    """Measure, and say where the records are."""
    from .run import store
    from .run.rows import machine_slug
    from .run.study import describe

    if gpus or dask:
        count, machines = _measure_on_gpus(
            study=chosen,
            sweep=sweep,
            gpus=gpus,
            dask=dask,
        )
    else:
        count = sweep.measure(chosen)
        machines = [machine_slug(describe(chosen.device))]
    places = []
    for machine in machines:
        places.append(str(store.measured_path(chosen.name, machine)))
    _say(f"{count} items measured; records in {', '.join(places)}")


def _measure_on_gpus(
    study: "Study",
    sweep: "Sweep",
    gpus: str,
    dask: str,
) -> tuple[int, list[str]]:
    from .run.cluster import asked_gpus, local_cluster, measure_on_gpus, running_cluster

    if gpus and dask:
        raise ValueError("--gpus and --dask must not be given together")
    sweep.jobs(study)  # what cannot be measured is said before workers start
    if dask:
        cluster = running_cluster(dask)
    else:
        cluster = local_cluster({"CUDA_VISIBLE_DEVICES": gpu} for gpu in asked_gpus(gpus))
    with cluster as client:
        return measure_on_gpus(study, sweep, client)


def _publish(study: str, machine: str = "") -> None:
    """Move a study's measured records into its published Parquet file."""
    from .run import store

    path = store.publish(study, machine)
    count = len(store.load(path.stem, path.parent.name))
    _say(f"{count} records published in {path}; their own files are removed")


def _bisect(
    study: str,
    case: str,
    releases: str = "",
    overlay: Sequence[str] = (),
    as_json: bool = False,
    details: bool = False,
    **how: Any,
) -> None:
    """Find the first release that made a case slower, or fast again.

    That is the first one slower than --good; with --good after --bad, the first one faster than
    --bad. Records go to data/records/; without a GPU they are replayed.
    """
    from .lab.bisect import bisect

    chosen = _study_named(study)
    searched = map(str.strip, releases.split(","))
    search = bisect(
        chosen,
        chosen.case_named(case),
        releases=list(filter(None, searched)),
        overlays=_overlays(overlay),
        **how,
    )
    if as_json:
        _say(_in_json(search.to_dict()))
        return
    given = "".join(f" --overlay {shlex.quote(argument)}" for argument in overlay)
    _say(search.details_with(given) if details else search)


def _compare(
    base: str,
    new: str,
    words: Sequence[str] = (),
    cases: Path | None = None,
    as_json: bool = False,
    **how: Any,
) -> int:
    """Test whether a new release of FlashInfer makes calls slower.

    Measures both releases until each case has a verdict; without a GPU it replays records. Exit
    status: 0 if every call is shown to be not slower, 1 if one is slower or fails, 2 for wrong
    use, 3 if inconclusive, 5 if attnlib itself crashed.
    """
    from .lab.upgrade import compare_releases

    if words and cases:
        raise ValueError(f"a call must be left out with --cases, got {' '.join(words)!r}")
    lines = " ".join(words)
    if cases and cases.suffix == ".jsonl":
        lines = "\n".join(case.label for case in _study_named(str(cases)).cases)
    elif cases:  # An empty file must not fall back to the default calls.
        lines = read_limited(cases).decode("utf-8-sig", "replace") or "\n"
    upgrade = compare_releases(
        base=base,
        new=new,
        cases=lines,
        **how,
    )
    _say(_in_json(upgrade.to_dict()) if as_json else upgrade)
    _say(upgrade.conclusion, file=sys.stderr if as_json else sys.stdout)
    return OUTCOMES[upgrade.outcome]


def _serve(
    arms: Sequence[str],
    open_at: Sequence[int] = (),
    not_slower: float = 0.02,
    as_json: bool = False,
    dry_run: bool = False,
    **given: Any,
) -> int:
    """Test under load whether an arm of an engine's server is slower than the first one.

    Starts the engine's own server for each arm in each round, in turns, drives the load, and judges
    time per token and time between tokens by rounds. Says first how many minutes that takes. Exit
    status: 0 if each arm is shown to be not slower, 1 if one is slower or a server fails, 2 for
    wrong use, 3 if inconclusive, 5 if attnlib itself crashed.
    """
    from .lab.serve import Asked, announced, serve

    comparison = Asked(arms=arms, loads=open_at, **given)
    if dry_run:
        _say(announced(comparison))
        return 0
    reach = serve(
        comparison,
        not_slower=not_slower,
        say=lambda words: _say(words, file=sys.stderr),
    )
    _say(_in_json(reach.to_dict()) if as_json else reach)
    _say(reach.conclusion, file=sys.stderr if as_json else sys.stdout)
    return OUTCOMES[reach.outcome]


def _known_loads() -> str:
    from .studies.serving.engine import ENGINES
    from .studies.serving.models import MODELS
    from .studies.splits.traffic import TRACES

    lists = f"engines: {', '.join(ENGINES)}; traffic: {', '.join(TRACES)}"
    return f"{lists}; models with made-up weights: {', '.join(MODELS)}"


def _percent(text: str) -> float:
    is_percent = re.fullmatch(r"\d+(\.\d+)?%", text)
    share = 0.0
    if is_percent:
        share = float(text.removesuffix("%")) / 100
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"must be above 0% and below 100%, as 2%, got {text!r}")
    return share


def _minutes(text: str) -> float:
    is_number = re.fullmatch(r"\d+(\.\d+)?", text)
    if not is_number or not float(text):
        raise argparse.ArgumentTypeError(f"must be above 0, as 9.5, got {text!r}")
    return float(text)


def _claims(ids: Sequence[str] = (), as_json: bool = False) -> None:
    """Show published claims, and what the records say about them."""
    from .lab import claims

    judged = claims.verdicts(ids)
    if as_json:
        _say(_in_json([row.to_dict() for row in judged]))
    elif ids:
        _say("\n\n".join(map(claims.details, judged)))
    else:
        _say(claims.as_frame(judged).to_string(index=False))


def _report(out: Path = DEFAULT_REPORT) -> None:
    """Execute the notebooks and write them as one self-contained HTML file."""
    from .lab.report.build import build_report

    if out == DEFAULT_REPORT:
        out.parent.mkdir(parents=True, exist_ok=True)
    path = build_report(out, on_notebook=print)
    _say(f"report written to {path}")


def _advise(
    words: Sequence[str] = (),
    lens: str = "",
    batch: int | None = None,
    measure: bool = False,
    heads: str = "",
    model: Sequence[str] = (),
    diff: Sequence[str] = (),
    server: Sequence[str] = (),
    call: Sequence[str] = (),
    as_json: bool = False,
    details: bool = False,
    **options: Any,
) -> int:
    """Say what runs a decode call, its known problems, and the nearest records.

    DeepSeek-V3, or heads such as 128/1 with --head-dim 576, are MLA. Several models, --diff, or a
    model without times on record (sparse MLA) make a table with a row per kind of layers. Exit
    status: 4 if a known problem holds of which a size was measured or reported, unless the records
    show that it costs this call nothing, or if the pick cannot run the call; else 0; 2 for wrong
    use. With --diff: 4 if such a problem comes, unless the new pick is faster all the same or the
    old one cannot run, or if a call that ran cannot run any more.
    """
    from .select.facts import Call
    from .select.situation import parse_server
    from .select.text import parse_call

    _require_no_release(words)
    stated = parse_call(call)
    stack: dict[str, Any] = {"server": parse_server(server)}
    named = [name for name in ("library", "backend", "gpu") if name in options]
    for name in named:
        stack[name] = options.pop(name)
    given = _CallGiven(
        text=" ".join(words),
        heads=heads,
        models=_split_models(model),
        lens=lens,
        batch=batch,
        options=options,
    )
    if given.text:
        given = given.by_text()
    is_several = bool(diff) or len(given.models) > 1
    if is_several and measure:
        raise ValueError("--measure must be left out with --diff and several models")
    facts = Call(**stated)
    if is_several or (not measure and given.lacks_records(facts)):
        table = _advised_together(given.said(), given.models, diff, facts, stack)
        reason = table.reason if diff else ""
        return _advised(table, as_json, text=table.details if details else "", reason=reason)
    subject, pinned = given.subject()
    facts = Call(**(pinned | stated))
    if measure:
        unused = []
        if call:
            unused.append("call")
        if server:
            unused.append("server")
        return _measured_and_advised(subject, facts, stack, unused, says_pick=bool(named))
    advice = _advice_of(subject, facts, stack)
    return _advised(advice, as_json, text=advice.details if details else "")


class _CallGiven(NamedTuple):
    """A call as `advise` was given it: its text, or options that say layer and lengths."""

    text: str
    heads: str
    models: Sequence[str]
    lens: str
    batch: int | None
    options: dict[str, Any]

    def by_text(self) -> "_CallGiven":
        """The same with the models of its text; ValueError for an option beside the text."""
        _require_alone(
            self.text,
            lens=self.lens,
            batch=self.batch,
            heads=self.heads,
            model=self.models,
            **self.options,
        )
        model = CallText.read(self.text).model or ""
        return self._replace(models=_split_models([model]))

    def lengths(self) -> Lens:
        has_layer = bool(self.heads or self.models)
        return _lens_given(self.lens, self.batch, has_layer)

    def said(self, model: str = "") -> CallText:
        """The call as a text says it; of options, those of one model or of none."""
        if self.text:
            return CallText.read(self.text)
        return _said_by_options(self.heads, model, self.lengths(), **self.options)

    def lacks_records(self, facts: "Call") -> bool:
        """Whether `advise` has no times of the first kind of a model's layers."""
        from .lab.stacks import layers_said
        from .select.asked import is_checkpoint

        model = "".join(self.models)
        if not is_checkpoint(model):
            return False
        first, *_ = layers_said(self.said(model), facts)
        return not first.has_records

    def subject(self) -> tuple[Subject, dict[str, Any]]:
        """What `advise` is called with, and the facts that the options of a layer pin.

        It is a text, what a model's options would say as one, or a layer and its lengths.
        """
        from .select.asked import LATENT_PAGE, is_checkpoint

        model = "".join(self.models)
        if self.text:
            return (self.text,), {}
        if is_checkpoint(model):
            return (self.said(model),), {}
        options = dict(self.options)
        pinned = _facts_of_options(options)
        lengths = self.lengths()
        if options.get("head_dim") == MLA_HEAD_DIM:
            options.setdefault("page_size", LATENT_PAGE)
        layer = parse_layer(self.heads, model=model, **options)
        return (layer, lengths.tokens), pinned


def _advice_of(
    subject: Subject,
    facts: "Call",
    stack: dict[str, Any],
) -> "Advice":
    from .lab.advise import advise

    return advise(*subject, facts=facts, **stack)


def _measured_and_advised(
    subject: Subject,
    facts: "Call",
    stack: dict[str, Any],
    unused: Sequence[str],
    says_pick: bool,
) -> int:
    """Print the times of all backends at a call, which options say nothing of them, and, for a
    stack that was named, what it runs."""
    from .lab.view import measure_call
    from .measure.calls.cases import case_of

    call = subject
    if isinstance(subject[0], CallText):
        call = (case_of(subject[0]),)
    _say(measure_call(*call))
    if unused:
        _say(f"all backends are measured here; not used: {', '.join(unused)}", file=sys.stderr)
    advice = _advice_of(subject, facts, stack)
    if says_pick:
        _say(f"{advice.choice.library} on {advice.choice.gpu} runs {advice.runs_as}")
    return 0


def _split_models(named: Sequence[str]) -> list[str]:
    """The models of `--model A --model B` and of `A,B`."""
    names: dict[str, None] = {}
    for text in named:
        # a layer by its heads has a comma of its own: 8/1 heads, head_dim 64
        names |= dict.fromkeys(map(str.strip, re.split(r",(?! *head_dim)", text)))
    return list(filter(None, names))


def _lens_given(lens: str, batch: int | None, has_layer: bool) -> Lens:
    """What --lens and --batch say; ValueError where no call, or only its layer, is given."""
    if not lens and has_layer:
        raise ValueError("--lens must be given, tokens of each request such as 8192x16")
    if not lens:
        raise ValueError(f"a call must be given, such as {EXAMPLE}, or --heads and --lens")
    return Lens.read(lens, batch=batch)


def _advised_together(
    said: CallText,
    models: Sequence[str],
    diff: Sequence[str],
    facts: "Call",
    stack: dict[str, Any],
) -> "Stacks":
    """The table of several models or of two stacks."""
    from .lab.advise import LIBRARY, RECORDED_GPU
    from .lab.stacks import advise_stacks

    if diff and "library" in stack:
        raise ValueError(f"--library must be left out with --diff, got {stack['library']}")
    library = stack.pop("library", LIBRARY)
    return advise_stacks(
        said,
        diff or [library],
        models=models,
        facts=facts,
        **{"gpu": RECORDED_GPU} | stack,
    )


def _advised(
    advice: "Advice | Stacks",
    as_json: bool,
    text: str = "",
    reason: str = "",
) -> int:
    """Print advice, or another `text` of it, and the `reason` of the exit status, if any; returns
    the status: `KNOWN_PROBLEM` if one holds that has a size and costs the call, or if the pick
    cannot run it."""
    status = KNOWN_PROBLEM if advice.holding or advice.cannot_run else 0
    if as_json:
        _say(_in_json(advice.to_dict() | {"status": status}))
        return status
    _say(text or advice)
    if reason:
        _say(fitted([f"Exit status {status}: {reason}."]))
    return status


def _require_no_release(words: Sequence[str]) -> None:
    """ValueError for a release among the words of a call, with the option that takes it."""
    releases = [word for word in words if "==" in word]
    if not releases:
        return
    option = "--diff" if len(releases) > 1 else "--library"
    named = " ".join(releases)
    raise ValueError(f"a call must have no release, got {named}: say {option} {named}")


def _require_alone(call: str, **options: Any) -> None:
    """ValueError for options that say a part of a call beside its text."""
    for name, value in options.items():
        if value not in ("", None, []):
            word = OTHER_NAMES.get(name, name)
            raise ValueError(
                f"{name} must be left out beside the text of a call, got {value!r}: "
                f"say {word}=... in {call!r}"
            )


def _said_by_options(
    heads: str,
    model: str,
    lens: Lens,
    page_size: int | None = None,
    **options: Any,
) -> CallText:
    """What the options of a model's layer say, as the text of a call would."""
    return CallText(
        heads=heads or None,
        model=model,
        lens=lens,
        page=page_size,
        **options,
    )


def _facts_of_options(options: dict[str, Any]) -> dict[str, Any]:
    """What the options of a layer pin."""
    from .select.asked import PINS

    return {fact: True for option, fact in PINS.items() if option in options}


def _refresh() -> None:
    """Execute the notebooks again from the records (replay), and redraw README's figure."""
    from .lab.report.build import refresh

    _say("written", "\nwritten ".join(map(str, refresh())))


def _watch(
    packages: Sequence[str] = (),
    base: str = "",
    new: str = "",
    measure: bool = False,
    badge: str = "",
    overlay: Sequence[str] = (),
) -> int:
    """Find what newer releases of the engines and FlashInfer change of what was read of them.

    Asks pip for releases after the last one in data/releases.json, and compares what rules, hooks
    and models cite (data/watch.yaml). A release that changes none of it is added there. Prints a
    page in Markdown, and with --badge writes a file that shields.io makes a badge of: how old the
    newest read releases are. With --measure it runs the calls of the study `suite` on the newest
    release of one kernel package beside the one before, and drafts a known problem of what is
    slower. Exit status: 0 if nothing must be read again and no call is slower, 1 without an index
    or a whole wheel, 2 for wrong use, 3 if --measure decides nothing of a call, 6 if the page names
    what must be read again or what is slower.
    """
    from .engines import sglang_hooks, vllm
    from .lab import watch

    if measure and badge:
        raise ValueError("--badge must go without --measure")
    if measure:
        return _watch_measured(packages, base, new, overlay)
    if overlay:
        raise ValueError("--overlay must go with --measure")
    points = {"sglang": sglang_hooks.POINTS, "vllm": vllm.POINTS}
    if not base and not new:
        page = watch.watch(packages, points)
    elif base and new and len(packages) == 1:
        change = watch.compare(packages[0], base, new, points)
        page = watch.Watch([change])
    else:
        raise ValueError("--base and --new must be given together, for one PACKAGE")
    if badge:
        text = json.dumps(page.badge(date.today()))
        Path(badge).write_text(text + "\n")
    _say(page)
    return CHANGED if page.changed else 0


def _watch_measured(
    packages: Sequence[str],
    base: str,
    new: str,
    overlay: Sequence[str],
) -> int:
    """Measure two releases of a kernel package; print what is slower."""
    from .lab import measured

    if len(packages) != 1:
        raise ValueError(f"--measure must have one PACKAGE, got {', '.join(packages) or 'none'}")
    (package,) = packages
    measured.require_package(package)
    _say(measured.minutes(package), file=sys.stderr)
    page = measured.measure(package, base, new, overlays=_overlays(overlay))
    _say(page)
    statuses = OUTCOMES | {"slower": CHANGED}
    return statuses[page.outcome]


def _explain(as_json: bool = False, details: bool = False, **given: Any) -> None:
    """Show which backend a library picks and why, or what changes between releases (no GPU)."""
    from .select.text import answer

    _require_no_release(given.get("words", ()))
    _say(answer(given, as_json, details))


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


JSON: Options = {
    "--json": dict(
        action="store_true",
        dest="as_json",
        help="print JSON instead of text",
    ),
}
DETAILS: Options = {
    "--details": dict(
        action="store_true",
        help="print all that is known, with sources",
    ),
}
MINUTES: Options = {
    "--minutes": dict(
        type=_minutes,
        metavar="N",
        help="measure nothing more after this time; default: no limit",
    ),
}
OVERLAY: Options = {
    "--overlay": dict(
        action="append",
        metavar="NAME==VERSION=DIR",
        help="folder that holds this release, instead of installing it with pip (whose settings, "
        "such as PIP_FIND_LINKS, apply); repeatable",
    ),
}
WORDS: Options = {
    "words": dict(
        nargs="*",
        metavar="NAME=VALUE",
        help=f"the call, such as {EXAMPLE}, in place of the options that say it",
    ),
}
LAYER: Options = {
    "--model": dict(
        metavar="NAME",
        help="a model of data/checkpoints.yaml, and how it is served: DeepSeek-V3.2, "
        "'Qwen3-32B at TP 4', 'DeepSeek-V3 at TP 8 with DP attention and speculation of 1 branch'",
    ),
    "--tp": dict(
        type=int,
        metavar="N",
        help="tensor-parallel size: GPUs that share the heads of a model; default: 1",
    ),
    "--heads": dict(
        metavar="Q/KV",
        help="query and KV heads, instead of --model: 8/1 (MLA: 16/1)",
    ),
    "--head-dim": dict(
        type=int,
        metavar="N",
        help="default: the model's, else 128 (MLA: 576)",
    ),
    "--page-size": dict(
        type=int,
        metavar="N",
        help="tokens per KV page; default: 16 (explain: the library's default)",
    ),
}
DTYPES: Options = {
    "--dtype": dict(
        help="query dtype; default: bfloat16",
    ),
    "--kv-dtype": dict(
        help="KV cache dtype; default: auto (the query dtype, or the engine's own resolution)",
    ),
}
SERVED: Options = {
    "--dp": dict(
        type=int,
        metavar="N",
        help="groups of DP attention, default 1: TP / DP GPUs share the heads of a model, and lens "
        "is the batch of one DP rank",
    ),
}
BATCH: Options = {
    "--batch": dict(
        type=int,
        metavar="N",
        help="number of requests, if --lens is one length or range",
    ),
}
MEASURE: Options = {
    "study": dict(
        metavar="STUDY",
        help="a study, or a file of captured steps, .jsonl",
    ),
    "--rounds": dict(
        type=int,
        metavar="N",
        help="rounds of every grid",
    ),
    "--retry": dict(
        action="store_true",
        help="measure again what is on record as failed",
    ),
    "--gpus": dict(
        metavar="N|all",
        help="deal the cases out to so many GPUs of this machine (needs Dask)",
    ),
    "--dask": dict(
        metavar="ADDRESS",
        help="deal the cases out to the workers of this Dask scheduler, one for each GPU",
    ),
    "--releases": dict(
        metavar="NAME==VERSION,VERSION",
        help="measure the calls of this package alone, over these releases of it, in four rounds",
    ),
    **MINUTES,
    **OVERLAY,
}
BISECT: Options = {
    "--package": dict(
        required=True,
        metavar="PACKAGE",
        help="distribution whose releases are searched, such as flashinfer-python",
    ),
    "--good": dict(
        required=True,
        metavar="GOOD",
        help="a fast release",
    ),
    "--bad": dict(
        required=True,
        metavar="BAD",
        help="a slow release",
    ),
    "--study": dict(
        required=True,
        metavar="STUDY",
        help="the study that has the case",
    ),
    "--case": dict(
        required=True,
        metavar="CASE",
        help=f"the case, such as '{EXAMPLE}'",
    ),
    "--backend": dict(
        help="default: flashinfer-auto, which is of flashinfer-python",
    ),
    "--rounds": dict(
        type=int,
        metavar="N",
        help="rounds per step of the search; default: 3",
    ),
    "--releases": dict(
        metavar="V,V,...",
        help="search only these releases; default: all",
    ),
    **OVERLAY,
    **DETAILS,
    **JSON,
}
COMPARE: Options = {
    **WORDS,
    "--base": dict(
        required=True,
        help="baseline release, or a wheel or folder",
    ),
    "--new": dict(
        required=True,
        help="release under test, or a wheel or folder",
    ),
    **LAYER,
    "--model": dict(
        nargs="+",
        dest="models",
        metavar="NAME",
        help=f"layers of one or more models of data/checkpoints.yaml; {MLA}",
    ),
    **BATCH,
    "--lens": dict(
        metavar="N,...",
        help=f"one decode call of that layer: {LENS_HELP}",
    ),
    "--backend": dict(
        help="the backend that an engine pins, such as fa2, xqa, prefill-fa2",
    ),
    "--cases": dict(
        type=Path,
        metavar="FILE",
        help=f"file of calls, a line each such as {EXAMPLE}, or steps.jsonl",
    ),
    "--not-slower": dict(
        type=_percent,
        metavar="P",
        help="non-inferiority margin: how much slower a call may be; default: 2%%",
    ),
    **JSON,
}
SERVE: Options = {
    "--engine": dict(
        choices=["sglang", "vllm"],
        help="whose server is started, by this Python; default: sglang",
    ),
    "--model": dict(
        required=True,
        metavar="FOLDER",
        help="a model's folder (weights may lack), or a name of the list below",
    ),
    "--arm": dict(
        required=True,
        action="append",
        dest="arms",
        metavar="ARM",
        help="default, NAME=VALUE of the plugin such as splits=bounded, or options of the server "
        "such as '--attention-backend flashinfer'; the first is the base; repeatable",
    ),
    "--traffic": dict(
        metavar="LOAD",
        help="prompts in flight: chat, kimi-conversation:32, 512x40+100000, or a log of lengths, "
        ".csv or steps.jsonl; default: chat",
    ),
    "--output": dict(
        type=int,
        metavar="N",
        help="tokens that a request makes; default: the log's mean, or 256",
    ),
    "--turns": dict(
        type=int,
        metavar="N",
        help="requests of each client, one after the other; default: 3",
    ),
    "--open": dict(
        type=int,
        action="append",
        dest="open_at",
        metavar="PERCENT",
        help="also an open loop: requests arrive at this share of what the base has served; "
        "repeatable",
    ),
    "--rounds": dict(
        type=int,
        metavar="N",
        help="fresh servers of each arm; default: 4",
    ),
    "--options": dict(
        metavar="TEXT",
        help="options of every server, such as --options='--context-length 131072'",
    ),
    "--together": dict(
        action="store_true",
        help="start the servers of a round at once: half the time, if all fit into the memory",
    ),
    **MINUTES,
    "--port": dict(
        type=int,
        metavar="N",
        help="of the first server, the next ones 1,000 higher; default: 30000",
    ),
    "--not-slower": dict(
        type=_percent,
        metavar="P",
        help="non-inferiority margin: how much slower an arm may be; default: 2%%",
    ),
    "--dry-run": dict(
        action="store_true",
        help="only say what would be started and how many minutes it takes; needs no GPU",
    ),
    **JSON,
}
PUBLISH: Options = {
    "study": dict(
        metavar="STUDY",
        help="a study that was measured",
    ),
    "--machine": dict(
        metavar="M",
        help="folder of data/records, if several have the study",
    ),
}
REPORT: Options = {
    "--out": dict(
        type=Path,
        metavar="FILE",
        help=f"default: {DEFAULT_REPORT}",
    ),
}
CLAIMS: Options = {
    "ids": dict(
        nargs="*",
        metavar="ID",
        help="show all details of these claims",
    ),
    **JSON,
}
SERVER: Options = {
    "--server": dict(
        action="append",
        metavar="FACT[=N]",
        help="how the server was started, for known problems: dp_attention, context=131072, "
        "glue_graph; repeatable",
    ),
}
CALL: Options = {
    "--call": dict(
        action="append",
        metavar="FIELD[=VALUE]",
        help="a fact of the call, such as graph or cubins=no (explain --help lists them); "
        "repeatable; topk defaults to 2048 in sparse_mla",
    ),
}
ADVISE: Options = {
    **SERVER,
    **CALL,
    **WORDS,
    **LAYER,
    "--model": dict(
        action="append",
        metavar="NAME",
        help="a model of data/checkpoints.yaml, and how it is served: 'DeepSeek-V3 at TP 8 with DP "
        "attention'; repeatable, or several with commas between them",
    ),
    "--diff": dict(
        nargs=2,
        metavar=("OLD", "NEW"),
        help="two releases of one engine, such as sglang==0.5.15 sglang==0.5.23: what is picked by "
        "each, and which known problems come or end",
    ),
    **SERVED,
    **BATCH,
    **DTYPES,
    "--lens": dict(
        metavar="N,...",
        help=LENS_HELP,
    ),
    "--library": dict(
        help="an engine or FlashInfer, sglang==0.5.23; default: flashinfer==0.7.2; --engine is "
        "the same",
    ),
    "--backend": dict(
        help="the backend that is pinned, such as flashinfer",
    ),
    "--gpu": dict(
        help="such as h100, b200 or sm90; default: sm90",
    ),
    "--measure": dict(
        action="store_true",
        help="benchmark all backends on this GPU; JIT builds of kernels take minutes",
    ),
    **DETAILS,
    **JSON,
}
EXPLAIN: Options = {
    **SERVER,
    **WORDS,
    "--library": dict(
        help="sglang==0.5.23, or sglang==0.5.23,flashinfer==0.7.2.post1 if that is installed; "
        "--engine is the same",
    ),
    "--gpu": dict(
        help="such as sm90 or h100; several with --diff: sm90,sm100",
    ),
    "--mode": dict(
        help="default: decode; several with --diff, by default all",
    ),
    **LAYER,
    **SERVED,
    **DTYPES,
    "--diff": dict(
        nargs=2,
        metavar=("OLD", "NEW"),
        help="what changes from OLD to NEW, such as flashinfer==0.6.13, for the --gpu, --mode, "
        "--backend, --call and layer (also DeepSeek MLA) that are given",
    ),
    "--backend": dict(
        dest="policy",
        help="an engine's rule, or a backend's name; default: auto",
    ),
    **CALL,
    **DETAILS,
    **JSON,
}
DIAGNOSE: Options = {
    "trace": dict(
        metavar="TRACE",
        help="trace of torch.profiler (json, json.gz) or Nsight Systems (sqlite); or text, without "
        "steps: key_averages().table(), CSV of nsys stats --report cuda_gpu_kern_sum",
    ),
    "after": dict(
        nargs="?",
        metavar="AFTER",
        help="a second trace: report what is slower than in the first",
    ),
    "--shape": dict(
        metavar="CALL",
        help="what the trace does not record: 'heads=32/8 page=16 lens=8192x16', with the release "
        "that served, 'lens=8192x16 sglang=0.5.23'",
    ),
    "--fail-on": dict(
        choices=["slower", "pattern"],
        help="exit status of two traces: 0 not slower, 1 slower, 3 not decided, 2 wrong use; "
        "or 1 where AFTER shows a known pattern that TRACE does not",
    ),
    **DETAILS,
    **JSON,
}
REPRO: Options = {
    "name": dict(
        metavar="NAME",
        help="a script",
    ),
}
WATCH: Options = {
    "packages": dict(
        nargs="*",
        metavar="PACKAGE",
        help="by default every package of data/watch.yaml",
    ),
    "--base": dict(
        metavar="RELEASE",
        help="compare this release of PACKAGE with --new; nothing is written",
    ),
    "--new": dict(
        metavar="RELEASE",
        help="the later one",
    ),
    "--badge": dict(
        metavar="FILE",
        help="also write a badge for shields.io: how old the newest read releases are",
    ),
    "--measure": dict(
        action="store_true",
        help="time both releases of one kernel PACKAGE instead (without a GPU: from the records)",
    ),
    **OVERLAY,
}
COMMANDS = {
    "doctor": Command(_doctor, JSON),
    "diagnose": Command(_diagnose, DIAGNOSE, status=USAGE),
    "measure": Command(_measure, MEASURE, known=_known_studies),
    "publish": Command(_publish, PUBLISH),
    "bisect": Command(_bisect, BISECT),
    "compare": Command(_compare, COMPARE, status=USAGE),
    "serve": Command(_serve, SERVE, known=_known_loads),
    "claims": Command(_claims, CLAIMS),
    "report": Command(_report, REPORT),
    "advise": Command(_advise, ADVISE, status=USAGE),
    "refresh": Command(_refresh),
    "repro": Command(_repro, REPRO, known=_known_scripts),
    "watch": Command(_watch, WATCH),
    "explain": Command(_explain, EXPLAIN, status=USAGE, known=_known_facts),
}
