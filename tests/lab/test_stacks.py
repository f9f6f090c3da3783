"""`advise` for several models and for two stacks: a row per kind of layers, what changes."""

import json
from dataclasses import replace

import pytest

from attnlib import cli
from attnlib.core.call_text import CallText
from attnlib.lab.stacks import Stacks, advise_stacks
from attnlib.run.releases import Version
from attnlib.select.known import PROBLEMS

pytestmark = [pytest.mark.usefixtures("published_records"), pytest.mark.slow]
UPGRADE = ("sglang==0.5.15", "sglang==0.5.23")
SKEWED = "32768x8+2048x56"
ALIKE = "8192x16"
CAP = "sglang-fa3-split-cap-mla"


def asked(*models, lens=SKEWED, libraries=UPGRADE, dp=8, **how):
    call = CallText.read(f"lens={lens} tp=8 dp={dp}")
    return advise_stacks(call, libraries, models=models, gpu="h100", **how)


def test_a_problem_that_comes_is_a_status_for_the_model_that_has_it():
    table = asked("DeepSeek-V3", "Llama-3.1-70B", dp=1).table().set_index("model")
    assert f"comes: {CAP}" in table["known problems"]["DeepSeek-V3"]
    assert CAP not in table["known problems"]["Llama-3.1-70B"]
    assert [found.problem.id for found in asked("DeepSeek-V3").holding] == [CAP]


def test_what_may_come_is_in_the_table_and_says_what_decides_it():
    hybrid = asked("Qwen3.5-35B-A3B", lens=ALIKE, libraries=("vllm==0.26.0", "vllm==0.33.0"), dp=1)
    assert hybrid.table()["known problems"][0] == "may come: vllm-decode-drop-0290"
    head = "- may be slower since vllm 0.29.0 (Qwen3.5-35B-A3B full), known to 0.29.0, of later"
    assert hybrid.notes[0].startswith(head)
    both = ("sglang==0.5.14", "sglang==0.5.16")
    open_one = asked("Llama-3.1-70B", lens=ALIKE, libraries=both, dp=1)
    assert "may come: sglang-page-table-width-page-one" in open_one.table()["known problems"][0]
    assert "if context (pass --server context=N)" in open_one.notes[0]
    stated = asked("Llama-3.1-70B", lens=ALIKE, libraries=both, dp=1, server={"context": 131072})
    assert "comes: sglang-page-table-width-page-one" in stated.table()["known problems"][0]
    assert open_one.holding == [] and stated.holding


def test_a_pick_that_cannot_run_is_said_and_a_status_where_it_is_new():
    both = ("flashinfer==0.6.2", "flashinfer==0.7.2")
    call = CallText.read(f"heads=32/8 head_dim=100 page=16 lens={ALIKE}")
    table = advise_stacks(call, both, gpu="h100")
    assert table.table()[both[1]].tolist() == ["fa2 (cannot run)"]
    assert not table.cannot_run, "neither can"
    assert advise_stacks(call, both[1:], gpu="h100").cannot_run


@pytest.mark.parametrize(
    "libraries, lens",
    [(UPGRADE, ALIKE), (("sglang==0.5.16", "sglang==0.5.23"), SKEWED)],
)
def test_lengths_that_lose_nothing_and_a_problem_of_both_are_none_that_comes(libraries, lens):
    assert asked("DeepSeek-V3", libraries=libraries, lens=lens).holding == []


def test_each_kind_of_layers_has_a_row_also_without_records_or_selector():
    table = asked("DeepSeek-V3.2", "gpt-oss-120b", "MiniMax-M3").table()
    kinds = table.layers.str.partition(" (")[0].tolist()
    assert kinds == ["sparse latent", "full", "window", "full", "block-sparse"]
    assert table[UPGRADE[1]].iloc[-1].startswith("its own class: MiniMaxSparseAttnBackend")


def test_one_library_lists_what_holds_and_what_may_hold():
    found = asked("DeepSeek-V3", "Llama-3.1-70B", libraries=UPGRADE[1:])
    assert CAP in found.table()["known problems"][0]
    ids = [each.problem.id for each in found.holding]
    assert ids == [CAP, "sglang-schedule-mla", "sglang-schedule-dp-attention"]
    assert any("Possible, if you confirm it: " in note for note in found.notes)


