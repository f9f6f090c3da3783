"""Every door takes a call as its text, as a case, and as older releases wrote it."""

import shlex
from pathlib import Path

import pytest

import attnlib
from attnlib import cli
from attnlib.core import AttnSpec, MlaSpec
from attnlib.lab.diagnose import shape_said
from attnlib.lab.source import _with_only_context, variant_of, wishes_said
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.mla.case import MlaCase
from attnlib.select import Call

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("published_records")

LAYER = AttnSpec(32, 8, 128, 16)
CASE = DecodeCase(LAYER, 16, 8192)
TEXT = "heads=32/8 head_dim=128 page=16 lens=8192x16"
OF_SGLANG = {"library": "sglang==0.5.23", "gpu": "sm90"}


def told(capsys, line):
    assert cli.main(shlex.split(line)) == 0
    return capsys.readouterr().out


# ---- view


@pytest.mark.parametrize(
    "call",
    [TEXT, CASE, "lens=8192x16 page=16 model=Llama-3.1-8B"],
    ids=str,
)
def test_a_view_of_a_call_is_that_of_its_axes(call):
    by_axes = attnlib.view(
        "Llama-3.1-8B",
        machine="h200",
        variant="dtype=bfloat16",
        page_size=16,
        lengths="fixed",
        batch=16,
        kv_len=8192,
    )
    seen = attnlib.view(call, machine="h200")
    assert seen.choice.case == by_axes.choice.case == CASE
    assert seen.choice.arguments == by_axes.choice.arguments
    assert seen.choice.call.splitlines()[1] == f"    {TEXT!r},"
    assert repr(seen).splitlines()[0].endswith(f": {TEXT}")


def test_a_view_of_a_layer_chooses_the_rest():
    seen = attnlib.view("heads=32/8 page=16", machine="h200", batch=16)
    assert seen.choice.case.spec == LAYER
    assert seen.choice.case.batch_size == 16


@pytest.mark.parametrize(
    "call, options, words",
    [
        (TEXT, {"kv_len": 8192}, "kv_len must be left out with the text of a call, got 8192"),
        (TEXT, {"tp": 2}, "tp must be left out with the text of a call, got 2"),
        (f"{TEXT} seed=3", {}, "call must be of decode or MLA, and without seed, got 'heads="),
        (f"mode=plan q_len=1 {TEXT}", {}, "call must be of decode or MLA, and without seed"),
        ("heads=32/8 window=9", {}, "window must be left out of a view without lens, got 9"),
        ("heads=32/8 lens=8192*16", {}, "lens must be TOKENS or TOKENSxCOUNT joined by +"),
        (LAYER, {}, "model must be a model, the text of a call or a case, got AttnSpec"),
    ],
)
def test_a_call_that_no_view_shows_is_refused(call, options, words):
    with pytest.raises(ValueError, match=f"^{words.replace('+', '[+]')}"):
        attnlib.view(call, machine="h200", **options)


def test_a_variant_is_the_words_that_model_page_and_lengths_leave_open():
    fp8 = DecodeCase(
        AttnSpec(8, 1, 64, 16, "float16", "float8_e4m3fn", 9),
        2,
        40,
        context=99,
    )
    assert variant_of(fp8) == "dtype=float16 kv_dtype=float8_e4m3fn window=9 context=99"
    sparse = MlaCase(MlaSpec(16, 2048, kv_format="fp8-656"), 2, 4096)
    assert variant_of(sparse) == "heads=16/1 top_k=2048 kv_format=fp8-656"
    drafts = MlaCase(MlaSpec(16), 2, 4096, q_len=4)
    assert variant_of(drafts) == "heads=16/1 q_len=4"
    assert wishes_said(drafts)["model"] == "DeepSeek MLA"


# ---- advise


def same_advice(one, other):
    return one.nearest.equals(other.nearest) and one.choice == other.choice


def test_advice_on_a_text_is_that_on_its_case_or_without_a_page_on_its_layer():
    asked = {"library": "sglang==0.5.23"}
    of_case = attnlib.advise(CASE, **asked)
    assert same_advice(attnlib.advise(TEXT, **asked), of_case)
    assert of_case.layer.page_size == 16, "the page of a case is pinned"
    of_layer = attnlib.advise(LAYER, [8192] * 16, **asked)
    assert of_layer.layer.page_size == 1, "the engine's own"
    unpinned = attnlib.advise("heads=32/8 lens=8192x16", **asked)
    assert same_advice(unpinned, of_layer)
    assert unpinned.layer == of_layer.layer
    drawn = attnlib.advise("heads=32/8 page=16 lens=ragged:8192x16 seed=2")
    assert len(drawn.lengths) == 16
    assert len({*drawn.lengths}) > 8


