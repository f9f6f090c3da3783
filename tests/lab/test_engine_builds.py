"""Which records say something of an engine: those of its own builds."""

import pandas as pd
import pytest

from attnlib.core import AttnSpec
from attnlib.lab.advised_times import mean_speedups
from attnlib.lab.engine_builds import (
    ANOTHER_BUILD,
    own_build,
    preferably_of,
    rivals_of,
    slower_as_expected,
    slower_nearby,
    time_on_record,
)
from attnlib.lab.expected import Expected
from attnlib.select import explain

OWN = "sglang-flash-attn-3"
RUNS = {
    OWN: "fa3",
    "flash-attn-3-precomputed": f"fa3, {ANOTHER_BUILD}",
    "flashinfer-fa2": "flashinfer",
}
GROUP = {"study": "s", "gpu": "NVIDIA H100", "timer": "graph", "page_table": ""}


def recorded(**us):
    """Rows of a call's records: backend (with _ for -) -> us."""
    rows = []
    for name, time in us.items():
        rows.append({**GROUP, "backend": name.replace("_", "-"), "us": time})
    return pd.DataFrame(rows)


def test_a_record_of_another_build_is_no_rival_of_the_engines():
    assert rivals_of(OWN, [*RUNS, "vllm-triton"], RUNS) == ["flashinfer-fa2"]


def test_the_rivals_of_a_wrapper_of_flashinfer_are_its_others():
    names = ["flashinfer-fa2", "flashinfer-xqa", "flashinfer-fa2-planned", "vllm-triton"]
    assert rivals_of("flashinfer-fa2", names, None) == ["flashinfer-xqa"]


@pytest.mark.parametrize(
    "times, words",
    [
        (
            {"flashinfer_fa2": 90.0},
            "has a slowdown of 1.11 against flashinfer-fa2 (here flashinfer)",
        ),
        ({"flashinfer_fa2": 96.0}, "has a slowdown of 1.04 against flashinfer-fa2"),
        ({"flashinfer_fa2": 200.0}, "has a speedup of 2.00 over flashinfer-fa2"),
        ({"flash_attn_3_precomputed": 50.0}, ""),
        ({"vllm_triton": 50.0}, ""),
    ],
)
def test_the_time_on_record_is_said_over_a_backend_of_the_engine(times, words):
    same = recorded(sglang_flash_attn_3=100.0, **times)
    said = time_on_record(OWN, same, RUNS)
    assert words in said
    assert bool(said) == bool(words)


@pytest.mark.parametrize(
    "times, words",
    [
        (
            {"flashinfer_fa2": 90.0},
            "has a slowdown of 1.11 against flashinfer-fa2 (here flashinfer)",
        ),
        ({"flashinfer_fa2": 96.0}, ""),
        ({"flash_attn_3_precomputed": 50.0}, ""),
    ],
)
def test_more_than_five_percent_over_nearby_batches_is_said(times, words):
    same = recorded(sglang_flash_attn_3=100.0, **times)
    batches = pd.concat([same.set_index("backend").us.to_frame().T] * 3, ignore_index=True)
    said = slower_nearby(OWN, mean_speedups([batches], OWN, RUNS), RUNS)
    assert words in said
    assert bool(said) == bool(words)
    few = [batches.head(2), batches.tail(2)]
    assert slower_nearby(OWN, mean_speedups(few, OWN, RUNS), RUNS) == ""


TWIN = "flash-attn-3-precomputed"


def test_the_expectation_of_another_build_is_not_told_under_the_name_of_the_engines_own():
    """All ratios are over the other build, and the engine's own has records of its own."""
    expected = {
        TWIN: Expected(1.0, 1152, "g"),
        "flashinfer-fa2": Expected(1 / 1.12, 1152, "g"),
    }
    by_twin = slower_as_expected(TWIN, expected, RUNS)
    words = f"By 1152 recorded batches {TWIN} (another build of what runs) is expected to have "
    assert by_twin.startswith(f"{words}a slowdown of 1.12 against flashinfer-fa2")
    close = expected | {OWN: Expected(1 / 1.11, 150, "g")}
    assert slower_as_expected(OWN, close, RUNS) == ""
    slower = expected | {OWN: Expected(1.25, 150, "g")}
    words = f"By 150 recorded batches {OWN} is expected to have a slowdown of 1.40 against"
    assert slower_as_expected(OWN, slower, RUNS).startswith(words)


def test_records_of_other_gpus_are_not_mixed():
    fast = recorded(flashinfer_fa2=10.0).assign(gpu="NVIDIA H200")
    same = pd.concat([recorded(sglang_flash_attn_3=100.0), fast], ignore_index=True)
    assert time_on_record(OWN, same, RUNS) == ""
    assert len(preferably_of("h200", same, ["h100", "h200"])) == 1
    assert len(preferably_of("h20", same, ["h100", "h200"])) == 2


@pytest.mark.parametrize(
    "library, gpu, policy, name",
    [
        ("sglang==0.5.23", "sm90", "fa3", "sglang-flash-attn-3"),
        ("sglang==0.5.23", "sm90", "flashinfer", "flashinfer-fa2"),
        ("sglang==0.5.23", "sm80", "fa3", ""),
        ("vllm==0.33.0", "sm90", "auto", "vllm-flash-attn-3"),
        ("flashinfer==0.7.2", "sm90", "auto", "flashinfer-fa2"),
    ],
)
def test_the_build_that_a_library_runs_itself(library, gpu, policy, name):
    spec = AttnSpec(32, 8, 128, 16)
    choice = explain(spec, mode="decode", gpu=gpu, library=library, policy=policy)
    assert own_build(choice) == name
