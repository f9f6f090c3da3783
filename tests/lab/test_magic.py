"""`%%attn_profile` in a real IPython shell: what it shows, keeps, writes, and how it fails."""

import json
import re

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from attnlib.lab.profile import Profile

OPTIONS = ("--calls", "--warmup", "--device", "--graph", "--trace", "--into")


@pytest.fixture
def shell(without_gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    shell.run_cell("%load_ext attnlib", store_history=True).raise_error()
    shell.user_ns["x"] = torch.ones(16, 16)
    return shell


@pytest.fixture
def says(shell, capsys):
    """Run a cell that must fail; returns all that the user sees of it, without colours."""

    def seen(text):
        capsys.readouterr()
        assert not shell.run_cell(text, store_history=True).success
        printed = capsys.readouterr()
        return re.sub(r"\x1b\[[0-9;]*m", "", printed.out + printed.err)

    return seen


def test_the_cells_profile_is_the_cells_output(shell):
    taken = shell.run_cell("%%attn_profile --calls 2 --warmup 0\ny = x @ x").result
    assert isinstance(taken, Profile)
    assert taken.calls == 2
    assert taken.ran == 4
    assert "aten::mm" in set(taken.table()["CPU operator"])
    assert shell.user_ns["y"].shape == (16, 16)


def test_options_keep_the_profile_and_write_the_trace(shell, tmp_path):
    line = "%%attn_profile --calls 1 --into before --trace t.json"
    shell.run_cell(f"{line}\nx.relu()").raise_error()
    assert shell.user_ns["before"].calls == 1
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    "line, words",
    [
        ("--call 3", "unrecognized arguments: --call 3"),  # no abbreviation
        ("--calls many", "argument --calls: invalid int value: 'many'"),
        ("--device tpu", "argument --device: invalid choice: 'tpu'"),
        ("--trace no/where.json", "--trace must name a file in a folder that exists"),
        ("--into 2x", "--into must be a name of Python, got '2x'"),
        *((cannot_be_had, "") for cannot_be_had in ("--device cuda", "--graph", "--calls 0")),
    ],
)
def test_a_wrong_option_is_one_line_that_lists_the_valid_ones(shell, says, line, words):
    (seen,) = says(f"%%attn_profile {line}\nran = True").strip().splitlines()
    assert seen.startswith("UsageError: %%attn_profile: ") and words in seen
    assert not words or seen.endswith(f"valid options: {', '.join(OPTIONS)}")
    assert "ran" not in shell.user_ns
    assert all(option in shell.find_magic("attn_profile", "cell").__doc__ for option in OPTIONS)


def test_an_error_in_the_cell_shows_the_cells_lines_and_none_of_ours(shell, says):
    seen = says("%%attn_profile\ndef half(n):\n    return 1 / n\nhalf(0)")
    assert "ZeroDivisionError: division by zero" in seen
    assert "----> 4 half(0)" in seen and "----> 3     return 1 / n" in seen
    assert "profile.py" not in seen and "magic.py" not in seen
    assert shell.run_cell("%%attn_profile --calls 1\nx + 1").success, "the shell goes on"
    seen = says("%%attn_profile\nraise RuntimeError('mine')")
    assert "RuntimeError: mine" in seen and "UsageError" not in seen and "raise Runtime" in seen


def test_a_cell_that_is_no_python_says_where_and_an_empty_one_is_refused(says):
    seen = says("%%attn_profile\nx +")
    assert "SyntaxError" in seen and "x +" in seen
    assert "the cell must hold code" in says("%%attn_profile\n  \n\n")
