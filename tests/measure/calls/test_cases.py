"""One contract for all kinds of case: names, JSON, and refusals that name the field."""

import re
from dataclasses import dataclass, replace

import pytest
from support.workloads import MASKS, extend_case

from attnlib.core import AttnSpec, MlaSpec
from attnlib.measure.calls.cases import parse_cases, read_case
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.calls.form import (
    Item,
    NamedCase,
    case_from_dict,
    item_from_dict,
    later,
)
from attnlib.measure.calls.mla.case import MlaCase
from attnlib.studies import STUDIES
from attnlib.studies.engine.case import EngineCase
from attnlib.studies.metadata.case import MetadataCase
from attnlib.studies.plan.case import PlanCase
from attnlib.studies.step.case import StepCase

MIXED_HALF = {"dtype": "float16", "kv_dtype": "float8_e4m3fn"}
MIXED = AttnSpec(16, 2, 128, 64, "bfloat16", "float8_e4m3fn")
DECODE = DecodeCase(MIXED, 7, 99, "skewed", 3)
METADATA = MetadataCase("decode", 32, 16, 8200, seq_len_delta=3, swa=True)
WIDE = replace(METADATA, context=9000)
STEP = StepCase(DecodeCase(AttnSpec(16, 2, 128, 64), 4, 900, "ragged"), 64)
MLA = MlaCase(MlaSpec(16, 2048, 64, "fp8-656"), 8, 32768, "ragged", 3)
CACHED = DecodeCase(AttnSpec(8, 2, 64, 16), 3, 100, "ragged", seed=4)

EXTEND = extend_case(CACHED, "dllm_extend")
PLAN = PlanCase(CACHED, 4)
ENGINE = EngineCase("qwen3-32b-tp4", 3, 900, 40, "offline", 2, "1+900+7")
PAIR = replace(CACHED, batch_size=2, kv_len=40, lengths="40+40", seed=0)
SAID = ExtendCase(PAIR, "prefill_paged", 30, q_lengths="30+8")
EVERY = (DECODE, METADATA, STEP, MLA, EXTEND, PLAN, ENGINE)
"""A case of every kind."""
MORE = [extend_case(CACHED, *pair) for pair in MASKS]
SWA = replace(CACHED, spec=replace(CACHED.spec, window=40))
LISTED = DecodeCase(AttnSpec(64, 8, 64, 16, **MIXED_HALF, window=9), 4, 9, "9+1+2+3")
MORE += [LISTED, SWA, PlanCase(SWA), StepCase(SWA, 4), WIDE]
MORE += [
    DecodeCase(AttnSpec(8, 2, 128, 1), 4, 100),
    MlaCase(MlaSpec(128), 1, 100),
]
SEVERAL = MlaCase(
    MlaSpec(16, page_size=1),
    3,
    60,
    "33+4+60",
    q_len=4,
    context=4096,
)
MORE += [
    SEVERAL,
    replace(SEVERAL, lengths="ragged", seed=2),
    replace(CACHED, context=4096),
]
MORE += [extend_case(replace(CACHED, context=4096), "target_verify", "causal")]


@pytest.mark.parametrize(
    "case",
    [*EVERY, *MORE],
    ids=lambda case: type(case).__name__,
)
def test_a_case_survives_its_json_form_and_its_text(case):
    form = case.to_dict()
    assert case_from_dict(form) == case
    item = Item("a", "graph", case)
    assert item_from_dict(item.to_dict()) == item
    assert all(isinstance(value, int | str) for value in form.values())
    assert read_case(case.label) == case
    assert case.key == case.label


def test_an_unknown_kind_lists_the_kinds_there_are():
    known = "engine, extend, metadata, mla, plan, serving, step"
    for kind in ("prefill", ["mla"], None):
        words = f"kind of a case must be one of {known}, got {kind!r}"
        with pytest.raises(ValueError, match=re.escape(words)):
            case_from_dict({"kind": kind})
    for case, name in (
        (DECODE, "seed"),
        (EXTEND, "kv_dtype"),
        (METADATA, "swa"),
    ):
        with pytest.raises(ValueError, match=rf"{name} must be of type \w+, got \[\]"):
            case_from_dict(case.to_dict() | {name: []})


