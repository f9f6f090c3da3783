"""The direct launch: it fails clearly when Triton's launcher is not the one it was written for."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.metadata_cases import DEVICE, Shape, arguments
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher

from attnlib.core.metadata import launch
from attnlib.core.metadata.decode import build_decode_metadata
from attnlib.core.metadata.launch import require_known_launcher

ROOT = Path(__file__).resolve().parents[2]


def test_the_installed_triton_launches_as_this_module_expects():
    require_known_launcher(object.__new__(CudaLauncher))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            lambda gridX, gridY, gridZ, function, stream, *args: None,
            r"'function', 'stream', 'args'.*triton>=3.6,<3.8",
        ),
        (lambda gridX, gridY, gridZ, stream, function, flags, *args: None, "flags"),
    ],
)
def test_a_launcher_with_other_arguments_is_refused_with_both_lists(other, said):
    with pytest.raises(RuntimeError, match=said):
        require_known_launcher(other)


@pytest.mark.parametrize(
    ("programs", "slots", "overlap"),
    [(1, 0, launch.NO_OVERLAP), (8, 8, launch.WAIT_AND_LET_START), (9, 8, launch.WAIT)],
)
def test_a_successor_may_start_early_only_while_our_whole_grid_is_on_the_gpu(
    programs, slots, overlap
):
    assert launch.overlap_of(programs, slots) == overlap


def test_signatures_are_forgotten_before_they_fill_the_memory_of_a_server(monkeypatch):
    monkeypatch.setattr(launch, "MAX_KNOWN", 3)
    ours = launch.Launcher(None, tuple, lambda _: ((), ()), lambda _: (0, (), None))
    tensors = [torch.empty(1, device=DEVICE)]
    kept = [ours._checked(("width", n), [tensors], (), ()) and len(ours.known) for n in range(7)]
    assert kept == [1, 2, 3, 1, 2, 3, 1]


def chain(*calls):
    return SimpleNamespace(calls=[*calls])


@pytest.mark.parametrize(
    ("hook", "heard"), [(None, False), (chain(), False), (chain(print), True), (print, True)]
)
def test_only_hooks_that_somebody_hears_are_called(hook, heard):
    assert launch.heard(hook, None) is launch.heard(chain(), hook) is heard


@pytest.mark.gpu
def test_a_launch_hook_still_hears_of_direct_launches():
    heard, call, hooks = [], arguments(Shape(3, 100)), knobs.runtime.launch_enter_hook

    def hear(told):
        heard.append(told.get()["name"])

    build_decode_metadata(**call)
    hooks.add(hear)
    try:
        build_decode_metadata(**call)
    finally:
        hooks.remove(hear)
    assert heard == ["decode_metadata_kernel"]


def test_every_kernel_compiles_for_hopper_where_no_gpu_is():
    script, kernels = ROOT / "tests/support/compile_kernels.py", set()
    for path in ROOT.glob("attnlib/core/**/*.py"):
        kernels |= set(re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M))
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    outside["PYTHONPATH"] = os.pathsep.join((f"{ROOT}/tests", str(ROOT), outside["PYTHONPATH"]))
    done = subprocess.run([sys.executable, script], env=outside, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    sizes = dict(line.split() for line in done.stdout.splitlines())
    assert set(sizes) == kernels and min(map(int, sizes.values())) > 10_000