def test_a_problem_that_costs_no_model_anything_has_no_fix_as_with_one_model():
    one = str(asked("DeepSeek-V3", libraries=UPGRADE[1:], dp=1))
    both = str(asked("DeepSeek-V3", "Llama-3.1-70B", libraries=UPGRADE[1:], dp=1))
    for text in (one, both):
        assert "Not slower at this call, at others since SGLang 0.5.16" in text
        assert "Slower since SGLang 0.5.16" not in text and "SPLITS=bounded" not in text
        assert "the fix is slower (speedup 0.92)" in text


def test_a_fix_names_the_model_that_it_is_for_where_another_gains_nothing():
    first, *_ = asked("DeepSeek-V3", libraries=UPGRADE[1:], dp=8).rows
    last, *_ = asked("DeepSeek-V3", libraries=UPGRADE[1:], dp=1).rows
    rows = [replace(last, layers="TP"), replace(first, layers="DP")]
    text = " ".join(str(Stacks(UPGRADE[1:], SKEWED, "h100", rows)).split())
    assert "Slower since SGLang 0.5.16" in text
    assert "fix of DeepSeek-V3 DP: ATTNLIB_SGLANG_SPLITS=bounded" in text
    assert "DeepSeek-V3 TP: on record of this call the fix is slower" in text


def test_problems_that_stay_have_a_line_and_their_size_and_fix_in_details():
    both = ("vllm==0.19", "vllm==0.33")
    call = CallText.read(f"lens={SKEWED}")
    table = advise_stacks(call, both, models=["Gemma-3-27B"], gpu="h100")
    said = " ".join(str(table).split())
    assert "In both releases (fixes: --details): vllm-triton-unsplit-images: median slow" in said
    assert "fix: " not in said
    assert "- stays: Slower in vLLM" in table.details
    assert "median slowdown" in table.details and "There is no setting for it." in table.details


def test_a_problem_that_comes_is_none_of_both_releases():
    _, _, stays = str(asked("DeepSeek-V3")).partition("In both releases")
    stays, _, _ = stays.partition("DeepSeek-V3 latent")
    assert "sglang-schedule-mla: " in stays and CAP not in stays


def test_the_shell_prints_details_of_two_stacks(capsys):
    line = "--diff vllm==0.19 vllm==0.33 --gpu h100 --model Gemma-3-27B --lens 8192x16"
    cli.main(["advise", *line.split(), "--details"])
    assert "- stays: Slower in vLLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, status, words",
    [
        (f"--diff {' '.join(UPGRADE)} --model DeepSeek-V3,Qwen3-32B --lens {SKEWED}", 4, CAP),
        (f"--diff {' '.join(UPGRADE)} model=DeepSeek-V3 tp=8 lens={SKEWED}", 0, CAP),
        (f"--diff {' '.join(UPGRADE)} heads=32/8 lens={ALIKE}", 0, "32/8 heads, head_dim 128"),
        (f"--engine {UPGRADE[1]} --model Qwen3-8B --model Qwen3-32B --lens {ALIKE}", 0, "32B"),
        ("--engine vllm==0.33.0 model=Gemma-3-27B,Qwen3-32B lens=8192x16", 4, "vllm-triton-un"),
    ],
)
def test_the_shell_takes_models_with_commas_again_and_in_a_text(line, status, words, capsys):
    assert cli.main(["advise", "--gpu", "h100", *line.split()]) == status
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, words",
    [
        (f"--diff {UPGRADE[0]} vllm==0.33.0 heads=8/1 lens={ALIKE}", "of one library"),
        (f"--diff {' '.join(UPGRADE)} --engine vllm==0.33.0 heads=8/1 lens=9", "left out with"),
        (f"--diff {' '.join(UPGRADE)} --measure heads=8/1 lens=9", "--measure must be left out"),
        (f"--diff {' '.join(UPGRADE)} --heads 8/1", "--lens must be given, tokens"),
        (f"--diff {' '.join(UPGRADE)} --model Qwen3-8B", "--lens must be given, tokens"),
        (f"--diff {' '.join(UPGRADE)}", "a call must be given, such as heads="),
        ("--model Qwen3-8B,Qwen3-9B --lens 9", "did you mean|model must be"),
        (
            f"--diff {UPGRADE[0]} {UPGRADE[0]} --json --model Qwen3-8B --lens 9",
            "two releases, both",
        ),
        (
            f"--diff {' '.join(UPGRADE)} --backend trtllm_mha --lens 9 "
            "--model Qwen3-8B,DeepSeek-V3.2",
            "DeepSeek-V3.2: backend of sglang in mode sparse_mla must be",
        ),
        (" ".join(UPGRADE), f"say --diff {' '.join(UPGRADE)}"),
        (f"--diff {' '.join(UPGRADE)} model=Qwen3-8B mode=prefill_paged lens=9", "mode decode"),
    ],
)
def test_wrong_use_is_one_line(line, words, fails):
    line = fails("advise", *line.split())
    assert any(word in line for word in words.split("|")), line


