"""What every metadata builder promises, ours and the op-by-op baselines: one test per promise."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.metadata_cases import (
    BUILDERS,
    OTHER_NUMBERS,
    POISON,
    poison,
)

from attnlib.core.metadata import launch
from attnlib.core.metadata.require import EITHER_WIDTH, IN_ROWS
from attnlib.core.schedule.kinds import StepSchedules
from attnlib.studies.metadata import eager

OURS = [pytest.param(b, b.ours, id=name) for name, b in BUILDERS.items()]
ALL = OURS + [
    pytest.param(b, b.eager, id=f"{name}-eager") for name, b in BUILDERS.items() if b.eager
]
EVERY_SHAPE = [
    pytest.param(builder, build, shape, id=f"{p.id}-{name}")
    for p in ALL
    for builder, build in [p.values]
    for name, shape in builder.shapes.items()
]
ours = pytest.mark.parametrize("builder, build", OURS)
all_builds = pytest.mark.parametrize("builder, build", ALL)


def check(builder, build, call):
    """Every word; the op-by-op decode metadata alone fills the columns past the live ones."""
    builder.assert_right(call, tails=build is not eager.build_decode_metadata)


def renew(builder, call, shape):
    """Other inputs in the same buffers, and poison in the outputs."""
    for name, tensor in builder.arguments(shape).items():
        if torch.is_tensor(tensor) and name not in builder.outputs:
            call[name].copy_(tensor)
    poison(call, builder.outputs)


@pytest.mark.parametrize("builder, build, shape", EVERY_SHAPE)
def test_every_word_is_right_and_every_tail_is_untouched(builder, build, shape):
    call = builder.arguments(shape)
    build(**call)
    check(builder, build, call)


@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
@given(data=st.data())
@settings(max_examples=20)
def test_random_calls_are_right(builder, data):
    call = builder.arguments(data.draw(builder.drawn))
    for build in filter(None, (builder.ours, builder.eager)):
        poison(call, builder.outputs)
        build(**call)
        check(builder, build, call)


@all_builds
def test_the_same_buffers_take_another_call(builder, build):
    call = builder.arguments(builder.small)
    build(**call)
    for seed, sizes in enumerate(OTHER_NUMBERS, 1):
        renew(builder, call, replace(builder.small, seed=seed))
        build(**call | sizes)
        check(builder, build, call | sizes)


@ours
def test_buffers_off_a_16_byte_address_are_right(builder, build):
    call = builder.arguments(builder.small)
    for name, tensor in call.items():
        if torch.is_tensor(tensor):
            flat = tensor.flatten()
            call[name] = torch.cat([flat[:1], flat])[1:].view_as(tensor)
    build(**call)
    build(**call)
    check(builder, build, call)


@ours
def test_a_pool_row_out_of_range_reads_nothing_and_gives_minus_one(builder, build):
    call = builder.arguments(replace(builder.small, batch=2, extra_columns=0))
    call["req_pool_indices"].copy_(torch.tensor([10_000, -1]))
    build(**call)
    pages = call.get("page_table", call.get("kv_indices"))
    assert {-1} <= {*pages.unique().tolist()} <= {-1, POISON}


@all_builds
@pytest.mark.parametrize("sides", [(4, 8), (1, 2)])
def test_columns_of_wider_tensors_are_taken_and_those_beside_them_untouched(builder, build, sides):
    call = builder.arguments(builder.small)
    wider = {}
    for name in IN_ROWS.intersection(call):
        width = call[name].shape[1]
        wider[name] = call[name].new_full((len(call[name]), width + sum(sides)), POISON)
        wider[name][:, sides[0] : sides[0] + width] = call[name]
        call[name] = wider[name][:, sides[0] : sides[0] + width]
    build(**call)
    build(**call)
    check(builder, build, call)
    for tensor in wider.values():
        assert (tensor[:, : sides[0]] == POISON).all()
        assert (tensor[:, -sides[1] :] == POISON).all()


OF_ANY_LENGTH = {"seq_lens", "req_to_token", "swa_slot_map", "kv_indices"}


def wrong_tensors(call, name):
    """Values that no builder takes for its tensor `name`, each with the start of its error."""
    tensor = call[name]
    first = next(other for other in call if torch.is_tensor(call[other]))
    yield [1, 2], f"{name} must be a tensor, got list"
    yield tensor.float(), f"{name} must be ["
    yield tensor.short(), f"{name} must be ["
    yield tensor[None], f"{name} must be ["
    yield (torch.stack([tensor, tensor], -1)[..., 0], f"{name} must be contiguous (a copy would")
    if name in IN_ROWS:
        yield tensor[:1].expand(len(tensor), -1), f"{name} must be contiguous (a copy would"
    if name not in EITHER_WIDTH:
        yield tensor.long(), f"{name} must be ["
    if name not in OF_ANY_LENGTH:
        yield tensor[:-1], f"{name} must be [{len(tensor)}"
    if name != first:
        yield tensor.to("meta"), f"{name} must be on {first}'s device"


def wrong_calls(builder, call):
    """Arguments to change in a right call, and what the error must say."""
    for name in [name for name in call if torch.is_tensor(call[name])]:
        yield from (({name: value}, message) for value, message in wrong_tensors(call, name))
    for name, value, *said in builder.wrong:
        if value is ...:
            # The input takes the output's memory: outputs are int32, which both may be.
            output, source = name.split(" = ")
            given = {source: call[output][: len(call[source])]}
            numbers = said[0] if said else {}
            yield given | numbers, f"{output} must not share memory with {source}"
        else:
            yield {name: value(call) if callable(value) else value}, f"{name} must be {said[0]}"


@all_builds
def test_a_wrong_argument_is_named_before_anything_is_written(builder, build):
    call = builder.arguments(builder.small)
    # From now on the signature of the right call is known.
    build(**call)
    poison(call, builder.outputs)
    for change, message in wrong_calls(builder, call):
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            build(**call | change)
        for name in builder.outputs:
            output = getattr(call.get(name), "words", call.get(name))
            assert output is None or (output == POISON).all(), message


@ours
def test_a_tensor_that_is_missing_or_unknown_is_named(builder, build):
    call = builder.arguments(builder.small)
    for name in ("seq_lens", "req_to_token"):
        with pytest.raises(TypeError, match=f"^{name} must be given, a tensor"):
            build(**{other: value for other, value in call.items() if other != name})
    with pytest.raises(TypeError, match="a tensor must be one of seq_lens, .*, got 'q'"):
        build(**call, q=call["seq_lens"])


@ours
@pytest.mark.parametrize(
    "name, value, words",
    [
        ("seq_lens", 65, r"seq_lens must lie in 0..64 with seq_len_delta 0, .* got \d+..65"),
        ("seq_lens", -1, r"seq_lens must lie in 0..64 with seq_len_delta 0, .* got -1"),
        ("req_pool_indices", 7, r"req_pool_indices must lie in 0..6 .rows of req_to_token.*7"),
        (
            "req_pool_indices",
            -1,
            "req_pool_indices must lie in 0..6 .* got -1",
        ),
    ],
)
def test_values_out_of_range_are_refused_where_a_check_is_asked_for(
    builder, build, name, value, words
):
    call = builder.arguments(builder.small)
    build(**call, check=True)
    check(builder, build, call)
    call[name][1] = value
    poison(call, builder.outputs)
    with pytest.raises(ValueError, match=words):
        build(**call, check=True)
    for output in builder.outputs:
        written = getattr(call.get(output), "words", call.get(output))
        assert written is None or (written == POISON).all()
    build(**call)


def one_word_apart(first, second):
    """Copies of two int32 tensors, contiguous, the second one word after the first."""
    room = first.new_zeros(first.numel() + second.numel() + 1)
    parts = (room[: first.numel()], room[1 : 1 + second.numel()])
    for part, tensor in zip(parts, (first, second), strict=True):
        part.copy_(tensor.flatten())
    return [part.view_as(tensor) for part, tensor in zip(parts, (first, second), strict=True)]


@ours
def test_an_output_must_not_lie_across_another_tensor_at_any_address(builder, build):
    shape = replace(builder.small, lens_dtype=torch.int32, extra_columns=0)
    call = builder.arguments(shape)
    build(**call)
    tensors = {name: tensor for name, tensor in call.items() if torch.is_tensor(tensor)}
    for output in builder.outputs:
        if output not in tensors:
            continue
        for name, tensor in tensors.items():
            if name == output or tensor.dtype != torch.int32:
                continue
            for pair in ((name, output), (output, name)):
                shared = one_word_apart(tensors[pair[0]], tensors[pair[1]])
                changed = dict(zip(pair, shared, strict=True))
                with pytest.raises(ValueError, match="must not share memory with"):
                    build(**call | changed)


@ours
def test_columns_of_one_buffer_side_by_side_share_no_memory(builder, build):
    call = builder.arguments(builder.small)
    tables = [name for name in ("page_table", "swa_page_table") if name in call]
    if len(tables) < 2:
        pytest.skip("it has one table")
    width = call["page_table"].shape[1]
    both = call["page_table"].new_full((len(call["page_table"]), 2 * width), POISON)
    halves = {"page_table": both[:, :width], "swa_page_table": both[:, width:]}
    build(**call | halves)
    build(**call)
    wanted = torch.cat([call["page_table"], call["swa_page_table"]], 1)
    assert torch.equal(both, wanted)
    with pytest.raises(ValueError, match="swa_page_table must not share memory with page_table"):
        build(**call | halves | {"swa_page_table": both[:, 1 : width + 1]})


@ours
def test_without_a_gpu_and_without_the_interpreter_it_says_so(builder, build, monkeypatch):
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    call = builder.arguments(builder.small)
    on_cpu = {name: value.cpu() for name, value in call.items() if torch.is_tensor(value)}
    if made := call.get("schedules"):
        on_cpu["schedules"] = StepSchedules(
            made.kinds,
            made.words.cpu(),
            made.table.cpu(),
        )
    with pytest.raises(ValueError, match="must be on a CUDA device .or set TRITON_INTERPRET=1"):
        build(**call | on_cpu)


def captured(run):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    return graph, made


@pytest.mark.gpu
@all_builds
@pytest.mark.parametrize("size", ["small", "large"])
def test_a_graph_replays_with_inputs_changed_in_place(builder, build, size):
    shape = getattr(builder, size)
    call = builder.arguments(shape)
    build(**call)
    graph, _ = captured(lambda: build(**call))
    for seed in (1, 2, 3):
        renew(builder, call, replace(shape, seed=seed))
        graph.replay()
        check(builder, build, call)


@pytest.mark.gpu
@ours
def test_calls_in_a_row_each_see_what_the_one_before_wrote(builder, build):
    # Overlapping launches: a call must wait for the kernel that changes its input.
    call = builder.arguments(builder.small)
    call["seq_lens"].clamp_(max=20)

    def clone(value):
        if isinstance(value, StepSchedules):
            return StepSchedules(value.kinds, value.words.clone(), value.table)
        return value.clone() if torch.is_tensor(value) else value

    def steps():
        seen = []
        for _ in range(20):
            call["seq_lens"].add_(1)
            build(**call)
            seen.append({name: clone(value) for name, value in call.items()})
        return seen

    build(**call)
    graph, seen = captured(steps)
    poison(call, builder.outputs)
    graph.replay()
    for step in seen:
        check(builder, build, step)


@pytest.mark.gpu
@ours
def test_another_size_compiles_nothing(builder, build):
    build(**builder.arguments(builder.small))
    before = builder.compiled()
    for sizes in OTHER_NUMBERS:
        build(**builder.arguments(builder.small) | sizes)
        build(**builder.arguments(replace(builder.small, batch=9)) | sizes)
    assert builder.compiled() == before


@pytest.mark.gpu
@ours
def test_a_launch_on_the_gpu_writes_what_the_eager_code_writes(builder, build):
    call = builder.arguments(builder.large)
    for _ in range(2):  # the second launch finds the kernel compiled
        poison(call, builder.outputs)
        build(**call)
        check(builder, build, call)
