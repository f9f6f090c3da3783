"""Advice: the rule with its source, what was measured nearby, and a line that measures the call."""

import json
import re
import shlex
from dataclasses import replace
from functools import cache
from html import unescape
from itertools import product

import numpy as np
import pytest
from support.words import flat

import attnlib
from attnlib import AttnSpec, cli
from attnlib.core.checkpoints import checkpoints
from attnlib.core.layer import parse_layer
from attnlib.core.spec import ELEMENT_BYTES, MlaSpec
from attnlib.lab.engine_builds import own_build
from attnlib.lab.known_sizes import ratios_of
from attnlib.lab.recorded import recorded_calls
from attnlib.measure.calls.cases import read_case
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.mla.case import MlaCase
from attnlib.run import store
from attnlib.run.releases import Version
from attnlib.select.facts import GPUS, Call
from attnlib.select.known import PROBLEMS
from attnlib.select.libraries import LIBRARIES
from attnlib.studies import STUDIES
from attnlib.studies.plan_rivals import BACKENDS, FLASH_ATTENTION, PAGES_OF_16
from attnlib.studies.random_batches import FP8

pytestmark = [pytest.mark.usefixtures("published_records"), pytest.mark.slow]
DENSE_MODELS = [name for name, model in checkpoints().items() if not model.kinds[0].mode]


def test_the_rule_is_the_one_of_the_pinned_backend_and_others_are_over_it():
    advice = attnlib.advise(
        AttnSpec(8, 1, 128, 16), [2048, 30720] * 32, library="sglang==0.5.23", backend="flashinfer"
    )
    assert advice.choice.picked == "flashinfer, which runs fa2" and advice.ours == "flashinfer-fa2"
    table = advice.table().set_index("backend")
    ours = set(BACKENDS) - set(PAGES_OF_16)  # SGLang's pages are tokens
    assert set(table.index) == ours | {"flashinfer-fa3", "flashinfer-cuda-cores"}
    table = table.loc[[name for name in table.index if name in ours]]
    ratios = ["time / engine's choice: mean", "min", "max"]
    assert (table.loc["flashinfer-fa2", ratios] == 1).all()
    counts = table["fastest in"].str.split(" of ", expand=True).astype(int)
    assert counts[0].sum() == len(advice.nearest) == 8
    assert (counts[1] == 8).all()
    assert advice.nearest.distance.is_monotonic_increasing
    assert len(repr(advice).splitlines()) < 20
    words = flat(advice.details)
    assert "SGLang #18364" in words
    assert advice.command in words.replace(" \\ ", " ")
    assert "GPU, in about 1 minute:" in words and "refuse pages of 1: flashinfer-xqa, " in words


