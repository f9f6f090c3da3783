"""The feature table, `data/backend_features.md`: `explain` is run over a grid of calls.

What is picked for every library, release, mode, layer, dtype and GPU, with notes that say why; then
what the limits leave to each backend. `python -m attnlib features` writes it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

from packaging.version import Version

from ..core.backends.limits import LATENT_MODES
from ..core.spec import AttnSpec
from .explain import Choice, explain
from .facts import DECODE_MODES, GPUS, OTHER, PREFILL_MODES, Call, facts_of
from .libraries import LIBRARIES, Library

PATH = Path(__file__).resolve().parents[2] / "data" / "backend_features.md"
TEMPLATE = Path(__file__).parent / "templates" / PATH.name
FP8 = "float8_e4m3fn"
BF16 = "bfloat16"
DTYPES = {"bf16": (BF16, BF16), "bf16, FP8 cache": (BF16, FP8), "FP8": (FP8, FP8)}
KINDS = {"flashinfer": tuple(DTYPES), "mini-sglang": ("bf16",)}
ENGINE_KINDS = ("bf16", "bf16, FP8 cache")
"""The dtypes of a library's rows, and of an engine's, whose models have 16 bits."""
HEADS = {"32/8 heads": (32, 8), "32/32 heads": (32, 32)}
LATENT_HEADS = {"128 heads": (128, 1), "16 heads": (16, 1)}
RULED: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang": {"mla": ("deepseek",), "sparse_mla": ("glm-dsa",)}
    | dict.fromkeys(("decode", *PREFILL_MODES), ("gpt-oss", "qwen3-next"))
}
"""Models for which an engine has rules in a mode, a row each: llama4's are gpt-oss's."""
SIZES, LATENT_SIZES, TOPK = (128, 16), (576, 64), 2048
"""head_dim and page size of the layers; tokens that sparse MLA chooses."""
DECODE_STEP, PROMPTS = (8192,) * 16, (2048,) * 4
PROBED_HEAD_DIMS, PROBED_PAGES = (64, 96, 128, 192, 256, 512), (1, 16, 32, 64, 128)
READ = ("flashinfer", "vllm")
"""Libraries whose backends' limits were read."""
UNREAD = ("trtllm-gen", "cute-dsl", "cudnn")
"""FlashInfer's backends of which only GPU and mode were read, outside MLA."""
MEASURED_GPU = "sm90"
MEASURED: dict[tuple[str, str], dict[str, str]] = {
    ("flashinfer", mode): dict.fromkeys(("fa2", "fa3"), "H200")
    for mode in (*PREFILL_MODES, *LATENT_MODES)
}
MEASURED["flashinfer", "decode"] = {
    **dict.fromkeys(("fa2", "fa3", "cuda-cores"), "H200"),
    "cudnn": "H100",
}
"""What the records of this repository time, by library and mode: backend -> GPU."""

Row = tuple[str, ...]


class Notes:
    """Numbered notes, each text once, and under which of them a newest release picks a backend."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.picked: dict[tuple[str, str, str], set[int]] = {}

    def of(self, library: Library, choice: Choice) -> set[int]:
        """The notes of a choice: the rows that decided, and its problem."""
        rows = [r for r in choice.reasons if r.matched and r.kind != "limit"]
        orders = [f"`{r.subject}`: " if ">" in r.subject else "" for r in rows]
        texts = [f"{order}{r.why}. *{r.source}*" for order, r in zip(orders, rows, strict=True)]
        texts += [f"**!** {choice.problem}."] if choice.problem else []
        found = {self.numbers.setdefault(text, len(self.numbers) + 1) for text in texts}
        if not choice.problem and choice.library.endswith(library.releases[-1:] or ("",)):
            self.picked.setdefault((library.name, choice.mode, choice.backend), set()).update(found)
        return found


def write() -> Path:
    """Write the table to `PATH` and return that."""
    PATH.write_text(markdown())
    return PATH


def markdown() -> str:
    """The whole file: `TEMPLATE`, which names the constants above, with the tables and notes."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    notes = Notes()
    picks = []
    for library in LIBRARIES.values():
        by_mode = {mode: tuple(_picks(library, mode, notes)) for mode in library.modes}
        picks.append((library.name, _alike(by_mode)))
    abilities = []
    for library in (LIBRARIES[name] for name in READ):
        by_mode = {mode: tuple(_abilities(library, mode, notes)) for mode in library.modes}
        abilities.append((f"{library.name}=={library.releases[-1]}", _alike(by_mode)))
    loader = FileSystemLoader(TEMPLATE.parent)
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined)
    constants = {name: value for name, value in globals().items() if name.isupper()}
    tables = {"picks": picks, "abilities": abilities, "notes": notes.numbers}
    return environment.get_template(TEMPLATE.name).render(constants, **tables).rstrip() + "\n"


