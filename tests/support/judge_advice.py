"""Judge `advise` on calls of layers that no record has: draw them, measure them, judge once.

    PYTHONPATH=tests python -m support.judge_advice draw [SEED]
    PYTHONPATH=tests python -m support.judge_advice warm
    PYTHONPATH=tests python -m support.judge_advice measure OUT --seconds N
    PYTHONPATH=tests python -m support.judge_advice judge OUT

`draw` prints 64 calls; unseen_calls.txt beside this file has those of `SEED`, drawn before any was
measured. `warm` compiles FlashInfer's modules, a process per core at most, and may run beside other
work. `measure` times each call by every backend of `ENGINES` that the environment can run: L2 cold,
in a CUDA graph, checked by the oracle, call by call. In another environment it adds to the same OUT
what that one can run. `judge` takes the calls that have a row of every measured backend which
supports them, prints the lines of `OUTCOMES` (tests/lab/test_unseen_batches.py) and appends the
calls to data/captures/unseen_batches.jsonl. Only `warm` and `measure` need a GPU.

A row of OUT: call, backend, status, reason, us (median), samples_us, plan_us, kernel_family,
oracle_error, gpu, gpu_id, versions, date.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from support.rounds import Process, add_limit, command_of, measure_left, rows_in, run

import attnlib
from attnlib.core.backends import unavailable, unsupported
from attnlib.core.backends.table import RECORDED
from attnlib.core.spec import AttnSpec
from attnlib.measure.calls.base import Bench
from attnlib.measure.calls.cases import read_case
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.decode.measure import DecodeSubject, decode_call
from attnlib.measure.calls.form import Item
from attnlib.measure.machine import describe_machine, describe_versions
from attnlib.run import store
from attnlib.studies import STUDIES
from attnlib.studies.random_batches import (
    BATCHES,
    COLD,
    KINDS,
    KV_LENS,
    LEAST_KV_BYTES,
    MOST_KV_BYTES,
)
from attnlib.studies.splits.traffic import batches

SEED = "advice is judged again, 20261128"
JUDGED = 2
"""Which judgement this is: the first was on 24 calls that have taught since."""
CALLS = Path(__file__).parent / "unseen_calls.txt"
CAPTURE = Path(__file__).parents[2] / "data/captures/unseen_batches.jsonl"
ENGINES = {
    "flashinfer==0.7.2": (
        "flashinfer-fa2",
        "flashinfer-fa3",
        "flashinfer-cuda-cores",
        "flashinfer-batch-attention",
        "flashinfer-xqa",
    ),
    "sglang==0.5.23": ("flashinfer-fa2", "flash-attn-3-precomputed"),
    "vllm==0.33.0": ("vllm-flash-attn-3", "flashinfer-xqa"),
}
BACKENDS = tuple(dict.fromkeys(name for names in ENGINES.values() for name in names))
LAYERS = 16
KV_HEADS = (1, 2, 4, 8, 16)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
"""Query heads per KV head."""
MOST_HEADS = 128
PAGES = (1, 16, 64)
HEAD_DIM = 128
"""And values of 16 bits: FlashInfer compiles for a minute per further one."""
TRAFFIC = ("kimi", "azure")
"""Of whose traces each layer has a batch; beside it one with a long request, and one of any kind.
"""
ONE_LONG = "one_long"
LONG_BATCHES = (8, 256)
LONG_KV_LENS = (4096, 131_072)


# ---- draw


def drawn_calls(seed: str) -> list[DecodeCase]:
    """Four calls of each of 16 layers that no record has, in an order that is drawn, too."""
    draw = random.Random(seed)
    layers: dict[AttnSpec, None] = {}
    while len(layers) < LAYERS:
        kv_heads = draw.choice(KV_HEADS)
        heads = kv_heads * draw.choice(GROUPS)
        layer = AttnSpec(heads, kv_heads, HEAD_DIM, draw.choice(PAGES))
        if heads <= MOST_HEADS and layer not in recorded_layers():
            layers[layer] = None
    calls = []
    for layer in layers:
        for kind in (*TRAFFIC, ONE_LONG, draw.choice(KINDS)):
            calls.append(_drawn_call(layer, kind, draw))
    draw.shuffle(calls)
    return calls


@cache
def recorded_layers() -> set[AttnSpec]:
    """The layers of every decode call on record, and of those that were judged before."""
    cases = []
    for study in STUDIES:
        for machine in store.machines(study):
            cases += store.find(study, machine).case.dropna().unique().tolist()
    before = [row for row in rows_in(CAPTURE) if row.get("judged", 1) < JUDGED]
    cases += [read_case(row["call"]) for row in before]
    return {case.spec for case in cases if isinstance(case, DecodeCase)}


def _drawn_call(layer: AttnSpec, kind: str, draw: random.Random) -> DecodeCase:
    """A batch that fits the memory and can be timed cold."""
    while True:
        if kind in TRAFFIC:
            steps = [step for step in batches() if step.trace.startswith(kind)]
            step = draw.choice(steps)
            case = DecodeCase(layer, step.in_flight, step.longest, step.lengths)
        else:
            ends = (LONG_BATCHES, LONG_KV_LENS) if kind == ONE_LONG else (BATCHES, KV_LENS)
            sizes = (_even_over_logarithms(draw, low, high) for low, high in ends)
            case = replace(DecodeCase(layer, *sizes), lengths=kind)
        if LEAST_KV_BYTES <= case.cost.kv_bytes <= MOST_KV_BYTES:
            return case


def _even_over_logarithms(draw: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** draw.random())


# ---- warm and measure


def frozen_calls() -> list[DecodeCase]:
    """Those that were drawn before any was measured."""
    return [read_case(line) for line in CALLS.read_text().splitlines()]


def runnable() -> list[str]:
    """The backends that this environment has; says on stderr why others cannot run."""
    names = []
    for name in BACKENDS:
        if reason := unavailable(name):
            print(f"not here: {name}: {reason}", file=sys.stderr)
        else:
            names.append(name)
    if not names:
        raise SystemExit("a backend must be able to run here, none is")
    return names


def process_of(calls: list[DecodeCase], names: list[str]) -> Process:
    """All calls by all backends that support them, call by call: one round, one process."""
    keys = []
    for call in calls:
        for name in names:
            if not unsupported(name, call.spec):
                keys.append({"call": call.label, "backend": name})
    return Process(tuple(keys))


def measurer(device: str = "cuda", timer: str = COLD):
    """What measures a key of `process_of`."""
    bench = Bench(device, describe_machine(device), describe_versions(RECORDED))
    subject = DecodeSubject(bench)

    def measure(key: dict) -> dict:
        return subject.measure(Item(key["backend"], timer, read_case(key["call"])))

    return measure


def modules_of(calls: list[DecodeCase], names: list[str]) -> list[tuple[str, str]]:
    """A backend and a tiny call for each module of FlashInfer; XQA has one for each group and page
    size."""
    found = {}
    for call in calls:
        for name in names:
            shape = (call.spec.group_size, call.spec.page_size) if name.endswith("xqa") else ()
            if name.startswith("flashinfer") and not unsupported(name, call.spec):
                tiny = DecodeCase(call.spec, 1, 64)
                found.setdefault((name, shape), tiny.label)
    return [(name, text) for (name, _), text in found.items()]


def call_once(name: str, text: str, device: str = "cuda") -> str:
    """Compile what a call needs, by making it; returns a line."""
    started = time.monotonic()
    try:
        decode_call(name, text, device=device, cuda_graph=True)()
        outcome = "ok"
    except Exception as error:
        outcome = f"FAILED: {error}"
    return f"{time.monotonic() - started:6.1f} s  {name}, {text}: {outcome}"


def warm(calls: list[DecodeCase]) -> int:
    """Compile all modules, side by side; returns exit status."""
    modules = modules_of(calls, runnable())
    spawn = multiprocessing.get_context("spawn")
    workers = min(len(modules), os.cpu_count() or 1)
    has_failed = False
    with ProcessPoolExecutor(max(1, workers), mp_context=spawn) as pool:
        for done in as_completed(pool.submit(call_once, *module) for module in modules):
            print(done.result(), flush=True)
            has_failed |= "FAILED" in done.result()
    return int(has_failed)


# ---- judge


def whole_calls(rows: list[dict]) -> list[dict]:
    """Of rows of one GPU the calls that every measured backend which supports them has, as the
    capture has them."""
    by_call: dict[str, dict] = {}
    for row in rows:
        by_call.setdefault(row["call"], {})[row["backend"]] = row
    measured = {row["backend"] for row in rows}
    card = "h100" if "H100" in rows[0]["gpu"] else "h200"
    whole = []
    for call, of_call in by_call.items():
        layer = read_case(call).spec
        needed = {name for name in measured if not unsupported(name, layer)}
        us = {name: row["us"] for name, row in of_call.items() if row["status"] == "ok"}
        if needed <= of_call.keys():
            whole.append({"call": call, "us": us, "gpu": card, "judged": JUDGED})
    return whole


def losses_of(engine, backends, batches):
    """Of each batch with two of the engine's backends or more: time of the backend that `advise`
    expects to be fastest, over the fastest, less 1; and the same of the engine's pick."""
    advised = []
    by_engine = []
    for batch in batches:
        us = {name: batch["us"][name] for name in backends if name in batch["us"]}
        if len(us) < 2:
            continue
        advice = attnlib.advise(
            batch["call"],
            library=engine,
            gpu=batch.get("gpu", "h200"),
        )
        expected = {name: advice.expected[name].ratio for name in us if name in advice.expected}
        chosen = min(expected, key=expected.__getitem__)
        fastest = min(us.values())
        advised.append(us[chosen] / fastest - 1)
        if advice.ours in batch["us"]:
            by_engine.append(batch["us"][advice.ours] / fastest - 1)
    return np.array(advised), np.array(by_engine)


