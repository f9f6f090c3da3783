"""The marks of SGLang and vLLM, in their own words."""

import pytest

from attnlib.measure.marks import MOST_CHARACTERS, NO_MARK, Mark, read_mark


@pytest.mark.parametrize(
    "name, mark",
    [
        ("step[DECODE bs=4]", Mark("SGLang", "decode", 4)),
        ("step[DECODE bs=16 toks=16]", Mark("SGLang", "decode", 16)),
        ("step[DRAFT_LOOP raw_bs=3 bs=4 topk=1]", Mark("SGLang", "decode", 3)),
        (
            "step[DECODE bs=32 g_sq=32 g_sqsq=32 g_sqsk=50923 g_sk=50923]",
            Mark("SGLang", "decode", 32, 32, 50923),
        ),
        (
            "step[DECODE bs=64 g_sq=128 g_sqsq=256 g_sqsk=262144 g_sk=131072]",
            Mark("SGLang", "verify", 64, 128, 131072),
        ),
        (
            "step[DECODE bs=64 g_sqsq=64 g_sqsk=100032 g_sk=100032]",
            Mark("SGLang", "decode", 64, 0, 100032),
        ),
        (
            "step[EXTEND bs=1 toks=1025 c_sq=1025 c_sqsq=1050625 c_sqsk=1050625 c_sk=1025]",
            Mark("SGLang", "prefill", 1, 1025, 1025),
        ),
        (
            "step[MIXED bs=66 c=2 g=64 c_sq=2048 c_sk=2048 c_sqsq=9 c_sqsk=9 g_sq=64 g_sk=65600]",
            Mark("SGLang", "mixed", 66, 2112, 67648),
        ),
        ("execute_context_0(0)_generation_16(16)", Mark("vLLM", "decode", 16, 16)),
        ("execute_context_2(600)_generation_1(1)", Mark("vLLM", "mixed", 3, 601)),
        (
            "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk50923sqsq32sqsk50923)",
            Mark("vLLM", "decode", 32, 32, 50923),
        ),
        (
            "execute_9_context_1(sq9sk40sqsq81sqsk360)_generation_0(sq0sk0sqsq0sqsk0)",
            Mark("vLLM", "prefill", 1, 9, 40),
        ),
        ("step[DECODE bs=9999999999]", Mark("SGLang", "decode")),
        ("step[DECODE bs=4" + " " * MOST_CHARACTERS + "]", NO_MARK),
        ("execute_model", NO_MARK),
        ("ProfilerStep#3", NO_MARK),
    ],
)
def test_a_mark_has_its_kind_requests_and_tokens(name, mark):
    assert read_mark(name) == mark
