"""Every command that README, CONTRIBUTING, the tests' README, notebooks and templates name.

Those of `RUN` are run, and README's sessions with the output that they show. The others need a GPU
or minutes, or write into the project: what would run them reads their words, make in a dry run, and
the studies and files that they name are there. Of conda and grep it is the files alone, of SGLang
nothing.
"""

import doctest
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from _pytest.config import get_config
from packaging.requirements import Requirement

from attnlib import cli
from attnlib.core.engines import arms
from attnlib.studies import STUDIES

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TEXTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "tests/README.md"]
TEXTS += sorted([*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / ".github").rglob("*.md")])
RUN = {"bisect", "claims", "doctor", "explain"}
CLAIM = "sglang-21104-215us"  # for a text's ID
FILE = r"(?:[\w.]+/)*[\w.]+\.(?:py|cfg|yml)|(?:tests|attnlib|notebooks)/[\w/]*"


def text_of(path):
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def blocks(path, language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(path), re.M | re.S)
    return [block for name, block in found if name == language]


def commands_in(path):
    """Lines of blocks in no language, and code in the text that begins as a command does.

    Two blanks begin a comment, brackets hold what may be left out, a variable may come first.
    """
    lines = re.sub(r"\\\n +", "", "".join(blocks(path, ""))).splitlines()
    text = re.sub(r"^```.*?^```$", "", text_of(path), flags=re.M | re.S)
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))
    lines += [span for span in spans if program_of(bare(span))]
    return [bare(line) for line in lines if not line.startswith(" ")]


def bare(line):
    return re.sub(r"^([A-Z_]+=\S+ )+| {2,}.*|\[|\]|\.{3}", "", line).strip()


def attnlib_reads(words):
    assert words[0] in cli.COMMANDS
    if len(words) == 1:  # a text that speaks of a command, not yet a line to type
        return
    if words[0] in RUN:
        assert cli.main([CLAIM if word == "ID" else word for word in words]) == 0
    study = getattr(cli.build_parser().parse_args(words), "study", "NAME")
    assert study == "NAME" or study in STUDIES or study.endswith(".jsonl")


def make_reads(words):
    subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def dask_reads(words):
    from distributed.cli.dask_worker import main  # late: it changes importlib.metadata

    main.make_context("dask worker", words)


def pytest_reads(words):
    config = get_config()  # with all plugins: `make` leaves nbval out of this run
    config.pluginmanager.load_setuptools_entrypoints("pytest11")
    config._parser.parse(words)


def plugin_reads(words):
    name, _, value = words[0].partition("=")
    assert arms.read({name: os.devnull if name.endswith("CAPTURE") else value})


READ_BY = {
    "python -m attnlib": attnlib_reads,
    "python -m pytest": pytest_reads,
    "make": make_reads,
    "pip install": lambda words: [Requirement(word) for word in words if word != "."],
    "export": plugin_reads,
    "python -m sglang.launch_server": lambda words: None,
    "dask worker": dask_reads,
    "conda env create -f": lambda words: None,
    "grep": lambda words: None,
}


def program_of(command):
    return next((name for name in READ_BY if command.startswith(f"{name} ")), None)


COMMANDS = sorted({command for path in TEXTS for command in commands_in(path)})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_texts_runs_or_is_read_by_what_runs_it(command, published_records):
    program = program_of(command)
    assert program, f"no command of {', '.join(READ_BY)}: {command}"
    READ_BY[program](shlex.split(command.removeprefix(program)))
    named = [file for file in re.findall(rf"(?<!\S)({FILE})(?!\S)", command) if "NAME" not in file]
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_every_text_with_commands_is_read():
    """Known ones are found where they stand: in a block, in text, in a notebook."""
    assert len(COMMANDS) > 30 and {program_of(command) for command in COMMANDS} == {*READ_BY}


@pytest.mark.parametrize("block", blocks(README, "console"), ids=lambda block: block[:30])
def test_readmes_console_shows_what_its_commands_print(published_records, capsys, block):
    command, _, output = block.partition("\n")
    command, _, count = command.partition(" | head -")
    assert cli.main(shlex.split(command.removeprefix("$ python -m attnlib"))) == 0
    assert "".join(capsys.readouterr().out.splitlines(True)[: int(count or 99)]) == output


def test_readmes_python_session_shows_what_its_lines_print(published_records):
    (block,) = blocks(README, "pycon")
    session = doctest.DocTestParser().get_doctest(block, {}, "README.md", None, 0)
    said = []
    assert doctest.DocTestRunner().run(session, out=said.append).failed == 0, "".join(said)
    assert session.examples
