"""The command `explain`: a choice as text and data, a layer and a call from text."""

import pytest

import attnlib
from attnlib import cli
from attnlib.core.spec import AttnSpec
from attnlib.select import Call, explain
from attnlib.select.text import parse_call, parse_layer, render

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
    assert "takes pages of 1" in head and "not used by its rules: model" in head
    _, *lines = table.splitlines()
    rows = [line.split()[:2] for line in lines]
    assert rows[0] == ["yes", "fa3"] and ["no", "trtllm_mla"] in rows
    assert len(lines) == len({*lines})
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
    assert (plain.gpu, plain["mode"]) == ("sm90", "decode")
    assert (plain.before, plain.after) == ("fa3", "fa2")
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
    title, _, *table, _, timed = said.splitlines()
    assert title == "### From flashinfer==0.6.3 to flashinfer==0.6.4"
    assert timed.endswith("attnlib compare --base flashinfer==0.6.3 --new flashinfer==0.6.4")
    head, rule, *_ = table
    assert head.startswith("| model")
    assert set(rule) == set("|- ")
    assert len({len(row) for row in table}) == 1


def test_what_is_slower_without_another_pick_is_said_of_hopper_alone(capsys):
    releases = ("sglang==0.5.15", "sglang==0.5.23")
    assert "slower since" not in said_of_diff(capsys, *releases, "sm80")
    said = said_of_diff(capsys, *releases, "sm90")
    assert "no pick changes: each" in said
    assert "- slower since 0.5.16" in said
    assert "0.5.15, without" not in said
    assert "diagnose TRACE AFTER" in said