def _alike(tables: Mapping[str, tuple[Row, ...]]) -> list[tuple[list[str], tuple[Row, ...]]]:
    """Names of the tables that are the same, in the order of the first of each."""
    same: dict[tuple[Row, ...], list[str]] = {}
    for name, rows in tables.items():
        same.setdefault(rows, []).append(name)
    return [(names, rows) for rows, names in same.items()]


def _picks(library: Library, mode: str, notes: Notes) -> Iterator[Row]:
    """A row for each dtype, layers that are picked alike in one, and run of releases."""
    heads = LATENT_HEADS if mode in LATENT_MODES else HEADS
    sizes = LATENT_SIZES if mode in LATENT_MODES else SIZES
    models = (OTHER, *RULED.get(library.name, {}).get(mode, ()))
    for kind, model in product(KINDS.get(library.name, ENGINE_KINDS), models):
        call = replace(call_of(mode), model=model)
        tables = {
            layer: tuple(
                _spans(library, mode, AttnSpec(*counts, *sizes, *DTYPES[kind]), call, notes)
            )
            for layer, counts in heads.items()
        }
        for layers, spans in _alike(tables):
            which = [kind] + [model] * (model != OTHER)
            name = ", ".join(which + layers[:1] * (len(layers) < len(heads)))
            yield from ((name, *span) for span in spans)


def _spans(library: Library, mode: str, spec: AttnSpec, call: Call, notes: Notes) -> Iterator[Row]:
    """One row for each run of releases that pick alike on every GPU."""
    picks = []
    for release in library.releases or ("main",):
        named = f"{library.name}=={release}" if library.releases else library.name
        asked: dict[str, Any] = {"mode": mode, "library": named, "call": call, "env": {}}
        choices = [explain(spec, gpu=gpu, **asked) for gpu in GPUS]
        numbers = set().union(*(notes.of(library, choice) for choice in choices))
        picks.append((release, tuple(map(cell, choices)), numbers))
    for cells, run in groupby(picks, key=lambda pick: pick[1]):
        releases, _, found = zip(*run, strict=True)
        span = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
        yield (span, *cells, _words(set().union(*found), ", "))


def cell(choice: Choice, *, mark: str = "**!**") -> str:
    """What is picked, the kernel where the pick calls another library, `mark` if it cannot run."""
    inner = f" ({choice.kernel or 'none'})" if choice.inner else ""
    failed = f" {mark}" if choice.problem and choice.backend else ""
    return f"{choice.backend or '*none*'}{inner}{failed}"


def call_of(mode: str, *, pinned_page: bool = False) -> Call:
    """The usual call of a mode: a decode step, or prompts."""
    lens = DECODE_STEP if mode in DECODE_MODES else PROMPTS
    topk = TOPK if mode == "sparse_mla" else 0
    return Call(kv_lens=lens, causal=mode not in LATENT_MODES, topk=topk, pinned_page=pinned_page)


def _abilities(library: Library, mode: str, notes: Notes) -> Iterator[Row]:
    """What the limits of the newest release leave to each backend, a row for each."""
    latent = mode in LATENT_MODES
    heads = LATENT_HEADS["128 heads"] if latent else HEADS["32/8 heads"]
    head_dims = (512, LATENT_SIZES[0]) if latent else PROBED_HEAD_DIMS
    release = Version(library.releases[-1])
    probes = []
    for case in product(GPUS, DTYPES, head_dims, PROBED_PAGES):
        gpu, kind, head_dim, page = case
        spec, call = (
            AttnSpec(*heads, head_dim, page, *DTYPES[kind]),
            call_of(mode, pinned_page=True),
        )
        probes.append((case, facts_of(spec, call, mode=mode, gpu=gpu, release=release)))
    for backend in library.backends[mode]:
        able = [case for case, facts in probes if not library.limits_of(backend, facts)]
        if not able:
            continue
        gpus, kinds, dims, pages = (dict.fromkeys(column) for column in zip(*able, strict=True))
        unmeasured = "no" if MEASURED_GPU in gpus else "**not measured here**"
        told = MEASURED.get((library.name, mode), {}).get(backend, unmeasured)
        picked = notes.picked.get((library.name, mode, backend), ())
        rest: Row = ("; ".join(kinds), _words(dims), _words(pages))
        if backend in UNREAD and not latent:
            rest = ("not read",) * len(rest)
        yield (backend, " ".join(gpus), *rest, _words(picked, ", ") or "only by name", told)


def _words(numbers: Iterable[int], between: str = " ") -> str:
    return between.join(map(str, sorted(numbers)))