def test_the_line_that_measures_parses_to_the_same_call(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("attnlib.lab.view.measure_call", lambda *call: seen.append(call))
    layer = AttnSpec(24, 8, 64, 1, "bfloat16", "float8_e4m3fn")
    line = attnlib.advise(layer, (7, 9, 9, 40)).command
    assert cli.main(shlex.split(line)[3:]) == 0
    ((text,),) = seen
    assert read_case(text) == DecodeCase(layer, 4, 40, "7+9+9+40")
    printed = capsys.readouterr()
    assert not printed.err
    assert printed.out.endswith("flashinfer==0.7.2 on sm90 runs fa2, here flashinfer-fa2\n")
    options = {"library": "vllm==0.33.0", "gpu": "h100", "backend": "TRITON_ATTN"}
    line = attnlib.advise(
        AttnSpec(8, 1, 128, 16),
        (7, 9),
        **options,
    ).command
    asked = "--engine vllm==0.33.0 --gpu h100 --backend TRITON_ATTN"
    assert line.startswith(f"python -m attnlib advise {asked} --measure heads=8/1 ")
    assert cli.main(shlex.split(line)[3:]) == 0
    assert "vllm==0.33.0 on sm90 runs TRITON_ATTN, here vllm-triton\n" in capsys.readouterr().out
    assert cli.main([*shlex.split(line)[3:], "--server", "context=131072"]) == 0
    assert "all backends are measured here; not used: server\n" in capsys.readouterr().err


@pytest.mark.parametrize("place", range(3))
def test_every_option_that_is_offered_has_advice_of_one_screen(place, monkeypatch):
    monkeypatch.setattr("attnlib.lab.advise.recorded_calls", cache(recorded_calls))
    engine = ("flashinfer==0.7.2", "sglang==0.5.23", "vllm==0.33.0")[place]
    library = LIBRARIES[engine.partition("==")[0]]
    calls = [*product(GPUS, ["bfloat16"]), *product(["sm90"], ELEMENT_BYTES)]
    for backend, (gpu, kv_dtype) in product(library.policies_for("decode"), calls):
        layer = AttnSpec(8, 1, 128, 16, "bfloat16", kv_dtype)
        how = {"library": engine, "backend": backend, "gpu": gpu}
        try:
            advice = attnlib.advise(layer, [4096], **how)
        except RuntimeError as error:
            assert f"cannot run decode on {gpu}: " in str(error) and backend in str(error)
        else:
            assert advice.choice.backend or advice.choice.problem
    for model in DENSE_MODELS[place::3]:  # each model with one of the three
        arguments = ["--model", model, "--tp", "2", "--lens", "1..900", "--batch", "3"]
        status = cli.main(["advise", *arguments, "--engine", engine, "--gpu", "h200"])
        assert status in (0, cli.KNOWN_PROBLEM)
    assert len(repr(advice).splitlines()) <= 40


def test_what_the_records_do_not_have_is_said():
    words = {
        "Not of B200: these times are of NVIDIA H200, and not all of its": {"gpu": "b200"},
        "is on record of head_dim 512: these are of": {"layer": AttnSpec(8, 1, 512, 16)},
        "No batch near it is on record of fa3.": {
            "layer": AttnSpec(32, 8, 128, 16, kv_dtype="float8_e4m3fn"),
            "library": "sglang==0.5.23",
        },
        "No batch near it is on record of FLASH_ATTN.": {"library": "vllm==0.33.0", "gpu": "a100"},
        "No batch has a window or sinks": {
            "library": "sglang==0.5.23",
            "facts": Call(sinks=True),
        },
    }
    for sentence, given in words.items():
        layer = given.pop("layer", AttnSpec(8, 1, 128, 16))
        assert sentence in flat(repr(attnlib.advise(layer, [4096] * 4, **given)))
        assert sentence not in flat(repr(attnlib.advise(AttnSpec(8, 1, 128, 16), [4096] * 4)))


def test_records_of_this_very_call_are_shown_of_every_study_and_far_batches_are_said():
    call = AttnSpec(16, 1, 128, 16), [33039] * 8
    advice = attnlib.advise(*call, gpu="H200")
    assert {*advice.same.gpu} == {"NVIDIA H200"}
    assert "plan_rivals" in {*advice.same.study}
    assert {"flashinfer-xqa", "flashinfer-fa2"} <= {*advice.same.backend}
    assert {"NVIDIA H100 80GB HBM3", "NVIDIA H200"} <= {*attnlib.advise(*call).same.gpu}
    (again,) = advice.same[advice.same.backend == "flashinfer-xqa"].to_dict("records")
    shown = attnlib.view(
        heads="16/1",
        records="plan_rivals",
        machine="h200",
        batch=8,
        kv_len=33039,
    )
    assert again["us"] == shown.times.set_index("backend").us["flashinfer-xqa"]
    assert attnlib.advise(call[0], [7, 9]).same.empty
    assert "Nothing near is on record: the nearest" in attnlib.advise(call[0], [1]).details
    assert "Nothing near" not in advice.details
    distances = [0.1, *[99.0] * (len(advice.nearest) - 1)]
    one_is_near = replace(advice, nearest=advice.nearest.assign(distance=distances))
    assert "Nothing near" not in one_is_near.details
    none_is = replace(advice, nearest=advice.nearest.assign(distance=99.0))
    assert "Nothing near is on record: the nearest batch is at distance 99.0" in none_is.details


@pytest.mark.parametrize(
    "engine, gpu, lacks, has",
    [
        ("vllm==0.33.0", "h200", "flash-attn-3-precomputed", ("vllm-triton", "TRITON_ATTN")),
        (
            "vllm==0.33.0",
            "h100",
            "flashinfer-batch-attention",
            (FLASH_ATTENTION, "FLASH_ATTN, of another"),
        ),
        ("sglang==0.5.23", "h200", "vllm-triton", ("flashinfer-xqa", "trtllm_mha")),
        ("sglang==0.5.23", "b200", "flash-attn-3-precomputed", ("flashinfer-fa2", "flashinfer")),
        ("mini-sglang", "h100", "flashinfer-batch-attention", (FLASH_ATTENTION, "fa")),
    ],
)
def test_a_backend_that_the_engine_lacks_is_said_to_be_none_of_its(engine, gpu, lacks, has):
    call = AttnSpec(8, 1, 128, 64), [8192] * 8
    advice = attnlib.advise(
        *call,
        library=engine,
        gpu=gpu,
        facts=Call(pinned_page=True),
    )
    (note,) = [note for note in advice.card().notes if note.startswith(f"Not in {engine} on sm")]
    table, (name, words) = advice.table().set_index("backend")["in the engine"], has
    assert lacks in note
    assert name not in note
    assert advice.runs[name].startswith(words)
    assert {*table[table == "no"].index} <= {*note.rstrip(".").split(": ")[1].split(", ")}
    fp8 = attnlib.advise(
        AttnSpec(8, 1, 128, 16, kv_dtype=FP8),
        [9],
        library="mini-sglang",
    )
    assert {*fp8.table()["in the engine"]} == {"no"}, "its cache has 16 bits"
    of_library = attnlib.advise(*call, gpu=gpu)
    assert "in the engine" not in of_library.table() and "Not in" not in repr(of_library)


def test_a_call_is_found_however_its_lengths_are_written_and_wide_its_page_table_is():
    layer = AttnSpec(8, 1, 128, 16)
    advice = attnlib.advise(layer, [1024] * 256, gpu="H100")
    words = dict(advice.facts)["in split_cap"]
    assert "graph, context=131072, us: " in words
    assert "sglang-flash-attn-3@bounded (sglang-kernel 0.4.10) " in words
    wide = DecodeCase(layer, 256, 1024, context=131072)
    assert attnlib.advise(wide, gpu="H100").same.equals(advice.same)
    assert attnlib.advise(
        layer,
        [1024] * 255 + [1025],
        gpu="H100",
    ).same.empty


@pytest.mark.parametrize("release, has_caps", [("0.5.15", False), ("0.5.16", True)])
def test_sglangs_own_attention_is_in_sglang_and_other_caps_with_our_plugin(release, has_caps):
    call = AttnSpec(8, 1, 128, 16), [1024] * 256
    advice = attnlib.advise(*call, library=f"sglang=={release}", gpu="H100")
    assert "sglang-flash-attn-3" in {*advice.same.backend}
    assert advice.runs["sglang-flash-attn-3"] == "fa3"
    capped = "sglang-flash-attn-3@bounded"
    (note,) = [note for note in advice.notes if note.startswith("Not in sglang")]
    assert "sglang-flash-attn-3," not in note and (capped in note) != has_caps
    assert (capped in advice.runs) == has_caps
    assert "sglang-flash-attn-3" in str(attnlib.advise(*call, library="vllm==0.33.0").notes)


CAP_NOTE = "[sglang-fa3-split-cap-gqa]"


def test_a_call_that_sglangs_cap_of_splits_reaches_is_told_so_with_what_to_set():
    call = AttnSpec(8, 1, 128, 16), [131072, *[1024] * 127]
    advice = attnlib.advise(*call, library="sglang==0.5.23", gpu="H200")
    with_flashinfer = "sglang==0.5.23,flashinfer==0.7.2.post1"
    assert CAP_NOTE in str(attnlib.advise(*call, library=with_flashinfer).notes)
    (first,) = [place for place, note in enumerate(advice.notes) if CAP_NOTE in note]
    problem, size = advice.notes[first : first + 2]
    assert problem.startswith("Slower since SGLang 0.5.16 (known to 0.5.23): ")
    assert "median slowdown " in size
    assert any(note.startswith("  fix: ATTNLIB_SGLANG_SPLITS=bounded") for note in advice.notes)
    (splits,) = [
        note for note in advice.notes if note.startswith("Splits of the longest request: 8")
    ]
    assert "8 now, 61 with SPLITS=bounded (model" in splits
    assert dict(advice.facts)["engine's choice"] == "fa3, sglang==0.5.23"
    assert (
        "Times of the engine's choice are of another build, which lacks SGLang's cap."
        in advice.notes
    )
    table = advice.table().set_index("backend")["in the engine"]
    assert table["flash-attn-3-precomputed"] == "fa3, of another build"


@pytest.mark.parametrize(
    "library, options, lengths",
    [
        ("sglang==0.5.15", {}, [131072, *[1024] * 127]),
        ("sglang==0.5.23", {"backend": "flashinfer"}, [131072, *[1024] * 127]),
        ("sglang==0.5.23", {"gpu": "b200"}, [131072, *[1024] * 127]),
        ("sglang==0.5.23", {}, [8192] * 16),
        ("vllm==0.33.0", {}, [131072, *[1024] * 127]),
        ("flashinfer==0.7.2", {}, [131072, *[1024] * 127]),
    ],
)
def test_a_call_that_the_cap_does_not_reach_is_told_nothing_of_it(library, options, lengths):
    advice = attnlib.advise(
        AttnSpec(8, 1, 128, 16),
        lengths,
        library=library,
        **options,
    )
    assert CAP_NOTE not in " ".join(advice.notes)


def test_a_window_of_few_blocks_is_split_by_no_cap_and_told_nothing_of_it():
    layer = AttnSpec(8, 1, 128, 16, window=128)
    advice = attnlib.advise(layer, [131072, *[1024] * 127], library="sglang==0.5.23")
    assert CAP_NOTE not in " ".join(advice.notes)


def test_an_h100_has_batches_of_its_own_with_the_present_planner():
    advice = attnlib.advise(AttnSpec(8, 1, 128, 16), [4096] * 4, gpu="H100")
    assert "expected by all batches (NVIDIA H100 80GB HBM3, NVIDIA H200):" in flat(repr(advice))
    told = flat(advice.details)
    assert "NVIDIA H100 80GB HBM3, FlashInfer 0.6.13" in told and "by the planner" not in told
    assert "flashinfer-batch-attention" in told and "2026-11-26" in told


def test_rules_of_the_model_and_of_what_the_user_fixed_count(capsys):
    call = ["advise", "--lens", "4096x4", "--engine", "vllm==0.33.0", "--gpu", "a100"]
    assert cli.main([*call, "--model", "gpt-oss-120b at TP 8"]) == 0
    assert "TRITON_ATTN" in capsys.readouterr().out
    assert cli.main([*call, "--heads", "8/1", "--page-size", "1"]) == cli.KNOWN_PROBLEM
    assert "the block size must be a multiple of 16" in capsys.readouterr().out
    call[4:] = ["sglang==0.5.23", "--gpu", "b200"]
    assert cli.main([*call, "--heads", "8/1", "--page-size", "1"]) == 0
    printed = capsys.readouterr().out
    assert "takes pages of 64, not of 1." in printed and " page=64 " in printed


@pytest.mark.parametrize(
    "call, lengths, words",
    [
        (AttnSpec(8, 1, 128, 16), [1.5], "lengths must be an integer >= 1, got 1.5"),
        (AttnSpec(8, 1, 128, 16), [], "lengths must be given with a layer"),
        (
            DecodeCase(AttnSpec(8, 1, 128, 16), 1, 9),
            [9],
            "and not with a case, got 1",
        ),
    ],
)
def test_lengths_are_those_of_the_call(call, lengths, words):
    with pytest.raises(ValueError, match=words):
        attnlib.advise(call, lengths)
    with pytest.raises(TypeError, match="AttnSpec, MlaSpec or text, got tuple"):
        attnlib.advise((32, 8), lengths)
    with pytest.raises(ValueError, match="a call must be words such as heads=32/8"):
        attnlib.advise("32/8")
    assert attnlib.advise(
        AttnSpec(8, 1, 128, 16),
        np.array([7, 9]),
    ).lengths == (7, 9)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--heads", "8/1", "--lens", "0x3"], "lens must be >= 1, got '0x3'"),
        (["--heads", "8/1", "--lens", ""], "lens must not be empty"),
        (["--heads", "16/2", "--head-dim", "576", "--lens", "9"], "num_kv_heads must be 1"),
        (
            ["--heads", "16/1", "--head-dim", "576", "--kv-dtype", "fp8", "--lens", "9"],
            "kv_dtype of MLA must be bfloat16",
        ),
        (["--heads", "8/1", "--lens", "9", "--server", "moon"], "a fact of the server must be"),
        (
            ["--heads", "8/1", "--lens", "9", "--backend", "foo"],
            "backend of flashinfer in mode ",
        ),
        (["--heads", "8/1", "--lens", "many"], "lens must be TOKENS or TOKENSxCOUNT"),
        (["--lens", "9"], "pass either heads or model, got neither"),
        (["--heads", "8/1", "--tp", "2", "--lens", "9"], "tp must go with a model"),
        (
            ["--model", "heads=8/1 head_dim=64", "--head-dim", "128", "--lens", "9"],
            "which contains it, got 128",
        ),
        (
            ["--heads", "8/1", "--lens", "9", "--batch", "-2"],
            "batch must be an integer in 1..65536",
        ),
        (["--heads", "8/1", "--lens", "9x99999999999"], "lens must be at most 65536 requests"),
        (["--heads", "8/1", "--lens", str(2**31)], "requests of at most 2147483647 tokens"),
        (
            ["--heads", "8/1", "--lens", "9", "--page-size", "0"],
            "page_size must be an integer >= 1",
        ),
    ],
)
def test_wrong_use_is_one_line_that_names_the_argument(fails, arguments, words):
    assert words in fails("advise", *arguments)


