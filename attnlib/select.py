"""Which kernel a library's `auto` picks, and why: rules as data, each row with its source.

FlashInfer's paged decode on tensor cores (BatchDecodeWithPagedKVCacheWrapper), read in the
releases' decode.py and utils.py. The first row that matches decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from .batch import AttnSpec

FIRST_KNOWN, LAST_KNOWN = "0.2.0", "0.7.2.post1"
HOPPER = (9,)
ANY_GPU = (8, 9, 10, 12)


@dataclass(frozen=True)
class Rule:
    """Releases `first` <= r < `before`, GPU major versions, and whether the query is FP8."""

    first: str
    before: str
    majors: tuple[int, ...]
    fp8_query: bool | None
    fp8_kv: bool | None
    backend: str
    reason: str

    def matches(self, release: Version, major: int, spec: AttnSpec) -> bool:
        """Does this row speak of `release` on a GPU of `major` with the spec's dtypes?"""
        in_time = Version(self.first) <= release and (
            not self.before or release < Version(self.before)
        )
        fp8 = (spec.dtype.startswith("float8"), spec.kv_dtype.startswith("float8"))
        dtypes = all(
            want is None or want == have
            for want, have in zip((self.fp8_query, self.fp8_kv), fp8, strict=True)
        )
        return in_time and major in self.majors and dtypes


FLASHINFER_DECODE_AUTO = (
    Rule("0.2.0", "0.6.0", ANY_GPU, None, None, "fa2", 'the code says "fa2"'),
    Rule(
        "0.6.0",
        "0.6.4",
        HOPPER,
        None,
        None,
        "fa3",
        "#2148: a general function chooses, fa3 on Hopper",
    ),
    Rule("0.6.0", "0.6.4", ANY_GPU, None, None, "fa2", "#2148: fa3 only on Hopper"),
    Rule(
        "0.6.4",
        "",
        HOPPER,
        True,
        True,
        "fa3",
        "#2530 spares FP8 tensors: fa3 as before",
    ),
    Rule("0.6.4", "", ANY_GPU, None, None, "fa2", "#2530: auto means fa2 again"),
)


def flashinfer_decode_auto(release: str, major: int, spec: AttnSpec) -> Rule:
    """The rule by which FlashInfer `release` resolves `auto` on a GPU of compute capability major.

    Raises ValueError for a release before 0.2.0 or after the newest one read, or an unknown GPU.
    """
    version = Version(release)
    if not Version(FIRST_KNOWN) <= version <= Version(LAST_KNOWN):
        raise ValueError(f"release must be in {FIRST_KNOWN}..{LAST_KNOWN}, got {release!r}")
    if major not in ANY_GPU:
        raise ValueError(f"major must be one of {ANY_GPU} (compute capability), got {major}")
    return next(r for r in FLASHINFER_DECODE_AUTO if r.matches(version, major, spec))
