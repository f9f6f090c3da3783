"""The checks about metadata: each says its words of records made to be so."""

from itertools import product

import pandas as pd
import pytest
from support.frames import ran
from support.ledger import row, verdict

from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.step.case import StepCase
from attnlib.studies.decode_metadata.checks import FAST_PATH, GENERAL_PATH
from attnlib.studies.decode_metadata.study import METADATA, METADATA_SWEEP, WINDOWED
from attnlib.studies.decode_metadata_eager.study import SOURCE_CASE
from attnlib.studies.evidence import MissingRecordsError
from attnlib.studies.scheduler_metadata.checks import KERNEL, LAYERS

DESIGNS = {
    ("metadata-eager", ""): ran("scan", *["gather"] * 12),
    ("metadata-serial", ""): ran("serial_metadata_kernel"),
    ("metadata-fused", ""): ran("decode_metadata_kernel"),
    ("sglang-metadata", "0.5.14"): ran(FAST_PATH),
    ("sglang-metadata", "0.5.23"): ran("_fused_decode_metadata_kernel"),
}
SIZES = tuple(dict.fromkeys((*METADATA, *METADATA_SWEEP)))
MERGED = ("sglang-metadata", "0.5.14")


def metadata(times, *, study="decode_metadata", cases=SIZES):
    """Two rounds of each design at each case."""
    timer = "eager" if study.endswith("eager") else "graph"
    found = []
    for case, design, round_ in product(cases, DESIGNS, (0, 1)):
        general = design == MERGED and case.page_size > 1
        more = {"study": study, "release": design[1], "timer": timer, "round": round_}
        more |= {"kernels": ran(GENERAL_PATH) if general else DESIGNS[design]}
        more |= {"oracle_error": 0.0, "layers": None}
        found.append(row(case, design[0], times(design, case), **more))
    return pd.DataFrame(found)


def speedup(ratio):
    """Everything takes 1 us, op by op `ratio`."""
    return lambda design, case: ratio if design[0] == "metadata-eager" else 1.0


def both(graph, eager):
    outside = metadata(speedup(eager), study="decode_metadata_eager", cases=SOURCE_CASE)
    return pd.concat([metadata(speedup(graph)), outside], ignore_index=True)


def steps(saved=200.0, *, once_zeros=0, once_prepares=1):
    """Two shapes of 64 layers, both timers; once a step takes `saved` us less."""
    prepare, layers, found = f"{KERNEL}_kernel", ["FlashAttnFwdSm90"] * LAYERS, []
    each = ran(*layers, *[prepare] * LAYERS)
    once = ran(*layers, *[prepare] * once_prepares, *["zero"] * once_zeros)
    for batch, timer, round_ in product((1, 16), ("graph", "eager"), (0, 1)):
        case = StepCase(DecodeCase(AttnSpec(16, 2, 128, 64), batch, 2048, "ragged"), LAYERS)
        more = {"study": "scheduler_metadata", "timer": timer, "round": round_, "heads": "16/2"}
        found.append(row(case, "flash-attn-3-step-each", 1000.0, kernels=each, **more))
        found.append(row(case, "flash-attn-3-step-once", 1000.0 - saved, kernels=once, **more))
    return pd.DataFrame(found)


@pytest.mark.parametrize(
    ("graph", "eager", "word"),
    [
        (5.0, 4.5, "confirmed"),
        (9.0, 5.0, "confirmed"),
        (5.0, 8.0, "refuted"),
    ],
)
def test_a_speedup_of_a_kernel_by_itself_is_judged_eagerly(graph, eager, word):
    assert verdict("4-78x", both(graph, eager)) == word


def test_a_speedup_without_its_eager_records_is_missing_them():
    with pytest.raises(MissingRecordsError, match="0 records of 1 shapes"):
        verdict("4-78x", metadata(speedup(5.0)))


@pytest.mark.parametrize(
    ("check", "kernels", "word"),
    [
        ("sequential-operations", None, "confirmed"),
        ("sequential-operations", ran("a", "b"), "partly"),
        ("fast-path", None, "confirmed"),
        ("fast-path", ran(GENERAL_PATH), "partly"),
        ("fast-path", ran("other"), "refuted"),
    ],
)
def test_the_merged_kernels_are_counted_and_named_as_traced(check, kernels, word):
    frame = metadata(speedup(5.0))
    others = pd.Series([kernels] * len(frame))
    if kernels:
        frame["kernels"] = frame.kernels.mask(frame.release == "0.5.14", others)
    assert verdict(check, frame) == word


def test_kernels_are_counted_by_name():
    frame = metadata(speedup(5.0))
    assert verdict("two-kernels", frame, 2.0) == "confirmed"
    assert verdict("two-kernels", frame, 1.0) == "refuted"


def test_every_page_size_is_right_where_each_record_with_a_window_is():
    frame = metadata(speedup(5.0), cases=WINDOWED)
    assert verdict("general-path", frame) == "confirmed"
    one = frame.assign(oracle_error=(frame.page_size == 4).astype(float))
    assert verdict("general-path", one) == "partly"
    assert verdict("general-path", frame.assign(status="error")) == "refuted"
    with pytest.raises(MissingRecordsError, match="of 8 shapes"):
        verdict("general-path", metadata(speedup(5.0)))


@pytest.mark.parametrize(("power", "word"), [(1.0, "confirmed"), (0.5, "refuted")])
def test_a_serial_sum_grows_as_the_batch_does(power, word):
    frame = metadata(lambda design, case: case.batch_size ** (power if design == MERGED else 0.3))
    assert verdict("serial-prefix-sum", frame) == word


@pytest.mark.parametrize(
    ("check", "steps_of", "word"),
    [
        ("63-calls", {}, "confirmed"),
        ("63-calls", {"once_zeros": LAYERS}, "confirmed"),
        ("63-calls", {"once_prepares": LAYERS}, "refuted"),
        ("215us", {}, "confirmed"),
        ("215us", {"saved": 100.0}, "refuted"),
        ("per-layer-calls-gone", {}, "confirmed"),
        ("per-layer-calls-gone", {"once_prepares": LAYERS}, "refuted"),
    ],
)
def test_steps_are_held_to_the_launches_and_the_time_they_save(check, steps_of, word):
    assert verdict(check, steps(**steps_of)) == word


def test_saved_time_needs_both_timers():
    frame = steps()
    with pytest.raises(MissingRecordsError, match="timer eager: a shape lacks some"):
        verdict("215us", frame[frame.timer == "graph"])