def judge(out: Path) -> int:
    """Print the lines of `OUTCOMES` and what was left out; append the calls to the capture.

    Times of two GPUs do not compare: the one with most whole calls counts.
    """
    if any(row.get("judged") == JUDGED for row in rows_in(CAPTURE)):
        raise SystemExit(f"{CAPTURE.name} must have no calls of judgement {JUDGED}, it has some")
    drawn = [call.label for call in frozen_calls()]
    by_gpu: dict[str, list[dict]] = {}
    for row in rows_in(out):
        if row["call"] not in drawn:
            raise SystemExit(f"OUT must have rows of {CALLS.name} alone, got {row['call']}")
        by_gpu.setdefault(row["gpu_id"], []).append(row)
    if not by_gpu:
        raise SystemExit(f"OUT must have rows, {out} has none")
    wholes = {gpu_id: whole_calls(rows) for gpu_id, rows in by_gpu.items()}
    gpu_id, whole = max(wholes.items(), key=lambda each: len(each[1]))
    whole.sort(key=lambda batch: drawn.index(batch["call"]))
    say_what_is_left_out(by_gpu, gpu_id, f"{len(whole)} of {len(drawn)} calls are whole")
    for engine, backends in ENGINES.items():
        advised, by_engine = losses_of(engine, backends, whole)
        if len(advised):
            numbers = f"{advised.mean():.3f}, {advised.max():.3f}, {by_engine.mean():.3f}"
            print(f'    ("{engine}", {JUDGED}): ({len(advised)}, {numbers}),')
    with CAPTURE.open("a") as file:
        file.writelines(f"{json.dumps(batch)}\n" for batch in whole)
    return 0


