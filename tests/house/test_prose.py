"""Every number in the prose of a notebook stands in one of its outputs, which nbval holds."""

import re
from decimal import Decimal
from itertools import groupby
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NUMBER = r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)x?(?!\.?\w)"
RELEASE = r"\bv?\d+(?:\.\d+){2,}(?:\.?post\d+)?\b"
GIVEN = "|".join(
    (
        r"```.*?```|`[^`]*`|(?:\[\d\d)?\]\([^)]*\)",  # code, addresses
        r"\d{4}-\d\d(?:-\d\d)?|#\d+|(?<![\d.])0\d\b|^\d+\. ",  # dates, pull requests, notebooks
        rf"{RELEASE}|\b(?:CUDA|Python) \d+\.\d+",
        r"[A-Za-z_][\w.]*-[\w.-]*\d[\w.-]*|\d+-bit",  # Llama-3.1-8B, FlashAttention-3
    )
)
# What no cell can print, by notebook: the hardware, a library's constants, what others said.
FACTS = {
    "02": ("about 5x", "About 5x", "132 SMs", "128 rows", "128 query rows", "127 are"),
    "03": ("2 %.", "of 1 % between processes", "at most 5 % of studies"),  # by test_stats.py
    "04": ("2 % is",),
    "05": ("8 a live page", "24 a request", "64 bytes", "from page size 16 on each word costs 64"),
    "06": ("at least 90 %", "500 tokens in, 8,000 out", "not 215"),
    "07": ("margin of 1.1", "4 blocks (512 tokens)"),
    "08": (
        "group of 4, fa2 from",
        "22 of them judged",
        "8.6 % at the 95th percentile (LOG.md",
        "bar of 1.0 and 5 %",
        "where 0.9 and 6 % were",
        "between 15 and 50 % as predicted",
    ),
    "09": (
        "128, 64, 32 and 16 query heads",
        "DeepSeek's 128 under TP=1, 2, 4 and 8; batch 1 to 256, top-k 512 and 2,048",
        "512 latent values and 64 rotary ones",
        "410 in decoding on an H800",
        "32 bits",
    ),
    "11": ("groups of 1, 4 and 8", "132 SMs has 264 slots", "one in 16 is long"),
    "14": (
        "193 us and 2.6 %",
        'what "5x" of a kernel',
        "one request of 12,000 tokens",
    ),
    "15": ("16, 64 or 128", "132 SMs", "FlashInfer 0.7", "8,192 tokens, 32/8 heads"),
    "16": (
        "fell by 18 %",
        "16-bit numbers, pages of 16 tokens",
        "median of 1.05 was predicted",
        "4 to 6 times faster at 8 KV heads and 1.5 to 2.5 times at one",
        "has 132 SMs: with more than 66 pairs",
        "not 70",
        "prediction of 1.5 to 2.5 times",
        "at least 15 of the 30 shapes",
        "median of 1.06 was predicted, and 15 to 22 slower",
    ),
}


def said(text, facts=()):
    """(number, sentence) of prose; givens and facts are passed over."""
    given = "|".join((*map(re.escape, facts), GIVEN))
    rest = re.sub(given, lambda found: "_" * len(found[0]), text, flags=re.M | re.S)
    for part in re.finditer(r".+?(?:[.?!:;](?=\s)|$)", rest, re.M):
        for number in re.findall(rf"(?<![\w.-]){NUMBER}", part[0]):
            yield number.replace(",", ""), text[part.start() : part.end()].strip()


def shown(cell):
    """The numbers of a code cell and of the outputs that nbval compares, no row's label.

    A letter may stand in front, as in names of cases (d128).
    """
    outputs = [] if "nbval-ignore-output" in cell.metadata.get("tags", ()) else cell.outputs
    texts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in outputs]
    text = re.sub(rf"(?m){RELEASE}|#\d+|^\d+  +", " ", "\n".join([cell.source, *texts]))
    return {found.replace(",", "") for found in re.findall(rf"(?<![\w.])[a-z]?{NUMBER}", text)}


def stands_in(number, numbers):
    """As it is, or as a longer number rounded; a single digit is never a rounded one."""
    if number in numbers or len(number) == 1:
        return number in numbers
    places = len(number.partition(".")[2])
    longer = [Decimal(n) for n in numbers if len(n.partition(".")[2]) > places]
    return any(abs(n - Decimal(number)) <= Decimal(5).scaleb(-places - 1) for n in longer)


