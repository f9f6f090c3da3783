"""The command `explain`: a choice as text and data, a layer and a call from text."""

import json

import pytest

import attnlib
from attnlib import cli
from attnlib.core import AttnSpec
from attnlib.select import Call, explain
from attnlib.select.text import parse_call, parse_layer, render, rules_of

BF16 = AttnSpec(32, 8, 128, 16)
NO_CALLS = (
    "speed",
    "topk=many",
    "topk=1,2",
    "topk=4x3",
    "graph=8",
    "kv_lens=8192xx3",
    "kv_lens=9x0",
)


def test_rows_that_hold_come_first_none_twice_and_rules_for_models_are_named():
    options = {"mode": "mla", "gpu": "sm90", "library": "sglang==0.5.23"}
    latent = AttnSpec(128, 1, 576, 64)
    choice = explain(latent, **options, call=Call(model="gpt-oss"))
    head, table = render(choice).split("\n\n")
    assert "takes pages of 1" in head and "makes no difference to its choice: model" in head
    _, *lines = table.splitlines()
    rows = [line.split()[:2] for line in lines]
    assert rows[0] == ["yes", "fa3"]
    assert ["no", "trtllm_mla"] in rows
    rules = rules_of(choice)
    assert len(rules) == len({*rules})
    blackwell = {**options, "gpu": "sm100", "call": Call(kv_lens=(9,))}
    assert "rules of other models do not apply" in render(explain(latent, **blackwell))
    with pytest.raises(ValueError, match="model must be one of [0-9]+ names, such as deepseek-v4"):
        Call(model="deepseek-v3")


def test_a_call_is_read_from_text():
    words = ["graph", "kv_lens=8192x2,8192", "q_lens=1,2,4", "topk=2048", "model=llama4"]
    call = Call(**parse_call(words))
    lens = {"kv_lens": (8192,) * 3, "q_lens": (1, 2, 4)}
    assert call == Call(graph=True, **lens, topk=2048, model="llama4")


@pytest.mark.parametrize("text", NO_CALLS)
def test_a_call_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="must be"):
        parse_call([text])
    with pytest.raises(ValueError, match="must be given once, got graph, graph=no"):
        parse_call(["graph", "graph=no"])


def test_a_layer_is_read_from_text():
    assert parse_layer("32/8", head_dim=128, page_size=16) == BF16
    with pytest.raises(ValueError, match="heads must be QUERY/KV"):
        parse_layer("32/²", head_dim=128, page_size=16)


def test_what_changes_between_releases_is_what_both_are_explained_to_pick():
    table = attnlib.changes("flashinfer==0.6.3", "flashinfer==0.6.4", model="Llama-3.1-8B")
    plain = table[table.dtype == "bf16"].squeeze()
    assert plain.gpu == "sm90"
    assert plain["mode"] == "decode"
    assert plain.before == "fa3"
    assert plain.after == "fa2"
    assert plain.source == "FlashInfer #2530"
    cannot = table[table.before == "fa3 (cannot run)"]
    assert "prefill_paged, target_verify" in cannot["mode"].iloc[-1]
    latent = attnlib.changes("flashinfer==0.6.13", "flashinfer==0.7.2", gpus=["sm100", "sm103"])
    assert {"DeepSeek MLA, 128 heads", "DeepSeek MLA, 16 heads"} <= set(latent.model)


def test_an_older_release_that_is_installed_beside_an_engine_cannot_run():
    table = attnlib.changes(
        "sglang==0.5.23,flashinfer==0.6.13",
        "sglang==0.5.23",
        gpus=["sm90"],
        modes=["decode"],
        policy="flashinfer",
    )
    mended = table.iloc[0]
    assert mended.before == f"{mended.after} (cannot run)"
    assert "older FlashInfer" in mended.why


def said_of_diff(capsys, old, new, gpu):
    """What `explain --diff` prints."""
    assert cli.main(["explain", "--diff", old, new, "--gpu", gpu]) == 0
    return capsys.readouterr().out


def test_changes_are_a_table_of_markdown_with_what_times_them(capsys):
    said = said_of_diff(capsys, "flashinfer==0.6.3", "flashinfer==0.6.4", "sm90")
    title, _, *lines, timed = said.splitlines()
    table = lines[: lines.index("")]
    ended = [line for line in lines if line.startswith("- ended, slower (decode on sm90")]
    assert len(ended) == 1
    assert "[flashinfer-fa3-decode-auto]" in ended[0]
    assert title == "### From flashinfer==0.6.3 to flashinfer==0.6.4"
    assert timed.endswith("attnlib compare --base flashinfer==0.6.3 --new flashinfer==0.6.4")
    head, rule, *_ = table
    assert head.startswith("| model")
    assert set(rule) == set("|- ")
    assert len({len(row) for row in table}) == 1


