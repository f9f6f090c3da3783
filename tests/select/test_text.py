"""The command `explain`: a choice as text and data, a layer and a call from text."""

import pytest

import attnlib
from attnlib import cli
from attnlib.core.spec import AttnSpec
from attnlib.select import Call, explain
from attnlib.select.text import parse_call, parse_layer, render

BF16 = AttnSpec(32, 8, 128, 16)
NO_CALLS = "speed topk=many topk=1,2 topk=4x3 graph=8 kv_lens=8192xx3 kv_lens=9x0".split()


def test_rows_that_hold_come_first_none_twice_and_rules_for_models_are_named():
    options = {"mode": "mla", "gpu": "sm90", "library": "sglang==0.5.23"}
    latent = AttnSpec(128, 1, 576, 64)
    head, table = render(explain(latent, **options, call=Call(model="gpt-oss"))).split("\n\n")
    assert "takes pages of 1" in head and "not used by its rules: model" in head
    _, *lines = table.splitlines()
    rows = [line.split()[:2] for line in lines]
    assert rows[0] == ["yes", "fa3"] and ["no", "trtllm_mla"] in rows
    assert len(lines) == len({*lines})
    blackwell = {**options, "gpu": "sm100", "call": Call(kv_lens=(9,))}
    assert "--call model=deepseek|" in render(explain(latent, **blackwell))
    with pytest.raises(ValueError, match="model must be one of other, deepseek"):
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


def test_what_changes_between_releases_is_what_both_are_explained_to_pick(capsys):
    releases = ("flashinfer==0.6.3", "flashinfer==0.6.4")
    table = attnlib.changes(*releases, model="Llama-3.1-8B")
    plain = table[table.dtype == "bf16"].squeeze()
    assert [plain.gpu, plain["mode"], plain.before, plain.after] == ["sm90", "decode", "fa3", "fa2"]
    assert plain.source == "FlashInfer #2530"
    cannot = table[table.before == "fa3 (cannot run)"]
    assert "prefill_paged, target_verify" in cannot["mode"].iloc[-1]
    latent = attnlib.changes("flashinfer==0.6.13", "flashinfer==0.7.2", gpus=["sm100", "sm103"])
    assert {"DeepSeek MLA, 128 heads", "DeepSeek MLA, 16 heads"} <= set(latent.model)
    assert cli.main(["explain", "--diff", *releases, "--gpu", "sm90"]) == 0
    title, _, head, rule, *rows, _, timed = capsys.readouterr().out.splitlines()
    assert timed.endswith(f"attnlib compare --base {releases[0]} --new {releases[1]}")
    assert title == "### From flashinfer==0.6.3 to flashinfer==0.6.4" and head.startswith("| model")
    assert set(rule) == set("|- ") and len({len(row) for row in (head, rule, *rows)}) == 1
    options = ["explain", "--diff", "sglang==0.5.15", "sglang==0.5.23", "--gpu"]
    assert cli.main([*options, "sm80"]) == 0
    assert "slower since" not in capsys.readouterr().out
    assert cli.main([*options, "sm90"]) == 0
    said = capsys.readouterr().out
    assert "no pick changes: each" in said and "- slower since 0.5.16" in said
    assert "0.5.15, without" not in said and "diagnose TRACE AFTER" in said
    engines = ("sglang==0.5.23,flashinfer==0.6.13", "sglang==0.5.23")
    mended = attnlib.changes(*engines, gpus=["sm90"], modes=["decode"], policy="flashinfer").iloc[0]
    assert mended.before == f"{mended.after} (cannot run)" and "older FlashInfer" in mended.why
