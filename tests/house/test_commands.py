"""Every command of the documents is accepted by its program, and names files that exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from attnlib import cli
from attnlib.studies import STUDIES

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"]
README = TEXTS[0].read_text()


def commands(text):
    """Commands of fenced blocks without a language, and code spans; two blanks begin a comment."""
    blocks = "".join(re.findall(r"^```\n(.*?)^```$", text, re.M | re.S))
    lines = re.sub(r"\\\n +", "", blocks).splitlines()
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`\n]+)`", text)]
    return [re.sub(r"^([A-Z_]+=\S+ )+| {2,}.*|\[|\]|\.{3}", "", line).strip() for line in lines]


COMMANDS = sorted({line for path in TEXTS for line in commands(path.read_text())})
OURS = [line for line in COMMANDS if line.startswith("python -m attnlib ")]
MAKE = [line for line in COMMANDS if re.match(r"make [a-z]", line)]
FILES = {file for line in COMMANDS for file in re.findall(r"(?:tests|attnlib|data)/[\w./]+", line)}


def test_commands_are_found():
    assert len(OURS) >= 10 and len(MAKE) >= 4


@pytest.mark.parametrize("line", OURS)
def test_the_parser_accepts_a_command(line):
    words = shlex.split(line.removeprefix("python -m attnlib "))
    if len(words) > 1:
        options = cli.build_parser().parse_args(words)
        study = getattr(options, "study", "NAME")
        assert study == "NAME" or study in STUDIES or study.endswith(".jsonl")


@pytest.mark.parametrize("line", MAKE)
def test_make_has_the_target(line):
    command = ["make", "--dry-run", *line.split()[1:]]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_named_files_exist():
    missing = [file for file in FILES if "NAME" not in file and not (ROOT / file).exists()]
    assert missing == []


@pytest.mark.parametrize("block", re.findall(r"^```console\n(.*?)^```$", README, re.M | re.S))
def test_readme_shows_what_its_commands_print(published_records, capsys, block):
    command, _, output = block.partition("\n")
    command, _, count = command.partition(" | head -")
    assert cli.main(shlex.split(command.removeprefix("$ python -m attnlib"))) == 0
    assert "".join(capsys.readouterr().out.splitlines(True)[: int(count or 99)]) == output
