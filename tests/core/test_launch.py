"""Launches: what is remembered, how they overlap, and that every kernel compiles for Hopper."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.metadata_cases import DECODE, DEVICE, Shape, arguments, poison
from triton import knobs

from attnlib.core import build_decode_metadata
from attnlib.core.metadata import decode, launch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "programs, slots, overlap",
    [
        (1, 0, launch.NO_OVERLAP),
        (8, 8, launch.WAIT_AND_LET_START),
        (9, 8, launch.WAIT),
    ],
)
def test_a_successor_may_start_early_only_while_our_whole_grid_is_on_the_gpu(
    programs, slots, overlap
):
    assert launch.overlap_of(programs, slots) == overlap


def bytes_of(span, start):
    rows = (
        range(start + row * span.pitch, start + row * span.pitch + span.width)
        for row in range(span.rows)
    )
    return {byte for row in rows for byte in row}


@pytest.mark.parametrize("seed", range(300))
def test_spans_overlap_where_they_have_a_byte_in_common(seed):
    draw = np.random.default_rng(seed)
    pitch = int(draw.integers(2, 9))
    spans = []
    for rows in draw.integers(1, 4, 2).tolist():
        width = int(draw.integers(0, pitch + 1))
        spans.append(launch.Span(rows, width, pitch if rows > 1 else width))
    first, second = spans
    for distance in range(-30, 31):
        common = bytes_of(first, 0) & bytes_of(second, distance)
        assert first.overlaps(second, distance) == bool(common), (first, second, distance)


def test_one_tensor_as_input_and_output_is_judged_anew_with_a_delta():
    span = launch.Span.of(torch.zeros(4, dtype=torch.int32))
    rule = launch.Apart(
        0,
        1,
        ("lens", "out"),
        (span, span),
        same_if_zero=True,
    )
    found = launch.Launch(
        bounds=(),
        apart=(rule,),
        sizes=(),
        cut=None,
    )
    for _ in range(2):
        found.check_apart([64, 64], 0)
        with pytest.raises(ValueError, match="out must not share memory with lens"):
            found.check_apart([64, 64], 1)
        with pytest.raises(ValueError, match="got one that begins 4 bytes after it"):
            found.check_apart([64, 68], 0)


def test_shapes_are_forgotten_before_they_fill_the_memory_of_a_server(monkeypatch):
    monkeypatch.setattr(launch, "MAX_REMEMBERED", 3)
    monkeypatch.setattr(launch, "shapes_of", lambda tensors, structure: (structure, []))
    empty = launch.Launch(
        bounds=(launch.Bound("delta", 9),),
        apart=(),
        sizes=(),
        cut=None,
    )
    launcher = launch.Launcher(None, lambda tensors, *structure: empty)
    tensors = [torch.empty(1, device=DEVICE)]
    counts = []
    for width in range(7):
        launcher.check(tensors, (width,), (0,))
        counts.append(len(launcher.remembered))
    assert counts == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.gpu
def test_a_remembered_launch_calls_tritons_launch_hooks():
    names = []
    call = arguments(Shape(3, 100))
    hooks = knobs.runtime.launch_enter_hook

    def hook(metadata):
        names.append(metadata.get()["name"])

    build_decode_metadata(**call)
    hooks.add(hook)
    try:
        build_decode_metadata(**call)
    finally:
        hooks.remove(hook)
    assert names == ["decode_metadata_kernel"]


@pytest.mark.gpu
def test_a_later_call_launches_what_the_first_compiled():
    call = arguments(Shape(5, 90, 4))
    build_decode_metadata(**call)
    remembered = len(decode.LAUNCHER.remembered)
    compiled = DECODE.compiled()
    for _ in range(2):
        poison(call, DECODE.outputs)
        build_decode_metadata(**call)
        DECODE.assert_right(call)
    assert len(decode.LAUNCHER.remembered) == remembered
    assert DECODE.compiled() == compiled


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_where_no_gpu_is():
    script = ROOT / "tests/support/compile_kernels.py"
    kernels = set()
    for path in ROOT.glob("attnlib/core/**/*.py"):
        kernels |= set(
            re.findall(r"^(?:@triton\.jit|\))\ndef (\w+_kernel)\(", path.read_text(), re.M)
        )
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outside["PYTHONPATH"] = os.pathsep.join(
        (
            f"{ROOT}/tests",
            str(ROOT),
            outside["PYTHONPATH"],
        )
    )
    done = subprocess.run(
        [sys.executable, script],
        env=outside,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    sizes = dict(line.split() for line in done.stdout.splitlines())
    assert set(sizes) == kernels
    assert min(map(int, sizes.values())) > 10_000
