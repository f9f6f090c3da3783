"""The complete examples for an engine that calls FlashAttention-3 itself, run on the CPU."""

import inspect
import re
import sys
from contextlib import contextmanager
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from support.library_fakes import SMS, FakeFlashAttention

from attnlib.core import (
    AttnSpec,
    DecodeBatch,
    PagedKV,
    build_step_schedules,
    precompute,
    schedule_words,
)
from attnlib.core.backends import flash_attn3
from attnlib.core.metadata.launch import interpreting
from attnlib.core.schedule import library

pytestmark = pytest.mark.skipif(not interpreting(), reason="the tensors are of the CPU")
SPEC = AttnSpec(8, 2, 128, page_size=16)
BATCH = 4
MAX_PAGES = 64
BEFORE = [20, 30, 1000, 3]
LENS = [700, 16, 129]
ROWS = [3, 0, 4]
POOL = 5
PAGES = torch.randperm(POOL * MAX_PAGES, generator=torch.Generator().manual_seed(1))
PAGES = PAGES.view(POOL, MAX_PAGES)
SLOTS = (PAGES[:, :, None] * 16 + torch.arange(16)).view(POOL, -1).int()
TABLE = PAGES[ROWS, :50].int()
ANSWERS = {
    "slots": {"req_rows": torch.tensor(ROWS), "table": torch.zeros_like(TABLE)},
    "blocks": {"req_rows": torch.zeros(3, dtype=torch.int32), "table": TABLE},
}
"""Where pages come from -> what the example is given; the other source has wrong pages."""


class Library(FakeFlashAttention):
    """The stand-in, whose attention call writes the counter as the library does.

    `calls` are all arguments; of the words a copy, beside the tensor.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def flash_attn_with_kvcache(self, **given):
        words = given["scheduler_metadata"]
        self.calls.append(given | {"read": words.clone()})
        words[-1] = 0
        return super().flash_attn_with_kvcache(**given)


class Engine:
    """What an example is run in: its names, and a GPU that captures and replays."""

    def __init__(self, monkeypatch, fake):
        self.fake = fake
        self.captures = 0
        torch.manual_seed(3)
        shape = (POOL * MAX_PAGES, 16, SPEC.num_kv_heads, SPEC.head_dim)
        pair = lambda: tuple(torch.randn(shape).bfloat16() for _ in range(2))  # noqa: E731
        self.names = {
            "batch": BATCH,
            "num_qo_heads": SPEC.num_qo_heads,
            "num_kv_heads": SPEC.num_kv_heads,
            "max_pages": MAX_PAGES,
            "req_to_token": SLOTS,
            "caches": [pair(), pair()],
            "lens": torch.tensor(LENS),
        }
        monkeypatch.setitem(sys.modules, "flash_attn_interface", fake)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=self.replay))
        gpu = SimpleNamespace(multi_processor_count=SMS)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)

    @contextmanager
    def capture(self, _):
        self.captures += 1
        yield

    def replay(self):
        """What was captured, by the values that are in its tensors now."""
        names = self.names
        names["q"].normal_()
        if "schedule_step" in names:
            names["schedule_step"]()
        names["outs"] = [names["attend"](*caches) for caches in names["caches"]]

    def run(self, text, **given):
        self.names |= given
        exec(text, self.names)


@pytest.fixture
def engine(monkeypatch, fake_fa3):
    fake = Library()
    monkeypatch.setattr(library, "import_library", lambda *_: fake)
    return Engine(monkeypatch, fake)


def tensors():
    """What an engine with a block table has before the example of `precompute`."""
    return {
        "cache_seqlens": torch.tensor(BEFORE, dtype=torch.int32),
        "page_table": torch.zeros(BATCH, MAX_PAGES, dtype=torch.int32),
        "q": torch.randn(BATCH, 1, SPEC.num_qo_heads, SPEC.head_dim).bfloat16(),
    }


def example(function, changes):
    """Its complete example on the CPU, after changes that must be found."""
    docstring = inspect.cleandoc(function.__doc__)
    (lines,) = re.findall(r"::\n\n((?:    .*\n|\n)+)", docstring)
    text = dedent(lines)
    for old, new in {'"cuda"': '"cpu"', **changes}.items():
        assert old in text
        text = text.replace(old, new)
    return text


def assert_attends(names, pages, q_lens):
    """Each layer's output is attention over the pages of the requests."""
    for out, (k_cache, v_cache) in zip(names["outs"], names["caches"], strict=True):
        rows = names["q"].flatten(0, -3).split(q_lens)
        outs = out.flatten(0, -3).split(q_lens)
        for x, y, page, length in zip(rows, outs, pages, LENS, strict=False):
            k, v = (each[page.long()].flatten(0, 1)[:length] for each in (k_cache, v_cache))
            q, k, v = (each.float().transpose(0, 1)[None] for each in (x, k, v))
            sees = torch.ones(len(x), length, dtype=torch.bool).tril(length - len(x))
            right = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=sees, enable_gqa=True
            )
            torch.testing.assert_close(y.float(), right[0].transpose(0, 1), atol=0.02, rtol=0.02)


