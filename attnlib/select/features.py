"""The feature table, `data/backend_features.md`: the selection is run, no source is parsed.

`markdown()` explains every (library, release, mode, layer, dtype, GPU) of a grid and writes down
what is picked, with notes that say why; then it asks the tables of limits what each backend can
run. `python -m attnlib features` writes the file; a test holds it current.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path

from packaging.version import Version

from ..core.spec import AttnSpec
from . import GPUS, LIBRARIES, Call, Choice, explain
from .choice import facts_of
from .libraries import Library
from .rules import limits_of
from .situation import DECODE_MODES, LATENT_MODES, PREFILL_MODES

PATH = Path(__file__).resolve().parents[2] / "data" / "backend_features.md"
FP8 = "float8_e4m3fn"
DTYPES = {
    "bf16": ("bfloat16", "bfloat16"),
    "bf16, FP8 cache": ("bfloat16", FP8),
    "FP8": (FP8, FP8),
}
HEADS = {"32/8 heads": (32, 8), "32/32 heads": (32, 32)}
ENGINE_DTYPES = {name: DTYPES[name] for name in ("bf16", "bf16, FP8 cache")}
CALLS = {"flashinfer": DTYPES, "mini-sglang": {"bf16": DTYPES["bf16"]}}
"""The dtypes of a library's rows where they are not an engine's, whose models have 16 bits."""
UNREAD = ("trtllm-gen", "cute-dsl", "cudnn")
"""FlashInfer's backends of which only GPU and mode were read, outside MLA."""
LATENT_HEADS = {"128 heads": (128, 1), "16 heads": (16, 1)}
HEAD_DIM, LATENT_HEAD_DIM, PAGE_SIZE, LATENT_PAGE_SIZE, TOPK = 128, 576, 16, 64, 2048
DECODE_STEP, PROMPTS = (8192,) * 16, (2048,) * 4
PROBED_HEAD_DIMS, PROBED_PAGES = (64, 96, 128, 192, 256, 512), (1, 16, 32, 64, 128)
READ = ("flashinfer", "vllm")
"""Libraries whose backends' limits were read."""
MEASURED_GPU = "sm90"
MEASURED = {("flashinfer", mode): ("fa2", "fa3") for mode in (*PREFILL_MODES, *LATENT_MODES)}
MEASURED["flashinfer", "decode"] = ("fa2", "fa3", "cuda-cores")
"""What the records of this repository time, by library and mode, all on an H200."""

INTRODUCTION = f"""# Which backend, where

Made by `python -m attnlib features`: the selection is run, no source is parsed. Do not edit.

A cell is what the library picks for one call of a fresh wrapper, with CUDA 12.8 or newer. Where
an engine's backend calls FlashInfer, the kernel follows in brackets. **!** marks a pick that cannot
run the call, *none* a call that no backend runs. The notes say which row of the rules decided, and
so when one backend is preferred over another, and what keeps a pick from running.

- Decode and MLA: {len(DECODE_STEP)} requests of {DECODE_STEP[0]:,} tokens; prefill: {len(PROMPTS)}
  prompts of {PROMPTS[0]:,}.
- head_dim {HEAD_DIM}, pages of {PAGE_SIZE} tokens; MLA 512 + 64, pages of {LATENT_PAGE_SIZE};
  sparse: the top {TOPK:,}.
- Only {MEASURED_GPU} (an H200) is measured in this repository, every other column is read in the
  releases.
"""
ABILITIES = f"""
## What each backend can run

Asked of the tables of limits, for the newest release, over head_dim {PROBED_HEAD_DIMS[0]} to
{PROBED_HEAD_DIMS[-1]} (MLA: 512 and 576) and pages of {PROBED_PAGES[0]} to {PROBED_PAGES[-1]}: a
value is listed if some call with it can run. *picked* names the notes above under which the library
itself takes the backend for these calls. What does not run on {MEASURED_GPU} is **not measured
here**. SGLang's backends have checks of their own that were not all read, so they are not listed.
"""

