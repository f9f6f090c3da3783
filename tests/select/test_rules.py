"""Files of rules: read as they are written, and refused where nobody understands them."""

import pytest
from packaging.version import Version

from attnlib.core import AttnSpec
from attnlib.core.releases import read_releases
from attnlib.select import LIBRARIES, MODES, Call
from attnlib.select.facts import facts_of
from attnlib.select.libraries import load_libraries
from attnlib.select.rules import COMPARISONS, Condition, Group, conditions

FILE = """\
library: toy
package: sgl-flash-mla
backends: {decode: plain quick}
policies:
  auto:
    decode:
      - {choose: quick, when: [gpu is sm90], why: it is quick, source: toy.py}
      - {choose: plain, why: it runs anywhere, source: toy.py}
limits:
  - {cannot: quick, when: [head_dim not in 64 128], why: "64 or 128", source: toy.py}
"""
LAYER = AttnSpec(32, 8, 128, 16)


@pytest.fixture
def read(tmp_path):
    def load_text(text):
        (tmp_path / "toy.yaml").write_text(text)
        return load_libraries(tmp_path)["toy"]

    return load_text


def facts(spec=LAYER, **call):
    return facts_of(
        spec,
        Call(**call),
        mode="decode",
        gpu="sm90",
        release=Version("1"),
    )


def picks(rows):
    """What each row of a table would choose, best first."""
    return [" > ".join(row.then) for row in rows]


def test_a_file_becomes_a_library(read):
    toy = read(FILE)
    assert toy.releases == tuple(read_releases("sgl-flash-mla"))
    assert toy.modes == ("decode",)
    assert picks(toy.policies["auto"]["decode"]) == ["quick", "plain"]
    odd = AttnSpec(32, 8, 96, 16)
    (limit,) = toy.limits_of("quick", facts(odd))
    assert limit.why == "64 or 128"
    assert not toy.limits_of("quick", facts())


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("gpu is sm90", "gpus is sm90", "auto, decode, row 1: no such fact in 'gpus is sm90'"),
        ("gpu is sm90", "gpu has sm90", "1: no such comparison in 'gpu has sm90'; there are is"),
        ("gpu is sm90", "gpu is sm91", "gpu must be sm75, sm80, .*, got 'sm91'"),
        ("gpu is sm90", "gpu is sm90 sm100", "is takes one value"),
        ("gpu is sm90", "heads >= few", "heads must be a number, got 'few'"),
        ("gpu is sm90", "head_dims is wide", "head_dims must be a number, got 'wide'"),
        ("gpu is sm90", "since spring", "Invalid version: 'spring'"),
        ("[gpu is sm90]", "[{all: [graph]}]", "must be text, a list or"),
        ("choose: quick", "choose: fast", "row 1: no such backend: fast"),
        ("choose: quick, ", "", "row 1: choose must name a backend"),
        ("why: it is quick, ", "", "row 1: why must be given"),
        (", source: toy.py", "", "row 1: source must be given"),
        ("why: it is quick", "reason: it is quick", "keys must be when, choose, .*, got reason"),
        ("{choose: plain", "{when: [graph], choose: plain", "the last row must have no condition"),
        ("{choose: plain", "{sets: {speed: 1}, choose: plain", "row 2: no such fact: speed"),
        ("    decode:\n", "    decoding:\n", "modes must be of decode, prefill_paged"),
        ("head_dim not in 64", "head_dim not of 64", "limits, row 1: no such comparison"),
        ("cannot: quick", "cannot: fast", "limits, row 1: no such backend: fast"),
        ("library: toy\n", "", ":1: library must be given"),
        ("package:", "versions:", "keys must be library, .*, got versions"),
        ("package: sgl-flash-mla", "package: toy", ":1: package must be one of .*, got 'toy'"),
    ],
)
def test_what_nobody_understands_is_refused_with_file_and_row(old, new, message, read):
    assert old in FILE
    with pytest.raises(ValueError, match=f"toy.yaml.*{message}"):
        read(FILE.replace(old, new, 1))


def test_a_row_with_rows_gives_them_what_it_says_itself(read):
    block = """\
      - when: [graph]
        source: toy.py
        rest: [quick, plain]
        rows:
          - {choose: plain, when: [sinks], why: sinks}
          - {why: no sinks, source: other.py}
"""
    toy = read(FILE.replace("    decode:\n", f"    decode:\n{block}"))
    table = toy.policies["auto"]["decode"]
    assert picks(table[:2]) == ["plain > quick", "quick > plain"]
    assert [row.source for row in table[:2]] == ["toy.py", "other.py"]
    assert [c.fact for c in table[0].when] == ["graph", "sinks"]


def test_a_document_adds_to_the_library_that_it_names(read):
    more = FILE.replace("auto:", "engine:").replace("decode: plain quick", "mla: quick")
    toy = read(f"{FILE}---\n{more.replace('package: sgl-flash-mla', 'by_rule_only: odd')}")
    assert list(toy.policies) == ["auto", "engine"]
    assert set(toy.backends) == {"decode", "mla"}


GRAPH = Condition("graph", "is", True)
ONE_VALUE = [op for op in COMPARISONS if op not in ("in", "not in")]


@pytest.mark.parametrize(
    "written, read_as",
    [
        ("fp8_kv", Condition("fp8_kv", "is", True)),
        ("not fp8_kv", Condition("fp8_kv", "is", False)),
        ("work <= 2_097_152", Condition("work", "<=", 2**21)),
        ("head_dims in 64/64 192/128", Condition("head_dims", "in", ("64/64", "192/128"))),
        ({"any": ["graph"]}, Group("or", (GRAPH,))),
        *((f"heads {op} 8", Condition("heads", op, 8)) for op in ONE_VALUE),
    ],
)
def test_a_condition_is_read_as_it_is_written(written, read_as):
    assert conditions(written) == (read_as,)


def test_nested_lists_are_all_of_them_and_any_is_one():
    either = {"any": ["sinks", ["heads is 1", "not causal"]]}
    one, group = conditions([["graph"], either])
    assert one.fact == "graph"
    assert str(group) == "(with attention sinks or (heads is 1 and without a causal mask))"
    assert not group.holds(facts())
    assert group.holds(facts(sinks=True))
    assert group.miss(facts()) == f"needs {group}"


@pytest.mark.parametrize(
    "written, why",
    [
        ("not tensor_cores", "only without tensor cores; this call has them"),
        ("not fp8_query", "only without an FP8 query; this call has one"),
        ("not cudnn", "only without cuDNN; this call has it"),
        ("graph", "only with a CUDA graph; this call is without"),
        ("gpu in sm80 sm89", "needs gpu in sm80, sm89; it is sm90"),
    ],
)
def test_a_condition_says_in_words_why_it_does_not_hold(written, why):
    (condition,) = conditions(written)
    assert condition.miss(facts(AttnSpec(32, 8, 128, 16, "float8_e4m3fn"))) == why


def test_what_an_engine_calls_is_a_release_and_a_policy_of_flashinfer_which_has_every_mode():
    flashinfer = LIBRARIES["flashinfer"]
    assert flashinfer.modes == MODES
    for library in LIBRARIES.values():
        for called in library.calls.values():
            assert called.library.removeprefix("flashinfer==") in flashinfer.releases
            assert called.policy in flashinfer.policies
    # Mini-SGLang, which has no releases, calls the newest.
    (called,) = LIBRARIES["mini-sglang"].calls.values()
    assert called.library == f"flashinfer=={flashinfer.releases[-1]}"
