"""Every command of the documents is accepted by its program and names files that exist; README's
are run, and its findings have the numbers of their notebooks."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from attnlib import cli
from attnlib.studies import STUDIES

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"]
README = TEXTS[0].read_text()
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)


def commands(text):
    """Commands of fenced blocks without a language, and code spans; two blanks begin a comment."""
    blocks = "".join(
        re.findall(
            r"^```\n(.*?)^```$",
            CONSOLE.sub("", text),
            re.M | re.S,
        )
    )
    lines = [*blocks.splitlines(), *re.findall(r"`([^`\n]+)`", text)]
    return [re.sub(r"^([A-Z_]+=\S+ )+| {2,}.*", "", line).strip() for line in lines]


COMMANDS = sorted({line for path in TEXTS for line in commands(path.read_text())})
OURS = [line for line in COMMANDS if line.startswith("python -m attnlib ")]
MAKE = [line for line in COMMANDS if re.match(r"make [a-z]", line)]
FILES = {file for line in COMMANDS for file in re.findall(r"(?:tests|attnlib|data)/[\w./]+", line)}


@pytest.mark.parametrize("line", OURS)
def test_the_parser_accepts_a_command(line):
    words = shlex.split(line.removeprefix("python -m attnlib "))
    if words != ["--help"]:
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


RUN_ELSEWHERE = {
    "make lab": "tests/browser/driving.py",
    "make report": ".github/workflows/report.yml",
    "make test": ".ci/run",
    "python -m attnlib report": "Makefile",
}
"""README's command -> what runs it. A GPU's and an engine's are run where there is one."""
SERVER = "python -m sglang.launch_server --model-path MODEL --attention-backend"
NEEDS_A_GPU = {"make gpu", f"{SERVER} fa3"}
INSTALLS = {line for line in commands(README) if line.startswith("pip ")}


def test_every_command_of_readme_is_run_by_something():
    for line, file in RUN_ELSEWHERE.items():
        assert line.removeprefix("make ") in (ROOT / file).read_text()
    named = {line for line in commands(README) if re.match(r"make [a-z]|python ", line)}
    assert named == {*RUN_ELSEWHERE, *NEEDS_A_GPU, "python -m attnlib --help"}


@pytest.mark.slow
def test_pip_can_install_what_readme_names():
    # One after the other: each writes the project's metadata into the same folder.
    options = "--dry-run --no-deps --no-build-isolation --disable-pip-version-check --quiet".split()
    assert INSTALLS == {'pip install -e ".[lab]"', "pip install ."}
    for line in INSTALLS:
        command = [sys.executable, "-m", *shlex.split(line), *options]
        subprocess.run(command, cwd=ROOT, check=True)


def test_help_lists_the_commands_that_readme_names(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    (line,) = [line for line in README.splitlines() if "--help` lists" in line]
    named = set(re.findall(r"`(\w+)`", line))
    assert len(named) == 4
    assert named <= set(capsys.readouterr().out.split())


def text_of(notebook):
    """What a notebook says: its prose and its outputs as text."""
    cells = nbformat.read(ROOT / notebook, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    words = [
        output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs
    ]
    return "\n".join([cell.source for cell in cells if cell.cell_type == "markdown"] + words)


FINDINGS = re.findall(
    r"^### .*?(?=^##)",
    README,
    re.M | re.S,
)


@pytest.mark.parametrize("finding", FINDINGS, ids=["splits", "fa3", "plan"])
def test_the_numbers_of_a_finding_are_those_of_its_notebooks(finding):
    notebooks = re.findall(r"\]\((notebooks/\S+)\)", finding)
    assert notebooks and all(f"*{word}" in finding for word in ("Rival", "Limits"))
    known = "".join(map(text_of, notebooks))
    prose = re.sub(r"\]\(.*?\)|<img .*?>", "", finding)
    numbers = re.findall(r"\d+(?:[.,]\d+)*", prose)
    lacking = [n for n in numbers if not re.search(rf"(?<![\d.]){re.escape(n)}(?!\.?\d)", known)]
    assert len(numbers) > 2 and lacking == []


@pytest.mark.slow
@pytest.mark.parametrize("shown", "\n".join(CONSOLE.findall(README)).split("$ ")[1:])
def test_readme_shows_what_its_commands_print(published_records, capsys, shown):
    command, _, output = shown.rstrip().partition("\n")
    command, _, count = command.partition(" | head -")
    status = cli.main(shlex.split(command.removeprefix("python -m attnlib")))
    assert status == (cli.KNOWN_PROBLEM if "advise" in command else 0)
    assert capsys.readouterr().out.splitlines()[: int(count or 99)] == output.splitlines()


def test_readme_and_the_page_of_switches_say_the_same_of_a_later_release():
    (said,) = re.findall(r"A later release starts [^.]+\.", README)
    assert said in text_of("notebooks/07_fixes_you_can_switch_on.ipynb")


def test_jupyterlab_opens_where_the_links_of_its_first_page_lead():
    page = ROOT / "notebooks" / "01_start.ipynb"
    linked = re.findall(r"\]\((\.\./[^)#]+)", text_of("notebooks/01_start.ipynb"))
    assert linked and all((page.parent / link).resolve().is_relative_to(ROOT) for link in linked)
    makefile = (ROOT / "Makefile").read_text()
    assert "\nLAB_ROOT := .\n" in makefile
    for text in (README, makefile.replace("$(LAB_ROOT)", ".")):
        lines = [line for line in text.replace("\\\n", "").splitlines() if "jupyter lab" in line]
        assert lines and all("--ServerApp.root_dir=." in line for line in lines)


def test_pages_that_contributors_are_sent_to_exist():
    sent = re.findall(r"notebook (\d\d)", (ROOT / "CONTRIBUTING.md").read_text())
    assert sent and all([*ROOT.glob(f"notebooks/{number}_*.ipynb")] for number in sent)
