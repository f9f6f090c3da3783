"""What engines pass, by data/engine_calls.yaml: taken as it is, right, nothing beside written."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.metadata_cases import BUILDERS, DEVICE, POISON, facts_of

from attnlib.core import StepSchedules

LISTED = yaml.safe_load((Path(__file__).parents[2] / "data/engine_calls.yaml").read_text())
CALLS = {call["name"]: call for call in LISTED["calls"]}
PADDING_ROW = 0
SLOTS = 1040
GIVEN = {"seq_lens": "lens", "req_pool_indices": "rows", "kv_start": "starts"}


def random_values(name, shape, rng):
    """Slots of the pool; no slot of the row that pads, and slot -1's place at the map's end."""
    values = rng.integers(0, SLOTS, shape)
    if name == "req_to_token":
        values[PADDING_ROW] = 0
    if name == "swa_slot_map":
        values[-1] = -1
    return values


def engine_call(listed):
    """(arguments, buffers): each argument a view of its buffer, which is poison elsewhere."""
    rng = np.random.default_rng(0)
    call = dict(listed["numbers"])
    buffers = {}
    builder = BUILDERS[listed["builder"]]
    for name, form in listed["tensors"].items():
        if "as" in form:
            call[name] = call[form["as"]]
            continue
        dtype = getattr(torch, form["dtype"])
        view = buffers[name] = torch.full(
            form["of"],
            POISON,
            dtype=dtype,
            device=DEVICE,
        )
        ends = form.get("to", form["of"])
        starts = form.get("from", [0] * len(form["of"]))
        for dim, (start, end) in enumerate(zip(starts, ends, strict=True)):
            view = view.narrow(dim, start, end - start)
        call[name] = view
        if name not in builder.outputs:
            given = listed.get(GIVEN.get(name))
            values = random_values(name, view.shape, rng) if given is None else np.array(given)
            view.copy_(torch.from_numpy(values))
    if "schedules" in builder.outputs:
        # SGLang's call is causal and says where each query token lies.
        facts = {"full": facts_of(call, varlen_q=True)}
        call["schedules"] = StepSchedules.reserve(facts, torch.device(DEVICE))
        call["schedules"].words.fill_(POISON)
    return builder, call, buffers


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("build", ["ours", "eager"])
def test_a_call_of_an_engine_is_taken_as_it_is(name, build):
    """Every word of the views is right, and the rest of their buffers is poison."""
    builder, call, buffers = engine_call(CALLS[name])
    for _ in range(2 if getattr(builder, build) else 0):
        getattr(builder, build)(**call)
        builder.assert_right(call, tails=build == "ours")
        for name in buffers:
            beside = buffers[name].clone()
            view = call[name]
            beside.as_strided(
                view.shape,
                view.stride(),
                view.storage_offset(),
            ).fill_(POISON)
            assert (beside == POISON).all(), name