def test_a_model_is_split_over_gpus_as_engines_do():
    assert parse_layer(model="Llama-3.1-70B", tp=8) == AttnSpec(8, 1, 128, 16)
    assert parse_layer(model="Llama-3.1-70B at TP 8") == AttnSpec(8, 1, 128, 16)
    assert parse_layer(model="Qwen3-30B-A3B", tp=8) == AttnSpec(4, 1, 128, 16)
    assert parse_layer(model="heads=24/8 head_dim=64") == AttnSpec(24, 8, 64, 16)


LONG_AMONG_SHORT = [65536, *[2048] * 31]


def test_mla_is_advised_by_the_records_of_the_engines_own_build():
    advice = attnlib.advise(MlaSpec(128), LONG_AMONG_SHORT, library="sglang==0.5.23", gpu="h100")
    assert advice.choice.picked == "fa3"
    assert advice.ours == "sglang-flash-attn-3-mla"
    assert "[sglang-fa3-split-cap-mla]" in str(advice.notes)
    in_engine = advice.table().set_index("backend")["in the engine"]
    assert in_engine["sglang-flash-attn-3-mla"] == "fa3"
    assert in_engine["flashmla-dense"] == "flashmla"
    assert in_engine["sglang-flash-attn-3-mla@bounded"] == "our plugin, SPLITS=bounded"
    assert advice.command == ""
    assert repr(advice).startswith("mode=mla heads=128/1 page=1 lens=65536+2048x31: 129,024 tok")
    told = advice.details
    assert "sglang-kernel 0.4.10, L2 warm" in told
    layer = AttnSpec(128, 1, 576, 64)
    same = attnlib.advise(layer, LONG_AMONG_SHORT, library="sglang==0.5.23", gpu="h100")
    assert same.notes == advice.notes


