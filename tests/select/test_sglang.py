"""What a choice for SGLang says of what was given, of what cannot run, and of backends by name.

Its backends themselves are held to SGLang's own steps (test_selectors.py).
"""

import pytest

from attnlib import cli
from attnlib.core.spec import AttnSpec
from attnlib.select import explain

PLAIN = "--library sglang==0.5.23 --gpu sm90 --mode decode --heads 32/8"
LATENT = f"{PLAIN} --mode mla --heads 128/1"
VERIFY = f"{PLAIN} --gpu sm100 --mode target_verify"
FIVE_DRAFTED = "--heads 32/4 --call eagle_topk=1 --call kv_lens=999x4 --call q_lens=5x4"
DEEPSEEK = "--call model=deepseek"
UNUSED = "not used by its rules: "


@pytest.mark.parametrize(
    ("options", "word"),
    [
        # A page that is not given is the library's own, and does not count as the user's.
        (f"{PLAIN} --call eagle_topk=1", "takes pages of 1"),
        (f"{VERIFY} --call eagle_topk=1", "auto: trtllm_mha"),
        (f"{PLAIN} --call eagle_topk=1 --page-size 16", "policy auto: flashinfer"),
        (f"{PLAIN} --gpu sm100 --page-size 1", "trtllm-gen\ntrtllm_mha takes no pages of 1"),
        (f"{LATENT} --gpu sm100 {DEEPSEEK} --page-size 16", "trtllm_mla takes no pages of 16"),
        # What no rule of the mode tests is said, options too.
        (f"{PLAIN} --call topk=2048 --call positions", f"{UNUSED}positions, topk"),
        (f"{PLAIN} --call model=gemma3", f"{UNUSED}model"),
        (f"{LATENT} --page-size 64", f"{UNUSED}page_size"),
        (f"{PLAIN} --dtype float16", f"{UNUSED}dtype"),
        (f"{PLAIN} --library flashinfer==0.7.2 --call sinks", f"{UNUSED}sinks"),
        (f"{LATENT} --library flashinfer==0.6.13 --call fixed_split", f"{UNUSED}fixed_split"),
        # A pick that cannot run.
        (f"{VERIFY} --call batch_invariant --call model=gpt-oss", "cannot run: trtllm_mha"),
        (f"{PLAIN} --gpu sm100 --head-dim 96", "cannot run: trtllm-gen: no list of its kernels"),
        (f"{PLAIN} --mode prefill_paged --head-dim 512", "fa3: head_dim must be at most 256"),
        (f"{PLAIN} --call fixed_split --gpu sm75", "cannot run: fa3: needs 8.x or 9.x"),
        (f"{LATENT} --gpu sm100 --heads 96/1 {DEEPSEEK}", "64 and 128"),
        (f"{PLAIN} --library sglang==0.5.12 --call model=qwen3-next --call eagle_topk=1", "Mamba"),
        (f"{VERIFY} --library sglang==0.5.15 --head-dim 512 {FIVE_DRAFTED}", "up to 32 query rows"),
        (
            f"{PLAIN} --gpu sm100 --library sglang==0.5.15 --head-dim 96",
            "64, 128, 256 or 512",
        ),
        (
            f"{PLAIN} --gpu sm100 --library sglang==0.5.15 --head-dim 96 --call model=gemma3",
            "full (head_dim 96): trtllm_mha, which runs trtllm-gen (cannot run)",
        ),
        # Branches: none, left to SGLang, one, several.
        (f"{PLAIN} --gpu sm100", "auto: trtllm_mha"),
        (f"{PLAIN} --gpu sm100 --call speculative", "auto: flashinfer"),
        (VERIFY, "auto: flashinfer"),
        (f"{VERIFY} --gpu sm90 --page-size 16", "auto: fa3"),
        (f"{VERIFY} --call eagle_topk=4", "auto: flashinfer"),
        (f"{VERIFY} --call eagle_topk=4 --call model=gpt-oss", "speculates with one branch"),
        (f"{LATENT} --gpu sm100 --call eagle_topk=4 {DEEPSEEK}", "several branches"),
        (f"{LATENT} --call speculative --call model=deepseek-v4", "one branch, told"),
        # Models whose prefill and decode differ are a table.
        (f"{PLAIN} --call model=qwen3-vl", "prefill_paged (head_dim 128): fa3"),
        (f"{PLAIN} --gpu sm100 --call model=mimo", "auto: fa4"),
        (f"{LATENT} --mode sparse_mla", "takes pages of 64"),
        (f"{LATENT} --gpu sm89 --call model=deepseek-v4", "need Hopper or Blackwell"),
        (f"{LATENT} --library sglang==0.5.11 --call model=deepseek-v4", "not there before 0.5.12"),
    ],
)
def test_what_is_given_counts_and_what_cannot_run_is_said(options, word, capsys):
    assert cli.main(["explain", *options.split()]) == 0
    assert word in capsys.readouterr().out


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
    options = {"mode": "decode", "library": "sglang==0.5.23", "policy": policy, "env": {}}
    with pytest.raises(RuntimeError, match=why):
        explain(layer, gpu=gpu, **options)
    assert explain(AttnSpec(32, 8, 128, 64), gpu="sm90", **options).backend == policy