def say_what_is_left_out(by_gpu: dict[str, list[dict]], gpu_id: str, words: str) -> None:
    """On stderr: calls that are not whole, rows of other GPUs, rows without a time."""
    print(words, file=sys.stderr)
    for other in by_gpu.keys() - {gpu_id}:
        print(f"left out: {len(by_gpu[other])} rows of GPU {other}", file=sys.stderr)
    for row in by_gpu[gpu_id]:
        if row["status"] != "ok":
            words = f"no time: {row['call']}, {row['backend']}: {row['reason']}"
            print(words, file=sys.stderr)


def asked(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="judge_advice", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    draw = verbs.add_parser("draw")
    draw.add_argument("seed", nargs="?", default=SEED)
    verbs.add_parser("warm")
    measure = verbs.add_parser("measure")
    measure.add_argument("out", type=Path)
    add_limit(measure)
    verbs.add_parser("judge").add_argument("out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run a verb; returns exit status."""
    options = asked(arguments)
    if options.verb == "draw":
        print(*(call.label for call in drawn_calls(options.seed)), sep="\n")
        return 0
    if options.verb == "judge":
        return judge(options.out)
    calls = frozen_calls()
    if options.verb == "warm":
        return warm(calls)
    process = process_of(calls, runnable())
    if options.process is not None:
        return measure_left(process, options.out, measurer())
    command = command_of("support.judge_advice", "measure", options.out)
    return run(command, [process], options.out, options.seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