def test_a_decode_call_of_mlas_head_dim_is_one_of_mla():
    library = "vllm==0.33.0"
    told = attnlib.advise("heads=128/1 head_dim=576 page=64 lens=8192x4", library=library)
    assert str(told) == str(
        attnlib.advise("mode=mla heads=128/1 page=64 lens=8192x4", library=library)
    )


def test_mla_of_another_engine_has_no_record_of_another_build_under_its_name():
    advice = attnlib.advise(
        MlaSpec(16),
        [4096] * 32,
        library="vllm==0.33.0",
        gpu="h200",
    )
    assert advice.choice.picked == "FLASH_ATTN_MLA"
    assert "No batch near it is on record of FLASH_ATTN_MLA." in advice.notes
    assert {*advice.table()["in the engine"]} == {"no"}


@pytest.mark.parametrize(
    "spec, words",
    [
        (MlaSpec(16, top_k=2048), "got top_k 2048"),
        (MlaSpec(16, kv_format="fp8-656"), "and fp8-656"),
    ],
)
def test_sparse_or_fp8_mla_is_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        attnlib.advise(spec, [4096])


ENGINE = ["--engine", "sglang==0.5.23", "--gpu", "h100", "--heads", "8/1"]


@pytest.mark.parametrize(
    "options, status",
    [
        (["--lens", "131072,1024x127"], cli.KNOWN_PROBLEM),
        (["--lens", "1024x128"], 0),
        (["--lens", "1024x128", "--server", "dp_attention"], cli.KNOWN_PROBLEM),
        (["--lens", "1024x128", "--server", "dp_attention=no"], 0),
    ],
)
def test_a_known_problem_that_holds_is_an_exit_status(options, status, capsys):
    assert cli.main(["advise", *ENGINE, *options, "--json"]) == status
    data = json.loads(capsys.readouterr().out)
    holds = [row["id"] for row in data["known"] if row["verdict"] == "holds"]
    assert bool(holds) == bool(status)
    assert data["picked"] == "fa3"


@pytest.mark.parametrize("server, status", [([], 0), (["--server", "dp_attention"], 4)])
def test_a_known_problem_without_a_size_is_a_note_and_no_exit_status(server, status, capsys):
    call = ["heads=8/1", "lens=512x1024", *server]  # above 992 requests
    assert cli.main(["advise", *call, *ENGINE[:4]]) == status
    count = "1 known problem" if not status else "1 more"
    assert f"{count} without a measured size: --details" in capsys.readouterr().out
    assert cli.main(["advise", *call, *ENGINE[:4], "--details"]) == status
    assert "Note, slower in SGLang (known to 0.5.23): " in capsys.readouterr().out


def test_a_card_of_which_no_batch_is_on_record_is_told_so():
    call = AttnSpec(8, 1, 128, 16), [3500] * 32
    words = "No batch is on record of an H20: these are of NVIDIA H200"
    assert words in str(attnlib.advise(*call, library="sglang==0.5.23", gpu="h20").notes)
    assert "No batch is on record" not in str(attnlib.advise(*call, gpu="h200").notes)


OWN = {
    "sglang==0.5.23": ("sglang-flash-attn-3", "sglang-flash-attn-3-mla"),
    "vllm==0.33.0": ("vllm-flash-attn-3",),
    "flashinfer==0.7.2": ("flashinfer-fa2", "flashinfer-mla-fa3"),
}
"""Engine -> its own builds of what it runs by default on Hopper."""
RIVALS = {
    "sglang==0.5.23": (
        "flashinfer-fa2",
        "sglang-flash-attn-3@bounded",
        "sglang-flash-attn-3@upstream",
        "sglang-flash-attn-3-mla@bounded",
        "sglang-flash-attn-3-mla@upstream",
        "sglang-triton-mla",
        "flashmla-dense",
        "flashinfer-mla-fa3",
    ),
    "vllm==0.33.0": ("flashinfer-xqa", "flashinfer-fa2", "vllm-triton"),
    "flashinfer==0.7.2": (
        "flashinfer-xqa",
        "flashinfer-fa3",
        "flashinfer-cuda-cores",
        "flashinfer-batch-attention",
        "flashinfer-mla-fa2",
    ),
}
"""Engine -> other backends that it has, by the names of records."""


