"""Text for a terminal: no line is wider than `WIDTH`, no word is lost, and numbers stand right."""

import shlex

import pytest
from support.words import flat

from attnlib.select.lines import WIDTH, command_lines, fact_rows, fitted, folded, table_lines

LONG = " ".join(f"word{number}" for number in range(40))


def test_a_long_line_is_cut_at_blanks_and_its_rest_stands_further_in():
    first, *others = folded(f"  {LONG}")
    assert first.startswith("  word0 ")
    assert others and all(line.startswith("    word") for line in others)
    assert flat(" ".join([first, *others])) == LONG
    assert max(map(len, [first, *others])) <= WIDTH
    assert folded("short") == ["short"]
    link = "https://" + "x" * WIDTH
    assert folded(f"see: {link}")[-1].strip() == link, "a link can be clicked"
    assert fitted(["a", "", "b"]) == "a\n\nb"


def test_the_values_of_facts_stand_under_each_other():
    first, second, *others = fact_rows([("fix", "set it"), ("evidence", LONG)])
    assert first.index("set it") == second.index("word0")
    assert others[0].index("word") == second.index("word0")


def test_a_long_command_is_one_command_over_its_lines():
    options = [f"--option-{number} 'a  value' x=1" for number in range(9)]
    command = f"python -m attnlib advise {' '.join(options)}"
    lines = command_lines(command)
    assert len(lines) > 1 and max(map(len, lines)) <= WIDTH
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)
    assert command_lines("python --a") == ["python --a"]


def test_words_stand_left_and_numbers_right():
    rows = [("backend", "us"), ("fa2", "9.5"), ("fa3", "-"), ("a", "110.25")]
    assert table_lines(rows) == [
        "backend      us",
        "fa2         9.5",
        "fa3           -",
        "a        110.25",
    ]


@pytest.mark.parametrize("name", ["kernel", "k" * 70])
def test_a_wide_table_cuts_heads_then_text_then_words(name):
    rows = [("name", "launches a step", "why"), (name, "4", LONG)]
    lines = table_lines(rows)
    assert max(map(len, lines)) <= WIDTH
    assert "launches" in lines[0] and "launches a step" not in lines[0]
    columns = ["", "", ""]
    starts = [0, lines[0].index("launches"), lines[0].index("why"), None]
    for line in lines[2:]:
        for place in range(3):
            columns[place] += line[starts[place] : starts[place + 1]].rstrip() + " "
    assert columns[0].split()[0] == name, "a word is cut last"
    assert LONG == flat(columns[2].removeprefix("a step "))
