"""A trace made by hand for every known pattern, and for none; files that are no trace."""

import gzip
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from support import traces
from support.traces import GEMM, Writer, runs

import attnlib
from attnlib import cli
from attnlib.core.spec import AttnSpec
from attnlib.lab.patterns import PATTERNS, gained
from attnlib.select.explain import explain
from attnlib.select.libraries import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
DECODE = {"mark": "step[DECODE bs=16]"}
FA2_SPLIT = [runs(traces.FA2_16, grid=(264, 1, 8)), runs(traces.MERGE, 2.0)]
WIDE = [runs(traces.FA2_128, grid=(64, 1, 8)), runs(traces.MERGE, 2.0)]
OPS = [runs(name, 2.0) for name in (traces.INDEX, traces.ADD, traces.SCAN, traces.ADD)]
PLANNED = [lambda writer: writer.copy("DtoH", 68), lambda writer: writer.wait()]
PREPARE = runs(traces.PREPARE, 2.0)


def served(*attention, count=STEPS, **how):
    """A trace of decode steps in CUDA graphs, all alike."""
    writer = Writer()
    for _ in range(count):
        writer.step(attention, **how)
    return writer


def eager(*attention):
    """Steps whose kernels are launched one by one."""
    writer = Writer()
    for _ in range(STEPS):
        for each in (runs(GEMM), *attention) * 4:
            each(writer)
        writer.copy("DtoH", 4)
    return writer


BAD = (
    served(runs(traces.FA3, 40.0), **DECODE),
    served(PREPARE, runs(traces.FLASH_ATTN_3)),
    served(*FA2_SPLIT, ahead=OPS),
    served(runs(traces.FA2_16, 300.0, grid=(4, 1, 8))),
    served(*WIDE, mark="step[TARGET_VERIFY bs=32]"),
    served(runs(traces.CUDA_CORES, grid=(16, 8, 1), block=(16, 4, 2))),
    served(*FA2_SPLIT, ahead=PLANNED, mark="execute_context_0(0)_generation_16(16)"),
    eager(*FA2_SPLIT),
    served(runs(traces.TRITON_2D, 480.0, grid=(10, 8, 1)), **DECODE),
)
GOOD = Writer()
for _ in range(STEPS):
    GOOD.step([runs(traces.FLASH_ATTN_3)], ahead=[PREPARE], **DECODE)
    GOOD.copy("DtoH", 68)  # of sampled tokens, which the host waits for
    GOOD.wait()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "server.pt.trace.json.gz"


@pytest.mark.parametrize("number", range(len(PATTERNS)))
def test_a_pattern_is_found_where_it_shows_and_nowhere_else(number, path):
    found = attnlib.diagnose(BAD[number].save(path))
    assert len(found.steps) == STEPS and {step.kind for step in found.steps} <= {"decode", "verify"}
    (row,) = found.patterns.to_dict("records")
    assert row["pattern"] == PATTERNS[number].name and row["us per step"] > 0 and row["since"]
    assert (ROOT / "notebooks" / f"{row['notebook']}.ipynb").exists()
    exported = attnlib.diagnose(BAD[number].export(path.with_suffix(".sqlite")))
    assert exported.patterns.equals(found.patterns) and exported.table().equals(found.table())


def test_a_trace_without_any_says_so_and_what_it_could_not_see(path):
    found = attnlib.diagnose(GOOD.save(path))
    told = repr(found)
    assert "6 steps, no known pattern" in told and "lengths of the requests are in no" in told
    assert "<table" in found._repr_html_()
    (axis,) = found.timeline(2).axes
    assert axis.get_title(loc="left") or axis.get_title()


@pytest.mark.parametrize(
    ("mark", "kernel", "kind", "family"),
    [
        ("step[VERIFY bs=4]", traces.FLASH_ATTN_3, "verify", "flash-attn-3"),
        ("step[DRAFT bs=4]", traces.FLASH_ATTN_3, "decode", "flash-attn-3"),
        ("execute_context_0(0)_generation_8(32)", traces.VLLM_FA4, "verify", "flash-attn-4"),
        ("execute_context_0(0)_generation_8(8)", traces.SGLANG_FA4, "decode", "flash-attn-4"),
        ("execute_context_1(512)_generation_0(0)", traces.TRTLLM_103, "prefill", "trtllm-gen"),
        ("step[EXTEND bs=4]", traces.TRITON_EXTEND, "prefill", "triton-extend"),
    ],
)
def test_a_mark_tells_the_kind_of_a_step_and_a_name_the_kernels_family(
    mark, kernel, kind, family, path
):
    diagnosis = attnlib.diagnose(served(runs(kernel), mark=mark).save(path))
    assert {step.kind for step in diagnosis.steps} == {kind}
    assert diagnosis.table()["is"].tolist() == [f"attention ({family})"]


