"""What engines pass, by data/engine_calls.yaml: taken as it is, right, nothing beside written."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.metadata_cases import BUILDERS, DEVICE, POISON, facts_of

from attnlib.core.schedule.fa3 import reserve

LISTED = yaml.safe_load((Path(__file__).parents[2] / "data/engine_calls.yaml").read_text())
CALLS = {call["name"]: call for call in LISTED["calls"]}
each = pytest.mark.parametrize("name", CALLS)
PADDING_ROW, SLOTS = 0, 1040
GIVEN = {"seq_lens": "lens", "last_page_lens": "lens", "req_pool_indices": "rows"}
GIVEN |= {"kv_start": "starts"}


def random_values(name, shape, rng):
    """Slots of the pool; no slot of the row that pads, and slot -1's place at the map's end."""
    values = rng.integers(0, SLOTS, shape)
    if name == "req_to_token":
        values[PADDING_ROW] = 0
    if name == "swa_slot_map":
        values[-1] = -1
    return values


def engine_call(listed, seed=0):
    """(arguments, buffers): each argument a view of its buffer, which is poison elsewhere."""
    rng, call, buffers = np.random.default_rng(seed), dict(listed["numbers"]), {}
    builder = BUILDERS[listed["builder"]]
    for name, form in listed["tensors"].items():
        if "as" in form:
            call[name] = call[form["as"]]
            continue
        dtype = getattr(torch, form["dtype"])
        view = buffers[name] = torch.full(form["of"], POISON, dtype=dtype, device=DEVICE)
        ends, starts = form.get("to", form["of"]), form.get("from", [0] * len(form["of"]))
        for dim, (start, end) in enumerate(zip(starts, ends, strict=True)):
            view = view.narrow(dim, start, end - start)
        call[name] = view
        if name not in builder.outputs:
            given = listed.get(GIVEN.get(name))
            values = random_values(name, view.shape, rng) if given is None else np.array(given)
            view.copy_(torch.from_numpy(values))
    if "scheduler" in call:
        # SGLang's call is causal and says where each query token lies.
        facts = facts_of(call, varlen_q=True)
        call["scheduler"] = reserve(facts, torch.device(DEVICE), out=buffers["scheduler"])
    return builder, call, buffers


def check(builder, call, buffers, tails=True):
    """Every word of the views, and poison in the rest of their buffers."""
    builder.assert_right(call, tails=tails)
    for name, buffer in buffers.items():
        if name != "scheduler":
            beside = buffer.clone()
            view = call[name]
            beside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(POISON)
            assert (beside == POISON).all(), name


@each
def test_a_call_of_an_engine_is_taken_as_it_is(name):
    builder, call, buffers = engine_call(CALLS[name])
    for _ in range(2):
        builder.ours(**call)
        check(builder, call, buffers)


@each
def test_the_op_by_op_code_takes_it_too(name):
    builder, call, buffers = engine_call(CALLS[name])
    if builder.eager:
        builder.eager(**call)
        check(builder, call, buffers, tails=False)


@pytest.mark.gpu
@each
def test_a_graph_replays_it_with_inputs_changed_in_place(name):
    builder, call, buffers = engine_call(CALLS[name])
    builder.ours(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        builder.ours(**call)
    for seed in range(1, 30):
        _, other, _ = engine_call(CALLS[name], seed)
        for argument, value in other.items():
            if torch.is_tensor(value):
                call[argument].copy_(value)
        graph.replay()
        check(builder, call, buffers)


def test_lengths_that_are_their_own_output_grow_in_a_loop_of_steps():
    # As SGLang's decode does: the caller's lengths move on, the call leaves them as they are.
    builder, call, buffers = engine_call(CALLS["FA3, decode, CUDA graph"])
    for _ in range(5):
        builder.ours(**call)
        check(builder, call, buffers)
        call["seq_lens"].add_(2)
        call["max_pages"] += 2