def test_explain_of_two_releases_names_the_option_that_takes_them(fails):
    assert f"say --diff {' '.join(UPGRADE)}" in fails("explain", *UPGRADE)


def test_json_has_the_rows_and_the_problems_of_each_stack(capsys):
    options = [
        *UPGRADE,
        "--model",
        "DeepSeek-V3",
        "--tp",
        "8",
        "--dp",
        "8",
        "--lens",
        SKEWED,
        "--json",
    ]
    assert cli.main(["advise", "--gpu", "h100", "--diff", *options]) == 4
    data = json.loads(capsys.readouterr().out)
    ids = {library: {row["id"] for row in data["known"][library]} for library in UPGRADE}
    assert CAP in ids[UPGRADE[1]] - ids[UPGRADE[0]]
    assert data["rows"][0]["model"] == "DeepSeek-V3"


def of_llama(*both):
    call = CallText.read("lens=32768+2048x63")
    return advise_stacks(call, both, models=["Llama-3.1-8B"], gpu="h100")


def test_a_known_problem_of_a_faster_pick_is_no_status():
    found = of_llama("flashinfer==0.6.2", "flashinfer==0.7.2")
    assert "comes: flashinfer-fa2-unsplit" in found.table()["known problems"][0]
    assert found.notes[0].startswith("- faster by the new pick (Llama-3.1-8B full): by ")
    assert "- slower than the new pick could be (Llama-3.1-8B full)" in found.notes[1]
    assert found.holding == []
    back = of_llama("flashinfer==0.7.2", "flashinfer==0.6.2")
    assert [each.problem.id for each in back.holding] == ["flashinfer-fa3-decode-auto"]
    assert back.notes[0].startswith("- slower by the new pick (Llama-3.1-8B full): by ")
    assert "a slowdown of" in back.notes[0] and "slower since" in back.notes[1]


def test_another_problem_than_that_of_the_faster_pick_stays_a_status():
    (row,) = of_llama("flashinfer==0.6.2", "flashinfer==0.7.2").rows
    assert row.outweighed_by(PROBLEMS["flashinfer-fa2-unsplit"])
    assert not row.outweighed_by(replace(PROBLEMS["flashinfer-fa2-unsplit"], what="wrong output"))
    assert not row.outweighed_by(PROBLEMS[CAP])


def said(capsys, line, status):
    """What the command says in one line of single blanks, with the status that it must have."""
    assert cli.main(["advise", "--gpu", "h100", *line.split()]) == status
    return " ".join(capsys.readouterr().out.split())


BROKEN = "--diff flashinfer==0.5.3 flashinfer==0.6.2 --tp 8 --kv-dtype fp8 --lens 8192x16"


def test_an_upgrade_that_breaks_a_call_says_so_first_and_nothing_ends(capsys):
    text = said(capsys, f"{BROKEN} --model Llama-3.1-70B", 4)
    _, _, first = text.partition("lens=8192x16 ")
    assert first.startswith("- Llama-3.1-70B full: the new pick cannot run the call, which ran be")
    assert "an FP8 cache needs an FP8 query: the module does not compile." in first
    assert "- fix: backend fa2, or " in first and "or stay with flashinfer==0.5.3" in first
    assert "ended" not in text and "ends" not in text
    assert "Exit status 4: Llama-3.1-70B full: the new pick cannot run the call" in text


def test_what_is_named_in_place_of_a_pick_that_cannot_run_can_run(capsys):
    assert "backend vllm" not in said(capsys, f"{BROKEN} --model Llama-3.1-70B", 4)
    pinned = f"{BROKEN} --model Llama-3.1-70B --backend fa2"
    assert "cannot run" not in said(capsys, pinned, 0)