def test_a_marked_step_without_known_attention_is_no_part_of_the_next_one(path):
    writer = Writer()
    for _ in range(STEPS):
        writer.step([runs("unknown_attention", 400.0)], mark="step[EXTEND bs=1]")
        writer.step([runs(traces.FLASH_ATTN_3)], **DECODE)
    diagnosis = attnlib.diagnose(writer.save(path))
    assert {step.kind for step in diagnosis.steps} == {"decode"}
    assert diagnosis.table().share.tolist() == pytest.approx([0.43], abs=0.01)


def test_steps_layers_and_what_comes_before_them_are_counted(path):
    found = attnlib.diagnose(BAD[2].save(path))
    ahead = [span.name for span in found.steps[1].ahead]
    assert ahead[:3] == ["_sample_kernel", "Memcpy DtoH", "index_elementwise_kernel"]
    fa2 = found.table().set_index("kernel").loc["BatchPrefillWithPagedKVCacheKernel"]
    assert (fa2["a step"], fa2["a layer"], fa2["us a step"]) == (4, 1, 40)
    assert fa2["of"] == "FlashInfer"
    assert found.patterns["us per step"][0] == 11.0  # four kernels of 2 us, three gaps of 1


def test_prefill_is_told_from_decode_by_the_mark_and_without_one_by_the_kernel(path):
    writer = served(runs(traces.FLASH_ATTN_3), count=1, mark="step[EXTEND bs=2 toks=300]")
    writer.step([runs(traces.FLASH_ATTN_3)], mark="step[DECODE bs=3]")
    found = attnlib.diagnose(writer.save(path))
    assert [(step.kind, step.batch_size) for step in found.steps] == [("prefill", 2), ("decode", 3)]
    found = attnlib.diagnose(eager(runs(traces.FA2_128)).save(path))
    assert [step.kind for step in found.steps] == ["prefill"] * STEPS
    assert "No decode step" in repr(found)


def test_gains_are_of_the_nearest_shape(published_records, path, capsys, fails):
    told = attnlib.diagnose(BAD[0].save(path)).patterns.iloc[0]
    assert "nearest to it: batch_size 16; the trace does not give heads" in told["by the records"]
    assert cli.main(["diagnose", str(path), "--shape", "heads=32/8,kv_len=9000"]) == 0
    printed = capsys.readouterr().out
    assert "1 known pattern" in printed and "heads 32/8, batch_size 16, kv_len 8192" in printed
    unknown = gained(PATTERNS[0], {"heads": "7/7", "kv_len": 9}, 100.0)
    assert "nearest to it: no heads '7/7'," in unknown
    for shape, why in (("head=1", "must be one of heads"), ("kv_len=8k", "kv_len must be an")):
        assert why in fails("diagnose", str(path), "--shape", shape)


def test_every_fix_that_was_measured_has_its_gain_on_record():
    told = {pattern.name: gained(pattern, {"heads": "32/8"}, 100.0) for pattern in PATTERNS}
    unmeasured = [name for name, words in told.items() if words == "no records of the fix"]
    assert unmeasured == [pattern.name for pattern in PATTERNS if not pattern.gain]
    assert not [words for words in told.values() if "nan" in words]
    short = {"heads": "32/32", "page_size": 1, "batch_size": 4, "kv_len": 1024}
    assert gained(PATTERNS[0], short, 100.0).startswith("nothing to gain: 0.89 times the time")


