"""Time our plan of fa2 beside FlashInfer's on a GPU, batch by batch, and write it as JSON.

    python tests/support/judge_plan.py OUT.json [--batches 100] [--rounds 4]

A script, run by hand after a change of `core.fa2.choice`. Both plans run the same kernels over the
same tensors: CUDA graphs, L2 cold, rounds A B B A in one process. Where ours is slower than
MOST_LOSS allows, it is timed under other chunks too. The last lines are a summary.
"""

import argparse
import json
import random
from pathlib import Path
from statistics import geometric_mean, median

import torch

from attnlib.core import backends
from attnlib.core.fa2.words import chunk_in
from attnlib.core.spec import AttnSpec
from attnlib.kinds.call import cache_copies, call_of
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.decode.measure import build_workload
from attnlib.measure.machine import describe_machine
from attnlib.measure.timer import capture, cold_copies, warm_up
from attnlib.studies.fa2_plan import KINDS, OTHER_KINDS, served

HEADS = ((32, 8), (8, 1), (16, 2), (64, 8), (28, 4))
LENGTHS = ("fixed", "ragged", "chat", "skewed", "one_long")
LIBRARY, OURS = "flashinfer-fa2", "flashinfer-fa2-planned"
MOST_LOSS = 0.97
SAMPLE_US, SAMPLES = 2000.0, 7
CHUNKS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)


def batches(count):
    """Every kind of every layout in turn, then as many random ones as are left of `count`."""
    cases = [
        served(kind, AttnSpec(*heads, 128, page_size), seed=place)
        for kind in (*KINDS, *OTHER_KINDS)
        for place, (heads, page_size) in enumerate(zip(HEADS, (16, 1, 64, 16, 1), strict=True))
    ]
    draw = random.Random("judge the plan")
    while len(cases) < count:
        batch, kv_len = (round(2 ** draw.uniform(*span)) for span in ((0, 8), (7, 16)))
        spec = AttnSpec(*HEADS[len(cases) % len(HEADS)], 128, draw.choice((1, 16, 64)))
        case = DecodeCase(spec, batch, kv_len, draw.choice(LENGTHS), seed=len(cases))
        if 2**20 <= case.cost.kv_bytes <= 4 * 2**30:
            cases.append(case)
    return cases[:count]


def graph_of(backend, plan, work, copies):
    """A replay of calls over cold copies, and their number; about SAMPLE_US long."""
    calls = [call_of(backend, work.q, kv, plan) for kv in copies]
    warm_up(calls[0])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    each_us = max(1e3 * start.elapsed_time(end) / len(calls), 1)
    turns = max(1, min(512 // len(calls), round(SAMPLE_US / each_us / len(calls))))
    graph = capture(calls, turns)
    graph.replay()
    return graph.replay, turns * len(calls)


def time_of(replay, calls):
    """Median microseconds per call over SAMPLES replays."""
    samples = []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(1e3 * start.elapsed_time(end) / calls)
    return median(samples)


def judge(case, rounds, l2_bytes):
    """Times of both plans in each round; other chunks where ours loses."""
    work = build_workload(case, device="cuda")
    copies = cache_copies(work.kv, cold_copies(case.cost.kv_bytes, l2_bytes))
    sides = {}
    for name in (LIBRARY, OURS):
        backend = backends.create(name, case.spec, device="cuda", cuda_graph=True)
        plan = backend.plan(work.batch)
        out = call_of(backend, work.q, work.kv, plan)()
        sides[name] = backend, plan, out.clone(), graph_of(backend, plan, work, copies)
    torch.testing.assert_close(sides[OURS][2], sides[LIBRARY][2], atol=2e-2, rtol=0)
    times = {LIBRARY: [], OURS: []}
    for _ in range(rounds):
        for name in (LIBRARY, OURS, OURS, LIBRARY):
            times[name].append(time_of(*sides[name][3]))
    backend, plan = sides[OURS][:2]
    planner = plan.state[-1]
    row = {
        "case": case.key,
        "heads": case.spec.heads,
        "lengths": case.lengths,
        "requests": case.batch_size,
        "chunk": chunk_in(planner._words.cpu().numpy(), planner.layout),
        "library_us": [round(us, 3) for us in times[LIBRARY]],
        "ours_us": [round(us, 3) for us in times[OURS]],
        "ratio": round(median(times[LIBRARY]) / median(times[OURS]), 4),
    }
    if row["ratio"] < MOST_LOSS:
        row["other_chunks_us"] = swept(planner, work, sides[OURS][3])
    return row


def swept(planner, work, graph):
    """Microseconds of the same graph by the plan of each chunk that the grid has room for."""
    times = {}
    for chunk in CHUNKS:
        try:
            planner.plan_with(work.batch.seq_lens_cpu, chunk)
        except ValueError:
            continue
        times[chunk] = round(time_of(*graph), 3)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    machine, rows = describe_machine(), []
    for case in batches(options.batches):
        try:
            row = judge(case, options.rounds, int(machine["l2_mib"] * 2**20))
        except torch.cuda.OutOfMemoryError:
            row = {"case": case.key, "error": "out of memory"}
        torch.cuda.empty_cache()
        rows.append(row)
        print(json.dumps(row), flush=True)
        options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=0))
    ratios = sorted(row["ratio"] for row in rows if "ratio" in row)
    lost = sum(ratio < MOST_LOSS for ratio in ratios)
    print(f"{len(ratios)} batches, library over ours: mean {geometric_mean(ratios):.3f}")
    print(f"median {median(ratios):.3f}, least {ratios[0]}, {lost} below {MOST_LOSS}")


if __name__ == "__main__":
    main()