def test_the_command_advises_on_words_as_on_options(capsys):
    line = f"advise --engine sglang==0.5.23 {TEXT}"
    pinned = "advise --engine sglang==0.5.23 --heads 32/8 --page-size 16 --lens 8192x16"
    assert told(capsys, line) == told(capsys, pinned)
    printed = told(capsys, "advise heads=8/1 page=16 lens=2048..30720x64")
    call = "heads=8/1 head_dim=128 page=16 lens=2048..30720x64"
    assert printed.startswith(f"{call}: 1,048,576 tokens\n")
    whole = told(capsys, "advise heads=8/1 page=16 lens=2048..30720x64 --details")
    assert f" --measure {call}" in whole


@pytest.mark.parametrize(
    "line, words",
    [
        (
            f"advise {TEXT} --page-size 16",
            "page_size must be left out beside the text of a call, got 16: say page=",
        ),
        (f"advise {TEXT} --lens 9", "lens must be left out beside the text of a call"),
        ("advise --heads 8/1", "--lens must be given, tokens of each request such as 8192x16"),
        (
            "advise mode=target_verify q_len=4 heads=16/2 lens=9",
            "call must be of mode decode or mla, got 'mode=target_verify",
        ),
        ("advise heads=8/1 lns=9", "did you mean lens?"),
        (f"compare --base 0.6.3 --new 0.6.4 {TEXT} --cases x.txt", "left out with --cases"),
        (f"explain {TEXT} --heads 8/1 --gpu sm90 --library vllm==0.33.0", "heads must be given on"),
        (
            f"explain mode=decode {TEXT} --mode decode --gpu sm90 --library vllm==0.33.0",
            "mode must be given once, got decode as well",
        ),
    ],
)
def test_what_is_said_twice_or_not_at_all_is_refused(fails, line, words):
    assert words in fails(*shlex.split(line))


# ---- explain


def test_a_text_is_explained_as_its_layer_mode_and_facts():
    pinned = {"pinned_page": True, "model": "other"}
    of_layer = attnlib.explain(
        LAYER, mode="decode", call=Call(kv_lens=(8192,) * 16, **pinned), **OF_SGLANG
    )
    assert attnlib.explain(TEXT, **OF_SGLANG) == of_layer
    assert attnlib.explain(CASE, **OF_SGLANG) == of_layer


def test_masks_queries_and_models_of_a_text_are_facts():
    text = "mode=target_verify q_len=4 heads=32/8 head_dim=128 page=16 lens=100+200"
    how = {"library": "flashinfer==0.7.2", "gpu": "sm90"}
    facts = {"kv_lens": (100, 200), "q_lens": (4, 4), "pinned_page": True}
    for words, custom in ((text, True), (f"{text} mask=causal", False)):
        call = Call(custom_mask=custom, **facts)
        assert attnlib.explain(words, **how) == attnlib.explain(
            LAYER, mode="target_verify", call=call, **how
        )
    choice = attnlib.explain("model=gpt-oss-20b page=64", **OF_SGLANG)
    assert choice.reasons
    assert not any("gpt-oss; it is other" in row.why for row in choice.reasons)


def test_a_latent_layer_is_explained_from_its_text(capsys):
    text = "mode=sparse_mla heads=16/1 top_k=2048 kv_format=fp8-656"
    layer = AttnSpec(16, 1, 576, 64, kv_dtype="float8_e4m3fn")
    call = Call(topk=2048, pinned_kv_dtype=True)
    of_layer = attnlib.explain(layer, mode="sparse_mla", call=call, **OF_SGLANG)
    assert attnlib.explain(text, **OF_SGLANG) == of_layer
    line = "explain --library sglang==0.5.23 --gpu sm90"
    options = "--mode sparse_mla --heads 16/1 --kv-dtype fp8"
    assert (
        told(capsys, f"{line} {text}").partition("\n\n")[2]
        == (told(capsys, f"{line} {options}").partition("\n\n")[2])
    )


@pytest.mark.parametrize(
    "call, error, words",
    [
        ("heads=32/8 lens=ragged:9x2", ValueError, "lens must not be drawn here, got ragged:9x2"),
        ("mode=draft_extend heads=32/8 q_len=2 lens=9", ValueError, "q_lens must be given with"),
        (MlaSpec(16), TypeError, "call must be an AttnSpec, a case or the text of a call, got Mla"),
    ],
)
def test_what_cannot_be_explained_is_refused(call, error, words):
    with pytest.raises(error, match=f"^{words}"):
        attnlib.explain(call, **OF_SGLANG)
    with pytest.raises(ValueError, match="^mode must be left out with mode=decode, got 'mla'"):
        attnlib.explain(f"mode=decode {TEXT}", mode="mla", **OF_SGLANG)