def test_releases_of_the_fa3_pattern_are_those_of_the_rules():
    for dtype in ("bfloat16", "float8_e4m3fn"):
        layer = AttnSpec(32, 8, 128, 16, dtype)
        picks = {
            release: explain(layer, library=f"flashinfer=={release}", mode="decode", gpu="sm90")
            for release in LIBRARIES["flashinfer"].releases
        }
        first, *_, last = [release for release, picked in picks.items() if picked.kernel == "fa3"]
        since = PATTERNS[0].since
        assert f"{first} to" in since and f" to {last}" in since


def test_a_trace_without_attention_that_is_known_names_what_ran_most(path):
    told = repr(attnlib.diagnose(eager().save(path)))
    assert "0 steps" in told and f"24 {GEMM}" in told


WHOLE = json.dumps({"traceEvents": GOOD.events}).encode()
BROKEN = {
    "cut.json": (WHOLE[:-3000], "ends within its events, after"),
    "cut.json.gz": (gzip.compress(WHOLE)[:-300], "must be a whole trace"),
    "card.json": (b'{"deviceProperties": [,], "traceEvents": [', "card.json must be a whole trace"),
    "notes.txt": (b"nothing of the kind", "must be a Chrome trace of torch.profiler"),
    "empty.json": (b"", "must be a Chrome trace"),
    "cpu.json": (b'{"traceEvents": [{"ph": "M"}, 7]}', "has no kernel of a GPU"),
    "odd.json": (b'{"traceEvents": [{"ph": "X", "dur": 1, "ts": 0, "name": 5}]}', "a whole trace"),
    "report.nsys-rep": (b"NVIDIA", "nsys export"),
    "cut.sqlite": (b"SQLite format 3\0" + b"\0" * 50, "must be a whole trace"),
}


def test_what_is_no_whole_trace_of_a_gpu_is_one_line(tmp_path, fails):
    for name, (data, words) in BROKEN.items():
        (tmp_path / name).write_bytes(data)
        assert words in fails("diagnose", str(tmp_path / name))
    assert "No such file" in fails("diagnose", str(tmp_path / "missing.json"))
    with sqlite3.connect(tmp_path / "graphs.sqlite") as base:
        base.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start)")
    assert "--cuda-graph-trace=node" in fails("diagnose", str(tmp_path / "graphs.sqlite"))


def test_a_long_trace_is_read_as_a_stream(tmp_path):
    """Five steps of it over and over; memory grows with the kernels, not with the file."""
    writer, path, count = served(*FA2_SPLIT, count=5, layers=32, **DECODE), tmp_path / "long", 0
    events = [
        json.dumps(event | {"args": {**event["args"], "x": "x" * 400}}) for event in writer.events
    ]
    with path.open("w") as file:
        file.write(json.dumps({**traces.HEAD, "traceEvents": []})[:-2])
        while file.tell() < 32 * 2**20:
            file.write((", " if count else "") + ", ".join(events))
            count += 1
        file.write("]}")
    # Not ru_maxrss: that begins with what the process that started this one held.
    code = "import re, sys, attnlib; print(len(attnlib.diagnose(sys.argv[1]).trace.work), "
    code += "*re.findall(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read()))"
    run = subprocess.run(
        [sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True
    )
    kernels, kib = map(int, run.stdout.split())
    assert kernels == 5 * (32 * 3 + 2) * count and kib <= 2**20


# A trace of an H200 (data/traces) -> the pattern that it was captured for, by its number.
REAL = {
    "fa3_decode": 0,
    "fa3_each": 1,
    "fa3_once": None,
    "metadata_ops": 2,
    "metadata_fused": None,
    "fa2_unsplit": 3,
    "verify_128": 4,
    "verify_16": None,
    "cuda_cores": 5,
    "xqa": None,
    "lengths_copied": 6,
    "fa2_host": None,
    "eager": 7,
    "prefill_decode": None,
    "sglang_fa3": None,
    "sglang_flashinfer": None,
}


@pytest.mark.parametrize("name", REAL)
def test_a_real_trace_shows_the_pattern_that_it_was_captured_for(name):
    found = attnlib.diagnose(ROOT / "data" / "traces" / f"{name}.json.gz")
    number = REAL[name]
    wanted = [] if number is None else [PATTERNS[number].name]
    assert [row["pattern"] for row in found.patterns.to_dict("records")] == wanted
    assert found.trace.gpu == "NVIDIA H200" and len(found.decodes) == 4
    assert len(found.steps) == 4 + (name == "prefill_decode")
