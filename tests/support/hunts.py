"""Measurements that LOG predicts and no study has: a lane of calls into a file of JSON lines.

    PYTHONPATH=tests python -m support.hunts LANE OUT --seconds N [--overlay NAME==VERSION=DIR ...]
    PYTHONPATH=tests python -m support.hunts show OUT

| lane | what is compared | needs |
|---|---|---|
| offsets | FlashInfer 0.6.18 over 0.6.17, eight calls, pages of 1 and of 16 | both as overlays |
| caps | vLLM's FlashAttention-3 in a graph: 32 over 128 splits of one request | vLLM |
| triton-splits | SGLang's Triton decode: 8 over 32 splits | SGLang |
| gather | EAGLE's gather of a page table: 131,072 and 1,048,576 over 8,192 columns | torch |
| traced | host times of a plan and a launch after traces of their process | FlashInfer |

Four rounds, a fresh process each (`traced`: for each arm), odd ones in reverse order: A B B A. All
but host times are GPU times in a CUDA graph, L2 warm, checked by an oracle first. `show` prints
ratios with their intervals and verdicts; it needs no GPU.

A row of OUT: lane, round, arm, call, status, reason, us (median), samples_us, kernel_family,
oracle_error, gpu, gpu_id, versions, date. Of `traced` plan_us and launch_us are medians after as
many traces as traces_before says.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch
from support.rounds import Process, add_limit, command_of, measure_left, rows_in, run

from attnlib.core.backends import create, unavailable, vllm
from attnlib.core.backends.sglang import SCHEDULED_REQUESTS
from attnlib.core.backends.table import RECORDED
from attnlib.core.schedule.flash_attn3 import sm_count
from attnlib.measure.calls.base import Bench
from attnlib.measure.calls.call import timed_call
from attnlib.measure.calls.cases import read_case
from attnlib.measure.calls.check import OracleCheck
from attnlib.measure.calls.decode.measure import DecodeSubject, build_workload
from attnlib.measure.calls.form import Item
from attnlib.measure.calls.inputs import Workload
from attnlib.measure.machine import describe_machine, describe_versions
from attnlib.measure.stats import judge_ratios
from attnlib.measure.timer import run_timer, time_host
from attnlib.measure.trace import TRACED_CALLS, repeat, trace_kernels
from attnlib.run.releases import parse_overlay
from attnlib.studies.releases.calls import FLASHINFER, PAGE_1

ROUNDS = 4
DEVICE = "cuda"
TIMER = "graph"
TRACES_BEFORE = (0, 2, 4, 6)
HOST_REPEATS = 10
"""How often `time_host` takes its samples for a median."""
UNTRACED = "no traces"
OVERLAY = "NAME==VERSION=DIR"


# ---- what a lane measures, by the key of its row


@cache
def subject() -> DecodeSubject:
    """What measures decode calls as the studies do."""
    bench = Bench(DEVICE, describe_machine(DEVICE), describe_versions(RECORDED))
    return DecodeSubject(bench)


def measure_offsets(key: dict) -> dict:
    """By the release that is the arm, which must be what the process imports."""
    case = read_case(key["call"])
    return subject().measure(Item("flashinfer-auto", TIMER, case, release=key["arm"]))


def measure_caps(key: dict) -> dict:
    """With the arm for vLLM's flash_attn_max_num_splits_for_cuda_graph."""
    vllm.MOST_SPLITS = int(key["arm"])
    return subject().measure(Item("vllm-flash-attn-3", TIMER, read_case(key["call"])))


def measure_triton(key: dict) -> dict:
    """With the arm for SGLang's --triton-attention-num-kv-splits."""
    case = read_case(key["call"])
    work, judge = subject().prepared(case)
    call = triton_call(work, int(key["arm"]))
    return timed(call, judge.check, work_per_call=float(case.cost.io_bytes))


def triton_call(work: Workload, most_splits: int) -> Callable[[], torch.Tensor]:
    """Decode of grouped queries as SGLang 0.5.23's Triton backend calls it on Hopper
    (triton_backend.py:469 and 2472); the splits of each request are chosen once, as once a step."""
    ops = "sglang.kernels.ops.attention"
    metadata = importlib.import_module(f"{ops}.metadata")
    decode = importlib.import_module(f"{ops}.decode_attention")
    batch = work.batch
    layer = batch.spec
    requests, heads, head_dim = work.q.shape
    parts = (requests, heads, most_splits)
    empty = partial(torch.empty, device=work.q.device)
    splits = empty(requests, dtype=torch.int32)
    metadata.get_num_kv_splits_triton[(1,)](
        splits,
        batch.seq_lens,
        requests,
        1,
        heads,
        layer.num_kv_heads,
        most_splits,
        sm_count(work.q.device),
        MAX_NUM_SEQ=SCHEDULED_REQUESTS,
    )
    out = torch.empty_like(work.q)
    attend = partial(
        decode.decode_attention_fwd,
        q=work.q,
        k_buffer=work.kv.k_cache.flatten(0, 1),
        v_buffer=work.kv.v_cache.flatten(0, 1),
        o=out,
        kv_indptr=batch.kv_indptr,
        kv_indices=batch.kv_indices.long(),
        attn_logits=empty((*parts, head_dim), dtype=torch.float32),
        attn_lse=empty(parts, dtype=torch.float32),
        num_kv_splits=splits,
        max_kv_splits=most_splits,
        sm_scale=layer.softmax_scale,
        k_scale=1.0,
        v_scale=1.0,
        use_pdl=True,
        page_size=layer.page_size,
    )

    def call() -> torch.Tensor:
        attend()
        return out

    return call


