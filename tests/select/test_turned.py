"""Every condition of a rule is turned by some answer, but for those that unturned.txt lists.

An answer is a line of data/vectors, or of answers.txt. `tests/support/turned.py` says what turned
means. After a new rule: add vectors that turn its conditions (`tests/support/engine_selectors.py`).
A line of unturned.txt is a debt: take it out once something turns it.

    python tests/select/test_turned.py

writes unturned.txt anew, from inside the repository, with tests/ on PYTHONPATH.
"""

import io
import json
import lzma
import shlex
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import test_selectors
from support.turned import Always, in_place, mutants, not_turned

from attnlib import cli
from attnlib.select import LIBRARIES

VECTORS = Path(__file__).parents[2] / "data" / "vectors"
UNTURNED = Path(__file__).with_name("unturned.txt")
ANSWERS = Path(__file__).with_name("answers.txt")
EVERY = 16
"""Of the drawn answers every sixteenth is tried on the conditions of unturned.txt."""
AGREES = {
    "vllm": test_selectors.vllm_agrees,
    "sglang": test_selectors.sglang_agrees,
    "flashinfer": test_selectors.flashinfer_agrees,
}


def drawn_answers():
    """A check for each line of data/vectors."""
    for engine, agrees in AGREES.items():
        text = lzma.decompress((VECTORS / f"{engine}_selectors.jsonl.xz").read_bytes())
        for line in text.splitlines():
            yield partial(agrees, json.loads(line))


def written_answers():
    """A check for each line of answers.txt."""
    for line in ANSWERS.read_text().splitlines():
        if not line.startswith("#"):
            yield partial(says, line)


def says(line):
    """Whether the command gives the answer of a line, and cannot run where the line says so."""
    options, _, answer = line.partition(" -> ")
    words, _, problem = answer.partition("! ")
    out = io.StringIO()
    with redirect_stdout(out):
        status = cli.main(["explain", *shlex.split(options)])
    said = out.getvalue()
    cannot = "but it cannot run: " in said
    return status == 0 and words.strip() in said and problem in said and cannot == bool(problem)


def all_mutants():
    return [mutant for library in LIBRARIES.values() for mutant in mutants(library)]


def words_of(survivors):
    """What a list of conditions that nothing turns says of them, each line once."""
    return sorted({mutant.words for mutant in survivors})


@pytest.mark.slow
def test_every_condition_is_turned_by_some_answer():
    listed = {line for line in UNTURNED.read_text().splitlines() if not line.startswith("#")}
    debts = []
    others = []
    for mutant in all_mutants():
        (debts if mutant.words in listed else others).append(mutant)
    drawn = [*drawn_answers()]
    written = [*written_answers()]
    new = words_of(not_turned(others, drawn + written))
    assert not new, f"{len(new)} conditions that nothing turns, such as {new[:3]}"
    # A debt survives nearly all answers, so each costs much time.
    paid = sorted(listed - {*words_of(not_turned(debts, drawn[::EVERY] + written))})
    assert not paid, f"{len(paid)} lines of unturned.txt that something turns, such as {paid[:3]}"


def test_a_mutant_is_in_its_table_and_no_longer():
    vllm = LIBRARIES["vllm"]
    mutant = next(mutant for mutant in mutants(vllm) if mutant.table == "limits")
    rows = vllm.limits
    with in_place(mutant):
        changed = vllm.limits[mutant.place]
        assert any(isinstance(part, Always) for part in changed.when)
    assert vllm.limits is rows


if __name__ == "__main__":
    head = [line for line in UNTURNED.read_text().splitlines() if line.startswith("#")]
    left = not_turned(all_mutants(), [*drawn_answers(), *written_answers()])
    UNTURNED.write_text("\n".join([*head, *words_of(left), ""]))
