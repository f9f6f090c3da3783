"""The one text form of a call, `heads=32/8 head_dim=128 page=16 lens=8192x16`. No torch.

A call is words NAME=VALUE with spaces between them, in any order, each once. It is printed in the
order of `CallText`, and what has its default is left out.

| word | says | default |
|---|---|---|
| mode | `decode`; one of several queries, `prefill_paged` ...; `mla`, `sparse_mla` | decode |
| q_len, q_lens | query tokens of each request; or of every one, as `lens` says tokens | |
| mask | where it is not the mode's usual one | |
| heads | query and KV heads of one GPU, `32/8`; of MLA `16/1` | |
| model, tp, dp | in place of heads and head_dim: a model, its GPUs, and groups of DP attention | |
| head_dim, page | of Q, K and V; tokens of a KV page | 128; 16, of MLA 64 |
| dtype, kv_dtype | of the query; of the cache, where it differs | bfloat16 |
| window | tokens that a query sees | 0: all |
| top_k, kv_format | of MLA: tokens that are attended to, how a token is cached | 0: all; bfloat16 |
| lens | tokens of each request, with dp of one rank: `8192x15+300`, see `Lens` | |
| seed, context | of drawn lengths and inputs; tokens of the page table's width | 0; 0: the longest request |

What only one question measures is a mode with words of its own, such as `mode=step layers=64`.
"""  # noqa: E501

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import groupby
from typing import Any, Self

import numpy as np

from .checkpoints import LATENT, served
from .layer import heads_named, parse_layer
from .spec import INT32_MAX, LENGTHS, AttnSpec, MlaSpec, require_int, require_type

EXAMPLE = "heads=32/8 head_dim=128 page=16 lens=8192x16"
DTYPE_WORDS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}
"""The engines' words for dtypes."""
FIXED = "fixed"
LISTED = "listed"
DRAWN = (*LENGTHS[1:], LISTED)
"""What may stand before `:` in `lens`."""
ITEM = re.compile(r"(\d+)(?:\.\.(\d+))?(?:x([1-9]\d*))?", re.ASCII)
LONGEST = 32
"""Characters of lengths in titles."""
MAX_REQUESTS = 65_536
"""Of one call; more than engines run concurrently."""
OTHER_NAMES = {
    "page_size": "page",
    "batch": "lens",
    "batch_size": "lens",
    "kv_len": "lens",
    "kv_lens": "lens",
    "lengths": "lens",
}
"""Names that arguments and columns have -> word; an error suggests it."""
MAY_BE_ZERO = ("window", "top_k", "seed", "context")
LENS_HELP = "tokens of each request: 8192x16, 8192x15+300, 2048..30720x64, ragged:8192x16"


def _of_files(text: str) -> str:
    """Where a file of calls is taken, if a text names one that was captured."""
    if not text.endswith(".jsonl"):
        return ""
    return " (a file of captured steps is for compare --cases, measure and serve --traffic)"


