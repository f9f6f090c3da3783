"""Cases of every kind: what they refuse, their names, and that a record can hold them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from attnlib.core.spec import AttnSpec, MlaSpec
from attnlib.kinds.cases import case_from_dict
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import MODES, ExtendCase
from attnlib.kinds.form import NamedCase, later
from attnlib.kinds.item import Item
from attnlib.kinds.metadata.case import MetadataCase
from attnlib.kinds.mismatch.case import MismatchCase
from attnlib.kinds.mla.case import MlaCase
from attnlib.kinds.step.case import StepCase

METADATA = MetadataCase("decode", 32, 16, 8200, seq_len_delta=3, swa=True)
DECODE = DecodeCase(AttnSpec(8, 2, 64, 16), 3, 100, "ragged", seed=4)
ONE_TOKEN = replace(DECODE, spec=replace(DECODE.spec, page_size=1))
STEP = StepCase(DecodeCase(AttnSpec(16, 2, 128, 64), 4, 900, "ragged"), 64)
MISMATCH = MismatchCase("head-counts", True)
MLA = MlaCase(MlaSpec(16, 2048, 64, "fp8-656"), 8, 32768, "ragged", 3)
DENSE = MlaCase(MlaSpec(128), 1, 100)


def extend_case(mode: str, mask: str = "") -> ExtendCase:
    ragged = mode == "prefill_ragged"
    return ExtendCase(ONE_TOKEN if ragged else DECODE, mode, 100 if ragged else 7, mask)


EXTENDS = [extend_case(mode, mask) for mode, masks in MODES.items() for mask in masks]


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (DECODE, None),
        (METADATA, "metadata"),
        (STEP, "step"),
        (MISMATCH, "mismatch"),
        (MLA, "mla"),
        (DENSE, "mla"),
        *((case, "extend") for case in EXTENDS),
    ],
)
def test_a_case_goes_through_json_and_back(case, kind) -> None:
    form = case.to_dict()
    assert case_from_dict(form) == case and form.get("kind") == kind
    assert all(isinstance(value, int | str) for value in form.values())
    item = Item("fa3", "graph", case)
    assert Item.from_dict(item.to_dict()) == item
    assert " " not in case.key


@pytest.mark.parametrize("case", [DECODE, METADATA, STEP, MISMATCH, MLA, EXTENDS[1]])
def test_a_form_with_a_field_missing_or_unknown_is_refused(case) -> None:
    form = case.to_dict()
    with pytest.raises(ValueError, match="must have the fields"):
        case_from_dict({**form, "extra": 1})
    for field in form.keys() - {"kind"}:
        with pytest.raises(ValueError, match="must have the fields"):
            case_from_dict({name: value for name, value in form.items() if name != field})


def test_a_field_that_came_later_stays_out_of_the_form_at_its_default() -> None:
    @dataclass(frozen=True)
    class Grown(NamedCase):
        batch_size: int
        cap: int = later(0)

    assert Grown(3).to_dict() == {"batch_size": 3} and Grown.from_dict({"batch_size": 3}) == Grown(
        3
    )
    assert Grown.from_dict(Grown(3, 32).to_dict()) == Grown(3, 32)


def test_an_unknown_kind_lists_the_kinds_there_are() -> None:
    with pytest.raises(
        ValueError, match="must be one of metadata, step, mismatch, mla, extend, got 'prefill'"
    ):
        case_from_dict({"kind": "prefill"})


@pytest.mark.parametrize(
    ("case", "field", "value", "message"),
    [
        (METADATA, "builder", "x", "builder must be one of decode, kv_indices, draft, verify"),
        (METADATA, "lengths", "long", "lengths must be one of fixed, ragged, skewed, got 'long'"),
        (METADATA, "batch_size", 0, "batch_size must be an integer >= 1, got 0"),
        (METADATA, "page_size", 3, "page_size must be a power of two, got 3"),
        (STEP, "layers", 0, "layers must be an integer >= 1, got 0"),
        (MLA, "num_qo_heads", 0, "num_qo_heads must be an integer >= 1, got 0"),
        (MLA, "top_k", -1, "top_k must be an integer >= 0, got -1"),
        (MLA, "top_k", 1.5, "top_k must be an integer >= 0, got 1.5"),
        (MLA, "page_size", 48, "page_size must be a power of two, got 48"),
        (MLA, "kv_format", "fp8", "kv_format must be one of bfloat16, fp8-656, got 'fp8'"),
        (MLA, "batch_size", 0, "batch_size must be an integer >= 1, got 0"),
        (MLA, "kv_len", True, "kv_len must be an integer >= 1, got True"),
        (MLA, "lengths", "long", "lengths must be one of fixed, ragged, skewed, got 'long'"),
        (EXTENDS[0], "mode", "prefill", "mode must be one of prefill_paged, .*, got 'prefill'"),
        (EXTENDS[0], "mask", "tree", "mask must be one of causal for prefill_paged, got 'tree'"),
        (EXTENDS[0], "q_len", 0, r"q_len must be an integer in 1..100 \(kv_len\), got 0"),
        (EXTENDS[0], "q_len", 101, "q_len must be an integer in 1..100 .*, got 101"),
        (EXTENDS[0], "q_len", True, "q_len must be an integer in 1..100 .*, got True"),
        (EXTENDS[0], "mode", "prefill_ragged", r"q_len must be kv_len \(100\) .*7 and 16"),
    ],
)
def test_a_wrong_field_is_named(case, field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        case_from_dict({**case.to_dict(), field: value})


def test_a_ragged_prefill_takes_pages_of_one_token() -> None:
    with pytest.raises(ValueError, match="page_size 1 .*, got 100 and 16"):
        ExtendCase(DECODE, "prefill_ragged", 100)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_has_its_usual_mask_unless_told(mode: str) -> None:
    assert extend_case(mode) == extend_case(mode, MODES[mode][0])


def test_labels_say_only_what_is_unusual() -> None:
    assert MetadataCase("decode", 1, 1, 128).label == "decode batch 1 page 1 ctx 128"
    assert METADATA.label == "decode batch 32 page 16 ctx 8200 seq_len_delta 3 swa True"
    assert MLA.label == "mla 16 heads top 2048 fp8-656 page 64 batch 8 kv_len 32768 ragged seed 3"
    assert DENSE.label == "mla 128 heads dense bfloat16 page 64 batch 1 kv_len 100"
    usual, causal = extend_case("target_verify"), extend_case("target_verify", "causal")
    assert usual.label == f"target_verify q_len 7 {DECODE.label}"
    assert causal.label == f"target_verify q_len 7 causal {DECODE.label}"
    assert usual.key == f"target_verify,q7,{DECODE.key}"
    assert causal.key == f"target_verify,q7,causal,{DECODE.key}"


def test_what_follows_from_a_case_or_its_layer() -> None:
    assert METADATA.max_pages == 513
    assert MlaSpec(128).softmax_scale == pytest.approx(0.0721687836)
    assert (MlaSpec(128).token_bytes, MLA.spec.token_bytes) == (1152, 656)
