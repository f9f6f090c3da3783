"""How words, numbers and cells of notebooks are counted."""

import pytest
from support.prose import calls_a_tool, numbers_of, words_of

TEXT = """fa2 of FlashInfer 0.6.3 takes 131 us on an H200 ([#2530](https://x.org/2530), 2026-11-25).
```
python -m attnlib diagnose 1 2 3
```
Set `page=16`."""


def test_numbers_are_releases_times_and_dates_and_no_names():
    assert numbers_of(TEXT) == ["0.6.3", "131", "2026"]


def test_words_are_those_that_are_read():
    assert words_of("A link [to it](https://x.org) - and `code`.") == [
        "A",
        "link",
        "[to",
        "it]",
        "and",
        "`code`.",
    ]


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ('attnlib.advise("heads=8/1 lens=4096")', True),
        ("%%attn_profile --calls 5\nf(x)", True),
        ("%run -m attnlib explain --gpu h100", True),
        ('HEADS = "32/8"\n%run -m attnlib explain heads=$HEADS', True),
        ("attnlib.show(table)", False),
        ('attnlib.view("a").rows.groupby("b").max()', False),
        ("import attnlib", False),
    ],
)
def test_a_cell_that_calls_a_tool(source, counts):
    assert calls_a_tool(source) is counts
