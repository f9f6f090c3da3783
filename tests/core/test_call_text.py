"""The words of a call: one grammar of lengths, one printed form, errors that name the word."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlib.core import AttnSpec, MlaSpec
from attnlib.core.call_text import DRAWN, CallText, Lens, parse_lengths, shortened

SOME_TOKENS = st.lists(st.integers(1, 40), min_size=1, max_size=40)
RUNS = st.lists(
    st.tuples(
        st.integers(1, 10**6),
        st.integers(1, 30),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(
    "text, tokens, printed",
    [
        ("8192x16", (8192,) * 16, "8192x16"),
        ("8192x2+300", (8192, 8192, 300), "8192x2+300"),
        ("8192,8192,300", (8192, 8192, 300), "8192x2+300"),  # the spelling of old
        ("100", (100,), "100"),
        ("1..9x3", (1, 5, 9), "1+5+9"),
        ("10..90x9", tuple(range(10, 100, 10)), "10..90x9"),
        ("10+20+30+40+50+60+70+80+90", tuple(range(10, 100, 10)), "10..90x9"),
    ],
)
def test_lengths_are_read_as_items_and_printed_in_one_form(text, tokens, printed):
    lens = Lens.read(text)
    assert lens.tokens == tokens
    assert lens.batch_size == len(tokens)
    assert lens.kv_len == max(tokens)
    assert str(lens) == printed


@given(SOME_TOKENS | RUNS.map(lambda runs: [size for size, count in runs for _ in range(count)]))
def test_any_lengths_are_printed_in_one_form_and_read_back(tokens):
    lens = Lens.of(tokens)
    assert lens.tokens == tuple(tokens)
    for each in (lens, Lens.listed(tokens)):
        assert Lens.read(str(each)) == each
        assert len(str(each)) <= len("listed:") + len("+".join(map(str, tokens)))


@given(
    st.sampled_from(DRAWN[:-1]),
    st.integers(1, 10**6),
    st.integers(1, 300),
)
def test_drawn_lengths_say_how_how_long_and_how_many(how, longest, count):
    lens = Lens(count, longest, how)
    assert Lens.read(f"{how}:{longest}x{count}") == Lens.read(str(lens)) == lens
    with pytest.raises(ValueError, match=f"lens must not be drawn here, got {how}:"):
        assert lens.tokens


def test_a_record_that_lists_equal_lengths_is_another_than_one_of_fixed_lengths():
    listed = Lens.read("listed:100x2")
    assert listed == Lens(2, 100, "100+100")
    assert Lens.read("100x2") == Lens.read("100+100") == Lens(2, 100, "fixed")
    assert listed.tokens == Lens.read("100x2").tokens


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "8192*16",
            "be TOKENS or TOKENSxCOUNT joined by +, such as .*, got '8192.16'",
        ),
        ("33++60", "be TOKENS or TOKENSxCOUNT joined by +"),
        ("0x4", "be >= 1, got '0x4'"),
        ("5x0", "be TOKENS or TOKENSxCOUNT joined by +"),
        ("9..1x4", "have a range from low to high"),
        ("1..9", "have a range from low to high of 2 requests or more"),
        ("1x99999", "be at most 65536 requests"),
        ("regged:8192x16", "be drawn as one of ragged, .*, got 'regged'; did you mean ragged[?]"),
        ("fixed:8192x16", "be drawn as one of ragged"),
        ("ragged:8192x15+300", "be such as ragged:8192x16, got 'ragged:8192x15.300'"),
    ],
)
def test_other_lengths_are_refused(text, words):
    words = words.replace("+", r"\+")
    with pytest.raises(ValueError, match=f"^lens must {words}"):
        Lens.read(text)


def test_a_batch_goes_with_one_length_or_range():
    assert parse_lengths("lens", "1..7", 4) == (1, 3, 5, 7)
    for text in ("8192x16", "1+2"):
        with pytest.raises(ValueError, match="batch must be left out where lens has the counts"):
            parse_lengths("lens", text, 4)


def test_words_stand_in_any_order_and_are_printed_in_one():
    said = CallText.read("lens=100x2  page=16 heads=32/8\n mode=decode")
    assert str(said) == "mode=decode heads=32/8 page=16 lens=100x2"
    assert CallText.read(str(said)) == said
    assert said.layer() == AttnSpec(32, 8, 128, 16)


def test_the_engines_words_for_dtypes_are_read():
    said = CallText.read("heads=32/8 dtype=bf16 kv_dtype=fp8")
    assert said.layer() == AttnSpec(32, 8, 128, 16, kv_dtype="float8_e4m3fn")
    assert CallText.read("heads=32/8 kv_dtype=auto").kv_dtype is None


def test_a_model_stands_for_its_heads():
    said = CallText.read("model=Llama-3.1-70B tp=8 page=32 window=64")
    assert said.layer() == AttnSpec(8, 1, 128, 32, window=64)
    assert said.layer(head_dim=64) == AttnSpec(8, 1, 64, 32, window=64)


def test_a_latent_layer_has_one_kv_head():
    said = CallText.read("mode=sparse_mla heads=16/1 top_k=2048 kv_format=fp8-656")
    assert said.latent_layer() == MlaSpec(16, 2048, 64, "fp8-656")
    with pytest.raises(ValueError, match="^heads must be QUERY/1 of MLA, such as 16/1, got '16/2'"):
        CallText.read("heads=16/2").latent_layer()


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "a call must be words such as heads=32/8 .*, got ''"),
        ("32/8", "a call must be words such as heads=32/8 .*, got '32/8'"),
        ("heads=", "a call must be words such as heads=32/8 .*, got 'heads='"),
        ("head_dims=64", "a word of a call must be one of mode, .*; did you mean head_dim[?]"),
        ("page_size=16", "a word of a call must be one of mode, .*; did you mean page[?]"),
        ("kv_len=9", "a word of a call must be one of mode, .*; did you mean lens[?]"),
        ("page=16 page=32", "page must be given once, got 'page=16 page=32'"),
        ("page=0", "page must be an integer >= 1, got 0"),
        ("page=x", "page must be an integer >= 1, got 'x'"),
        ("window=-1", "window must be an integer >= 0, got '-1'"),
        ("page=99999999999", r"page must be an integer in 1\.\.2147483647, got 99999999999"),
    ],
)
def test_other_words_are_refused_with_the_nearest_spelling(text, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        CallText.read(text)


def test_what_must_be_said_and_what_must_not_are_named():
    said = CallText.read("heads=32/8 window=64")
    with pytest.raises(ValueError, match="^lens must be given in the text of a call, got 'heads="):
        said.required("lens")
    with pytest.raises(ValueError, match="^window must be left out of mode=mla, got 64"):
        said.require_only("mode=mla", ["heads"])


def test_a_title_has_the_first_of_many_lengths():
    text = "heads=32/8 lens=" + "+".join(map(str, [7, 700] * 40))
    short = shortened(text)
    assert re.fullmatch(r"heads=32/8 lens=(7\+700\+)+7\+\.\.\.\(80 requests\)", short)
    assert len(short) < 70
    assert shortened("heads=32/8 lens=ragged:8192x16") == "heads=32/8 lens=ragged:8192x16"


def test_a_model_with_dp_attention_is_words_of_a_call():
    text = "model=Qwen3-32B tp=8 dp=2 lens=9x4"
    said = CallText.read(text)
    assert str(said) == text
    assert said.layer().heads == "16/2"
    assert said.of_latent_model is said


@pytest.mark.parametrize(
    "text, by_heads",
    [
        ("model=DeepSeek-V3 tp=8 lens=9x4", "mode=mla heads=16/1 lens=9x4"),
        ("mode=decode model=DeepSeek-V3 tp=8 dp=8 lens=9", "mode=mla heads=128/1 lens=9"),
        (
            "model=DeepSeek-V3.2 page=1 lens=9",
            "mode=sparse_mla heads=128/1 page=1 top_k=2048 lens=9",
        ),
    ],
)
def test_a_model_with_a_latent_cache_is_a_call_of_mla(text, by_heads):
    assert str(CallText.read(text).of_latent_model) == by_heads
