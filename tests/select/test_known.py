"""Known problems: each holds at its example, and is silent once one fact of it is another."""

import re

import pytest
import yaml
from packaging.version import Version

from attnlib.core import AttnSpec
from attnlib.core.call_text import parse_lengths
from attnlib.select import Call, explain
from attnlib.select.known import (
    HOLDS,
    PROBLEMS,
    WHAT,
    Found,
    found,
    how_much,
    known_problems,
    load_problems,
    problem_lines,
    report,
    report_in_brief,
    sizes,
    truth,
)
from attnlib.select.rules import Group
from attnlib.select.situation import card_named, situation_from, situation_of

ALL = [*PROBLEMS.values()]
NAMES = [problem.id for problem in ALL]


def neighbours(problem):
    """Situations in which one fact of an entry's example is another: the fact, and the situation.

    A fact may have several values in a list."""
    for fact, values in problem.silent.items():
        for value in values if isinstance(values, list) else [values]:
            yield fact, situation_from({**problem.example, fact: value})


SILENT = [(problem, *pair) for problem in ALL for pair in neighbours(problem)]


def leaves(parts):
    """The single conditions of conditions and groups."""
    for part in parts:
        if isinstance(part, Group):
            yield from leaves(part.of)
        else:
            yield part


def holding_situations(problem):
    """The situations that an entry says it holds at."""
    yield situation_from(problem.example)
    if problem.also:
        yield situation_from({**problem.example, **problem.also})


def test_there_are_forty_causes_of_five_kinds():
    assert len(ALL) >= 40
    assert {problem.what for problem in ALL} == set(WHAT)


@pytest.mark.parametrize("problem", ALL, ids=NAMES)
def test_a_problem_holds_at_its_example(problem):
    for situation in holding_situations(problem):
        answer = found(problem, situation)
        assert answer is not None
        assert answer.missing == ()


@pytest.mark.parametrize(
    "problem, situation",
    [(problem, situation) for problem, _, situation in SILENT],
    ids=[f"{problem.id}-{fact}" for problem, fact, _ in SILENT],
)
def test_a_problem_is_silent_once_one_fact_is_another(problem, situation):
    assert found(problem, situation) is None


@pytest.mark.parametrize("problem", ALL, ids=NAMES)
def test_every_condition_of_a_problem_is_turned(problem):
    tried = [*holding_situations(problem)]
    tried += [situation for _, situation in neighbours(problem)]
    for leaf in leaves(problem.when):
        answers = {truth(leaf, situation.facts) for situation in tried}
        change = "a change in `silent` must turn it, one in `example` or `also` must meet it"
        assert answers >= {True, False}, f"{leaf}: {change}"


@pytest.mark.parametrize("problem", ALL, ids=NAMES)
def test_the_releases_of_a_problem_are_its_bounds(problem):
    for name, span in problem.releases.items():
        if span.since:
            assert span.has(span.since)
        if span.ends_in:
            assert span.has(span.ends_in) is False
            assert "until" not in str(span)
        else:
            assert span.has(span.until) is True
            assert span.has(Version("999")) is None, name


def test_a_newer_release_than_is_known_may_have_a_problem():
    problem = PROBLEMS["vllm-cap-of-32-splits"]
    newer = situation_from({**problem.example, "stack": "vllm==0.99.0"})
    answer = found(problem, newer)
    assert answer.verdict == "may hold"
    assert answer.missing == ("vllm after 0.33.0",)
    lens_are_missing = {name: fact for name, fact in problem.example.items() if name != "lens"}
    assert found(problem, situation_from({**lens_are_missing, "stack": "vllm==0.99.0"})) is None


def test_an_unknown_fact_is_named_by_what_a_user_gives():
    problem = PROBLEMS["sglang-fa3-split-cap-mla"]
    written = dict(problem.example)
    del written["lens"]
    assert found(problem, situation_from(written)).missing == ("kv_lens",)
    wall = PROBLEMS["sglang-page-table-context-wall"]
    without = {name: fact for name, fact in wall.example.items() if name != "context"}
    assert found(wall, situation_from(without)).missing == ("context",)