def assert_as_our_own(engine, calls):
    """The arguments are those of attnlib's own call with a schedule, by name and by value."""
    table = PAGES[:BATCH].int()
    batch = DecodeBatch.build(SPEC, torch.tensor([*LENS, 1], dtype=torch.int32), table)
    q = torch.randn(BATCH, SPEC.num_qo_heads, SPEC.head_dim).bfloat16()
    facts = flash_attn3.facts_of(batch)
    metadata = precompute(facts, batch.seq_lens)
    flash_attn3.attend(q, PagedKV(*engine.names["caches"][0]), batch, metadata=metadata)
    ours = engine.fake.calls[-1]
    assert engine.names["facts"] == facts
    assert ours["num_splits"] == facts.split_cap > 1
    for call in calls:
        assert call.keys() == ours.keys()
        for name, value in ours.items():
            if isinstance(value, torch.Tensor):
                assert (call[name].shape, call[name].dtype) == (value.shape, value.dtype), name
            else:
                assert call[name] == pytest.approx(value), name


@pytest.mark.parametrize("source", ANSWERS)
def test_schedules_of_a_step_are_captured_and_replayed(engine, source):
    text = example(build_step_schedules, {"**slots,": f"**{source},"})
    engine.run(text, **ANSWERS[source])
    calls = list(engine.fake.calls)
    assert (engine.captures, len(calls)) == (1, 1 + 2 + 2)
    names = engine.names
    assert names["cache_seqlens"].tolist() == [*LENS, 0]
    wanted = schedule_words(names["facts"], names["cache_seqlens"].numpy())
    assert all(call["read"].tolist() == wanted.tolist() for call in calls[-2:])
    assert_attends(names, TABLE, [1] * BATCH)
    assert_as_our_own(engine, calls)


def test_a_schedule_of_the_library_is_renewed_before_a_replay(engine):
    lens = [*LENS, 1]
    table = PAGES[[*ROWS, 1], :50].int()
    engine.run(example(precompute, {}), **tensors(), lens=torch.tensor(lens), table=table)
    calls = list(engine.fake.calls)
    assert (engine.captures, len(calls)) == (1, 1 + 2 + 2)
    assert len(engine.fake.scheduled) == 2, "at the start and for the replay"
    facts = engine.names["facts"]
    for call, then in zip(calls[1::2], (BEFORE, lens), strict=True):
        assert call["read"].tolist() == schedule_words(facts, then).tolist()
    assert_attends(engine.names, table, [1] * BATCH)
    assert_as_our_own(engine, calls)


VARLEN = {
    "max_seqlen_q=1,": "max_seqlen_q=3, varlen_q=True,",
    "torch.zeros(batch, 1, ": "torch.zeros(6, ",
    "**slots,": "**blocks, cu_seqlens_q=cu_seqlens_q,",
    "q=q,": "q=q, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=3,",
}
"""What the docstring says of query tokens that differ by request."""


def test_query_tokens_that_differ_by_request(engine):
    sums = torch.tensor([0, 3, 4, 6, 6], dtype=torch.int32)
    engine.run(example(build_step_schedules, VARLEN), cu_seqlens_q=sums, **ANSWERS["blocks"])
    names = engine.names
    lens = names["cache_seqlens"].numpy()
    wanted = schedule_words(names["facts"], lens, sums.diff().numpy())
    assert engine.fake.calls[-1]["read"].tolist() == wanted.tolist()
    assert_attends(names, TABLE, sums.diff().tolist())


@pytest.mark.parametrize(
    "function, line, given",
    [
        (build_step_schedules, "full.mark_used()", ANSWERS["slots"]),
        (precompute, "metadata.mark_used()", {}),
    ],
)
def test_a_call_that_is_not_marked_lets_no_other_read_the_words(engine, function, line, given):
    with pytest.raises(ValueError, match="something else is in it now"):
        engine.run(example(function, {line: "pass"}), **tensors() | given)