def is_advised(case):
    """Whether `advise` takes a call: decode, also dense MLA of 16 bits."""
    if isinstance(case, MlaCase):
        return case.q_len == 1 and not case.spec.top_k and case.spec.kv_format == "bfloat16"
    return isinstance(case, DecodeCase)


def newest_times(study, machine):
    """The GPU, and the median time of the newest release of each backend: a row per call and
    timer."""
    rows = store.load(study, machine)
    rows = rows[(rows.status == "ok") & ~rows.throttled.astype(bool)]
    rows = rows[rows.case.map(is_advised).astype(bool)]
    by = ["case", "timer", "backend"]
    rows = rows.assign(age=rows.release.map(lambda release: Version(release or "0")))
    rows = rows.sort_values("age", kind="stable")
    newest = rows.groupby(by, sort=False).release.transform("last")
    rows = rows[rows.release == newest]
    return set(rows.gpu), rows.groupby(by, sort=False).run_us.median().unstack()


def slow_calls(engine):
    """Recorded calls of all studies at which the engine's default is over 5 % slower than a rival
    of its own, on one machine and by one timer."""
    found = {}
    for study in STUDIES:
        for machine in store.machines(study):
            gpus, times = newest_times(study, machine)
            for own in OWN[engine]:
                if own in times:
                    rivals = times.reindex(columns=RIVALS[engine]).min(axis=1)
                    slow = times[own] > 1.05 * rivals
                    found |= dict.fromkeys((case, *gpus, own) for case, _ in times[slow].index)
    return list(found)


FEWEST_SLOW = {"sglang==0.5.23": 200, "vllm==0.33.0": 90, "flashinfer==0.7.2": 450}


@pytest.mark.parametrize("engine", OWN)
def test_a_pick_that_the_records_show_slower_is_never_shown_without_saying_so(engine, monkeypatch):
    monkeypatch.setattr("attnlib.lab.advise.recorded_calls", cache(recorded_calls))
    once = cache(lambda name, *shared, **where: ratios_of(PROBLEMS[name], *shared, **where))
    monkeypatch.setattr(
        "attnlib.lab.known_sizes.ratios_of",
        lambda problem, *shared, **where: once(problem.id, *shared, **where),
    )
    calls = slow_calls(engine)
    told = 0
    for case, gpu, own in calls:
        advice = attnlib.advise(case, library=engine, gpu=gpu)
        if own_build(advice.choice) != own:
            continue
        told += 1
        said = [note for note in advice.notes if note.startswith(f"On record of this call {own}")]
        assert said, f"{case.key} on {gpu}"
    assert told >= FEWEST_SLOW[engine]


NO_HELP = "No request loses splits in this call: SPLITS=bounded does not help."


@pytest.mark.parametrize("lens", ["2048x128", "8192x64", "8192x16"])
@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_requests_that_are_alike_are_not_told_to_bound_their_splits(lens, gpu):
    text = f"mode=mla heads=128/1 lens={lens}"
    advice = attnlib.advise(text, library="sglang==0.5.23", gpu=gpu)
    assert NO_HELP in advice.notes
    assert not [
        note for note in advice.notes if "of the nearest recorded batches" in note and "@" in note
    ]


def test_the_record_of_this_call_is_told_where_the_pick_is_the_fastest_too():
    text = "mode=mla heads=128/1 lens=2048x128"
    notes = attnlib.advise(text, library="sglang==0.5.23", gpu="h100").notes
    (said,) = [note for note in notes if note.startswith("On record of this call")]
    assert "has a speedup of 1.04 over sglang-flash-attn-3-mla@" in said
    assert not [note for note in notes if "of the nearest recorded batches" in note]


def test_batches_that_lose_splits_speak_for_a_call_that_does():
    text = "mode=mla heads=128/1 lens=30000x8+2048x56"
    notes = attnlib.advise(text, library="sglang==0.5.23", gpu="h100").notes
    assert NO_HELP not in notes
    assert [note for note in notes if "of the nearest recorded batches" in note]


UNLIKE = "32768x8+2048x56"
ALIKE = "8192x64"
SERVED = ["--engine", "sglang==0.5.23", "--gpu", "h100"]
CAP = "sglang-fa3-split-cap-mla"


@pytest.mark.parametrize(
    "model",
    [
        ["model=DeepSeek-V3", "tp=8", "dp=8"],
        ["--model", "DeepSeek-V3 at TP 8 with DP attention"],
        ["--model", "deepseek v3", "--tp", "8", "--dp", "8"],
    ],
)
def test_a_latent_model_by_name_loses_splits_with_unlike_lengths(model, capsys):
    lens = [f"lens={UNLIKE}"] if "tp=8" in model else ["--lens", UNLIKE]
    assert cli.main(["advise", *model, *lens, *SERVED]) == cli.KNOWN_PROBLEM
    told = capsys.readouterr().out
    assert "mode=mla heads=128/1 page=1 lens=32768x8+2048x56" in told
    assert f"[{CAP}]" in told
    alike = [f"lens={ALIKE}"] if "tp=8" in model else ["--lens", ALIKE]
    cli.main(["advise", *model, *alike, *SERVED])
    assert CAP not in capsys.readouterr().out


@pytest.mark.parametrize("lens", [UNLIKE, ALIKE])
def test_explain_says_the_cap_of_a_latent_model_where_advise_does(lens, capsys):
    options = ["--library", "sglang==0.5.23", "--gpu", "h100"]
    assert cli.main(["explain", "model=DeepSeek-V3", "tp=8", "dp=8", f"lens={lens}", *options]) == 0
    told = capsys.readouterr().out
    assert (CAP in told) == (lens == UNLIKE)