def unshown(cells, facts=()):
    """Where prose has a number that neither the last three outputs nor the next one shows.

    The first cell, which answers, and the last, which says what is not shown, may take any.
    """
    every = [shown(cell) if cell.cell_type == "code" else set() for cell in cells]
    for at, cell in enumerate(cells):
        inner = 0 < at < len(cells) - 1
        seen = set().union(*(every[max(0, at - 5) : at + 2] if inner else every))
        for number, sentence in said(cell.source, facts) if cell.cell_type == "markdown" else ():
            if not stands_in(number, seen):
                yield f"cell {at}: {number} in: {sentence}"


def scattered(cells, facts=()):
    """Parts of the answer whose numbers no three outputs in a row show together."""
    every = [shown(cell) for cell in cells if cell.cell_type == "code"]
    rows = [set().union(*every[at : at + 3]) for at in range(len(every))]
    answer = cells[0].source.split("\n\n")[1]
    for part, found in groupby(said(answer, facts), key=lambda pair: pair[1]):
        numbers = [number for number, _ in found]
        if not any(all(stands_in(number, row) for number in numbers) for row in rows):
            yield part


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_number_in_the_prose_stands_in_an_output(path):
    cells, facts = nbformat.read(path, as_version=4).cells, FACTS.get(path.stem[:2], ())
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert [fact for fact in facts if fact not in prose] == []
    assert "\n".join(unshown(cells, facts)) == ""
    assert [*scattered(cells, facts)] == []


@pytest.mark.parametrize(
    ("prose", "missing"),
    [
        ("1,336 tokens, 1.64 times, 62 us on 132 SMs, 8.0 x.", []),
        ("On an H200 0.6.4 (#18364, 2026-11-21) `runs 7` fp8, sm90 and FlashAttention-3.", []),
        ("1.63 times, 1.6370 times, 61.7 us, 9 of 133.", ["1.63", "1.6370", "61.7", "9", "133"]),
        ("Row 5, release 6.4 and 8 of all.", ["5", "6.4"]),
        ("d128 of 128. 2 rounds; 62 %", ["2"]),
    ],
)
def test_a_number_is_shown_as_it_is_or_rounded(prose, missing):
    v4 = nbformat.v4
    table = "   us  ratio tokens of\n5  61.6  1.637   1336  8.0\n6  0.6.4  d128 8"
    output = v4.new_output("execute_result", data={"text/plain": table})
    cells = [v4.new_code_cell("frame", outputs=[output]), v4.new_markdown_cell(prose)]
    assert [line.split()[2] for line in unshown(cells, ["132 SMs"])] == missing


def test_an_answer_is_shown_in_one_place():
    v4 = nbformat.v4
    answer = v4.new_markdown_cell("# Why?\n\n**12 of 40 take 5 us; 17 of 40 take less.**")
    texts = ["12 40 5", "", "", "40", "", "17"]
    outputs = [v4.new_output("stream", text=text) for text in texts]
    cells = [answer, *(v4.new_code_cell(outputs=[output]) for output in outputs)]
    assert [*scattered(cells)] == []
    assert [*scattered([*cells[:4], *cells[5:]])] == ["17 of 40 take less.**"]


FINDING = re.compile(r"^- \*\*\[[^]]*\]\(notebooks/(\w+\.ipynb)\)\*\* (.*(?:\n  .*)*)", re.M)
README_FINDINGS = FINDING.findall((FOLDER.parent / "README.md").read_text())


@pytest.mark.parametrize(("name", "finding"), README_FINDINGS)
def test_every_number_and_release_of_readmes_findings_stands_in_the_answer_of_its_notebook(
    name, finding
):
    answer = nbformat.read(FOLDER / name, as_version=4).cells[0].source.split("\n\n")[1]
    numbers, known = ({number for number, _ in said(text)} for text in (finding, answer))
    assert numbers and numbers <= known
    assert {*re.findall(RELEASE, finding)} <= {*re.findall(RELEASE, answer)}


def test_readme_has_three_findings():
    assert len(README_FINDINGS) == 3
