"""The report as one HTML page: findings, notebooks, known problems, claims and provenance.

The page's content policy forbids every script and anything loaded from elsewhere. The template
escapes every string except the notebooks' HTML, which `fragment` has cleaned, and the style.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from markupsafe import Markup

from ...run import store
from ...run.pairs import PREFIX
from ...run.study import mode, record_machine
from ...select.known import PROBLEMS, Span, size_on_record
from ...studies import STUDIES
from .. import cards
from ..claims import Judged
from .fragment import Fragment

TEMPLATES = Path(__file__).with_name("templates")
LIVE_RUN = Path(__file__).resolve().parents[2] / "data" / "live_run.json"
TITLE = "Attention backends: regressions reproduced, explained, fixed"
LEADS = ("04", "08", "03", "07")
"""The notebooks whose findings lead the page, each with its first figure."""
MODES = {
    "replay": "Replayed from published records; no GPU was used to build this page.",
    "live": "Measured on the GPU that built this page.",
}


def published() -> list[tuple[str, str]]:
    """Name and machine of every published study, and of its bisect if there are records of one."""
    shown = []
    for study in STUDIES.values():
        if study.reference_machine:
            shown.append((study.name, record_machine(study)))
        if study.bisect_machine:
            shown.append((PREFIX + study.name, study.bisect_machine))
    return shown


def facts_of(study: str, machine: str) -> dict[str, str]:
    """Where a study's numbers come from: a row of the table, of which each record says more.

    Empty for a live page where this GPU has not measured it; otherwise missing records are an
    error (FileNotFoundError).
    """
    is_live = mode() == "live"
    if is_live and machine not in store.machines(study):
        return {}
    source = store.provenance(study, machine)
    return {
        "records": f"{source['records']} in {source['file']}",
        "sha256": source["sha256"],
        "measured": source["measured"],
        "machine": source["machine"]["gpu"],
    }


def render_page(
    pages: Sequence[Fragment],
    judged: Sequence[Judged],
    studies: Sequence[tuple[str, str]],
) -> str:
    """The whole HTML document; `studies` are name and machine of the records behind it."""
    from pygments.formatters import HtmlFormatter

    own_style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    highlight = HtmlFormatter(style="default").get_style_defs(".highlight")
    tally = Counter(claim.verdict for claim in judged).most_common()
    claims = []
    by_source = groupby(judged, key=lambda row: row.claim.source)
    for source, rows in by_source:
        claims.append((source, list(rows)))
    facts = {study: facts_of(study, machine) for study, machine in studies}
    return cards.fill_template(
        TEMPLATES / "page.html",
        title=TITLE,
        style=Markup(f"{own_style}{cards.STYLE}{highlight}"),
        mode=MODES[mode()],
        pages=pages,
        leads=_leading(pages),
        claims=claims,
        tally=", ".join(f"{count} {verdict}" for verdict, count in tally),
        studies=facts,
        live_run=live_run(),
        known=known_rows(),
        known_in_all=len(PROBLEMS),
    )


def known_rows() -> dict[str, list[dict[str, str]]]:
    """Component -> a row per known problem that was measured: what it is, until when, how much."""
    tables: dict[str, list[dict[str, str]]] = {}
    for problem in PROBLEMS.values():
        if not problem.record:
            continue
        row = {
            "id": problem.id,
            "what": problem.what,
            "says": problem.says,
            "releases": _spans(problem.releases),
            "size": size_on_record(problem),
            "do": problem.do,
        }
        tables.setdefault(problem.component, []).append(row)
    return tables


def _spans(releases: Mapping[str, Span]) -> str:
    """Since when and until when each package has a problem."""
    spans = []
    for package, span in releases.items():
        spans.append(f"{package} {span}")
    return "; ".join(spans) or "any: it is a setting"


def _leading(pages: Sequence[Fragment]) -> list[Fragment]:
    """Those of `LEADS`, in its order."""
    leads = [page for page in pages if page.number in LEADS]
    return sorted(leads, key=lambda page: LEADS.index(page.number))


def live_run(path: Path = LIVE_RUN) -> dict[str, str]:
    """What the last `make gpu` of the published tree ran; empty if it never ran."""
    if not path.exists():
        return {}
    run = json.loads(path.read_text())
    parts = run["parts"]
    total = {}
    for word in ("passed", "skipped", "failed"):
        counts = [part.get(word, 0) for part in parts]
        total[word] = sum(counts)
    days = sorted({part["date"] for part in parts})
    return {
        "days and GPU": f"{days[0]} to {days[-1]}, {run['gpu']}",
        "tests and notebooks": f"{len(parts)} files: {_joined(total)}",
        "not run": ", ".join(run["left"]) or "none",
        "agrees with published verdicts": run["agrees"],
        "versions": _joined(run["versions"]),
    }


def _joined(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())
