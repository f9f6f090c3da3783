"""Cases as lines: our keys, vLLM's batches, FlashInfer's benchmark lists."""

import pytest

from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import ExtendCase
from attnlib.kinds.listed import parse_cases
from attnlib.kinds.mla.case import MlaCase
from attnlib.studies import STUDIES

MODEL = "Llama-3.1-8B"
DECODE = "--routine BatchDecodeWithPagedKVCacheWrapper --backends fa2 auto --page_size 16 "
DECODE += "--batch_size 16 --s_kv 1024 --num_qo_heads 64 --num_kv_heads 8 --head_dim_qk 128 "
DECODE += '--head_dim_vo 128 -vv --refcheck --case_tag "Llama-3.1 70B"'
PAGED = DECODE.replace("Decode", "Prefill").replace("--s_kv", "--s_qo 512 --s_kv")
RAGGED = PAGED.replace("Paged", "Ragged").replace("512", "1024")
LATENT = "--routine BatchMLAPagedAttentionWrapper --page_size=32 --batch_size 16 --s_qo 1 "
LATENT += "--s_kv 1024 --num_qo_heads 128 --num_kv_heads 128 --head_dim_ckv 512 --head_dim_kpe 64"


def keys(*lines, models=(MODEL,)):
    return [case.key for case in parse_cases(lines, models)[0]]


def test_the_key_of_every_case_of_the_studies_is_read_back():
    kinds = DecodeCase | ExtendCase | MlaCase
    cases = dict.fromkeys(c for s in STUDIES.values() for c in s.cases if isinstance(c, kinds))
    assert parse_cases([case.key for case in cases]) == (tuple(cases), ())


def test_sinks_are_said_behind_a_window_and_read_back():
    (case,), _ = parse_cases(["64/8,d64,p16,b4,k1024,w128,sinks,ragged"])
    assert (case.spec.sinks, case.spec.window, case.lengths) == (True, 128, "ragged")
    assert case.key == "64/8,d64,p16,b4,k1024,w128,sinks,ragged" and " sinks batch " in case.label
    assert not parse_cases(["64/8,d64,p16,b4,k1024,ragged"])[0][0].spec.sinks


@pytest.mark.parametrize("tail", ["", ",float16/float8_e4m3fn", ",ragged,seed3"])
def test_a_window_is_said_behind_the_tokens_and_read_back(tail):
    (case,), _ = parse_cases([key := f"32/8,d128,p16,b16,k8192,w1024{tail}"])
    assert (case.spec.window, case.key) == (1024, key)
    assert " page 16 window 1024 batch " in case.label


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("q2k", ["prefill_paged,q2048,32/8,d128,p16,b1,k2048"]),
        ("8q1s1k", ["32/8,d128,p16,b8,k1024"]),
        ("8q1kv1k", ["32/8,d128,p16,b8,k1024"]),
        ("16q4s1k", ["target_verify,q4,causal,32/8,d128,p16,b16,k1024"]),
        ("q512s8k", ["prefill_paged,q512,32/8,d128,p16,b1,k8192"]),
        ("2q2k_32q1s1k", ["prefill_paged,q2048,32/8,d128,p16,b2,k2048", "32/8,d128,p16,b32,k1024"]),
    ],
)
def test_vllms_batches_are_calls_of_each_model(batch, expected):
    assert keys("# a comment", "", batch) == expected
    assert len(keys(batch, models=(MODEL, "Llama-2-7B", "DeepSeek MLA"))) == 2 * len(expected)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (DECODE, "64/8,d128,p16,b16,k1024"),
        (f"{DECODE} --random_actual_seq_len", "64/8,d128,p16,b16,k1024,ragged"),
        (
            f"{DECODE} --q_dtype fp8_e4m3 --kv_dtype fp8_e4m3",
            "64/8,d128,p16,b16,k1024,float8_e4m3fn",
        ),
        (f"{DECODE} --s_qo 4", "target_verify,q4,causal,64/8,d128,p16,b16,k1024"),
        (f"{PAGED} --causal", "prefill_paged,q512,64/8,d128,p16,b16,k1024"),
        (f"{RAGGED} --causal", "prefill_ragged,q1024,64/8,d128,p1,b16,k1024"),
        (LATENT, "mla,128,heads,dense,bfloat16,page,32,batch,16,kv_len,1024"),
    ],
)
def test_flashinfers_lines_are_read(line, key):
    assert keys(line, models=()) == [key]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--routine bmm_fp8 --m 4", "routine must be one of BatchDecode.*, got 'bmm_fp8'"),
        (PAGED, "prefill must be --causal"),
        (f"{PAGED} --causal --random_actual_seq_len", "if paged, of fixed lengths"),
        (DECODE.replace("--s_kv 1024", ""), "--s_kv must be a number, got ''"),
        (DECODE.replace("_vo 128", "_vo 64"), "head_dim_vo must be head_dim_qk, 128, got 64"),
        (f"{DECODE} --s_qo 4 --spec_dec_mask full", "spec_dec_mask must be causal"),
        (f"{DECODE} --kv_dtype nvfp4", "kv_dtype must be one of bfloat16"),
        (LATENT.replace("--s_qo 1", "--s_qo 4"), "dims, s_qo and dtypes must be"),
    ],
)
def test_a_line_of_flashinfers_that_we_cannot_run_is_left_out_and_told(line, why):
    cases, (note,) = parse_cases([line, KEY := "32/8,d128,p16,b16,k8192"])
    assert [case.key for case in cases] == [KEY]
    with pytest.raises(AssertionError, match=f"line 1 is left out: .*{why}"):
        raise AssertionError(note)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("8q1s1k_x", "it must be a key such as"),
        ("33/8,d128,p16,b1,k8", "num_qo_heads must be a multiple"),
        ("32/8,d128,p16,b1,k8,sorted", "lengths must be one of"),
        ("prefill_paged,q9,32/8,d128,p16,b1,k8", r"q_len must be an integer in 1\.\.8"),
        ("q2ks1k", r"q_len must be an integer in 1\.\.1024"),
    ],
)
def test_a_line_that_nobody_understands_is_refused_with_its_number(line, why):
    with pytest.raises(ValueError, match=f"^line 2 of the cases: .*{why}"):
        parse_cases(["", line], [MODEL])


def test_a_batch_needs_a_model_with_heads():
    with pytest.raises(ValueError, match="a batch says no heads: name a model of Llama"):
        parse_cases(["8q1s1k"], ["DeepSeek MLA"])
