"""What the marks of SGLang and vLLM say of a forward pass: its kind, requests and lengths.

| engine | mark |
|---|---|
| SGLang | `step[DECODE bs=4]` |
| the same, with `detailed_annotations` | `step[DECODE bs=4 g_sq=4 g_sqsq=4 g_sqsk=900 g_sk=900]` |
| vLLM | `execute_context_0(0)_generation_4(4)` |
| the same, newer | `execute_4_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq4sk900sqsq4sqsk900)` |

`c` is context (prefill), `g` generation, `sq` the sum of all query tokens and `sk` that of all KV
tokens (SGLang #24911). No mark has the longest request.
"""

import re
from dataclasses import dataclass

from .spans import SIZE

DECODE = "decode"
VERIFY = "verify"
PREFILL = "prefill"
MIXED = "mixed"
SGLANG = "SGLang"
VLLM = "vLLM"
BEGINS = ("step[", "execute_")
"""How the marks of SGLang and of vLLM begin."""
MOST_CHARACTERS = 512
"""Of a mark; a longer name is none of theirs."""
SGLANG_WORD = re.compile(r"step\[\s*(\w+)")
SGLANG_FIELD = re.compile(rf"\b(raw_bs|bs|[cg]_sq|[cg]_sk)={SIZE}")
VLLM_COUNTS = re.compile(
    rf"execute_(?:\d+_)?context_{SIZE}\(([^)]*)\)_generation_{SIZE}(?:\(([^)]*)\))?"
)
VLLM_SUMS = re.compile(rf"(?:sq)?{SIZE}(?:sk{SIZE})?")
SGLANG_KINDS = {
    "DECODE": DECODE,
    "DRAFT": DECODE,
    "DRAFT_LOOP": DECODE,
    "TARGET_VERIFY": VERIFY,
    "VERIFY": VERIFY,
    "EXTEND": PREFILL,
    "SPLIT_PREFILL": PREFILL,
    "MIXED": MIXED,
}
"""VERIFY and DRAFT are its words from 0.5.20 on, DRAFT of prompts too, whose tokens are then told;
any other word of a mark is its own kind."""


@dataclass(frozen=True)
class Mark:
    """What one mark says. Sums are of all requests; 0 where the mark does not have them."""

    engine: str = ""
    kind: str = ""
    requests: int = 0
    query_tokens: int = 0
    kv_tokens: int = 0


NO_MARK = Mark()


def read_mark(name: str) -> Mark:
    """What the name of an annotation says; `NO_MARK` for that of another tool.

    Examples
    --------
    >>> mark = read_mark("step[DECODE bs=32 g_sq=32 g_sqsq=32 g_sqsk=50923 g_sk=50923]")
    >>> mark.kind, mark.requests, mark.kv_tokens
    ('decode', 32, 50923)
    """
    if len(name) > MOST_CHARACTERS:
        return NO_MARK
    by_sglang = SGLANG_WORD.match(name)
    if by_sglang:
        return _of_sglang(name, by_sglang[1])
    by_vllm = VLLM_COUNTS.match(name)
    if by_vllm:
        return _of_vllm(by_vllm)
    return NO_MARK


def _of_sglang(name: str, word: str) -> Mark:
    if word == "DRAFT" and " toks=" in name:  # of prompts
        word = "EXTEND"
    sizes = {}
    for field, size in SGLANG_FIELD.findall(name):
        sizes[field] = int(size)
    requests = sizes.get("raw_bs", sizes.get("bs", 0))
    queries = sizes.get("c_sq", 0) + sizes.get("g_sq", 0)
    kind = SGLANG_KINDS.get(word, word.lower())
    if kind == DECODE and requests and queries > requests:
        kind = VERIFY
    return Mark(
        engine=SGLANG,
        kind=kind,
        requests=requests,
        query_tokens=queries,
        kv_tokens=sizes.get("c_sk", 0) + sizes.get("g_sk", 0),
    )


def _of_vllm(match: re.Match[str]) -> Mark:
    contexts = int(match[1])
    generations = int(match[3])
    of_contexts = _sums(match[2])
    of_generations = _sums(match[4] or "")
    if contexts:
        kind = MIXED if generations else PREFILL
    else:
        kind = VERIFY if of_generations[0] > generations else DECODE
    return Mark(
        engine=VLLM,
        kind=kind,
        requests=contexts + generations,
        query_tokens=of_contexts[0] + of_generations[0],
        kv_tokens=of_contexts[1] + of_generations[1],
    )


def _sums(text: str) -> tuple[int, int]:
    """The query tokens and the KV tokens of one group of vLLM's mark, 0 where it has none."""
    found = VLLM_SUMS.match(text)
    if not found:
        return 0, 0
    return int(found[1]), int(found[2] or 0)
