"""Choices: the case that they are, and the call that makes them again."""

from __future__ import annotations

import ast
from dataclasses import fields, replace

import pytest

from attnlib.core.spec import AttnSpec
from attnlib.kinds.decode.case import DecodeCase
from attnlib.lab.choices import LINE, Choices

CHOICES = Choices(
    model="Llama-3.1-70B at TP 8",
    records="demo",
    release="0.6.3",
    timer="graph",
    variant="bfloat16",
    page_size=16,
    lengths="ragged",
    batch=4,
    kv_len=1024,
    backends=("flashinfer-fa2", "flashinfer-fa3"),
    against="flashinfer-fa2",
)


def arguments(call):
    tree = ast.parse(call, mode="eval").body
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords}
    return {"model": ast.literal_eval(tree.args[0]), **named}


def test_the_case_is_the_models_with_the_chosen_sizes():
    assert CHOICES.case == DecodeCase(AttnSpec(8, 1, 128, 16), 4, 1024, "ragged")


def test_the_call_says_every_choice():
    said = {f.name: getattr(CHOICES, f.name) for f in fields(Choices) if f.name != "rounds"}
    assert arguments(CHOICES.call) == said


def test_rounds_are_said_where_they_are_measured():
    live = replace(CHOICES, records="live", rounds=5)
    assert arguments(live.call)["rounds"] == 5


def test_the_call_fits_a_line_and_breaks_no_name():
    assert "'Llama-3.1-70B at TP 8'" in CHOICES.call
    assert max(map(len, CHOICES.call.splitlines())) <= LINE


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"backends": ()}, "backends must name at least one"),
        ({"against": "sdpa"}, "against must be one of the backends .*got 'sdpa'"),
        ({"rounds": 0}, "rounds must be an integer >= 1, got 0"),
        ({"rounds": True}, "rounds must be an integer >= 1, got True"),
    ],
)
def test_choices_that_make_no_view_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        replace(CHOICES, **wrong)
