"""What `explain` answers to calls from public threads and of SGLang, by the engines' sources."""

import json
import re
import shlex
from pathlib import Path

import pytest

from attnlib import cli


def lines_of(name):
    """The lines of a file beside this one, without its comments."""
    lines = Path(__file__).with_name(name).read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def joined(printed):
    """A text in which the rest of a line that was cut stands behind it again."""
    return re.sub(r"\n  (?=\S)", " ", printed)


def explained(capsys, *arguments):
    assert cli.main(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("line", lines_of("answers.txt"))
def test_the_answer_is_the_engines(line, capsys):
    options, _, answer = line.partition(" -> ")
    words, _, problem = answer.partition("! ")
    assert cli.main(["explain", *shlex.split(options)]) == 0
    printed = joined(capsys.readouterr().out)
    (cannot,) = re.findall("but it cannot run: (.*)", printed) or [""]
    assert words.strip() in printed
    assert problem in cannot
    assert bool(problem) == bool(cannot)


def test_every_option_counts_with_diff(capsys):
    diff = ("--diff", "vllm==0.24.0", "vllm==0.25.0", "--gpu", "sm90")
    pinned = explained(capsys, *diff, "--policy", "FLASHINFER", "--mode", "decode")
    assert {row["after"] for row in pinned} == {"FLASHINFER, which runs xqa"}
    assert {row["mode"] for row in pinned} == {"decode"}
    fp8 = explained(capsys, *diff, "--policy", "FLASHINFER", "--kv-dtype", "float8_e4m3fn")
    assert {row["dtype"] for row in fp8} == {"bfloat16/float8_e4m3fn"}
    one = explained(capsys, *diff, "--policy", "FLASHINFER", "--heads", "24/8")
    assert {row["model"] for row in one} == {"heads=24/8 head_dim=128"}


@pytest.mark.parametrize("line", lines_of("refusals.txt"))
def test_what_cannot_be_answered_is_one_line_that_says_why(line, fails):
    options, _, words = line.partition(" -> ")
    assert words in fails("explain", *shlex.split(options))
