"""Cases as lines of text: the keys of every study are read back, other lines are refused."""

import pytest

from attnlib.kinds.cases import parse_cases
from attnlib.kinds.decode.case import DecodeCase
from attnlib.kinds.extend.case import ExtendCase
from attnlib.kinds.mla.case import MlaCase
from attnlib.studies import STUDIES


def test_the_key_of_every_case_of_the_studies_is_read_back():
    kinds = DecodeCase | ExtendCase | MlaCase
    cases = dict.fromkeys(c for s in STUDIES.values() for c in s.cases if isinstance(c, kinds))
    assert parse_cases([case.key for case in cases]) == tuple(cases)


def test_sinks_are_said_behind_a_window_and_read_back():
    (case,) = parse_cases(["64/8,d64,p16,b4,k1024,w128,sinks,ragged"])
    assert (case.spec.sinks, case.spec.window, case.lengths) == (True, 128, "ragged")
    assert case.key == "64/8,d64,p16,b4,k1024,w128,sinks,ragged" and " sinks batch " in case.label
    assert not parse_cases(["64/8,d64,p16,b4,k1024,ragged"])[0].spec.sinks


@pytest.mark.parametrize("tail", ["", ",float16/float8_e4m3fn", ",ragged,seed3"])
def test_a_window_is_said_behind_the_tokens_and_read_back(tail):
    (case,) = parse_cases([key := f"32/8,d128,p16,b16,k8192,w1024{tail}"])
    assert (case.spec.window, case.key) == (1024, key)
    assert " page 16 window 1024 batch " in case.label


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("8q1s1k", "it must be a key such as"),
        ("33/8,d128,p16,b1,k8", "num_qo_heads must be a multiple"),
        ("32/8,d128,p16,b1,k8,sorted", "lengths must be one of"),
        ("prefill_paged,q9,32/8,d128,p16,b1,k8", r"q_len must be an integer in 1\.\.8"),
    ],
)
def test_a_line_that_nobody_understands_is_refused_with_its_number(line, why):
    with pytest.raises(ValueError, match=f"^line 2 of the cases: .*{why}"):
        parse_cases(["# a comment", line])
