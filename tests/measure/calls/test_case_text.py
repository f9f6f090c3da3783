"""Every case is printed as one text and read back from it."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlib.core.spec import (
    ELEMENT_BYTES,
    EXTEND_MODES,
    LENGTHS,
    MLA_TOKEN_BYTES,
    AttnSpec,
    MlaSpec,
)
from attnlib.measure.calls.cases import read_case
from attnlib.measure.calls.decode.case import DecodeCase
from attnlib.measure.calls.extend.case import ExtendCase
from attnlib.measure.calls.mla.case import MlaCase
from attnlib.run import store
from attnlib.studies import STUDIES

WORDS = re.compile(r"[a-z_]+=\S+( [a-z_]+=\S+)*")
SIZES = st.integers(1, 9000)
PAGES = st.sampled_from([1, 16, 64])
DTYPES = st.sampled_from([*ELEMENT_BYTES])


@pytest.fixture
def published(published_records):
    """Every case that a study has, or a published record."""
    cases = {}
    for study in STUDIES.values():
        cases |= dict.fromkeys(study.cases)
        for machine in store.machines(study.name):
            cases |= dict.fromkeys(store.load(study.name, machine).case)
    return [case for case in cases if case is not None]


def test_every_published_case_is_printed_as_one_text_and_read_back(published):
    texts = {case.label: case for case in published}
    assert len(texts) == len(published) > 2000
    for text, case in texts.items():
        assert WORDS.fullmatch(text)
        assert read_case(text) == case


@st.composite
def lengths(draw):
    """The three fields of a case that say its lengths."""
    if draw(st.booleans()):
        tokens = draw(st.lists(SIZES, min_size=1, max_size=6))
        return len(tokens), max(tokens), "+".join(map(str, tokens))
    return draw(SIZES), draw(SIZES), draw(st.sampled_from(LENGTHS))


@st.composite
def decodes(draw):
    kv_heads = draw(st.integers(1, 8))
    spec = AttnSpec(
        num_qo_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128, 256])),
        page_size=draw(PAGES),
        dtype=draw(DTYPES),
        kv_dtype=draw(DTYPES),
        window=draw(st.integers(0, 4096)),
    )
    batch_size, kv_len, how = draw(lengths())
    context = draw(st.sampled_from([0, kv_len, 131_072]))
    return DecodeCase(
        spec,
        batch_size,
        kv_len,
        how,
        draw(st.integers(0, 9)),
        context,
    )


@st.composite
def extends(draw):
    case = draw(decodes())
    mode = draw(st.sampled_from([*EXTEND_MODES]))
    case = replace(case, spec=replace(case.spec, window=0))
    mask = draw(st.sampled_from(EXTEND_MODES[mode]))
    if mode == "prefill_ragged":
        return ExtendCase(
            replace(case, spec=replace(case.spec, page_size=1)),
            mode,
            case.kv_len,
        )
    if mode == "prefill_paged" and case.lengths not in LENGTHS and draw(st.booleans()):
        tokens = [int(length) for length in case.lengths.split("+")]
        queries = [draw(st.integers(1, length)) for length in tokens]
        return ExtendCase(
            case,
            mode,
            max(queries),
            mask,
            "+".join(map(str, queries)),
        )
    return ExtendCase(case, mode, draw(st.integers(1, case.kv_len)), mask)


@st.composite
def latents(draw):
    spec = MlaSpec(
        num_qo_heads=draw(st.integers(1, 128)),
        top_k=draw(st.sampled_from([0, 2048])),
        page_size=draw(PAGES),
        kv_format=draw(st.sampled_from([*MLA_TOKEN_BYTES])),
    )
    batch_size, kv_len, how = draw(lengths())
    q_len = 1 if spec.top_k else draw(st.integers(1, min(kv_len, 8)))
    context = draw(st.sampled_from([0, kv_len, 131_072]))
    seed = draw(st.integers(0, 9))
    return MlaCase(spec, batch_size, kv_len, how, seed, q_len, context)


@given(decodes() | extends() | latents())
def test_any_case_is_read_back_from_its_text(case):
    assert read_case(case.label) == case


@pytest.mark.parametrize(
    "text, words",
    [
        ("mode=prefill lens=9", "mode must be one of .*, got 'prefill'; did you mean prefill_"),
        ("heads=32/8", "lens must be given in the text of a call, got 'heads=32/8'"),
        ("lens=9", "pass either heads or model, got neither"),
        ("heads=32/8 lens=9 q_len=2", "q_len must be left out of mode=decode, got 2"),
        ("mode=mla heads=16/1 lens=9 dtype=fp8", "dtype must be left out of mode=mla, got float8"),
        ("mode=mla heads=16/1 lens=9 top_k=4", "top_k must be given with mode=sparse_mla, and"),
        ("mode=sparse_mla heads=16/1 lens=9", "top_k must be given with mode=sparse_mla, and"),
        ("mode=target_verify heads=8/1 lens=9", "q_len must be given in the text of a call"),
        (
            "mode=prefill_paged heads=8/1 lens=9 q_len=2 q_lens=2",
            "q_len must be left out with q_lens, got 2",
        ),
        ("mode=metadata builder=decode page=16 lens=9 swa=no", "swa must be yes or left out, got"),
        ("heads=33/8 lens=8", "num_qo_heads must be a multiple of num_kv_heads"),
        ("heads=32/8 lens=sorted:8", "lens must be drawn as one of .*, got 'sorted'"),
        ("32/8,d128,p16,b1", "a call must be words such as heads=32/8 .*, got '32/8,d128,p16,b1'"),
    ],
)
def test_other_text_is_refused(text, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        read_case(text)