def measure_gather(key: dict) -> dict:
    """What SGLang 0.5.23 does in each draft step of several branches (flashattention_backend.py,
    3064 to 3073), with the arm's columns; pages hold one token."""
    requests = int(key["call"].split()[0])
    columns = int(key["arm"])
    page_size = 1
    slots = torch.randint(2**30, (requests, columns), dtype=torch.int32)
    rows = torch.randperm(requests)
    req_to_token = slots.to(DEVICE)
    req_pool_indices = rows.to(DEVICE)
    strided_indices = torch.arange(0, columns, page_size, device=DEVICE)
    table = torch.zeros_like(req_to_token)

    def gather() -> torch.Tensor:
        token = req_to_token[req_pool_indices[:, None], strided_indices[None, :]]
        table[:, :columns].copy_(token // page_size)
        return table

    def check(found: torch.Tensor) -> OracleCheck:
        wrong = int((found.cpu() != torch.stack([slots[row] for row in rows])).sum())
        return OracleCheck(wrong, budget=0.0, rows=requests, counts="wrong pages")

    return timed(gather, check, work_per_call=float(2 * slots.nbytes))


def timed(call: Callable, check: Callable, work_per_call: float) -> dict:
    """A record's fields: the output is checked before the call is timed."""
    return timed_call(
        call,
        check,
        timer=lambda: run_timer(TIMER)(call),
        work_per_call=work_per_call,
        gpu=DEVICE == "cuda",
    )


def measure_traced(key: dict) -> dict:
    """Median host times of a replan and of a launch of one small kernel, again after every second
    trace of the call; without traces after as many untraced calls."""
    case = read_case(key["call"])
    work = build_workload(case, device=DEVICE)
    backend = create("flashinfer-fa2", case.spec, device=DEVICE, cuda_graph=True)
    plan = backend.plan(work.batch)
    attend = partial(backend.run, work.q, work.kv, plan)
    word = torch.zeros(1, device=DEVICE)
    calls = {
        "plan_us": lambda: backend.plan(work.batch, out=plan),
        "launch_us": lambda: word.add_(1),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    traces = 0
    for wanted in TRACES_BEFORE:
        while traces < wanted:
            if key["arm"] == UNTRACED:
                repeat(attend, TRACED_CALLS)
            else:
                trace_kernels(attend)
            traces += 1
        for name, call in calls.items():
            samples = [us for _ in range(HOST_REPEATS) for us in time_host(call).samples_us]
            times[name].append(round(median(samples), 2))
    return {"status": "ok", "traces_before": TRACES_BEFORE, **times}


# ---- lanes


@dataclass(frozen=True)
class Lane:
    """Calls by arms, the last of which the others are compared with. Arms that are `apart` have a
    process each. `needs` is a backend of the library that must be there."""

    measure: Callable[[dict], dict]
    arms: tuple[str, ...]
    calls: tuple[str, ...]
    apart: bool = False
    needs: str = "sdpa"


PAGES_OF_1 = tuple(PAGE_1.values())
PAGES_OF_16 = tuple(text.replace("page=1 ", "page=16 ") for text in PAGES_OF_1)
ONE_REQUEST = tuple(
    f"heads={heads} page=16 lens={tokens}"
    for heads in ("8/1", "16/2", "32/8")
    for tokens in (32_768, 131_072, 262_144)
)
TRITON_CALLS = (
    "heads=32/8 page=1 lens=131072",
    "heads=16/2 page=1 lens=131072",
    "heads=32/8 page=1 lens=100000,512x39",
    "heads=32/8 page=1 lens=2048x64",
)
LANES = {
    "offsets": Lane(
        measure_offsets,
        arms=("0.6.18", "0.6.17"),
        calls=PAGES_OF_1 + PAGES_OF_16,
        apart=True,
    ),
    "caps": Lane(
        measure_caps,
        arms=("32", "128"),
        calls=ONE_REQUEST,
        needs="vllm-flash-attn-3",
    ),
    "triton-splits": Lane(
        measure_triton,
        arms=("8", "32"),
        calls=TRITON_CALLS,
        needs="sglang-triton-mla",
    ),
    "gather": Lane(
        measure_gather,
        arms=("1048576", "131072", "8192"),
        calls=("32 requests, pages of 1",),
    ),
    "traced": Lane(
        measure_traced,
        arms=("TEARDOWN_CUPTI=1", "TEARDOWN_CUPTI=0", UNTRACED),
        calls=("heads=32/8 page=16 lens=4096x64",),
        apart=True,
        needs="flashinfer-fa2",
    ),
}


def processes_of(name: str, overlays: dict[str, Path]) -> list[Process]:
    """The fresh processes of a lane, odd rounds in reverse order."""
    lane = LANES[name]
    processes = []
    for number in range(ROUNDS):
        keys = []
        for call in lane.calls:
            for arm in lane.arms:
                keys.append({"lane": name, "round": number, "arm": arm, "call": call})
        if number % 2:
            keys.reverse()
        if not lane.apart:
            processes.append(Process(tuple(keys)))
            continue
        for arm in dict.fromkeys(key["arm"] for key in keys):
            mine = tuple(key for key in keys if key["arm"] == arm)
            processes.append(Process(mine, environment_of(arm, overlays)))
    return processes


def environment_of(arm: str, overlays: dict[str, Path]) -> dict[str, str]:
    """Variables of an arm that has a process of its own: a variable, or a release's folder."""
    name, is_variable, value = arm.partition("=")
    if is_variable:
        return {name: value}
    folder = overlays.get(f"{FLASHINFER}=={arm}")
    if folder is None:
        return {}
    paths = (str(folder), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


# ---- show


def sides_of(name: str, rows: list[dict]) -> dict[str, tuple[list[float], list[float]]]:
    """What is compared -> times of both sides, round by round, of rounds that have both."""
    if name == "traced":
        return _after_and_before(rows)
    us = {(row["call"], row["arm"], row["round"]): row["us"] for row in rows}
    *others, base = LANES[name].arms
    sides = {}
    for call in LANES[name].calls:
        for arm in others:
            rounds = [n for n in range(ROUNDS) if {(call, arm, n), (call, base, n)} <= us.keys()]
            if rounds:
                new = [us[call, arm, number] for number in rounds]
                old = [us[call, base, number] for number in rounds]
                sides[f"{call}: {arm} over {base}"] = (new, old)
    return sides


def _after_and_before(rows: list[dict]) -> dict[str, tuple[list[float], list[float]]]:
    sides: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        for what in ("plan_us", "launch_us"):
            words = f"{row['arm']}, {what} after {row['traces_before'][-1]} over before"
            after, before = sides.setdefault(words, ([], []))
            after.append(row[what][-1])
            before.append(row[what][0])
    return sides


def show(rows: list[dict]) -> None:
    """Print each lane of each GPU as one table (Holm), and what has no time."""
    tables: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        tables.setdefault((row["lane"], row["gpu_id"]), []).append(row)
    for (name, gpu_id), mine in tables.items():
        print(f"{name}, {mine[0]['gpu']} {gpu_id}")
        sides = sides_of(name, [row for row in mine if row["status"] == "ok"])
        pairs = [*sides.values()]
        for words, pair, judged in zip(sides, pairs, judge_ratios(pairs), strict=True):
            new, old = (median(side) for side in pair)
            print(
                f"  {words}: {judged.ratio:.3f} ({judged.low:.3f} to {judged.high:.3f}), "
                f"{judged.verdict}, {judged.rounds} rounds; {new:.2f} over {old:.2f} us"
            )
        for row in mine:
            if row["status"] != "ok":
                where = f"round {row['round']}, {row['arm']}, {row['call']}"
                print(f"  no time: {where}: {row['reason']}")


def asked(arguments: list[str]) -> argparse.Namespace:
    """The command line, `overlays` as requirement -> folder."""
    parser = argparse.ArgumentParser(prog="hunts", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="lane", required=True)
    for name in LANES:
        lane = verbs.add_parser(name)
        lane.add_argument("out", type=Path)
        add_limit(lane)
        if name == "offsets":
            lane.add_argument("--overlay", action="append", default=[], metavar=OVERLAY)
    verbs.add_parser("show").add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    options.overlays = {}
    if options.lane == "offsets":
        try:
            options.overlays = dict(map(parse_overlay, options.overlay))
        except ValueError as error:
            parser.error(str(error))
        needed = [f"{FLASHINFER}=={arm}" for arm in LANES["offsets"].arms]
        if {*needed} != options.overlays.keys():
            parser.error(f"offsets must have --overlay of {' and '.join(needed)}")
    return options


def main(arguments: list[str]) -> int:
    """Run a lane or show; returns exit status."""
    options = asked(arguments)
    if options.lane == "show":
        show(rows_in(options.out))
        return 0
    lane = LANES[options.lane]
    overlays = options.overlays
    processes = processes_of(options.lane, overlays)
    if options.process is not None:
        return measure_left(processes[options.process], options.out, lane.measure)
    if reason := unavailable(lane.needs):
        raise SystemExit(f"{options.lane} cannot be measured here: {reason}")
    given = [f"--overlay={requirement}={folder}" for requirement, folder in overlays.items()]
    command = command_of("support.hunts", options.lane, options.out, *given)
    return run(command, processes, options.out, options.seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
