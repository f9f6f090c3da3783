"""What was chosen: a named model's case, who answers, which backends; and the call that says so.

A model is the attention that one GPU has of it. What its name leaves open, `variant` says: the
dtypes of query and cache, `bfloat16` or `bfloat16/float8_e4m3fn`, and a window and sinks if there
are, `bfloat16, window 4096, sinks`; of latent attention (MLA) query heads, tokens attended to and
cache, `128 heads, dense, bfloat16`.
"""

import re
from dataclasses import dataclass, fields

from ..core.spec import MLA, MODELS, AttnSpec, MlaSpec, require_int, require_word
from ..core.spec import model_of as model_named
from ..kinds.cases import Case
from ..kinds.decode.case import DecodeCase
from ..kinds.mla.case import MlaCase

NAMES = (*MODELS, MLA)
"""What `model` may be."""
_VARIANT = re.compile(r"(.*?)(?:, window (\d+))?(, sinks)?")
_LATENT = re.compile(r"(\d+) heads, (?:dense|top (\d+)), (\S+)")
AXES = ("release", "timer", "variant", "page_size", "lengths", "batch", "kv_len")
"""What makes a case of a model, in the order in which one narrows the next."""
LIVE = "live"
"""The source that measures on this GPU."""
ROUNDS = 3
"""As many as the studies have: with one there is no interval."""
LINE, INDENT = 88, "    "


@dataclass(frozen=True)
class Choices:
    """One view's choices, all of them made.

    `records` is a study, or `live`; `release` is FlashInfer's, empty for the installed one; the
    other backends are compared with `against`. `rounds` counts in live mode only.
    """

    model: str
    records: str
    release: str
    timer: str
    variant: str
    page_size: int
    lengths: str
    batch: int
    kv_len: int
    backends: tuple[str, ...]
    against: str
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        if not self.backends:
            raise ValueError("backends must name at least one backend, got none")
        require_word("against", self.against, self.backends)
        require_int("rounds", self.rounds)

    @property
    def case(self) -> DecodeCase | MlaCase:
        """The case; ValueError for a shape that cannot be."""
        spec = spec_of(self.model, variant=self.variant, page_size=self.page_size)
        sizes = (self.batch, self.kv_len, self.lengths)
        return MlaCase(spec, *sizes) if isinstance(spec, MlaSpec) else DecodeCase(spec, *sizes)

    @property
    def call(self) -> str:
        """The Python call that gives this view again: as many arguments on a line as fit."""
        unsaid = ("model", *(() if self.records == LIVE else ("rounds",)))
        named = [f.name for f in fields(self) if f.name not in unsaid]
        lines = [INDENT]
        for argument in (repr(self.model), *(f"{name}={getattr(self, name)!r}" for name in named)):
            if len(lines[-1]) + len(argument) >= LINE:
                lines.append(INDENT)
            lines[-1] += f"{argument}, "
        return "\n".join(["attnlib.view(", *(line.rstrip() for line in lines), ")"])


def model_of(case: Case | None) -> str:
    """The model that a case is of; empty for another shape and another kind of case."""
    return model_named(case.spec) if isinstance(case, DecodeCase | MlaCase) else ""


def variant_of(spec: AttnSpec | MlaSpec) -> str:
    """What the model's name leaves open."""
    if isinstance(spec, MlaSpec):
        read = f"top {spec.top_k}" if spec.top_k else "dense"
        return f"{spec.num_qo_heads} heads, {read}, {spec.kv_format}"
    window = f", window {spec.window}" if spec.window else ""
    return spec.dtypes + window + (", sinks" if spec.sinks else "")


def spec_of(model: str, *, variant: str, page_size: int) -> AttnSpec | MlaSpec:
    """The spec of a named model: inverse of `model_of` and `variant_of`; ValueError."""
    require_word("model", model, NAMES)
    if model != MLA:
        dtypes, window, sinks = _VARIANT.fullmatch(variant).groups()  # type: ignore[union-attr]
        dtype, _, kv_dtype = dtypes.partition("/")
        return AttnSpec(*MODELS[model], page_size, dtype, kv_dtype, int(window or 0), bool(sinks))
    found = _LATENT.fullmatch(variant)
    if not found:
        like = "'128 heads, dense, bfloat16' or '128 heads, top 2048, fp8-656'"
        raise ValueError(f"variant of {MLA} must be as {like}, got {variant!r}")
    heads, top_k, kv_format = found.groups()
    return MlaSpec(int(heads), int(top_k or 0), page_size, kv_format)
