"""The seeded call of any case, the oracle's output over it, and the oracle's judge of others."""

from dataclasses import replace

import torch

from attnlib.core import DecodeBatch
from attnlib.core.spec import EXTEND_MODES
from attnlib.measure.calls.cases import subject_class
from attnlib.measure.calls.check import Judge
from attnlib.measure.calls.extend.case import ExtendCase

MASKS = [(mode, mask) for mode in EXTEND_MODES for mask in EXTEND_MODES[mode]]
"""Every mode of several queries per request, with each of its masks."""


def extend_case(cached, mode, mask="", q_len=7):
    """Of a ragged prefill the tokens are all queries, one a page."""
    if mode != "prefill_ragged":
        return ExtendCase(cached, mode, q_len, mask)
    paged = replace(cached, spec=replace(cached.spec, page_size=1))
    return ExtendCase(paged, mode, cached.kv_len, mask)


def query_rows(batch, q_len):
    """One-query requests that see what `q_len` causal queries of each request of `batch` see."""
    unseen = torch.arange(q_len - 1, -1, -1, dtype=torch.int32)
    lens = (batch.seq_lens_cpu[:, None] - unseen).flatten()
    table = batch.page_table.repeat_interleave(q_len, 0)
    return DecodeBatch.build(batch.spec, lens, table)


def work_of(case, device="cpu"):
    return subject_class(case).build(case, device=device)


def exact(work, probs_dtype=None):
    """The oracle's output, float64."""
    attend = subject_class(work.case).attend
    return attend(work.q, work.kv, work.batch, probs_dtype=probs_dtype)


def rounded(work):
    """The same in the output's dtype, as an honest kernel rounds it."""
    return exact(work).to(getattr(torch, getattr(work.case.spec, "out_dtype", "bfloat16")))


def judge_of(work):
    return Judge(subject_class(work.case).attend, work.q, work.kv, work.batch)