def test_an_upgrade_that_mends_a_call_is_no_status(capsys):
    line = f"--diff flashinfer==0.6.2 flashinfer==0.7.2 --kv-dtype fp8 --lens {SKEWED}"
    text = said(capsys, f"{line} --model Gemma-3-27B", 0)
    assert "the old pick could not run the call, the new one can: fa3: an FP8 cache" in text
    assert "- slower than the new pick could be (Gemma-3-27B full)" in text
    assert "by the new pick" not in text
    assert "flashinfer-fa2-unsplit comes, but the old pick could not run the call" in text


def test_a_window_shorter_than_the_requests_has_no_speedup_and_a_full_layer_has_one():
    both = ("flashinfer==0.6.2", "flashinfer==0.7.2")
    found = asked("Gemma-3-27B", "gpt-oss-120b", libraries=both, dp=1)
    speedups = found.table().speedup.tolist()
    assert speedups[0].endswith("(H200)") and float(speedups[0].split()[0]) > 1
    assert speedups[1:] == ["not on record"] * 3
    text = " ".join(str(found).split())
    assert "- speedup not on record (Gemma-3-27B window): No batch has a window or sinks" in text
    assert "No batch near it is on record of head_dim 64" in text
    (faster,) = [note for note in found.notes if "faster by the new pick" in note]
    assert "(Gemma-3-27B full)" in faster and "Confidence: low, the nearest batch" in faster


def test_what_records_of_full_layers_say_of_a_problem_is_not_said_of_a_window():
    found = asked("Gemma-3-27B", libraries=("vllm==0.33.0",), lens="32768x8+2048x120", dp=1)
    (window,) = [row for row in found.rows if row.layers.startswith("window")]
    assert not any(each.here for each in window.answers[0].known)


@pytest.mark.parametrize("lens", [SKEWED, ALIKE])
def test_sparse_layers_of_one_model_say_what_runs_and_that_no_times_are_on_record(lens, capsys):
    line = f"--engine vllm==0.33.0 model=DeepSeek-V3.2 tp=8 lens={lens}"
    text = said(capsys, line, 0)
    assert "FLASH_ATTN_MLA_SPARSE" in text and "No times of the engine's builds are on" in text
    assert "Nearest records" not in text and "MlaSpec" not in text


def test_a_new_pick_of_sparse_layers_is_not_on_record():
    found = asked("DeepSeek-V3.2", libraries=("vllm==0.19", "vllm==0.33"), dp=1)
    assert found.table().speedup.tolist() == ["not on record"]
    assert "Nearest records" not in str(found)


def test_json_of_a_diff_has_lists_of_problems_and_the_status_with_its_reason(capsys):
    line = f"--diff {' '.join(UPGRADE)} --tp 8 --dp 8 --lens {SKEWED} --json --gpu h100"
    assert cli.main(["advise", "--model", "DeepSeek-V3", *line.split()]) == 4
    data = json.loads(capsys.readouterr().out)
    for part in (data, data["rows"][0]):
        assert part["comes"] == [CAP] and part["ends"] == []
        assert "sglang-schedule-mla" in part["stays"] and CAP not in part["stays"]
    assert data["status"] == 4
    assert data["reason"] == f"{CAP} comes (DeepSeek-V3 latent)"


def test_details_of_a_diff_have_sources_and_sizes_of_what_ended(capsys):
    line = f"--diff flashinfer==0.6.2 flashinfer==0.7.2 model=Llama-3.1-8B lens={SKEWED}"
    short = said(capsys, line, 0)
    whole = said(capsys, f"{line} --details", 0)
    for word in ("FlashInfer #2148", "fa3_decode_regression, NVIDIA H200"):
        assert word in whole and word not in short


def test_a_problem_that_may_be_in_the_newer_stack_does_not_end():
    (row,) = asked("DeepSeek-V3", libraries=UPGRADE).rows
    assert row.problems["ends"] == []
    swapped = replace(row, answers=row.answers[::-1], stack={"sglang": Version("0.5.15")})
    assert swapped.problems["ends"] == [CAP]
    newer = replace(swapped, stack={"sglang": Version("9.9")})
    assert newer.problems["ends"] == [] and newer.problems["may stay"] == [CAP]
