"""Cases with several queries a request: what they refuse, their names, their JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnlib.core.spec import AttnSpec
from attnlib.kinds.cases import case_from_dict
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import MODES, ExtendCase

CACHED = DecodeCase(AttnSpec(8, 2, 64, 16), 3, 100, "ragged", seed=4)
ONE_TOKEN = replace(CACHED, spec=replace(CACHED.spec, page_size=1))


def case_of(mode: str, mask: str = "") -> ExtendCase:
    ragged = mode == "prefill_ragged"
    return ExtendCase(ONE_TOKEN if ragged else CACHED, mode, 100 if ragged else 7, mask)


@pytest.mark.parametrize(
    ("mode", "mask"), [(m, mask) for m, masks in MODES.items() for mask in masks]
)
def test_json_gives_the_case_back(mode: str, mask: str) -> None:
    case = case_of(mode, mask)
    form = case.to_dict()
    assert case_from_dict(form) == case
    assert (form["kind"], form["mode"], form["mask"]) == ("extend", mode, mask)
    assert (form["kv_len"], form["lengths"], form["num_qo_heads"]) == (100, "ragged", 8)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_has_its_usual_mask_unless_told(mode: str) -> None:
    assert case_of(mode) == case_of(mode, MODES[mode][0])


def test_names_say_the_mode_the_queries_and_an_unusual_mask() -> None:
    usual, causal = case_of("target_verify"), case_of("target_verify", "causal")
    assert usual.label == f"target_verify q_len 7 {CACHED.label}"
    assert causal.label == f"target_verify q_len 7 causal {CACHED.label}"
    assert usual.key == f"target_verify,q7,{CACHED.key}"
    assert causal.key == f"target_verify,q7,causal,{CACHED.key}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "prefill"}, "mode must be one of prefill_paged, .*, got 'prefill'"),
        ({"mask": "tree"}, "mask must be one of causal for prefill_paged, got 'tree'"),
        ({"q_len": 0}, r"q_len must be an integer in 1..100 \(kv_len\), got 0"),
        ({"q_len": 101}, "q_len must be an integer in 1..100 .*, got 101"),
        ({"q_len": True}, "q_len must be an integer in 1..100 .*, got True"),
        ({"mode": "prefill_ragged"}, r"q_len must be kv_len \(100\) and page_size 1 .*7 and 16"),
        ({"mode": "prefill_ragged", "q_len": 100}, "page_size 1 .*, got 100 and 16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ExtendCase(**{"cached": CACHED, "mode": "prefill_paged", "q_len": 7, **changes})


@pytest.mark.parametrize("field", ["mode", "q_len", "mask", "kv_len"])
def test_json_without_a_field_is_refused(field: str) -> None:
    form = case_of("dllm_extend").to_dict()
    del form[field]
    with pytest.raises(ValueError, match="must have the fields"):
        case_from_dict(form)
