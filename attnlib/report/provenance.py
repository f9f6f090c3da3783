"""Where the report's numbers come from: which studies a notebook shows, and how to repeat them.

A study is shown by a notebook that names it in its code; one that searches releases shows the
records of that search too. Every string that comes from records is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import store
from ..bisect import PREFIX
from ..studies import STUDIES
from ..study import mode, record_machine, record_name


@dataclass(frozen=True)
class Shown:
    """A study whose records are shown: its name, their machine, its question."""

    study: str
    machine: str
    question: str

    @property
    def found(self) -> dict[str, Any]:
        """What `store.provenance` says of it; the lender's where the study borrows."""
        known = STUDIES.get(self.study)
        return store.provenance(record_name(known) if known else self.study, self.machine)


def published() -> list[Shown]:
    """All whose records the notebooks show, searches included."""
    shown = []
    for study in STUDIES.values():
        shown.append(Shown(study.name, record_machine(study), study.question))
        if study.bisect_machine:
            machine = record_machine(replace(study, reference_machine=study.bisect_machine))
            search = "Which release changed the speed?"
            shown.append(Shown(PREFIX + study.name, machine, search))
    return shown


def studies_of(sources: Iterable[str]) -> list[str]:
    """Names of the studies that code cells name, in the order of `STUDIES`; see above."""
    text = "\n".join(sources)
    words = set(re.findall(r"""["'](\w+)["']""", text))
    searched = re.search(r"\bbisect\(", text)
    named = []
    for name, study in STUDIES.items():
        if name in words:
            named += [name, *([PREFIX + name] if searched and study.bisect_machine else [])]
    return named


def on_record(shown: Shown) -> bool:
    """Whether there are records: always of a published study, else it is an error; live not yet."""
    return mode() == "replay" or shown.machine in store.machines(shown.study)


def repeat_block(number: str, shown: Sequence[Shown]) -> str:
    """How to measure what a notebook shows again, a line a command; empty without a study."""
    shown = [each for each in shown if on_record(each)]
    if not shown:
        return ""
    links = ", ".join(_link(each) for each in shown)
    lines = [command for each in shown for command in each.found["commands"]]
    return (
        f"<aside class='repeat' aria-label='Repeat notebook {html.escape(number)}'>\n<p><b>Repeat "
        f"this</b> on your GPU; the records shown here: {links}.</p>\n{_commands(lines)}</aside>"
    )


def provenance_block(shown: Shown) -> str:
    """A study's question, machine, versions, days, file with its sum, and the command again."""
    name = html.escape(shown.study)
    if not on_record(shown):
        return f"<p id='study-{name}'>{name}: not measured on this GPU.</p>"
    found = shown.found
    rows = {
        "question": shown.question,
        "records": f"{found['records']} in {found['file']}",
        "sha256": found["sha256"],
        "measured": found["measured"],
        "machine": _pairs(found["machine"]),
        "versions": _pairs({name: ", ".join(seen) for name, seen in found["versions"].items()}),
    }
    body = "\n".join(
        f"<tr><th scope='row'>{name}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return (
        f"<section class='study' id='study-{name}'><h3>{name}</h3>\n<table class='provenance'>\n"
        f"{body}\n</table>\n<p>Repeat this:</p>\n{_commands(found['commands'])}</section>"
    )


def _link(shown: Shown) -> str:
    name = html.escape(shown.study)
    return f"<a href='#study-{name}'>{name}</a>"


def _commands(lines: Sequence[str]) -> str:
    text = html.escape("\n".join(dict.fromkeys(lines)))
    return (
        "<div class='scroll text' tabindex='0' role='group' aria-label='Commands'>"
        f"<pre>{text}</pre></div>"
    )


def _pairs(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())