Row = tuple[str, ...]


@dataclass
class Notes:
    """Numbered notes, each text once, and under which of them a backend was picked last."""

    numbers: dict[str, int] = field(default_factory=dict)
    picked: dict[tuple[str, str, str], dict[int, None]] = field(default_factory=dict)

    def of(self, choice: Choice) -> list[int]:
        """The notes of a choice: the rows that decided, and its problem."""
        rows = [r for r in choice.reasons if r.matched and r.kind != "limit"]
        orders = [f"`{r.subject}`: " if ">" in r.subject else "" for r in rows]
        texts = [f"{order}{r.why}. *{r.source}*" for order, r in zip(orders, rows, strict=True)]
        texts += [f"**!** {choice.problem}."] if choice.problem else []
        return [self.numbers.setdefault(text, len(self.numbers) + 1) for text in texts]

    def remember(self, library: Library, choice: Choice, notes: list[int]) -> None:
        """Keep the notes under which the library's newest release picks a backend."""
        if not choice.problem and choice.library.endswith(library.releases[-1:] or ("",)):
            key = (library.name, choice.mode, choice.backend)
            self.picked.setdefault(key, {}).update(dict.fromkeys(notes))


def write(path: Path | None = None) -> Path:
    """Write the table to `path` (default: `PATH`) and return it."""
    path = path or PATH
    path.write_text(markdown())
    return path


def markdown() -> str:
    """The whole file."""
    notes = Notes()
    picks = [line for library in LIBRARIES.values() for line in _picks(library, notes)]
    footnotes = [f"{number}. {text}" for text, number in notes.numbers.items()]
    able = [line for library in LIBRARIES.values() for line in _abilities(library, notes)]
    parts = (INTRODUCTION, *picks, "## Notes\n", *footnotes, ABILITIES, *able)
    return "\n".join(parts).rstrip() + "\n"


def _picks(library: Library, notes: Notes) -> Iterator[str]:
    yield f"## {library.name}\n"
    tables = [(mode, tuple(_pick_rows(library, mode, notes))) for mode in library.modes]
    for modes, rows in _alike(tables):
        yield f"### {library.name}: {', '.join(modes)}\n"
        yield from _table(("call", "releases", *GPUS, "notes"), rows)


def _alike(tables: list[tuple[str, tuple[Row, ...]]]) -> list[tuple[list[str], tuple[Row, ...]]]:
    """Names of the tables that are the same, in the order of the first of each."""
    same: dict[tuple[Row, ...], list[str]] = {}
    for name, rows in tables:
        same.setdefault(rows, []).append(name)
    return [(names, rows) for rows, names in same.items()]


def _pick_rows(library: Library, mode: str, notes: Notes) -> Iterator[Row]:
    """A row for each dtype, layers that are picked alike in one, and run of releases."""
    heads = LATENT_HEADS if mode in LATENT_MODES else HEADS
    for kind, dtypes in CALLS.get(library.name, ENGINE_DTYPES).items():
        tables = [
            (layer, tuple(_spans(library, mode, _spec(mode, heads[layer], dtypes), notes)))
            for layer in heads
        ]
        for layers, spans in _alike(tables):
            name = kind if len(layers) == len(heads) else f"{kind}, {layers[0]}"
            yield from ((name, *span) for span in spans)


def _spec(mode: str, heads: tuple[int, int], dtypes: tuple[str, str]) -> AttnSpec:
    latent = mode in LATENT_MODES
    sizes = (LATENT_HEAD_DIM, LATENT_PAGE_SIZE) if latent else (HEAD_DIM, PAGE_SIZE)
    return AttnSpec(*heads, *sizes, *dtypes)


def _call(mode: str, **more: bool) -> Call:
    lens = DECODE_STEP if mode in DECODE_MODES else PROMPTS
    topk = TOPK if mode == "sparse_mla" else 0
    return Call(kv_lens=lens, causal=mode not in LATENT_MODES, topk=topk, **more)