def test_a_field_that_came_later_stays_out_of_the_form_at_its_default():
    @dataclass(frozen=True)
    class Grown(NamedCase):
        batch_size: int
        cap: int = later(0)

    assert Grown(3).to_dict() == {"batch_size": 3}
    assert Grown.from_dict({"batch_size": 3}) == Grown(3)
    assert Grown.from_dict(Grown(3, 32).to_dict()) == Grown(3, 32)


@pytest.mark.parametrize(
    "case, lost",
    [(case, name) for case in EVERY for name in case.to_dict() if name != "kind"],
    ids=str,
)
def test_a_field_that_lacks_and_one_too_many_are_refused(case, lost):
    form = case.to_dict()
    with pytest.raises(ValueError, match="must have the fields .*extra"):
        case_from_dict({**form, "extra": 1})
    del form[lost]
    with pytest.raises(ValueError, match=f"must have the fields .*'{lost}'"):
        case_from_dict(form)


@pytest.mark.parametrize(
    "case, field, value, words",
    [
        (DECODE, "batch_size", 0, "an integer >= 1, got 0"),
        (DECODE, "kv_len", -1, "an integer >= 1, got -1"),
        (DECODE, "window", -1, "an integer >= 0, got -1"),
        (EXTEND, "window", 64, "0 for several queries per request, got 64"),
        (DECODE, "lengths", "zipf", "one of fixed, ragged, skewed, .*, got 'zipf'"),
        (METADATA, "builder", "prefill", "one of decode, kv_indices"),
        (METADATA, "lengths", "long", "one of fixed, ragged, skewed, .*, got 'long'"),
        (METADATA, "batch_size", 0, "an integer >= 1, got 0"),
        (METADATA, "batch_size", [1], r"an integer >= 1, got \[1\]"),
        (METADATA, "page_size", 3, "a power of two, got 3"),
        (METADATA, "context", 8199, "an integer >= 8200, got 8199"),
        (STEP, "layers", 0, "an integer >= 1, got 0"),
        (MLA, "num_qo_heads", 0, "an integer >= 1, got 0"),
        (MLA, "top_k", -1, "an integer >= 0, got -1"),
        (MLA, "kv_format", "fp8", "one of bfloat16, fp8-656, fp8-576, got 'fp8'"),
        (MLA, "batch_size", 0, "an integer >= 1, got 0"),
        (MLA, "kv_len", True, "an integer >= 1, got True"),
        (MLA, "lengths", "long", "one of fixed, ragged, skewed, .*, got 'long'"),
        (MLA, "q_len", 2, "1 where top_k is not 0, got 2 with 2048"),
        (SEVERAL, "q_len", 61, "an integer in 1..60, got 61"),
        (SEVERAL, "context", 59, r"0 or at least kv_len \(60\), got 59"),
        (DECODE, "context", 98, r"0 or at least kv_len \(99\), got 98"),
        (EXTEND, "mode", "prefill", "one of prefill_paged, .*, got 'prefill'"),
        (EXTEND, "mask", "tree", "one of full for dllm_extend, got 'tree'"),
        (EXTEND, "q_len", 101, "an integer in 1..100, got 101"),
        (PLAN, "q_len", 0, "an integer >= 1, got 0"),
    ],
)
def test_a_wrong_field_is_named_with_what_it_must_be_and_was(case, field, value, words):
    with pytest.raises(ValueError, match=f"^{field} must be {words}"):
        case_from_dict({**case.to_dict(), field: value})


@pytest.mark.parametrize("q_len, got", [(7, "7 and 16"), (100, "100 and 16")])
def test_a_ragged_prefill_asks_for_all_tokens_one_a_page(q_len, got):
    with pytest.raises(ValueError, match=rf"q_len must be kv_len \(100\) and page_size 1 .*{got}"):
        ExtendCase(CACHED, "prefill_ragged", q_len)