# ---- compare, diagnose


def test_a_comparison_takes_words_and_files(capsys, tmp_path):
    file = tmp_path / "calls.txt"
    file.write_text(f"{TEXT}\n")
    line = "compare --base 0.6.3 --new 0.6.4"
    assert told(capsys, f"{line} {TEXT}") == told(capsys, f"{line} --cases {file}")


def test_the_shape_of_a_trace_is_said_in_words_or_as_before():
    before = cli._facts_of_shape("heads=32/8,kv_len=8192,batch_size=16,page_size=16")
    trace = ROOT / "data" / "traces" / "fa3_decode.json.gz"
    said = cli._facts_of_shape("heads=32/8 page=16 lens=8192x16")
    shape = attnlib.diagnose(trace, **said).shape
    assert shape == {
        **attnlib.diagnose(trace, **before).shape,
        "lens": "8192x16",
        "longest": 8192,
    }
    both = cli._facts_of_shape("sglang=0.5.23 heads=32/8 lens=8192x16")
    assert both == cli._facts_of_shape("heads=32/8 lens=8192x16") | {"sglang": "0.5.23"}
    with pytest.raises(ValueError, match="each fact once, got 'sglang' again"):
        cli._facts_of_shape("lens=8192x16 sglang=0.5.23 sglang=0.5.22")
    assert shape_said(cli._facts_of_shape("lens=100+300")) == {"lens": "100+300"}
    assert shape_said({"page": 16}) == {"page_size": 16}
    with pytest.raises(ValueError, match="^page_size must be left out with page, got 9$"):
        attnlib.diagnose(trace, page=16, page_size=9)


# ---- where a text was refused


OF_MLA = "mode=mla heads=128/1 page=1 lens=32768x8+2048x56"


def test_a_text_without_context_takes_the_only_one_on_record():
    seen = attnlib.view(OF_MLA, machine="h200")
    assert seen.choice.case.label == f"{OF_MLA} context=131072"
    study = attnlib.STUDIES["split_cap"]
    assert study.case_named(OF_MLA).label == f"{OF_MLA} context=131072"


def test_a_context_is_chosen_only_where_there_is_one():
    recorded = ["dtype=float16 context=10", "heads=8/1 context=9", "heads=8/1 context=10"]
    assert _with_only_context("dtype=float16", recorded) == "dtype=float16 context=10"
    assert _with_only_context("heads=8/1", recorded) == "heads=8/1"
    assert _with_only_context("heads=8/1", [*recorded, "heads=8/1"]) == "heads=8/1"
    assert _with_only_context(None, ["None context=9"]) is None


def test_explore_opens_with_a_call():
    explorer = attnlib.explore(TEXT, machine="h200")
    assert explorer.view.choice.case == CASE
    assert attnlib.explore(CASE).view.choice.case == CASE
    with pytest.raises(ValueError, match="^kv_len must be left out with the text of a call"):
        attnlib.explore(TEXT, kv_len=8192)


def test_a_decode_call_takes_a_text():
    assert attnlib.decode_call("sdpa", TEXT, device="cpu").__name__ == f"sdpa, {TEXT}"
    with pytest.raises(ValueError, match="^case must be a DecodeCase or its text, got 'mode=mla"):
        attnlib.decode_call("sdpa", OF_MLA)


def test_explain_takes_heads_alone_and_a_card(capsys):
    by_text = attnlib.explain("heads=32/8", gpu="h100", library="sglang==0.5.23")
    assert by_text.mode == "decode"
    assert by_text.gpu == "sm90"
    assert by_text.backend == "fa3"
    line = "explain --library sglang==0.5.23 --gpu h100"
    head = told(capsys, f"{line} --heads 32/8").splitlines()[0]
    assert head == told(capsys, f"{line} heads=32/8").splitlines()[0]


@pytest.mark.parametrize("words", [["steps.jsonl"], ["--heads=32/8", "--lens=steps.jsonl"]])
def test_a_file_of_captured_steps_is_sent_to_the_commands_that_take_it(words, fails):
    taken = "(a file of captured steps is for compare --cases, measure and serve --traffic)"
    assert taken in fails("advise", *words)
