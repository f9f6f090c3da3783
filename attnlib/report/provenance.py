"""Where the report's numbers come from: which studies a notebook shows, and how to repeat them.

A study is shown by a notebook that names it in its code; one that searches releases shows the
records of that search too.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from ..run import store
from ..run.bisect import PREFIX
from ..run.record import Record
from ..run.study import mode, record_machine, record_name
from ..studies import STUDIES

PART_COUNTS = "passed", "skipped", "failed"
LIVE_RUN = Path(__file__).resolve().parents[2] / "data" / "live_run.json"


@dataclass(frozen=True)
class Shown:
    """A study whose records are shown: its name, their machine, its question."""

    study: str
    machine: str
    question: str

    @property
    def on_record(self) -> bool:
        """Whether there are records. A published study without any is an error, no False."""
        return mode() == "replay" or self.machine in store.machines(self.study)

    @property
    def commands(self) -> list[str]:
        """How to measure it again, each command once."""
        return [*self._found["commands"]]

    @property
    def facts(self) -> dict[str, str]:
        """Its question, and of its records number, file, checksum, days, machine and versions.

        Published records of the study on other machines, which a notebook may load, stand beside.
        """
        found, records = self._found, store.read(self._name, self.machine)
        versions = {name: ", ".join(seen) for name, seen in found["versions"].items()}
        machines = store.machines(self._name) if mode() == "replay" else []
        others = [store.provenance(self._name, name) for name in machines if name != self.machine]
        beside = [f"{of['records']} in {of['file']}, sha256 {of['sha256']}" for of in others]
        return {
            "question": self.question,
            "records": f"{found['records']} in {found['file']}",
            "sha256": found["sha256"],
            "measured": found["measured"],
            "samples": _waits(records),
            "A/A": f"{sum(record.item.again for record in records)} records",
            "machine": _pairs(found["machine"]),
            "versions": _pairs(versions),
            **({"on other machines": "; ".join(beside)} if beside else {}),
        }

    @property
    def _name(self) -> str:
        known = STUDIES.get(self.study)
        return record_name(known) if known else self.study

    @cached_property
    def _found(self) -> dict[str, Any]:
        return store.provenance(self._name, self.machine)


def _waits(records: Iterable[Record]) -> str:
    """By timer, how long the same work ran before the first sample: a long call that is timed at
    once may be timed before the clock falls."""
    waits: dict[str, list[float]] = {}
    for record in records:
        if record.item.case and record.run_us:
            waits.setdefault(record.item.timer, []).append(record.settle_us / 1e3)
    medians = {timer: median(found) for timer, found in waits.items()}
    words = (
        f"{n} after {ms:.0f} ms (median)" if ms else f"{n} at once" for n, ms in medians.items()
    )
    return ", ".join(words)


def published() -> list[Shown]:
    """All whose records the notebooks show, searches included; not what nobody measured yet."""
    shown, known = [], [s for s in STUDIES.values() if s.reference_machine or s.borrows]
    for study in known:
        shown.append(Shown(study.name, record_machine(study), study.question))
        if study.bisect_machine:
            machine = record_machine(replace(study, reference_machine=study.bisect_machine))
            search = "Which release changed the speed?"
            shown.append(Shown(PREFIX + study.name, machine, search))
    return shown


def live_run(path: Path = LIVE_RUN, published: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What `make gpu` ran last of the published tree, and what is left; empty if it never ran.

    Its verdicts are held against `published`, by claim, and else against those published then.
    """
    if not path.exists():
        return {}
    told = json.loads(path.read_text())
    parts, verdicts = told["parts"], told["verdicts"]
    books = [part["failed"] for part in parts if part["part"].endswith(".ipynb")]
    total = {word: sum(part.get(word, 0) for part in parts) for word in PART_COUNTS}
    total["failed"] -= sum(books)
    skips = sorted({why for part in parts for why in part.get("skips", ())})
    took = f"{sum(part['seconds'] for part in parts) / 60:.0f} minutes of a GPU"
    days, ids = (sorted({part[name] for part in parts}) for name in ("date", "gpu_id"))
    when = " to ".join(dict.fromkeys(days[:1] + days[-1:]))
    now = {name: was for name, (was, _) in verdicts.items()} | dict(published or {})
    pairs = ((name, now[name], here) for name, (_, here) in verdicts.items())
    other = [f"{name} {here} (published {word})" for name, word, here in pairs if word != here]
    return {
        "day and GPU": f"{when}, {told['gpu']} {', '.join(ids)}",
        "tests": _pairs(total),
        "skipped for": "; ".join(skips) or ("not told" if total["skipped"] else "none"),
        "notebooks": f"{len(books)}, {sum(books)} failed; all of it took {took}",
        "not run yet": ", ".join(Path(name).stem for name in told["left"]) or "none",
        "verdicts": f"{len(verdicts) - len(other)} as published, {told['of'] - len(verdicts)} not "
        f"told by what was measured; other: {', '.join(other) or 'none'}",
        "versions": _pairs(told["versions"]),
    }


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


def _pairs(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())