def test_a_fact_of_a_call_that_is_not_stated_is_unknown_and_a_switch_of_a_server_is_off():
    capture = PROBLEMS["sglang-fa3-capture-sm8x"]
    without = {name: fact for name, fact in capture.example.items() if name != "graph"}
    assert found(capture, situation_from(without)).missing == ("graph",)
    kept = PROBLEMS["flash-attn-3-schedule-kept"]
    without = {name: fact for name, fact in kept.example.items() if name != "schedule_kept"}
    assert found(kept, situation_from(without)) is None
    dp = PROBLEMS["sglang-schedule-dp-attention"]
    without = {name: fact for name, fact in dp.example.items() if name != "dp_attention"}
    assert found(dp, situation_from(without)).missing == ("dp_attention",)


def test_problems_that_hold_come_first():
    situation = situation_from(PROBLEMS["sglang-fa3-split-cap-gqa"].example)
    answers = known_problems(situation)
    verdicts = [answer.verdict for answer in answers]
    assert verdicts == sorted(verdicts)
    assert "sglang-fa3-split-cap-gqa" in {answer.problem.id for answer in answers}


def test_a_card_is_not_its_compute_capability():
    assert card_named("h20") == "h20"
    assert card_named("NVIDIA H200") == "h200"
    assert card_named("NVIDIA GeForce RTX 4090") == "rtx4090"
    assert card_named("sm90") == ""
    assert card_named("L40S") == "l40s"
    assert card_named("NVIDIA A10G") == "a10g"


def test_sizes_are_the_records_and_no_text_has_a_number_of_times():
    write = "write data/known/sizes.json (data/known/README.md, last section)"
    for problem in ALL:
        if problem.record:
            assert problem.id in sizes(), f"{problem.id}: {write}"
            lines = how_much(problem)
            if "loaded" in problem.record:
                assert lines.pop().startswith("under load: "), problem.id
            assert lines and all(line.startswith("on record: ") for line in lines), problem.id
        else:
            assert how_much(problem)
            assert problem.id not in sizes(), f"{problem.id} has no record: {write}"
        assert not re.search(r"\d times as|\d %", problem.says), problem.id
    assert set(sizes()) == {problem.id for problem in ALL if problem.record}


def test_every_thread_is_an_address_and_every_notebook_is_there(request):
    root = request.config.rootpath
    for problem in ALL:
        for link in problem.links:
            assert link.startswith("https://github.com/") or (root / link).exists(), link


def test_a_problem_is_a_few_lines():
    problem = PROBLEMS["vllm-sparse-mla-sm90"]
    answer = found(problem, situation_from(problem.example))
    text = "\n".join(problem_lines(answer))
    assert text.startswith("Slower since vLLM 0.30.0 (known to 0.33.0): ")
    assert "reported against it: " in text


@pytest.mark.parametrize(
    "name, words",
    [
        ("sglang-schedule-window", "Slower in SGLang (known to 0.5.23): "),
        (
            "sglang-glue-graph-frozen-plan",
            "Note, wrong output since SGLang 0.5.20 (known to 0.5.23): ",
        ),
        ("sglang-metadata-op-by-op", "Slower in SGLang (ended in 0.5.10): "),
        ("sglang-page-table-width", "Slower since SGLang 0.5.15 (ended in 0.5.17): "),
        ("torch-pageable-copies", "Blocked host: "),
    ],
)
def test_the_releases_of_a_problem_come_first(name, words):
    problem = PROBLEMS[name]
    first, *others = problem_lines(found(problem, situation_from(problem.example)))
    assert first.startswith(words)
    assert ("Size not measured. Source: SGLang 0.5.23, " in str(others)) == bool(problem.read)


