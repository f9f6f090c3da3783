"""Launches: what is remembered, how they overlap, and that every kernel compiles for Hopper."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.metadata_cases import DECODE, DEVICE, Shape, arguments, poison
from triton import knobs

from attnlib.core.metadata import decode, launch
from attnlib.core.metadata.decode import build_decode_metadata

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("programs", "slots", "overlap"),
    [(1, 0, launch.NO_OVERLAP), (8, 8, launch.WAIT_AND_LET_START), (9, 8, launch.WAIT)],
)
def test_a_successor_may_start_early_only_while_our_whole_grid_is_on_the_gpu(
    programs, slots, overlap
):
    assert launch.overlap_of(programs, slots) == overlap


def test_shapes_are_forgotten_before_they_fill_the_memory_of_a_server(monkeypatch):
    monkeypatch.setattr(launch, "MAX_REMEMBERED", 3)
    monkeypatch.setattr(launch, "shapes_of", lambda tensors, structure: (structure, []))
    empty = launch.Launch(bounds=(launch.Bound("delta", 9),), apart=(), sizes=(), cut=None)
    launcher = launch.Launcher(None, lambda tensors, *structure: empty)
    tensors = [torch.empty(1, device=DEVICE)]
    counts = []
    for width in range(7):
        launcher.check(tensors, (width,), (0,))
        counts.append(len(launcher.remembered))
    assert counts == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.gpu
def test_a_remembered_launch_calls_tritons_launch_hooks():
    names, call, hooks = [], arguments(Shape(3, 100)), knobs.runtime.launch_enter_hook

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
    remembered, compiled = len(decode.LAUNCHER.remembered), DECODE.compiled()
    for _ in range(2):
        poison(call, DECODE.outputs)
        build_decode_metadata(**call)
        DECODE.assert_right(call)
    assert (len(decode.LAUNCHER.remembered), DECODE.compiled()) == (remembered, compiled)


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_where_no_gpu_is():
    script, kernels = ROOT / "tests/support/compile_kernels.py", set()
    for path in ROOT.glob("attnlib/core/**/*.py"):
        kernels |= set(
            re.findall(r"^(?:@triton\.jit|\))\ndef (\w+_kernel)\(", path.read_text(), re.M)
        )
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outside["PYTHONPATH"] = os.pathsep.join((f"{ROOT}/tests", str(ROOT), outside["PYTHONPATH"]))
    done = subprocess.run([sys.executable, script], env=outside, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    sizes = dict(line.split() for line in done.stdout.splitlines())
    assert set(sizes) == kernels and min(map(int, sizes.values())) > 10_000
