"""Made-up records of the studies of plans: times follow the model of the choice, and no GPU."""

from dataclasses import replace

import numpy as np

from attnlib.core.fa2.choice import PlanShape, choose, predicted_us
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import ExtendCase
from attnlib.kinds.item import Item
from attnlib.kinds.lengths import sample_seq_lens
from attnlib.kinds.plan.case import PlanCase
from attnlib.kinds.step.case import StepCase
from attnlib.run import store
from attnlib.studies.fa2_plan.study import SERVED
from attnlib.studies.fa2_plan.tables import COPIED, FA3, HOST, OUR_KERNEL, OURS, OURS_MANY, PLANNED

MACHINE = {"gpu": "Test GPU", "gpu_id": "0badcafe", "num_sms": 132, "l2_mib": 50.0}
LONG, CHAT, FOUR = (SERVED[kind, 3] for kind in ("one long", "chat of 64", "four"))
SPEC = LONG.spec
SLOWER = {"flashinfer-fa2": {LONG: 20.0, CHAT: 1.5, FOUR: 1.0}, "flashinfer-cuda-cores": 2.0}
SLOWER[FA3] = {LONG: 1.1, CHAT: 1.2, FOUR: 0.9}
CHUNKS = (256, 512, 1024, 2048, 4096)


def plan_frame(make_record):
    """Three rounds of each kind of record; a factor of `SLOWER` over our time, rounds 1 % apart."""
    items = (*_decodes(), *_many(), *_plans(), *_steps())
    return _measured(make_record, "demo", MACHINE, items)


def chunk_frame(make_record):
    """Three rounds of chunk sweeps, on another GPU."""
    return _measured(make_record, "demo_chunks", MACHINE | {"gpu_id": "deadbeef"}, [*_chunks()])


def _measured(make_record, study, machine, items):
    for round_ in range(3):
        drift = 1 + round_ / 100
        for item, us, more in items:
            own = {"run_us": (us * drift,), "machine": machine, "study": study, "round": round_}
            store.append(make_record(item=item, **own, **more))
    (machine,) = store.machines(study)
    return store.load(study, machine)


def _us(case):
    lens = sample_seq_lens(case)
    choice = choose(PlanShape.of(case.spec, lens, 132), lens)
    return float(choice.us[choice.best])


def _decodes():
    for case in (LONG, CHAT, FOUR):
        for timer in ("graph", "graph-cold"):
            yield Item(OURS, timer, case), _us(case), {}
            for name, factor in SLOWER.items():
                factor = factor if isinstance(factor, float) else factor[case]
                yield Item(name, timer, case), factor * _us(case), {}
    half = replace(LONG, spec=replace(SPEC, dtype="float16", kv_dtype="float16"))
    for case in (half, replace(LONG, spec=replace(SPEC, head_dim=64))):
        yield Item(OURS, "graph", case), 10.0, {}
        yield Item("flashinfer-fa2", "graph", case), 30.0, {}


def _many():
    for case in (LONG, CHAT):
        for q_len in (2, 8):
            asked = ExtendCase(case, "target_verify", q_len, "causal")
            for timer, factor in (("graph", 4.0), ("profiler", 2.0)):
                yield Item(OURS_MANY, timer, asked), 50.0, {}
                yield Item("flashinfer-prefill-fa2", timer, asked), 50.0 * factor, {}


def _chunks():
    for case in (LONG, CHAT, FOUR):
        lens = sample_seq_lens(case)
        shape = PlanShape.of(case.spec, lens, 132)
        told = predicted_us(shape, lens.astype(int), np.array(CHUNKS))
        for chunk, us in zip(CHUNKS, told.tolist(), strict=True):
            yield Item("fa2-chunk", "graph", PlanCase(case, chunk=chunk)), us, {}
        yield Item("fa2-chunk", "graph", PlanCase(case)), 1.02 * _us(case), {}


def _plans():
    for batch, us in ((1, 2.0), (140, 4.0), (1024, 8.0)):
        case = PlanCase(DecodeCase(SPEC, batch, 8192, "ragged"))
        yield Item("fa2-plan", "graph", case), us, {}
        yield Item("fa2-plan-alone", "graph", case), us + 0.4, {}
        yield Item("fa2-plan-words", "graph", case), us - 0.5, {}
    yield Item("fa2-plan", "eager", case), 12.0, {}


def _steps():
    launch = {"name": OUR_KERNEL, "launches": 1.0, "gpu_us": 4.0}
    layer = {"name": "BatchPrefillWithPagedKVCacheKernel", "launches": 32.0, "gpu_us": 1600.0}
    case = StepCase(LONG, 32)
    for name, us, plan_us, kernels in (
        (COPIED, 3000.0, (900.0,), (layer,)),
        (HOST, 2600.0, (700.0,), (layer,)),
        (PLANNED, 1700.0, (), (launch, layer)),
    ):
        yield Item(name, "eager", case), us, {"plan_us": plan_us, "kernels": kernels}