def test_a_problem_without_a_setting_says_so_in_a_sentence():
    problem = PROBLEMS["vllm-schedule-two-windows"]
    lines = problem_lines(found(problem, situation_from(problem.example)))
    assert "  There is no setting for it." in lines
    assert not [problem.id for problem in ALL if problem.do.startswith("no setting")]


def test_a_problem_that_may_hold_says_what_to_pass():
    problem = PROBLEMS["sglang-eagle-gathers-context"]
    without = {
        name: value
        for name, value in problem.example.items()
        if name not in ("context", "eagle_topk")
    }
    (line,) = report([found(problem, situation_from(without))])
    assert line == (
        "Possible, if you confirm it: sglang-eagle-gathers-context "
        "(pass --server context=N --call eagle_topk=N)."
    )
    newer = found(problem, situation_from({**problem.example, "stack": "sglang==0.9.0"}))
    assert "(not known of sglang after 0.5.23)." in report([newer])[0]


RELEASE = re.compile(r"(SGLang|vLLM|FlashInfer) ([0-9]+[.][0-9]+[.][0-9]+(?:[.]post[0-9]+)?)")
RECOMMENDED = [
    (problem, package.lower(), release)
    for problem in ALL
    for package, release in RELEASE.findall(problem.do)
]


PLAIN = {"model": "other", "speculative": False}
"""A call without drafts, of a model of which no problem is known; an example may say otherwise."""


def ids_of(example):
    """The known problems that hold or may hold in a situation."""
    situation = situation_from({**PLAIN, **example})
    return {answer.problem.id for answer in known_problems(situation)}


@pytest.mark.parametrize(
    "problem, package, release",
    RECOMMENDED,
    ids=[f"{problem.id}-{release}" for problem, _, release in RECOMMENDED],
)
def test_a_release_that_is_recommended_has_no_other_problem(problem, package, release):
    there = ids_of({**problem.example, "stack": f"{package}=={release}"})
    new = there - ids_of(problem.example)
    assert {name for name in new if name not in problem.do} == set()


GOOD = {
    "what": "slower",
    "says": "It is slower.",
    "releases": {"sglang": {"until": "0.5.23"}},
    "when": ["mode is decode"],
    "read": "a file",
    "do": "nothing",
    "example": {"stack": "sglang==0.5.23", "mode": "decode", "gpu": "sm90"},
    "silent": {"mode": "mla"},
}
SLOW = {"url": "ftp://x", "says": "slow"}
BAD = {
    "says must be given": {"says": ""},
    "what must be one of slower, ": {"what": "strange"},
    "keys must be what, ": {"size": "2x"},
    "do must be text, got 2": {"do": 2},
    "no such fact in 'moon is full'": {"when": ["moon is full"]},
    "backend must be ": {"when": ["backend is fa9"]},
    "until or ends_in must be given": {"releases": {"sglang": {"since": "0.5.1"}}},
    "keys must be since, until, ends_in": {"releases": {"sglang": {"to": "0.5.1"}}},
    "Invalid version: 'new'": {"releases": {"sglang": {"until": "new"}}},
    "one of record, reported, read must be given": {"reported": [SLOW]},
    "url must be https": {"read": None, "reported": [SLOW]},
    "reported: says must be given": {"read": None, "reported": [{"url": "https://x"}]},
    "record: gpu must be given": {"read": None, "record": {"study": "x"}},
}


def written(folder, name, entries):
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(entries))


@pytest.mark.parametrize("words, change", BAD.items(), ids=BAD)
def test_an_entry_that_is_not_valid_is_named_with_its_file(words, change, tmp_path):
    entry = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    written(tmp_path, "parts", {"one": entry})
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        load_problems(tmp_path)
    assert str(caught.value).startswith("parts.yaml:2, one")
    assert "\n" not in str(caught.value)


def test_an_id_stands_in_one_file(tmp_path):
    written(tmp_path, "parts", {"one": GOOD})
    assert load_problems(tmp_path)["one"].component == "parts"
    written(tmp_path, "spares", {"one": GOOD})
    with pytest.raises(ValueError, match="spares.yaml:2, one: an id must be unique"):
        load_problems(tmp_path)