USUAL = DecodeCase(AttnSpec(32, 8, 128, 16), 16, 8192)
ODD = replace(
    USUAL,
    spec=replace(USUAL.spec, kv_dtype="float8_e4m3fn"),
    lengths="ragged",
    seed=5,
)
MLA_USUAL = MlaCase(MlaSpec(128), 1, 100)


@pytest.mark.parametrize(
    "case, text",
    [
        (USUAL, "heads=32/8 head_dim=128 page=16 lens=8192x16"),
        (
            ODD,
            "heads=32/8 head_dim=128 page=16 kv_dtype=float8_e4m3fn lens=ragged:8192x16 seed=5",
        ),
        (
            LISTED,
            "heads=64/8 head_dim=64 page=16 dtype=float16 kv_dtype=float8_e4m3fn window=9 "
            "lens=9+1+2+3",
        ),
        (
            MetadataCase("decode", 1, 1, 128),
            "mode=metadata builder=decode page=1 lens=ragged:128",
        ),
        (
            replace(WIDE, pool_size=64),
            "mode=metadata builder=decode seq_len_delta=3 swa=yes pool_size=64 page=16 "
            "lens=ragged:8200x32 context=9000",
        ),
        (
            MLA,
            "mode=sparse_mla heads=16/1 page=64 top_k=2048 kv_format=fp8-656 lens=ragged:32768x8 "
            "seed=3",
        ),
        (MLA_USUAL, "mode=mla heads=128/1 page=64 lens=100"),
        (SEVERAL, "mode=mla q_len=4 heads=16/1 page=1 lens=33+4+60 context=4096"),
        # The usual mask is left out.
        (extend_case(CACHED, "target_verify"), f"mode=target_verify q_len=7 {CACHED.label}"),
        (
            extend_case(CACHED, "target_verify", "causal"),
            f"mode=target_verify q_len=7 mask=causal {CACHED.label}",
        ),
        (SAID, "mode=prefill_paged q_lens=30+8 heads=8/2 head_dim=64 page=16 lens=40x2"),
        (PLAN, f"mode=plan q_len=4 {CACHED.label}"),
        (STEP, f"mode=step layers=64 {STEP.decode.label}"),
        (EngineCase("m", 3, 900), "mode=engine driver=steps output_len=64 model=m lens=900x3"),
        (
            replace(ENGINE, dp=2, context=4096),
            "mode=engine driver=offline output_len=40 model=qwen3-32b-tp4 tp=2 dp=2 "
            "lens=1+900+7 context=4096",
        ),
    ],
)
def test_the_text_says_only_what_is_unusual_after_the_shape(case, text):
    assert case.label == text
    assert read_case(text) == case


def test_the_text_of_every_case_of_the_studies_is_read_back():
    cases = tuple(dict.fromkeys(case for study in STUDIES.values() for case in study.cases))
    assert parse_cases([case.label for case in cases]) == cases


@pytest.mark.parametrize(
    "line, why",
    [
        ("8q1s1k", "a call must be words such as heads=32/8"),
        ("heads=33/8 lens=8", "num_qo_heads must be a multiple"),
        ("heads=32/8 lens=sorted:8", "lens must be drawn as one of"),
        (
            "mode=prefill_paged q_len=9 heads=32/8 page=16 lens=8",
            r"q_len must be an integer in 1\.\.8",
        ),
    ],
)
def test_a_line_that_is_no_key_is_refused_with_its_number(line, why):
    with pytest.raises(ValueError, match=f"^line 2 of the cases: .*{why}"):
        parse_cases(["# a comment", line])


@pytest.mark.parametrize("kind, words", [(DecodeCase, "an AttnSpec"), (MlaCase, "an MlaSpec")])
def test_a_layer_that_is_no_spec_is_refused_at_once(kind, words):
    with pytest.raises(ValueError, match=rf"spec must be {words}, got \(32, 8\)"):
        kind((32, 8), 16, 100)