def _spans(library: Library, mode: str, spec: AttnSpec, notes: Notes) -> Iterator[Row]:
    """One row for each run of releases that pick alike on every GPU."""
    picks = [
        (release, *_picked(library, release, mode, spec, notes))
        for release in library.releases or ("main",)
    ]
    for cells, run in groupby(picks, key=lambda pick: pick[1]):
        together = list(run)
        first, last = together[0][0], together[-1][0]
        numbers = sorted({number for _, _, found in together for number in found})
        span = first if first == last else f"{first} to {last}"
        yield (span, *cells, ", ".join(map(str, numbers)))


def _picked(
    library: Library, release: str, mode: str, spec: AttnSpec, notes: Notes
) -> tuple[Row, list[int]]:
    """What a release picks on each GPU, and the notes of these choices."""
    named = f"{library.name}=={release}" if library.releases else library.name
    cells, numbers = [], []
    for gpu in GPUS:
        choice = explain(spec, mode=mode, gpu=gpu, library=named, call=_call(mode), env={})
        inner = f" ({choice.kernel or 'none'})" if choice.inner else ""
        failed = " **!**" if choice.problem and choice.backend else ""
        cells.append(f"{choice.backend or '*none*'}{inner}{failed}")
        found = notes.of(choice)
        notes.remember(library, choice, found)
        numbers += found
    return tuple(cells), numbers


def _abilities(library: Library, notes: Notes) -> Iterator[str]:
    """What the limits of the newest release leave to each backend, a row a backend."""
    if library.name not in READ:
        return
    tables = [(mode, tuple(_ability_rows(library, mode, notes))) for mode in library.modes]
    for modes, rows in _alike(tables):
        yield f"### {library.name}=={library.releases[-1]}: {', '.join(modes)}\n"
        head = ("backend", "GPUs", "dtypes", "head_dim", "pages", "picked", "measured")
        yield from _table(head, rows)


def _ability_rows(library: Library, mode: str, notes: Notes) -> Iterator[Row]:
    for backend in library.backends[mode]:
        able = [case for case in _probes(mode) if _can_run(library, mode, backend, case)]
        if not able:
            continue
        gpus, kinds, dims, pages = (tuple(dict.fromkeys(c)) for c in zip(*able, strict=True))
        timed = backend in MEASURED.get((library.name, mode), ())
        told = "H200" if timed else "no" if MEASURED_GPU in gpus else "**not measured here**"
        picked = notes.picked.get((library.name, mode, backend), {})
        numbers = ", ".join(map(str, sorted(picked))) or "only by name"
        rest = ("; ".join(kinds), _words(dims), _words(pages))
        if backend in UNREAD and mode not in LATENT_MODES:
            rest = ("not read",) * len(rest)
        yield (backend, " ".join(gpus), *rest, numbers, told)


def _probes(mode: str) -> Iterable[tuple[str, str, int, int]]:
    dims = (512, LATENT_HEAD_DIM) if mode in LATENT_MODES else PROBED_HEAD_DIMS
    return product(GPUS, DTYPES, dims, PROBED_PAGES)


def _can_run(library: Library, mode: str, backend: str, case: tuple[str, str, int, int]) -> bool:
    gpu, kind, head_dim, page = case
    heads = LATENT_HEADS["128 heads"] if mode in LATENT_MODES else HEADS["32/8 heads"]
    spec = AttnSpec(*heads, head_dim, page, *DTYPES[kind])
    release = Version(library.releases[-1])
    facts = facts_of(spec, _call(mode, pinned_page=True), mode=mode, gpu=gpu, release=release)
    return not limits_of(library.limits, backend, facts)


def _words(numbers: tuple[int, ...]) -> str:
    return " ".join(str(number) for number in sorted(numbers))


def _table(head: Row, rows: Iterable[Row]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""
