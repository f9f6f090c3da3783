"""Attention layers (head counts, page size, dtypes) and the checks of fields. No torch."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, dataclass, field
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar

Count = TypeVar("Count", bound=Any)
MOST_LISTED = 20
"""Words that a refusal lists; of more it names the nearest."""
MOST_SHOWN = 60
"""Characters of a wrong value that a refusal shows; of a longer one it names the type."""
INT32_MAX = 2**31 - 1
LATER = {"later": True}
"""Metadata of a field that older records lack: at its default it is left out of a record."""
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
FP8_OUT_DTYPE = "bfloat16"
LENGTHS = ("fixed", "ragged", "skewed", "chat", "retrieval", "agents", "one_long")
"""Distributions of a batch's lengths (`measure.calls.lengths`). Explicit ones are `33+1+60`."""
CUSTOM_MASKS = ("tree", "chain")
"""Masks that are passed to a library bit by bit."""
MASKS = ("causal", "full", *CUSTOM_MASKS)
EXTEND_MODES = {
    "prefill_paged": ("causal",),
    "target_verify": ("tree", "chain", "causal"),
    "draft_extend": ("causal",),
    "dllm_extend": ("full",),
    "prefill_ragged": ("causal",),
}
"""Mode of several queries per request -> its masks, the usual one first."""

LATENT_DIM = 512
ROPE_DIM = 64
MLA_HEAD_DIM = LATENT_DIM + ROPE_DIM
MLA_TOKEN_BYTES = {"bfloat16": 2 * MLA_HEAD_DIM, "fp8-656": 656, "fp8-576": MLA_HEAD_DIM}
"""Format of a cached token -> its bytes; `measure.calls.mla.format` describes those of FP8."""
MLA_SCALE = 2.0**-6
"""The one scale of an `fp8-576` cache: its values are multiplied by it."""

MLA = "DeepSeek MLA"


class Grouped:
    """Query heads in groups; the heads of a group share a KV head."""

    num_qo_heads: int
    num_kv_heads: int

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (1 is MHA, num_qo_heads is MQA)."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def heads(self) -> str:
        """Head counts as people write them, `32/8`."""
        return f"{self.num_qo_heads}/{self.num_kv_heads}"

    def require_groups(self) -> None:
        """ValueError unless all groups have the same size."""
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads ({self.num_kv_heads}), "
                f"got {self.num_qo_heads}"
            )


@dataclass(frozen=True)
class AttnSpec(Grouped):
    """A layer of multi-head, grouped-query or multi-query attention.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Heads of one GPU; KV heads divide query heads.
    head_dim : int
        Of Q, K and V.
    page_size : int
        Tokens of a KV page, a power of two.
    dtype : str
        The query's: `bfloat16`, `float16` or `float8_e4m3fn`.
    kv_dtype : str
        The cache's; by default the query's.
    window : int
        Tokens that a query sees, itself included; 0: all. FlashInfer's window_left + 1;
        FlashAttention-3's window_size is (window - 1, 0).

    Raises
    ------
    ValueError
        Naming the argument, what it must be and what it was.

    Examples
    --------
    Llama-3.1-8B over an FP8 cache:

    >>> from attnlib import AttnSpec
    >>> spec = AttnSpec(32, 8, 128, page_size=16, kv_dtype="float8_e4m3fn")
    >>> spec.group_size, spec.dtypes
    (4, 'bfloat16/float8_e4m3fn')
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    window: int = field(default=0, metadata=LATER)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_dtype", self.kv_dtype or self.dtype)
        for name in ("num_qo_heads", "num_kv_heads", "head_dim"):
            require_int(name, getattr(self, name))
        self.require_groups()
        require_page_size(self.page_size)
        require_int("window", self.window, least=0)
        for name in ("dtype", "kv_dtype"):
            require_word(name, getattr(self, name), ELEMENT_BYTES)

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def out_dtype(self) -> str:
        """Output dtype: the query's, or bfloat16 if the query is FP8."""
        if self.dtype.startswith("float8"):
            return FP8_OUT_DTYPE
        return self.dtype

    @property
    def dtypes(self) -> str:
        """The query's dtype, then the cache's if it differs: `bfloat16/float8_e4m3fn`."""
        if self.dtype == self.kv_dtype:
            return self.dtype
        return f"{self.dtype}/{self.kv_dtype}"

    def require_no_window(self, what: str) -> None:
        """ValueError if the layer has a window; `what` does not support one."""
        if self.window:
            raise ValueError(f"window must be 0 for {what}, got {self.window}")


@dataclass(frozen=True)
class MlaSpec:
    """Latent attention (MLA) after weight absorption: all query heads read one latent KV head.

    A token has 512 latent values, both key and value, and 64 rotary values, key only. Query and
    output are bfloat16.

    Parameters
    ----------
    num_qo_heads : int
        Query heads of one GPU; the model has 128.
    top_k : int
        Tokens of each request that are attended to; 0: all.
    page_size : int
        Tokens of a KV page, a power of two.
    kv_format : str
        `bfloat16`, `fp8-656` or `fp8-576`, see `core.mla`.

    Raises
    ------
    ValueError
        Naming the argument, what it must be and what it was.

    Examples
    --------
    DeepSeek-V3.2 on one of 8 GPUs (TP 8), which attends to 2,048 tokens:

    >>> spec = MlaSpec(num_qo_heads=16, top_k=2048, kv_format="fp8-656")
    >>> spec.heads, spec.token_bytes
    ('16/1', 656)
    """

    num_qo_heads: int
    top_k: int = 0
    page_size: int = 64
    kv_format: str = "bfloat16"

    def __post_init__(self) -> None:
        require_int("num_qo_heads", self.num_qo_heads)
        require_int("top_k", self.top_k, least=0)
        require_page_size(self.page_size)
        require_word("kv_format", self.kv_format, MLA_TOKEN_BYTES)

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(192): the width of DeepSeek's query head before absorption, 128 plain and 64
        rotary values, not the 576 after it."""
        return 1.0 / math.sqrt(192)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the cache."""
        return MLA_TOKEN_BYTES[self.kv_format]

    @property
    def heads(self) -> str:
        """Head counts as people write them, `128/1`."""
        return f"{self.num_qo_heads}/1"


