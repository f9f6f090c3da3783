"""The report as one HTML page: findings, claims, notebooks, provenance, and the way between them.

The page holds all it needs and says so to the browser: its policy forbids scripts and everything
that would be loaded. Every string that comes from records, claims or titles is escaped here;
`fragment` has made the notebooks' own HTML safe.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ..claims import CheckedClaim
from ..study import mode
from . import cards
from .fragment import Fragment
from .provenance import Shown, provenance_block, repeat_block

STYLE = Path(__file__).with_name("page.css")
TITLE = "Attention backends: regressions reproduced, explained, fixed"
CLAIM_COLUMNS = ("claim", "claimed", "measured", "verdict", "why")
MODES = {
    "replay": "Replayed from published records; no GPU was used to build this page.",
    "live": "Measured on the GPU that built this page.",
}


@dataclass(frozen=True)
class Page:
    """One notebook in the report: its file's stem, its HTML, and the studies that it shows."""

    anchor: str
    fragment: Fragment
    shown: tuple[Shown, ...]

    @property
    def number(self) -> str:
        """`02` of `02_slug`."""
        return self.anchor.split("_")[0]


def render_page(
    pages: Sequence[Page], checked: Sequence[CheckedClaim], studies: Iterable[Shown], *, part: str
) -> str:
    """The whole HTML document; `part` says which notebooks these are, if not all."""
    return PAGE.format(
        title=html.escape(f"{TITLE} ({part})" if part else TITLE),
        heading=html.escape(TITLE),
        style=f"{STYLE.read_text(encoding='utf-8')}{cards.STYLE}{_highlighting()}",
        part=f"<p><b>This file is a part:</b> {html.escape(part)}.</p>\n" if part else "",
        mode=html.escape(MODES[mode()]),
        tabs="\n".join(_tab(page) for page in pages),
        claims_tab='<li><a href="#claims">Claims</a></li>' if checked else "",
        findings="\n".join(_finding(page) for page in pages),
        claims=claims_section(checked) if checked else "",
        notebooks="\n".join(_notebook(pages, at) for at in range(len(pages))),
        provenance="\n".join(provenance_block(study) for study in studies),
    )


def claims_tally(checked: Iterable[CheckedClaim]) -> str:
    """How many claims got which verdict, most first: `40 open, 10 confirmed, ...`."""
    counted = Counter(claim.finding.verdict for claim in checked).most_common()
    return ", ".join(f"{count} {verdict}" for verdict, count in counted)


def claims_section(checked: Sequence[CheckedClaim]) -> str:
    """The claims table, a body a pull request, with the tally before it; every value escaped."""
    head = "".join(f"<th scope='col'>{name}</th>" for name in CLAIM_COLUMNS)
    bodies = "\n".join(
        _pull_request(list(claims)) for _, claims in groupby(checked, key=lambda c: c.claim.source)
    )
    return CLAIMS.format(tally=html.escape(claims_tally(checked)), head=head, bodies=bodies)


def _tab(page: Page) -> str:
    name = html.escape(page.fragment.question, quote=True)
    return (
        f'<li><a href="#{page.anchor}" title="{name}" '
        f'aria-label="{page.number}: {name}">{page.number}</a></li>'
    )


def _finding(page: Page) -> str:
    question = html.escape(page.fragment.question)
    answer = f"<p>{page.fragment.finding}</p>" if page.fragment.finding else ""
    return (
        f'<li><span class="number" aria-hidden="true">{page.number}</span>'
        f'<div><a href="#{page.anchor}">{question}</a>{answer}</div></li>'
    )


def _notebook(pages: Sequence[Page], at: int) -> str:
    page = pages[at]
    ways = [("Previous", pages[at - 1])] if at else []
    ways += [("Next", pages[at + 1])] if at + 1 < len(pages) else []
    links = [
        f'<a href="#{to.anchor}">{word}: {html.escape(to.fragment.question)}</a>'
        for word, to in ways
    ]
    return NOTEBOOK.format(
        anchor=page.anchor,
        number=page.number,
        question=html.escape(page.fragment.question),
        body=page.fragment.body,
        repeat=repeat_block(page.number, page.shown),
        links="\n".join([*links, '<a href="#findings">All findings</a>']),
    )


def _pull_request(claims: list[CheckedClaim]) -> str:
    source = claims[0].claim.source
    address = html.escape(f"https://github.com/{source.repo}/pull/{source.pull}", quote=True)
    head = (
        f"<tr role='row'><th scope='rowgroup' role='rowheader' colspan='{len(CLAIM_COLUMNS)}'>"
        f"<a href='{address}' rel='noreferrer'>{html.escape(source.label)}</a></th></tr>"
    )
    rows = "\n".join(_claim_row(claim) for claim in claims)
    return f"<tbody role='rowgroup'>\n{head}\n{rows}\n</tbody>"


def _claim_row(checked: CheckedClaim) -> str:
    claim, finding = checked.claim, checked.finding
    verdict = html.escape(finding.verdict)
    cells = (
        f"<q>{html.escape(claim.quote)}</q>",
        html.escape(claim.claimed),
        html.escape(finding.measured or "-"),
        f"<b class='{html.escape(finding.verdict.replace(' ', '-'))}'>{verdict}</b>",
        html.escape(finding.reason),
    )
    filled = "".join(
        # A phone shows each row as a card, where the column's name stands before the cell.
        f"<td role='cell' data-column='{name}'>{cell}</td>"
        for name, cell in zip(CLAIM_COLUMNS, cells, strict=True)
    )
    return f"<tr role='row' id='claim-{html.escape(claim.id)}'>{filled}</tr>"


def _highlighting() -> str:
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter(style="default").get_style_defs(".highlight")


CLAIMS = """<section id="claims" aria-labelledby="claims-head">
<h2 id="claims-head">Published claims, checked</h2>
<p>What pull requests say, and what the records say of it: {tally}.</p>
<table class="claims" role="table" aria-labelledby="claims-head">
<thead role="rowgroup"><tr role="row">{head}</tr></thead>
{bodies}
</table>
</section>"""
NOTEBOOK = """<section id="{anchor}" class="notebook" aria-labelledby="{anchor}-head">
<h2 id="{anchor}-head"><span class="number">{number}</span> {question}</h2>
{body}
{repeat}
<nav class="ways" aria-label="From notebook {number}">{links}</nav>
</section>"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<a class="skip" href="#findings">To the findings</a>
<nav class="tabs" aria-label="Contents"><ul>
<li><a href="#findings">Findings</a></li>
{claims_tab}
{tabs}
<li><a href="#provenance">Provenance</a></li>
</ul></nav>
<header>
<h1>{heading}</h1>
{part}<p>Executed notebooks and the records behind them. {mode} <span class="screen">Code is
folded: open a <q>code</q> line to see what made the output below it.</span></p>
</header>
<main>
<section id="findings" aria-labelledby="findings-head">
<h2 id="findings-head">Findings</h2>
<ol class="findings">
{findings}
</ol>
</section>
{claims}
{notebooks}
<section id="provenance" aria-labelledby="provenance-head">
<h2 id="provenance-head">Provenance</h2>
<p>Every figure and table above is computed from these files.</p>
{provenance}
</section>
</main>
</body>
</html>
"""