def known_in_diff(capsys, *options, base="0.5.15"):
    """What `explain --diff` says of known problems from a release of SGLang to 0.5.23."""
    diff = ("--diff", f"sglang=={base}", "sglang==0.5.23")
    assert cli.main(["explain", *diff, *options]) == 0
    printed = capsys.readouterr().out
    assert f"sglang==0.5.23 picks the same backend and kernel as sglang=={base}" in printed
    assert "diagnose TRACE AFTER" in printed
    return printed


UPGRADE = ("--diff", "flashinfer==0.6.2", "flashinfer==0.7.2", "--gpu", "h100")


def rows_of_upgrade(capsys, *options):
    """The dtypes and modes of the rows that `explain --diff` prints of an upgrade, and its text."""
    assert cli.main(["explain", *UPGRADE, *options]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["explain", *UPGRADE, *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    return [(row["dtype"], row["mode"]) for row in rows], printed


def test_a_model_of_any_name_and_a_layer_are_tried_in_every_mode_and_dtype(capsys):
    wanted, said = rows_of_upgrade(capsys, "--model", "Llama-3.1-8B")
    assert {dtype for dtype, _ in wanted} == {"bf16", "bf16, FP8 cache"}
    assert any("prefill_ragged" in modes for _, modes in wanted)
    assert "flashinfer-graph-tiles" in said
    for other in (("--model", "Qwen3-32B"), ("--model", "gpt-oss-120b"), ("--heads", "24/8")):
        rows, its_words = rows_of_upgrade(capsys, *other)
        assert rows == wanted, other
        assert "flashinfer-graph-tiles" in its_words
    latent, _ = rows_of_upgrade(capsys, "--model", "DeepSeek-V3")
    assert latent == [("bf16, FP8 cache", "mla")]
    one, _ = rows_of_upgrade(capsys, "--model", "Qwen3-32B", "--mode", "decode", "--dtype", "fp16")
    assert one == [("float16", "decode")]


def test_layers_of_a_model_for_which_no_selector_is_asked_are_said_to_be_left_out(capsys):
    _, said = rows_of_upgrade(capsys, "--model", "Qwen3.5-35B-A3B")
    assert "- left out: linear layers of Qwen3.5-35B-A3B, which take a class of their own" in said
    assert "left out" not in rows_of_upgrade(capsys, "--model", "Qwen3-32B")[1]


CAP = "[sglang-fa3-split-cap-gqa]"


def test_a_known_problem_that_a_release_brings_is_said_with_its_size(capsys):
    said = known_in_diff(capsys, "--gpu", "h100", "--mode", "decode")
    (line,) = [line for line in said.splitlines() if CAP in line]
    assert line.startswith("- may be slower since sglang 0.5.16 (decode on sm90), if ")
    assert ", if it has splits lost to SGLang's cap (pass --call kv_lens=LENS" in line
    assert "median slowdown " in said
    assert "ATTNLIB_SGLANG_SPLITS=bounded" in said
    pages = known_in_diff(capsys, "--gpu", "h100", "--mode", "decode", "--page-size", "16")
    assert "- ended, slower (decode on sm90): With pages of 16 tokens and more" in pages
    of_newer = "[sglang-page-table-context-wall]"
    assert of_newer not in said, "it is known to 0.5.18, and not known to have ended"


@pytest.mark.parametrize(
    "options",
    [
        ("--gpu", "sm80"),
        ("--gpu", "b200"),
        ("--gpu", "h100", "--policy", "triton"),
        ("--gpu", "h100", "--policy", "flashinfer"),
        ("--gpu", "h100", "--mode", "prefill_paged"),
        ("--gpu", "h100", "--mode", "decode", "--call", "kv_lens=8192x16", "--heads", "8/1"),
    ],
)
def test_a_known_problem_of_another_gpu_backend_mode_or_batch_is_not_said(options, capsys):
    assert CAP not in known_in_diff(capsys, *options)


def test_a_page_that_is_given_counts_for_a_known_problem(capsys):
    of_one_token = "[sglang-page-table-width-page-one]"
    options = ("--gpu", "h100", "--mode", "decode", "--heads", "8/1")
    assert of_one_token in known_in_diff(capsys, *options, base="0.5.14")
    assert of_one_token not in known_in_diff(capsys, *options, "--page-size", "64", base="0.5.14")


def test_an_upgrade_from_a_release_that_had_a_problem_does_not_bring_it(capsys):
    options = ("--gpu", "h100", "--mode", "decode", "--heads", "8/1", "--page-size", "1")
    assert "page-table-width" not in known_in_diff(capsys, *options, base="0.5.15")


def test_the_lengths_that_are_given_decide_a_known_problem(capsys):
    options = ["explain", "--library", "sglang==0.5.23", "--gpu", "h100", "--mode", "decode"]
    options += ["--heads", "8/1", "--server", "context=131072", "--call"]
    assert cli.main([*options, "kv_lens=131072,1024x127"]) == 0
    said = capsys.readouterr().out
    assert "Slower since SGLang 0.5.16 (known to 0.5.23): " in said
    assert CAP in said
    assert cli.main([*options, "kv_lens=1024x128"]) == 0
    assert CAP not in capsys.readouterr().out
    assert cli.main([*options, "kv_lens=1024x128", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)["known"]
    verdicts = {row["id"]: row["verdict"] for row in known}
    assert verdicts["sglang-page-table-width-page-one"] == "holds"
    assert verdicts["sglang-schedule-dp-attention"] == "may hold"


def test_a_fact_of_the_server_that_is_not_known_lists_those_there_are(fails):
    options = ["--library", "sglang==0.5.23", "--gpu", "h100", "--mode", "decode"]
    said = fails("explain", *options, "--heads", "8/1", "--server", "moon")
    assert "a fact of the server must be one of dp_attention, " in said
    assert "got 'moon'" in said


def test_the_text_of_a_call_takes_a_model_by_name():
    how = {"gpu": "h100", "library": "sglang==0.5.23"}
    choice = explain("model=DeepSeek-V3 tp=8 dp=8 lens=8192x16", **how)
    assert choice.mode == "mla"
    assert choice.picked == "fa3"
    with_sinks = explain("model=gpt-oss-20b tp=2 lens=8192x16", **how)
    call = Call(model="GptOssForCausalLM", sinks=True, kv_lens=(8192,) * 16)
    layer = AttnSpec(32, 4, 64, 16)
    assert with_sinks.reasons == explain(layer, mode="decode", call=call, **how).reasons
    with pytest.raises(ValueError, match="pass either heads or model, got 8/1 and DeepSeek-V3"):
        explain("model=DeepSeek-V3 heads=8/1 lens=9", **how)
    with pytest.raises(ValueError, match="mode must be none of mla"):
        explain("mode=mla model=Qwen3-8B lens=9", **how)


def test_a_cache_that_no_kernel_of_ours_reads_is_a_fact_of_a_text():
    how = {"gpu": "b200", "library": "vllm==0.33.0"}
    by_text = explain("heads=32/8 kv_dtype=nvfp4 lens=9", **how)
    call = Call(cache="nvfp4", pinned_kv_dtype=True, kv_lens=(9,))
    layer = AttnSpec(32, 8, 128, 16)
    assert by_text.order == explain(layer, mode="decode", call=call, **how).order


def test_a_problem_that_comes_without_another_pick_is_of_the_new_release(capsys):
    diff = ["explain", "--diff", "sglang==0.5.23", "sglang==0.5.15", "--gpu", "h100"]
    assert cli.main([*diff, "--mode", "decode", "--heads", "8/1"]) == 0
    said = capsys.readouterr().out
    assert "picks the same backend and kernel as" in said
    assert "by the new pick" not in said
    assert "may be slower in the new release (decode on sm90), if model is deepseek-v4 and " in said


def test_problems_that_may_hold_come_after_all_others(capsys):
    diff = ["explain", "--diff", "sglang==0.5.15", "sglang==0.5.23", "--gpu", "h100"]
    options = ["--mode", "decode", "--heads", "8/1", "--server", "dp_attention"]
    assert cli.main([*diff, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("- ") and line.endswith("]")]
    maybe = [line.startswith("- may be ") for line in heads]
    assert any(maybe) and maybe == sorted(maybe)
    assert "if eagle topk >= 2 and context >= 65536 (pass --server " in str(heads)


def test_lengths_that_a_known_problem_asks_for_are_not_called_unused(capsys):
    words = ("heads=32/8", "page=1", "lens=32768x8+2048x56")
    options = ("--library", "sglang==0.5.23", "--gpu", "h100", "--call", "positions")
    assert cli.main(["explain", *words, *options]) == 0
    printed = capsys.readouterr().out
    (unused,) = [line for line in printed.splitlines() if line.startswith("makes no difference")]
    assert "positions" in unused and "kv_lens" not in unused