@pytest.mark.parametrize(
    "library, policy, problem",
    [
        ("vllm==0.33.0,flashinfer==0.6.2", "FLASHINFER", "flashinfer-fa3-decode-auto"),
        ("flashinfer==0.6.2", "auto", "flashinfer-fa3-decode-auto"),
        ("flashinfer==0.6.2", "fa3", "flashinfer-fa3-decode-by-name"),
    ],
)
def test_a_backend_of_an_engine_is_no_kernel_that_was_asked_for(library, policy, problem):
    layer = AttnSpec(32, 8, 128, 16)
    call = Call(cubins=False)
    choice = explain(
        layer,
        gpu="h100",
        library=library,
        policy=policy,
        call=call,
    )
    situation = situation_of(choice, layer, call, stated=["cubins"])
    assert situation.facts["by_name"] == (policy == "fa3")
    holding = {found.problem.id for found in known_problems(situation) if found.verdict == HOLDS}
    assert {name for name in holding if name.startswith("flashinfer-fa3")} == {problem}


def test_in_brief_problems_without_a_size_and_those_that_may_hold_are_counted():
    sized = Found(next(problem for problem in ALL if problem.has_size))
    unsized = Found(next(problem for problem in ALL if not problem.has_size))
    possible = Found(sized.problem, missing=("graph",))
    first, size, _, others, more = report_in_brief([sized, unsized, possible])
    assert first.endswith(f"[{sized.problem.id}]")
    assert size.startswith("  size: ")
    assert others.startswith("1 more without a measured size")
    assert more.startswith("1 more may hold, if you state more")
    alone = report_in_brief([unsized, unsized])
    assert len(alone) == 1
    assert alone[0].startswith("2 known problems without a measured size")


@pytest.mark.parametrize(
    "window, lens, holds",
    [
        (0, "8192x32", True),
        (1024, "8192x32", False),
        (1024, "8192x31,512", True),
        (512, "8192x31,100", False),
    ],
)
def test_a_window_in_which_all_requests_read_as_much_is_no_long_request(window, lens, holds):
    """With a window of 512 no request reads 1,000 tokens."""
    spec = AttnSpec(32, 8, 128, 16, window=window)
    call = Call(kv_lens=parse_lengths("lens", lens))
    choice = explain(
        spec,
        mode="decode",
        gpu="sm90",
        library="vllm==0.33.0",
        policy="TRITON_ATTN",
        call=call,
    )
    ids = {answer.problem.id for answer in known_problems(situation_of(choice, spec, call))}
    assert ("vllm-triton-unsplit" in ids) == holds


def test_a_fix_that_the_model_does_not_allow_is_not_named():
    """vLLM settles that Gemma 3 has image prefixes, with which FLASH_ATTN cannot run."""
    spec = AttnSpec(32, 16, 128, 16)
    call = Call(kv_lens=(8192,) * 16, model="gemma3")
    choice = explain(spec, mode="decode", gpu="sm90", library="vllm==0.33.0", call=call)
    known = known_problems(situation_of(choice, spec, call, stated=["model"]))
    (found_here,) = [each for each in known if each.problem.id.startswith("vllm-triton-unsplit")]
    assert found_here.problem.do.startswith("There is no setting for it. FLASH_ATTN takes no image")
    assert "FLASH_ATTN" not in choice.order


def test_the_release_between_is_said_to_be_no_fix():
    for name in ("gqa", "mla", "verify"):
        do = PROBLEMS[f"sglang-fa3-split-cap-{name}"].do
        assert "or SGLang 0.5.14 (0.5.15 copies wide page tables)" in do
        assert PROBLEMS[f"sglang-fa3-split-cap-{name}"].releases["sglang"].since > Version("0.5.15")
    for name in ("sglang-page-table-width", "sglang-page-table-width-page-one"):
        assert PROBLEMS[name].releases["sglang"].since == Version("0.5.15")
