"""The report as one HTML page: findings, claims, notebooks and provenance.

The page's content policy forbids anything loaded from elsewhere and every script but the search,
by its hash. Templates escape every string except the notebooks' HTML, which `fragment` has made
safe, the style and the search.
"""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..draw import cards
from ..run import store
from ..run.pairs import PREFIX
from ..run.study import mode, record_machine
from ..studies import STUDIES
from ..studies.claims import Judged
from .fragment import Fragment

TEMPLATES = Path(__file__).with_name("templates")
LIVE_RUN = Path(__file__).resolve().parents[1] / "data" / "live_run.json"
TOLD = ("gpu", "cpu")
UNTOLD = """apache-tvm-ffi cuda numpy nvidia-cudnn-cu13 nvidia-cudnn-frontend python
transformers""".split()
"""What the page tells of a machine, and versions that it does not; the records have all."""
TITLE = "Attention backends: regressions reproduced, explained, fixed"
LEADS = ("11", "01", "07")
"""The notebooks whose findings lead the page, each with its first figure."""
MODES = {
    "replay": "Replayed from published records; no GPU was used to build this page.",
    "live": "Measured on the GPU that built this page.",
}


@dataclass(frozen=True)
class Shown:
    """A study whose records are shown: its name and the machine of the records."""

    study: str
    machine: str

    @property
    def on_record(self) -> bool:
        """Whether there are records. In replay a published study without records is an error."""
        return mode() == "replay" or self.machine in store.machines(self.study)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """File, checksum, machine, versions, days and commands of the records."""
        return store.provenance(self.study, self.machine)

    @property
    def facts(self) -> dict[str, str]:
        """The rows of its provenance table; published records of other machines are listed too."""
        source = self.provenance
        known = source["versions"].items()
        versions = {name: ", ".join(seen) for name, seen in known if name not in UNTOLD}
        facts = {
            "records": f"{source['records']} in {source['file']}",
            "sha256": source["sha256"],
            "measured": source["measured"],
            "machine": _pairs({k: v for k, v in source["machine"].items() if k in TOLD}),
            "versions": _pairs(versions),
        }
        others = [name for name in store.machines(self.study) if name != self.machine]
        if others and mode() == "replay":
            facts["on other machines"] = ", ".join(others)
        return facts


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
    def name(self) -> str:
        """`a slug` of `02_a_slug`."""
        return " ".join(self.anchor.split("_")[1:])


def published() -> list[Shown]:
    """Every study with a published machine, and its bisect if there are records of one."""
    shown = []
    for study in STUDIES.values():
        if study.reference_machine:
            shown.append(Shown(study.name, record_machine(study)))
        if study.bisect_machine:
            shown.append(Shown(PREFIX + study.name, study.bisect_machine))
    return shown


def studies_in(code: str) -> list[Shown]:
    """The published studies that a notebook's code names; `bisect(` shows the bisect's records."""
    names = set(re.findall(r"\w+", code))
    if "bisect" in names:
        names |= {PREFIX + name for name in names}
    return [shown for shown in published() if shown.study in names]


def render_page(pages: Sequence[Page], judged: Sequence[Judged], studies: Iterable[Shown]) -> str:
    """The whole HTML document."""
    from pygments.formatters import HtmlFormatter

    own_style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    search = (TEMPLATES / "search.js").read_text(encoding="utf-8")
    highlight = HtmlFormatter(style="default").get_style_defs(".highlight")
    tally = Counter(claim.verdict for claim in judged).most_common()
    by_source = groupby(judged, key=lambda row: row.claim.source)
    return cards.render(
        TEMPLATES / "page.html",
        title=TITLE,
        style=Markup(f"{own_style}{cards.STYLE}{highlight}"),
        script=Markup(search),
        script_hash=base64.b64encode(hashlib.sha256(search.encode()).digest()).decode(),
        mode=MODES[mode()],
        pages=pages,
        leads=[page for number in LEADS for page in pages if page.number == number],
        claims=[(source, list(rows)) for source, rows in by_source],
        tally=", ".join(f"{count} {verdict}" for verdict, count in tally),
        studies=list(studies),
        live_run=live_run(),
    )


def live_run(path: Path = LIVE_RUN) -> dict[str, str]:
    """What the last `make gpu` of the published tree ran; empty if it never ran."""
    if not path.exists():
        return {}
    run = json.loads(path.read_text())
    parts = run["parts"]
    words = "passed", "skipped", "failed"
    total = {word: sum(part.get(word, 0) for part in parts) for word in words}
    days = sorted({part["date"] for part in parts})
    return {
        "day and GPU": f"{' to '.join(dict.fromkeys([days[0], days[-1]]))}, {run['gpu']}",
        "tests and notebooks": f"{len(parts)} files: {_pairs(total)}",
        "not run": ", ".join(run["left"]) or "none",
        "agrees with published verdicts": run["agrees"],
        "versions": _pairs(run["versions"]),
    }


def _pairs(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())