def test_python_advises_on_a_latent_model_as_the_shell_does():
    text = f"model=DeepSeek-V3 tp=8 lens={UNLIKE}"
    advice = attnlib.advise(text, library="sglang==0.5.23", gpu="h100")
    assert advice.layer.heads == "16/1" and advice.is_latent
    with pytest.raises(ValueError, match="explain: sparse_mla"):
        attnlib.advise("model=DeepSeek-V3.2 tp=8 lens=4096x8")
    with pytest.raises(ValueError, match="pass either heads or model, got 16/1 and DeepSeek-V3"):
        attnlib.advise("model=DeepSeek-V3 heads=16/1 lens=4096x8")


DENSE_WITH_DP = "Qwen3-235B-A22B at TP 4 with DP attention"


def held(capsys, *arguments):
    """The known problems that a command says to hold."""
    cli.main([*arguments, "--json"])
    data = json.loads(capsys.readouterr().out)
    return [row["id"] for row in data["known"] if row["verdict"] == "holds"]


@pytest.mark.parametrize(
    "command",
    [
        ["advise", "--engine", "sglang==0.5.23", "--gpu", "h100", "--lens", "1024x128"],
        ["explain", "--library", "sglang==0.5.23", "--gpu", "h100", "--call", "kv_lens=1024x128"],
    ],
)
def test_dp_attention_in_the_words_of_a_model_is_a_fact_of_the_server(command, capsys):
    with_dp = held(capsys, *command, "--model", DENSE_WITH_DP)
    by_server = ["--model", "Qwen3-235B-A22B", "--server", "dp_attention"]
    assert with_dp == held(capsys, *command, *by_server) != []
    assert held(capsys, *command, "--model", "Qwen3-235B-A22B", "--tp", "4", "--dp", "4") == with_dp
    without = held(capsys, *command, "--model", "Qwen3-235B-A22B")
    assert {*without} < {*with_dp}


def test_a_server_that_the_model_contradicts_is_refused(fails):
    options = ["--lens", "9", "--server", "dp_attention=no"]
    words = "dp_attention must be left out"
    assert words in fails("advise", "--model", DENSE_WITH_DP, *options)


def test_of_several_kinds_of_layers_the_first_is_advised_on_and_said():
    advice = attnlib.advise("model=gpt-oss-20b tp=2 lens=4096x8")
    words = "gpt-oss-20b has several kinds of layers: this is of the first, full, not of window."
    assert words in advice.notes
    assert advice.has_sinks and advice.layer.heads == "32/4"
    assert "kinds of layers" not in str(attnlib.advise("model=Qwen3-8B lens=4096x8").notes)


def test_mla_is_not_measured_by_advise(fails):
    words = "call must be of mode decode to be measured here, got 'mode=mla heads=128/1"
    assert words in fails("advise", "--measure", "--model", "DeepSeek-V3", "--lens", "9x4")


def test_a_model_that_is_named_is_no_open_fact_of_a_known_problem():
    how = {"library": "sglang==0.5.16", "gpu": "h200", "server": {"context": 131072}}
    of_model = "sglang-dsv4-slot-map"
    assert of_model in str(attnlib.advise("heads=8/1 page=1 lens=4096x8", **how).notes)
    named = attnlib.advise("model=Llama-3.1-70B tp=8 page=1 lens=4096x8", **how)
    assert of_model not in str(named.notes)


def test_more_than_one_query_token_is_refused(fails):
    words = "q_len must be 1 in advise (explain takes the verification of drafts), got 4"
    call = "mode=mla heads=128/1 lens=32768x8+2048x56 q_len=4"
    assert words in fails("advise", *call.split(" "))
    with pytest.raises(ValueError, match="q_len must be 1 in advise"):
        attnlib.advise(read_case(call))


def test_a_context_holds_the_longest_request(fails):
    call = ["heads=8/1", "lens=8192x16"]
    words = "context must hold the longest request (8192), got 1024"
    assert words in fails("advise", *call, "--server", "context=1024")
    how = ["--library", "sglang==0.5.23", "--gpu", "h100"]
    assert words in fails("explain", *call, *how, "--server", "context=1024")
    attnlib.advise(" ".join(call), server={"context": 8192})


def test_a_backend_is_the_fastest_in_some_of_the_batches_that_have_it():
    text = "mode=mla heads=128/1 lens=8192x64"
    table = attnlib.advise(text, library="sglang==0.5.23", gpu="h100").table()
    assert table.set_index("backend")["fastest in"]["flashmla-dense"] == "1 of 1"


def test_backends_of_another_draw_are_compared_with_the_engines_choice():
    advice = attnlib.advise("heads=8/8 head_dim=128 page=16 lens=4096x8", gpu="h200")
    table = advice.table().set_index("backend")
    cuda_cores = table.loc["flashinfer-cuda-cores"]
    assert 0.9 < cuda_cores["time / engine's choice: mean"] < 1
    assert cuda_cores[["fastest in", "time / fastest: mean"]].isna().all()
    expected = cuda_cores["time / engine's choice: expected"]
    (said,) = [note for note in advice.notes if "is expected to have" in note]
    slowdown = 1 / advice.expected["flashinfer-cuda-cores"].ratio
    assert expected == round(1 / slowdown, 3)
    assert said == (
        f"By 604 recorded batches flashinfer-fa2 is expected to have a slowdown of {slowdown:.2f} "
        "against flashinfer-cuda-cores."
    )
    wide = attnlib.advise("heads=64/1 head_dim=128 page=16 lens=4096x8", gpu="h200")
    assert not [note for note in wide.notes if "against flashinfer-cuda-cores." in note]


@pytest.mark.parametrize("lens, is_clear", [("32768x8+2048x56", True), ("4096x64", False)])
def test_backends_that_lie_close_are_no_clear_winner(lens, is_clear):
    text = f"mode=mla heads=128/1 lens={lens}"
    gpu = "h200" if is_clear else "h100"
    advice = attnlib.advise(text, library="sglang==0.5.23", gpu=gpu)
    table = advice.table()
    means = table["time / fastest: mean"]
    close = table.backend[means <= 1.06 * means.min()].tolist()
    assert (len(close) == 1) == is_clear
    said = [note for note in advice.notes if note.startswith("No clear winner")]
    names = ", ".join(close)
    assert said == ([] if is_clear else [f"No clear winner, means within 6 %: {names}."])


