"""The report as one HTML page: findings, claims, notebooks, provenance, and the way between them.

Its policy forbids the browser scripts and whatever would be loaded from elsewhere.
Its templates escape every string that they are not told is HTML already: that is the notebooks'
own, which `fragment` has made safe, and the style.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from markupsafe import Markup

from ..draw import cards
from ..run.study import mode
from ..studies.claims import CheckedClaim
from .fragment import Fragment
from .provenance import Shown, live_run

TEMPLATES = Path(__file__).with_name("templates")
TITLE = "Attention backends: regressions reproduced, explained, fixed"
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

    @property
    def on_record(self) -> list[Shown]:
        """Those of its studies that have records."""
        return [study for study in self.shown if study.on_record]

    @property
    def commands(self) -> list[str]:
        """How to measure what it shows again, each command once."""
        return list(dict.fromkeys(line for study in self.on_record for line in study.commands))


def render_page(
    pages: Sequence[Page],
    checked: Sequence[CheckedClaim],
    studies: Iterable[Shown],
    *,
    part: str,
    published: Mapping[str, str] | None = None,
) -> str:
    """The whole HTML document; `part` says which notebooks these are, if not all.

    `published` has each claim's verdict by the published records; another one here says so.
    """
    from pygments.formatters import HtmlFormatter

    own = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    highlight = HtmlFormatter(style="default").get_style_defs(".highlight")
    tally = Counter(claim.finding.verdict for claim in checked).most_common()
    by_source = groupby(checked, key=lambda each: each.claim.source)
    return cards.render(
        TEMPLATES / "page.html",
        title=TITLE,
        style=Markup(f"{own}{cards.STYLE}{highlight}"),
        part=part,
        mode=MODES[mode()],
        pages=pages,
        claims=[(source, list(said)) for source, said in by_source],
        published=published or {},
        tally=", ".join(f"{count} {verdict}" for verdict, count in tally),
        studies=list(studies),
        live_run=live_run(published=published),
    )
