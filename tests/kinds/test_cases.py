"""Cases other than attention: what they are, and that a record can hold them."""

from __future__ import annotations

import pytest

from attnlib.core.spec import AttnSpec, MlaSpec
from attnlib.kinds.cases import case_from_dict
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.item import Item
from attnlib.kinds.metadata.case import MetadataCase
from attnlib.kinds.mismatch.case import MismatchCase
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.step.case import StepCase

CASE = MetadataCase("decode", 32, 16, 8200, seq_len_delta=3, swa=True)


def test_a_metadata_case_goes_through_json_and_back() -> None:
    assert case_from_dict(CASE.to_dict()) == CASE
    item = Item("metadata-fused", "graph", CASE)
    assert Item.from_dict(item.to_dict()) == item


def test_a_case_without_a_kind_is_attention() -> None:
    case = DecodeCase(AttnSpec(8, 2, 128, 1), 4, 100)
    assert case_from_dict(case.to_dict()) == case
    assert "kind" not in case.to_dict()


def test_the_label_says_only_what_is_unusual() -> None:
    assert MetadataCase("decode", 1, 1, 128).label == "decode batch 1 page 1 ctx 128"
    assert CASE.label == "decode batch 32 page 16 ctx 8200 seq_len_delta 3 swa True"
    assert " " not in CASE.key


def test_the_table_is_as_wide_as_the_longest_context_needs() -> None:
    assert CASE.max_pages == 513


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("builder", "prefill", "builder must be one of decode, kv_indices, draft, verify"),
        ("lengths", "long", "lengths must be one of fixed, ragged, skewed, got 'long'"),
        ("batch_size", 0, "batch_size must be an integer >= 1, got 0"),
        ("page_size", 3, "page_size must be a power of two, got 3"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object, message: str) -> None:
    fields = {**CASE.to_dict(), field: value}
    with pytest.raises(ValueError, match=message):
        case_from_dict(fields)


def test_an_unknown_kind_lists_the_kinds_there_are() -> None:
    with pytest.raises(
        ValueError, match="must be one of metadata, step, mismatch, mla, extend, got 'prefill'"
    ):
        case_from_dict({"kind": "prefill"})


def test_a_missing_field_is_refused() -> None:
    form = CASE.to_dict()
    del form["pool_size"]
    with pytest.raises(ValueError, match="must have the fields"):
        case_from_dict(form)


STEP = StepCase(DecodeCase(AttnSpec(16, 2, 128, 64), 4, 900, "ragged"), 64)


@pytest.mark.parametrize("case", [STEP, MismatchCase("head-counts", True)])
def test_steps_and_mismatches_go_through_json_and_back(case: StepCase | MismatchCase) -> None:
    assert case_from_dict(case.to_dict()) == case
    assert Item.from_dict(Item("fa3", "graph", case).to_dict()).case == case
    assert " " not in case.key


def test_a_step_needs_a_layer() -> None:
    with pytest.raises(ValueError, match="layers must be an integer >= 1, got 0"):
        StepCase(STEP.decode, 0)


def test_a_mismatch_with_another_field_is_refused() -> None:
    with pytest.raises(ValueError, match="must have the fields"):
        case_from_dict({"kind": "mismatch", "name": "none", "guard": True, "extra": 1})


MLA = MlaCase(MlaSpec(16, 2048, 64, "fp8-656"), 8, 32768, "ragged", 3)


@pytest.mark.parametrize("case", [MLA, MlaCase(MlaSpec(128), 1, 100)])
def test_an_mla_case_goes_through_json_and_back(case: MlaCase) -> None:
    assert case_from_dict(case.to_dict()) == case
    assert Item.from_dict(Item("flashmla-dense", "graph", case).to_dict()).case == case
    assert case.to_dict()["kind"] == "mla"


def test_the_label_of_an_mla_case_tells_it_from_its_neighbours() -> None:
    assert MLA.label == ("mla 16 heads top 2048 fp8-656 page 64 batch 8 kv_len 32768 ragged seed 3")
    assert MlaCase(MlaSpec(128), 1, 100).label == (
        "mla 128 heads dense bfloat16 page 64 batch 1 kv_len 100"
    )
    assert " " not in MLA.key


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_qo_heads", 0, "num_qo_heads must be an integer >= 1, got 0"),
        ("top_k", -1, "top_k must be an integer >= 0, got -1"),
        ("top_k", 1.5, "top_k must be an integer >= 0, got 1.5"),
        ("page_size", 48, "page_size must be a power of two, got 48"),
        ("kv_format", "fp8", "kv_format must be one of bfloat16, fp8-656, got 'fp8'"),
        ("batch_size", 0, "batch_size must be an integer >= 1, got 0"),
        ("kv_len", True, "kv_len must be an integer >= 1, got True"),
        ("lengths", "long", "lengths must be one of fixed, ragged, skewed, got 'long'"),
    ],
)
def test_a_wrong_field_of_an_mla_case_is_named(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case_from_dict({**MLA.to_dict(), field: value})


@pytest.mark.parametrize("field", ["kv_format", "kv_len"])
def test_an_mla_case_with_a_field_missing_or_unknown_is_refused(field: str) -> None:
    form = MLA.to_dict()
    with pytest.raises(ValueError, match="must have the fields"):
        case_from_dict({**form, "extra": 1})
    del form[field]
    with pytest.raises(ValueError, match="must have the fields"):
        case_from_dict(form)


def test_the_softmax_scale_is_that_of_the_query_before_absorption() -> None:
    assert MlaSpec(128).softmax_scale == pytest.approx(0.0721687836)
    assert (MlaSpec(128).token_bytes, MLA.spec.token_bytes) == (1152, 656)