def test_the_times_of_a_call_on_another_gpu_are_said_to_be_of_that_gpu():
    told = str(attnlib.advise("heads=32/8 head_dim=128 page=16 lens=8192x16", gpu="a100"))
    assert "This call on record (fa3_decode_regression, NVIDIA H100" in told
    assert "Not of A100: these times are of NVIDIA H100 80GB HBM3" in told and "H200" not in told


def test_another_builds_times_are_told_beside_what_the_limit_of_splits_costs():
    """The table has that build's times: with it alone the engine's pick looks as fast as any."""
    asked = {"library": "sglang==0.5.23", "gpu": "h100"}
    told = " ".join(str(attnlib.advise("heads=8/1 lens=100000x2+1024x30", **asked)).split())
    assert "are of another build, which lacks SGLang's cap." in told
    assert "lens=100000+512x39 context=131072: 54.9 us, 39.2 us with SPLITS=bounded." in told
    assert "Splits of the longest request: 29 now, 49 with SPLITS=bounded" in told
    alike = str(attnlib.advise("heads=8/1 lens=8000x32", **asked))
    assert "another build, which lacks" not in alike and "SPLITS=bounded (model" not in alike


ON_RECORD = "heads=32/8 page=16 lens=8192x16"
NOT_ON_RECORD = "heads=8/1 page=16 lens=8192x16+512x48"


@pytest.mark.parametrize("text", [ON_RECORD, NOT_ON_RECORD])
def test_a_notebook_shows_first_what_the_short_text_says(text):
    advice = attnlib.advise(text, library="sglang==0.5.23", gpu="h200")
    short, whole = advice._repr_html_().split("<summary>Details</summary>")
    words = flat(unescape(re.sub("<[^>]+>", " ", short)))
    for line in repr(advice).replace("--details", "see Details").splitlines():
        assert flat(line) in words
    assert "speedup" in words and "Confidence: " in words
    assert "backends among the nearest recorded batches" in whole
    assert "nearest recorded batches" not in words


def test_heads_of_the_nearest_batch_that_are_others_are_said():
    advice = attnlib.advise("heads=14/2 lens=4096x16")
    nearest = advice.nearest.heads.iloc[0]
    assert nearest != "14/2"
    assert f"The nearest batch has other heads ({nearest})." in advice.notes
    of_nearest = attnlib.advise(advice.nearest.case.iloc[0])
    assert "The nearest batch has other heads" not in str(of_nearest.notes)


def test_times_of_other_batches_are_said_to_be_so():
    words = "All times below were measured on other batches."
    assert words in attnlib.advise("heads=8/1 lens=7+9").notes
    assert words not in attnlib.advise("heads=16/1 lens=33039x8", gpu="H200").notes


NEAREST_CALLS = "Nearest calls on record that lose splits, with these heads"


def test_the_size_of_the_cap_is_told_of_the_nearest_calls_with_these_heads():
    text = "heads=8/1 page=1 lens=65536+2048x120"
    notes = attnlib.advise(text, library="sglang==0.5.23", gpu="h100").notes
    (first,) = [place for place, note in enumerate(notes) if note.startswith(NEAREST_CALLS)]
    said = notes[first + 1 : first + 4]
    assert all(line.startswith("  heads=8/1 ") for line in said)
    words = "lens=65536+2048x127 context=131072: 108.5 us, 78.9 us with SPLITS=bounded"
    assert words in str(said)
    alike = attnlib.advise("heads=8/1 page=1 lens=2048x121", library="sglang==0.5.23", gpu="h100")
    assert NEAREST_CALLS not in str(alike.notes)


def test_the_rounds_of_a_call_on_record_are_those_of_all_machines_and_no_repeats():
    case = DecodeCase(AttnSpec(32, 8, 128, 16), batch_size=16, kv_len=8192)
    rows = recorded_calls(case)
    of_modes = rows[(rows.study == "engine_modes") & (rows.backend == "flashinfer-fa2")]
    expected = set()
    for machine in store.machines("engine_modes"):
        frame = attnlib.load("engine_modes", machine)
        frame = frame[frame.case.map(lambda each: getattr(each, "label", "")) == case.label]
        good = frame[(frame.status == "ok") & (frame.backend == "flashinfer-fa2") & ~frame.repeat]
        expected |= {(machine, number) for number in good["round"]}
    assert of_modes.rounds.tolist() == [len(expected)]
    assert len(expected) > 1


def test_engine_is_another_name_of_library_also_in_python():
    text = "heads=8/1 lens=8192x16"
    assert attnlib.advise(text, engine="sglang==0.5.23").choice.library == "sglang==0.5.23"
    chosen = attnlib.explain(text, engine="vllm==0.33.0", gpu="h100")
    assert chosen == attnlib.explain(text, library="vllm==0.33.0", gpu="h100")
    both = {"library": "vllm==0.33.0", "engine": "sglang==0.5.23", "gpu": "h100"}
    for verb in (attnlib.advise, attnlib.explain):
        with pytest.raises(ValueError, match="library and engine are one argument"):
            verb(text, **both)


def test_a_gpu_without_a_backend_on_record_has_no_empty_table():
    lacking = "the engine has none of the backends of the 8 nearest batches (NVIDIA H200)."
    advice = attnlib.advise(
        "model=DeepSeek-V3 tp=8 lens=8192x16",
        engine="sglang==0.5.23",
        gpu="a100",
    )
    words = flat(repr(advice))
    assert f"This call is not on record, and {lacking}" in words
    assert "(NVIDIA H200): " not in words


