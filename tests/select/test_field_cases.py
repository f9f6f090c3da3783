"""What `explain` answers to calls from public threads and of SGLang, by the engines' sources."""

import json
import re
from pathlib import Path

import pytest

from attnlib import cli
from attnlib.core.spec import AttnSpec
from attnlib.select import explain

ANSWERS = Path(__file__).with_name("answers.txt").read_text().splitlines()
MHA = ("--heads", "32/8")


def explained(capsys, *arguments):
    assert cli.main(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("line", [line for line in ANSWERS if not line.startswith("#")])
def test_the_answer_is_the_engines(line, capsys):
    options, _, answer = line.partition(" -> ")
    words, _, problem = answer.partition("! ")
    assert cli.main(["explain", *options.split()]) == 0
    printed = capsys.readouterr().out
    (cannot,) = re.findall("but it cannot run: (.*)", printed) or [""]
    assert words.strip() in printed and problem in cannot and bool(problem) == bool(cannot)


@pytest.mark.parametrize(
    ("release", "options", "why"),
    [
        ("0.6.9", ("decode", "--head-dim", "512"), "head_dim 64, 128 or 256"),
        ("0.6.13", ("decode", "--head-dim", "96"), "head_dim 64, 128, 256 or 512"),
        ("0.6.13", ("decode", "--head-dim", "80"), "in prefill alone"),
        ("0.6.13", ("prefill_paged", "--page-size", "8"), "16 tokens and more"),
    ],
)
def test_trtllm_gen_has_the_kernels_that_its_index_lists(capsys, release, options, why):
    where = ("--library", f"flashinfer=={release}", "--gpu", "sm100", "--policy", "trtllm-gen")
    assert cli.main(["explain", *where, *MHA, "--mode", *options]) == 2
    assert why in capsys.readouterr().err
    assert cli.main(["explain", *where, *MHA, "--mode", options[0]]) == 0


def test_every_option_counts_with_diff(capsys):
    diff = ("--diff", "vllm==0.24.0", "vllm==0.25.0", "--gpu", "sm90")
    pinned = explained(capsys, *diff, "--policy", "FLASHINFER", "--mode", "decode")
    assert {row["after"] for row in pinned} == {"FLASHINFER (xqa)"}
    assert {row["mode"] for row in pinned} == {"decode"}
    fp8 = explained(capsys, *diff, "--policy", "FLASHINFER", "--kv-dtype", "float8_e4m3fn")
    assert {row["dtype"] for row in fp8} == {"bfloat16/float8_e4m3fn"}
    one = explained(capsys, *diff, "--policy", "FLASHINFER", "--heads", "24/8")
    assert {row["model"] for row in one} == {"24/8 heads, head_dim 128"}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("--heads 32/8 --gpu sm90 --call fixed_split", "tests fixed_split in these calls"),
        ("--heads 32/8 --gpu sm90 --mode decode --dtype float16 --call topk=4", "tests topk"),
        ("--gpu sm90 --mode mla --page-size 64 --call softcap", "tests softcap"),
        ("--heads 32/8 --library vllm==0.33.0", "--library must be left out"),
        ("--gpu sm90 --model Qwen3-32B --call model=gpt-oss", "left out, Qwen3-32B says it"),
        ("--mode decode,mla --policy FLASHINFER", "policy of vllm in mode mla must be one of auto"),
    ],
)
def test_what_does_not_count_is_refused_with_diff(options, word, capsys):
    assert cli.main(["explain", "--diff", "vllm==0.24.0", "vllm==0.33.0", *options.split()]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "layer", "gpu", "why"),
    [
        ("hpc_ops", AttnSpec(8, 1, 128, 64), "sm100", "needs Hopper"),
        ("hpc_ops", AttnSpec(16, 1, 128, 64), "sm90", "group size must be 4 or 8"),
        ("hpc_ops", AttnSpec(8, 1, 64, 64), "sm90", "head_dim must be 128"),
        ("trtllm_mha", AttnSpec(32, 8, 128, 64), "sm89", "needs Hopper or Blackwell"),
        ("trtllm_mha", AttnSpec(32, 8, 72, 64), "sm90", "XQA decodes"),
    ],
)
def test_a_backend_asked_for_by_name_is_held_to_its_limits(policy, layer, gpu, why):
    options = {"mode": "decode", "library": "sglang==0.5.23", "policy": policy}
    with pytest.raises(RuntimeError, match=why):
        explain(layer, gpu=gpu, **options)
    assert explain(AttnSpec(32, 8, 128, 64), gpu="sm90", **options).backend == policy