def ceil_div(amount: Count, size: Any) -> Count:
    """The least number of `size` that hold `amount`; integers, or arrays of them."""
    return -(-amount // size)


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of torch, without its module."""
    return str(dtype).removeprefix("torch.")


def require_int(
    name: str,
    value: Any,
    *,
    least: int = 1,
    most: int = INT32_MAX,
) -> None:
    """ValueError unless `value` is a Python int (no bool) in least..most."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and least <= value <= most:
        return
    limits = f"in {least}..{most}"
    too_large = isinstance(value, int) and value > most
    if most == INT32_MAX and not too_large:
        limits = f">= {least}"
    raise ValueError(f"{name} must be an integer {limits}, got {value!r}")


def require_between(
    name: str,
    values: Any,
    least: int,
    most: int,
    why: str = "",
) -> None:
    """ValueError unless all of `values`, an array or a tensor, lie in least..most."""
    low = int(values.min())
    high = int(values.max())
    if low < least or high > most:
        raise ValueError(f"{name} must lie in {least}..{most}{why}, got {low}..{high}")


def require_all_read(what: str, read: Any, lens: Any, when: str) -> None:
    """RuntimeError unless `what` reads all tokens `lens` [bs] of a call; it `read` [bs]."""
    short = (read < lens).nonzero()[0]
    if len(short):
        first = short[0]
        raise RuntimeError(
            f"{what} must read all {lens[first]} tokens of request {first}, it reads {read[first]} "
            f"({len(short)} of {len(lens)} requests are cut short): plan for these lengths {when}"
        )


def require_word(
    name: str,
    value: Any,
    words: Collection[str] | Collection[int],
) -> None:
    """ValueError unless `value` is one of `words`: it lists them, or of many the nearest."""
    known = [*map(str, words)]
    if value in [*words]:  # a list: an unhashable value cannot be looked up in a dict
        return
    if len(known) <= MOST_LISTED:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    near = ", ".join(nearest(str(value), known))
    raise ValueError(f"{name} must be one of {len(known)} names, such as {near}, got {value!r}")


def nearest(text: str, words: Collection[str], count: int = 4) -> list[str]:
    """The words that are spelled most like a text, without regard to case."""
    by_lower = {word.lower(): word for word in words}
    found = get_close_matches(text.lower(), by_lower, count, cutoff=0.3)
    return [by_lower[word] for word in found] or [*words][:count]


def require_type(
    name: str,
    value: object,
    wanted: type | UnionType,
    such_as: str = "",
) -> None:
    """ValueError unless `value` is of a type, or one of several; `such_as` is an example."""
    if isinstance(value, wanted):
        return
    words = getattr(wanted, "__name__", str(wanted))
    if such_as:
        words = f"{words}, such as {such_as}"
    got = repr(value)
    if len(got) > MOST_SHOWN:
        got = f"one of type {type(value).__name__}"
    raise ValueError(f"{name} must be of type {words}, got {got}")


def require_types(
    declared: Iterable[Field[Any]],
    values: Mapping[str, Any],
) -> None:
    """ValueError unless the value of each field, or its default, is of its very type: no bool for
    an int."""
    for each in declared:
        value = values.get(each.name, each.default)
        if type(value) is not each.type:
            wanted = getattr(each.type, "__name__", each.type)
            raise ValueError(f"{each.name} must be of type {wanted}, got {value!r}")


def require_lengths(
    name: str,
    value: Any,
    count: int,
    longest: int,
    words: Collection[str] = (),
) -> None:
    """ValueError unless `value` is one of `words`, or `count` integers like 33+1+60 whose largest
    is `longest`."""
    if value in words:
        return
    text = str(value)
    lengths = []
    if re.fullmatch(r"[1-9][0-9]*(\+[1-9][0-9]*)*", text):
        lengths = [int(part) for part in text.split("+")]
    if len(lengths) != count or max(lengths) != longest:
        choices = f"one of {', '.join(words)}, or " if words else ""
        raise ValueError(
            f"{name} must be {choices}{count} like 33+1+60, {longest} the largest, got {value!r}"
        )


def require_one_query(spec: MlaSpec, q_len: Any) -> None:
    """ValueError for chosen tokens with several queries a request: they are chosen for one."""
    require_int("q_len", q_len)
    if spec.top_k and q_len > 1:
        raise ValueError(f"q_len must be 1 where top_k is not 0, got {q_len} with {spec.top_k}")


def require_context(value: Any, longest: int) -> None:
    """ValueError unless `value` is 0 or a width in tokens that holds the longest request."""
    require_int("context", value, least=0)
    if value and value < longest:
        raise ValueError(f"context must be 0 or at least kv_len ({longest}), got {value}")


def require_page_size(value: Any) -> None:
    """ValueError unless `value` is a power of two."""
    require_int("page_size", value)
    if value & (value - 1):
        raise ValueError(f"page_size must be a power of two, got {value}")


def require_given(
    name: str,
    value: object,
    due: bool,
    when: str,
    here: str,
) -> None:
    """ValueError unless a value is given exactly if it is `due`; `when` and `here` are words of the
    message."""
    if (value is not None) != due:
        got = "none" if value is None else "some"
        raise ValueError(f"{name} must be given {when}, and only then, got {got} with {here}")
