"""Questions of public threads get the known problem that answers them; their twins do not."""

import json
import shlex
from pathlib import Path

import pytest

from attnlib import cli

PATH = Path(__file__).with_name("known_questions.txt")
LINES = [line for line in PATH.read_text().splitlines() if line and not line.startswith("#")]
PAIRS = [*zip(LINES[::2], LINES[1::2], strict=True)]


def settings(words):
    """Options as option -> value; of --call and --server, which repeat, option and field."""
    found = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        field = value.partition("=")[0] if option in ("--call", "--server") else ""
        found[option, field] = value
    return found


def known(capsys, options):
    """Id -> verdict of the known problems that `explain` says for these options."""
    words = []
    for (option, _), value in options.items():
        words += [option, value]
    assert cli.main(["explain", *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["known"]
    return {row["id"]: row["verdict"] for row in rows}


@pytest.mark.parametrize("asked, twin", PAIRS)
def test_a_question_has_its_known_problem_and_its_twin_has_not(asked, twin, capsys):
    options, _, problem = asked.partition(" -> ")
    given = settings(shlex.split(options))
    assert known(capsys, given)[problem] == "holds"
    assert twin.startswith("but ")
    other = {**given, **settings(shlex.split(twin.removeprefix("but ")))}
    assert problem not in known(capsys, other)


def test_a_pick_that_was_reported_slower_is_said_between_two_releases(capsys):
    diff = ["--diff", "vllm==0.29.0", "vllm==0.33.0", "--gpu", "h100", "--mode", "sparse_mla"]
    assert cli.main(["explain", *diff, "--heads", "8/1", "--head-dim", "512"]) == 0
    said = capsys.readouterr().out
    assert "reported: about 36 % slower at concurrency 1" in said
    assert "reported against it: " in said
    assert cli.main(["explain", *diff, "--heads", "8/1", "--head-dim", "576"]) == 0
    assert "reported" not in capsys.readouterr().out
