"""Mutated traces, captures, files of cases and arguments: no traceback, no hang, a right status.

`ATTNLIB_INPUTS=3000 python -m pytest tests/test_mutated_input.py` tries more of them.
"""

import os
import random
import re
import shutil
import time

import pytest
from support.mutations import MUTATED

from attnlib import cli

INPUTS = int(os.environ.get("ATTNLIB_INPUTS", "300"))
PER_TEST = 20
MOST_SECONDS = 5.0
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, INPUTS, PER_TEST))
def test_no_input_ends_a_command_but_with_an_answer_or_one_line(
    first, without_gpu, tmp_path, capsys
):
    for seed in range(first, first + PER_TEST):
        pick = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        words = MUTATED[seed % len(MUTATED)](pick, folder)
        told = f"seed {seed}: {[word[:200] for word in words]}"
        began = time.process_time()
        try:
            status = cli.main(words)
        except SystemExit as asked_for_help:
            status = asked_for_help.code
        seconds = time.process_time() - began
        out, err = capsys.readouterr()
        right = {0, cli.USAGE, cli.COMMANDS[words[0]].status}
        if words[0] == "compare":
            right |= {*cli.OUTCOMES.values()}
        if words[0] == "advise":
            right.add(cli.KNOWN_PROBLEM)
        assert status in right, f"{told}: {status}\n{err}"
        assert "Traceback" not in err, f"{told}\n{err}"
        assert status != 0 or out, told
        assert seconds < MOST_SECONDS, f"{told}: {seconds:.1f} s"
        assert not STEERS.search(out + err), told
        if status == cli.USAGE:
            assert out == "" and err.startswith(f"attnlib {words[0]}: "), f"{told}\n{out}{err}"
            if words[0] == "diagnose" and words[2:] in ([], ["--json"]):
                assert str(folder) in err, told
            assert len(err) < 2500, f"{told}: {len(err)} characters"
        assert len([*folder.iterdir()]) <= 1, f"{told}: it wrote something"
        shutil.rmtree(folder)