@dataclass(frozen=True)
class Lens:
    """Tokens of each request, as a text says them and as the fields of a case have them.

    | text | requests |
    |---|---|
    | `8192x16` | 16 of 8192 tokens |
    | `8192x15+300` | each item in turn: TOKENS, or TOKENSxCOUNT |
    | `2048..30720x64` | 64, evenly spaced from 2048 to 30720 |
    | `ragged:8192x16` | 16 of at most 8192, drawn (`measure.calls.lengths`) |
    | `listed:100x2` | as `100x2`, in a record that lists them one by one |

    Parameters
    ----------
    batch_size : int
        Requests.
    kv_len : int
        Tokens of the longest.
    lengths : str
        `fixed`, how they are drawn, or all of them as records write them, `33+1+60`.
    """

    batch_size: int
    kv_len: int
    lengths: str = FIXED

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Self:
        """Of requests with these tokens; those that are all alike are fixed."""
        if len({*tokens}) == 1:
            return cls(len(tokens), tokens[0])
        return cls.listed(tokens)

    @classmethod
    def listed(cls, tokens: Sequence[int]) -> Self:
        """Of requests with these tokens, one by one."""
        words = [str(length) for length in tokens]
        return cls(len(tokens), max(tokens), "+".join(words))

    @classmethod
    def read(
        cls,
        text: str,
        name: str = "lens",
        batch: int | None = None,
    ) -> Self:
        """Inverse of `str`; `name` and `batch` are those of `parse_lengths`."""
        drawn, colon, items = text.rpartition(":")
        if not colon:
            return cls.of(parse_lengths(name, items, batch))
        if drawn not in DRAWN:
            near = did_you_mean(drawn, DRAWN)
            raise ValueError(
                f"{name} must be drawn as one of {', '.join(DRAWN)}, got {drawn!r}{near}"
            )
        tokens = parse_lengths(name, items, batch)
        if drawn == LISTED:
            return cls.listed(tokens)
        if not re.fullmatch(r"\d+(x\d+)?", items):
            raise ValueError(f"{name} must be such as {drawn}:8192x16, got {text!r}")
        return cls(len(tokens), tokens[0], drawn)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a case."""
        return {
            "batch_size": self.batch_size,
            "kv_len": self.kv_len,
            "lengths": self.lengths,
        }

    @property
    def is_listed(self) -> bool:
        """Whether each request's tokens are known, not drawn."""
        return self.lengths not in DRAWN

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each request; ValueError for drawn ones."""
        if self.lengths == FIXED:
            return (self.kv_len,) * self.batch_size
        if not self.is_listed:
            raise ValueError(f"lens must not be drawn here, got {self}")
        return tuple(map(int, self.lengths.split("+")))

    def __str__(self) -> str:
        if not self.is_listed:
            return f"{self.lengths}:{_run(self.kv_len, self.batch_size)}"
        text = runs(self.tokens)
        if self.lengths != FIXED and Lens.of(self.tokens) != self:
            return f"{LISTED}:{text}"
        return text


def runs(tokens: Sequence[int]) -> str:
    """Lengths as items joined by `+`, or as a range where that is shorter."""
    items = []
    for length, run in groupby(tokens):
        items.append(_run(length, len([*run])))
    text = "+".join(items)
    as_range = f"{tokens[0]}..{tokens[-1]}x{len(tokens)}"
    rises = tokens[0] < tokens[-1]
    if not rises or len(as_range) >= len(text):
        return text
    is_same = parse_lengths("lens", as_range) == tuple(tokens)
    return as_range if is_same else text


def _run(length: int, count: int) -> str:
    return f"{length}x{count}" if count > 1 else str(length)


def parse_lengths(
    name: str,
    text: str,
    batch: int | None = None,
) -> tuple[int, ...]:
    """Tokens of each request of `8192x16`, `100+200`, `8192x15+100` or `2048..30720x64`.

    A range is evenly spaced, both ends included. A comma is read as `+`. `batch` is the number of
    requests where `text` is one length or range without a count. ValueError calls the lengths
    `name`.
    """
    require_type(name, text, str, such_as="8192x15+300")
    if batch is not None:
        require_int("batch", batch, most=MAX_REQUESTS)
    items = [ITEM.fullmatch(item) for item in re.split("[+,]", text)]
    lengths: list[int] = []
    for item in items:
        if item is None:
            words = "TOKENS or TOKENSxCOUNT joined by +, such as 8192x15+300, or 1..9x4"
            raise ValueError(f"{name} must be {words}{_of_files(text)}, got {text!r}")
        if batch and (item[3] or len(items) > 1):
            raise ValueError(f"batch must be left out where {name} has the counts, got {batch}")
        low = int(item[1])
        high = int(item[2] or item[1])
        count = batch or int(item[3] or 1)
        if count + len(lengths) > MAX_REQUESTS or high > INT32_MAX:
            limits = f"at most {MAX_REQUESTS} requests of at most {INT32_MAX} tokens"
            raise ValueError(f"{name} must be {limits}, got {text!r}")
        if high < low or (high > low and count < 2):
            words = f"{name} must have a range from low to high of 2 requests or more (1..9x2)"
            raise ValueError(f"{words}, got {item[0]!r} of {count}")
        if low == high:
            lengths += [low] * count
        else:
            spaced = np.linspace(low, high, count).round()
            lengths += spaced.astype(int).tolist()
    if min(lengths) < 1:
        raise ValueError(f"{name} must be >= 1, got {text!r}")
    return tuple(lengths)


@dataclass(frozen=True)
class CallText:
    """What the text of a call says, a field a word; None where it says nothing.

    `own` are the words, and their values, that only its mode has.

    Examples
    --------
    >>> from attnlib.core.call_text import CallText
    >>> said = CallText.read("lens=8192x15+300 heads=32/8 head_dim=128 page=16")
    >>> str(said)
    'heads=32/8 head_dim=128 page=16 lens=8192x15+300'
    >>> said.layer().group_size, said.lens.batch_size
    (4, 16)
    """

    mode: str | None = None
    own: tuple[tuple[str, int | str], ...] = ()
    q_len: int | None = None
    q_lens: Lens | None = None
    mask: str | None = None
    model: str | None = None
    tp: int | None = None
    dp: int | None = None
    heads: str | None = None
    head_dim: int | None = None
    page: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    window: int | None = None
    top_k: int | None = None
    kv_format: str | None = None
    lens: Lens | None = None
    seed: int | None = None
    context: int | None = None

    @classmethod
    def read(cls, text: str, own: Collection[str] = ()) -> Self:
        """Inverse of `str`.

        ValueError names the word, what it must be and what it was. `own` are the names of words
        that only its mode has.
        """
        said: dict[str, Any] = {}
        read = WORDS | dict.fromkeys(own, _integer_or_text)
        for word in text.split():
            name, given, value = word.partition("=")
            if not given or not value:
                words = f"a call must be words such as {EXAMPLE}{_of_files(word)}"
                raise ValueError(f"{words}, got {word!r}")
            if name not in read:
                known = ", ".join(read)
                near = did_you_mean(OTHER_NAMES.get(name, name), read)
                raise ValueError(f"a word of a call must be one of {known}, got {name!r}{near}")
            if name in said:
                raise ValueError(f"{name} must be given once, got {text!r}")
            said[name] = read[name](name, value)
        if not said:
            raise ValueError(f"a call must be words such as {EXAMPLE}, got {text!r}")
        if said.get("kv_dtype") == "auto":  # the default, under its name in the engines
            del said["kv_dtype"]
        of_its_mode = [(name, said.pop(name)) for name in own if name in said]
        return cls(**said, own=tuple(of_its_mode))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.given.items())

    @property
    def given(self) -> dict[str, Any]:
        """The words that are said, with their values."""
        values = {"mode": self.mode} | dict(self.own)
        values |= {name: getattr(self, name) for name in WORDS}
        return {name: value for name, value in values.items() if value is not None}

    def layer(self, **defaults: Any) -> AttnSpec:
        """The layer; `defaults` are arguments of `parse_layer` that are not said."""
        said: dict[str, Any] = {
            "heads": self.heads,
            "model": self.model,
            "tp": self.tp,
            "dp": self.dp,
            "head_dim": self.head_dim,
            "page_size": self.page,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "window": self.window,
        }
        given = {name: value for name, value in said.items() if value is not None}
        arguments = defaults | given
        return parse_layer(**arguments)

    @property
    def of_latent_model(self) -> Self:
        """Where its model has a latent cache, the same by heads, in the mode of that cache."""
        is_decode = self.mode in (None, "decode", *LATENT.values())
        if not self.model or heads_named(self.model) or not is_decode:
            return self
        of_model = served(
            text=self.model,
            tp=self.tp or 1,
            dp=self.dp or 1,
        )
        kind = of_model.checkpoint.kinds[0]
        if not kind.mode:
            return self
        if self.heads:
            raise ValueError(f"pass either heads or model, got {self.heads} and {self.model}")
        heads, _, _ = kind.on_one_gpu(of_model.ranks)
        return replace(
            self,
            mode=kind.mode,
            heads=f"{heads}/1",
            model=None,
            tp=None,
            dp=None,
            top_k=self.top_k or kind.topk or None,
        )

    def latent_layer(self) -> MlaSpec:
        """The layer of MLA."""
        heads = re.fullmatch(r"(\d+)/1", self.heads or "")
        if not heads:
            raise ValueError(f"heads must be QUERY/1 of MLA, such as 16/1, got {self.heads!r}")
        return MlaSpec(
            num_qo_heads=int(heads[1]),
            top_k=self.top_k or 0,
            page_size=self.page or 64,
            kv_format=self.kv_format or "bfloat16",
        )

    def require_only(self, what: str, words: Collection[str]) -> None:
        """ValueError for a word that `what` has not."""
        for name, value in self.given.items():
            if name not in words:
                raise ValueError(f"{name} must be left out of {what}, got {value}")

    def required(self, name: str) -> Any:
        """The value of a word; ValueError if it is not said."""
        if name not in self.given:
            raise ValueError(f"{name} must be given in the text of a call, got {str(self)!r}")
        return self.given[name]


def words_of_layer(spec: AttnSpec | MlaSpec) -> dict[str, Any]:
    """The words of a layer, without those that have their default."""
    if isinstance(spec, MlaSpec):
        return {
            "heads": spec.heads,
            "page": spec.page_size,
            "top_k": spec.top_k or None,
            "kv_format": spec.kv_format if spec.kv_format != "bfloat16" else None,
        }
    return {
        "heads": spec.heads,
        "head_dim": spec.head_dim,
        "page": spec.page_size,
        "dtype": spec.dtype if spec.dtype != "bfloat16" else None,
        "kv_dtype": spec.kv_dtype if spec.kv_dtype != spec.dtype else None,
        "window": spec.window or None,
    }


def shortened(text: str) -> str:
    """The text of a call for a title: many lengths, one by one, are cut (`shortened_lens`)."""
    words = []
    for word in text.split():
        name, _, value = word.partition("=")
        if name in ("lens", "q_lens"):
            word = f"{name}={shortened_lens(value)}"
        words.append(word)
    return " ".join(words)


def shortened_lens(text: str) -> str:
    """The first of many lengths, and how many requests they are."""
    if len(text) <= LONGEST:
        return text
    first, _, _ = text[:LONGEST].rpartition("+")
    return f"{first}+...({Lens.read(text).batch_size} requests)"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with the nearest of `known`, or nothing."""
    closest = get_close_matches(word, [*known], 1)
    return f"; did you mean {closest[0]}?" if closest else ""


def _integer(name: str, text: str) -> int:
    least = 0 if name in MAY_BE_ZERO else 1
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ValueError(f"{name} must be an integer >= {least}, got {text!r}")
    require_int(name, int(text), least=least)
    return int(text)


def _integer_or_text(name: str, text: str) -> int | str:
    if text.isdecimal() and len(text) < 19:
        return int(text)
    return text


def _text(name: str, text: str) -> str:
    return text


def _dtype(name: str, text: str) -> str:
    return DTYPE_WORDS.get(text, text)


def _lens(name: str, text: str) -> Lens:
    return Lens.read(text, name)


WORDS: dict[str, Callable[[str, str], Any]] = {}
"""Word of a call -> what reads its value."""
for _field in fields(CallText):
    if _field.name != "own":
        WORDS[_field.name] = _integer if _field.type == int | None else _text
WORDS |= {"dtype": _dtype, "kv_dtype": _dtype, "lens": _lens, "q_lens": _lens}