def test_a_pick_that_cannot_run_the_call_is_an_exit_status(capsys):
    assert cli.main(["advise", "heads=32/8", "head_dim=100", "lens=8192x16"]) == cli.KNOWN_PROBLEM
    assert "The rule's pick cannot run: fa2: head_dim must be 64" in capsys.readouterr().out
    assert cli.main(["advise", "heads=32/8", "head_dim=128", "lens=8192x16"]) == 0


@pytest.mark.parametrize("owner", ["", "deepseek-ai/"])
def test_a_model_may_have_its_owner_before_its_name(owner):
    text = f"model={owner}DeepSeek-V3 tp=8 lens=8192x16"
    assert attnlib.advise(text, engine="sglang==0.5.23").layer.heads == "16/1"


def test_batches_of_another_head_dim_are_not_shown_for_a_call_that_the_pick_cannot_run():
    for text, able in [
        ("heads=32/8 head_dim=7 lens=8", "No backend of flashinfer==0.6.3 can run it."),
        ("heads=32/8 head_dim=512 lens=8", "Asked for by name can run it: cuda-cores."),
    ]:
        advice = attnlib.advise(text, library="flashinfer==0.6.3")
        for told in (str(advice), advice.details):
            assert able in told
            assert "flashinfer-fa3 " not in told and "slowdown of" not in told
        assert "no batch is like it: nothing is compared." in str(advice)
        assert bool(advice.command) == ("cuda-cores" in able)


@pytest.mark.parametrize(
    "argument, words",
    [
        ({"server": {"dp_atention": True}}, "a fact of the server must be one of dp_attention, "),
        ({"server": 3}, "server must be of type Mapping, such as {'dp_attention': True}, got 3"),
        ({"server": {"context": "a"}}, "context of server must be an integer >= 1, got 'a'"),
        ({"server": {"dp_attention": 2}}, "dp_attention of server must be True or False, got 2"),
        ({"gpu": None}, "gpu must be of type str, such as h100, got None"),
        ({"gpu": 90}, "gpu must be of type str, such as h100, got 90"),
        ({"backend": None}, "backend must be of type str, such as auto, got None"),
        ({"backend": 7}, "backend must be of type str, such as auto, got 7"),
        ({"facts": "x"}, "facts must be of type Call, got 'x'"),
        ({"library": 3}, "library must be of type str, such as sglang==0.5.23, got 3"),
    ],
)
def test_a_wrong_argument_in_python_is_named(argument, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        attnlib.advise("heads=8/1 lens=8192x16", **argument)


def test_explain_names_a_wrong_argument_too():
    wanted = {"gpu": "h100", "library": "sglang==0.5.23"}
    for name, value in {"gpu": 90, "policy": None, "call": "x", "library": 3}.items():
        with pytest.raises(ValueError, match=f"^{name} must be of type "):
            attnlib.explain("heads=8/1", **wanted | {name: value})


def test_what_runs_with_a_cap_has_no_speedup_of_a_build_without_it():
    text = "heads=8/1 lens=100000+500x39"
    rows = str(attnlib.advise(text, library="sglang==0.5.23", gpu="h100")).splitlines()
    (twin,) = [row for row in rows if row.startswith("flash-attn-3-precomputed ")]
    assert twin.endswith("(another build, without SGLang's cap)") and "runs now" not in twin
    (own,) = [row for row in rows if row.startswith("sglang-flash-attn-3 ")]
    assert own.split()[1:3] == ["-", "-"] and own.endswith("(runs now, not on record)")
    (fix,) = [row for row in rows if row.startswith("sglang-flash-attn-3@bounded ")]
    assert fix.endswith("ATTNLIB_SGLANG_SPLITS=bounded (not on record)")
    for call, release in [("heads=8/1 lens=8000x32", "0.5.23"), (text, "0.5.15")]:
        told = str(attnlib.advise(call, library=f"sglang=={release}", gpu="h100"))
        assert "(runs now, timed in another build)" in told and "without SGLang's cap" not in told
        assert "which lacks SGLang's cap" not in told


SAID = re.compile(
    r"(?:By|Over) (\d+) .*batches (\S+) .*a slowdown of ([0-9.]+) against ([^ ]+?)\.?(?: |$)"
)


@pytest.mark.parametrize("library", ["sglang==0.5.23", "vllm==0.33.0", "flashinfer==0.7.2"])
def test_what_is_said_of_the_pick_has_the_numbers_of_the_table(library):
    """Also where the table is over another build of what runs."""
    texts = [
        "heads=8/1 page=16 lens=32768x8+2048x56",
        "heads=32/8 page=16 lens=60000+900x40",
        "mode=mla heads=128/1 lens=30000x8+2048x56",
    ]
    said = 0
    for text, gpu in product(texts, ["h100", "h200"]):
        advice = attnlib.advise(text, library=library, gpu=gpu)
        if sentence := advice.slower_by_records:
            batches, own, slowdown, rival = SAID.match(sentence).groups()
            table = advice.speedups.set_index("backend")
            ratio = table.speedup[rival] / table.speedup[own]
            assert float(slowdown) == pytest.approx(ratio, abs=0.006)
            assert int(batches) == table.batches[[own, rival]].min()
            is_other = "(another build of what runs)" in sentence
            assert is_other == (own != own_build(advice.choice))
            said += 1
    assert said


def test_lengths_with_dp_are_said_to_be_of_one_rank(capsys):
    text = "model=DeepSeek-V3 tp=8 dp={} lens=8192x5"
    of_rank = attnlib.advise(text.format(8), library="sglang==0.5.23", gpu="h100")
    assert str(of_rank).splitlines()[0].endswith(": 40,960 tokens of one DP rank")
    assert of_rank.layer.num_qo_heads == 128, "one GPU has all heads"
    alone = attnlib.advise(text.format(1), library="sglang==0.5.23", gpu="h100")
    assert str(alone).splitlines()[0].endswith(": 40,960 tokens")
    with pytest.raises(SystemExit):
        cli.main(["advise", "--help"])
    assert "lens is the batch of one DP rank" in flat(capsys.readouterr().out)
