"""Scheduler metadata: made once a step, reused by any number of layers, refused where unfit."""

import re
from dataclasses import replace

import pytest
import torch

from attnlib.core import SchedulerFacts
from attnlib.core.schedule import library
from attnlib.core.schedule.flash_attn3 import COUNTED, precompute
from attnlib.core.schedule.splits import max_words

CPU = torch.device("cpu")
FACTS = SchedulerFacts(3, 32, 8, 128, 1, 4096, 132, page_size=16, causal=True)
LENS = torch.tensor([4096, 70, 900], dtype=torch.int32)


@pytest.fixture
def metadata(fake_fa3):
    return precompute(FACTS, LENS)


def test_a_buffer_that_another_steps_metadata_took_over_is_refused_until_renewed(fake_fa3):
    buffer = torch.full((max_words(8),), -1, dtype=torch.int32)
    large = replace(FACTS, batch_size=8)
    first = precompute(FACTS, LENS, out=buffer)
    assert first.words.data_ptr() == buffer.data_ptr()
    assert len(first.words) == 17
    assert torch.equal(first.words, precompute(FACTS, LENS).words)
    assert not buffer[17:].any()
    assert len(buffer[17:]) == 16
    second = precompute(
        large,
        torch.full((8,), 900, dtype=torch.int32),
        out=buffer,
    )
    second.require_fits(large, device=CPU)
    with pytest.raises(ValueError, match="words must be those of this scheduler metadata"):
        first.require_fits(FACTS, device=CPU)
    first.renew(LENS)
    first.require_fits(FACTS, device=CPU)


def test_the_attention_calls_own_write_to_the_counter_is_no_takeover(metadata):
    metadata.require_fits(FACTS, device=CPU)
    metadata.words[-1] = 0
    metadata.mark_used()
    metadata.require_fits(FACTS, device=CPU)


# What differs at the attention call, and what it must be.
MISFITS = {
    "batch_size": (4, "3"),
    "num_qo_heads": (64, "32"),
    "num_kv_heads": (2, "8"),
    "head_dim": (120, "128"),
    "head_dim_v": (64, "128"),
    "dtype": ("float16", "bfloat16"),
    "causal": (False, "True"),
    "window": ((99, 0), "(-1, -1)"),
    "page_size": (32, "16"),
    "max_seqlen_k": (8192, "4096"),
    "num_splits": (2, "14"),
    "num_sms": (114, "132"),
    "sm_margin": (8, "0"),
    "has_softcap": (True, "False"),
    "pack_gqa": (False, "True"),
    "max_seqlen_q": (2, "1"),
    "varlen_q": (True, "False"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_differs_is_refused_with_the_field_and_both_values(metadata, name):
    got, must = MISFITS[name]
    made = f"{must} {COUNTED[name]}" if name in COUNTED else f"{name} {must}"
    with pytest.raises(
        ValueError, match="does not fit the call: the schedule was made for"
    ) as found:
        metadata.require_fits(replace(FACTS, **{name: got}), device=CPU)
    made_for, _, has = str(found.value).partition("; this call has ")
    assert re.search(rf"(for |, ){re.escape(made)}(,|$)", made_for)
    assert str(got) in has


def test_a_call_on_another_device_is_refused(metadata):
    with pytest.raises(ValueError, match="device must be that of the .* cpu, got cuda:1"):
        metadata.require_fits(FACTS, device=torch.device("cuda:1"))


def test_every_fact_that_two_calls_must_share_is_guarded():
    # One process has one build of the library.
    assert set(SchedulerFacts.__dataclass_fields__) - set(MISFITS) == {"build", "hdim96"}


def test_renewing_writes_new_lengths_into_the_same_words(fake_fa3, metadata):
    words, before = metadata.words, metadata.words.tolist()
    assert FACTS.num_splits == 0
    assert FACTS.split_cap == 14
    assert metadata.facts.num_splits == 14
    metadata.renew(torch.tensor([1, 2, 3], dtype=torch.int32))
    assert metadata.words is words and words.tolist() != before
    assert [call["num_splits"] for call in fake_fa3.scheduled] == [14, 14]
    metadata.require_fits(FACTS, device=CPU)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"seq_lens": LENS[:2]}, r"seq_lens must be \[3\] int32, got \[2\]"),
        ({"seq_lens": LENS.long()}, r"seq_lens must be \[3\] int32, got \[3\] int64"),
        ({"seq_lens": LENS.repeat(2)[::2]}, "seq_lens must be contiguous"),
        ({"out": torch.zeros(16).int()}, r"out must be \[>= 17\] int32, got \[16\]"),
        ({"out": torch.zeros(17)}, r"out must be \[any\] int32, got \[17\] float32"),
        ({"out": torch.zeros(17, 1).int()}, r"out must be \[any\] int32, got \[17, 1\]"),
        ({"out": torch.zeros(40).int()[::2]}, "out must be contiguous"),
        ({"out": torch.zeros(17, device="meta").int()}, "device of the call, cpu, got meta"),
        ({"cu_seqlens_q": LENS}, "cu_seqlens_q must be given if facts.varlen_q, and only"),
        ({"facts": replace(FACTS, pack_gqa=False)}, "pack_gqa must be None or True .* got False"),
    ],
)
def test_bad_input_is_refused_by_name_before_the_library_is_asked(fake_fa3, arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        precompute(**{"facts": FACTS, "seq_lens": LENS} | arguments)
    assert fake_fa3.scheduled == []


def test_query_offsets_need_an_entry_more_than_requests(fake_fa3):
    facts = replace(FACTS, varlen_q=True, max_seqlen_q=4)
    sums = torch.tensor([0, 4, 5, 7], dtype=torch.int32)
    assert precompute(
        facts,
        LENS,
        cu_seqlens_q=sums,
    ).words[4:7].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be \[4\] int32"):
        precompute(facts, LENS, cu_seqlens_q=sums[:3].contiguous())


def test_a_library_with_another_layout_is_an_error_not_an_answer(fake_fa3, monkeypatch):
    monkeypatch.setattr(fake_fa3, "get_scheduler_metadata", lambda *_, **__: LENS)
    monkeypatch.setattr(library, "supplier", lambda: "flash-attn-3")
    with pytest.raises(RuntimeError, match=r"flash-attn-3 must lay metadata out in 17 words"):
        precompute(FACTS, LENS)
