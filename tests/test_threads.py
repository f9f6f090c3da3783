"""Questions of public threads have the right answer; what is like them is told nothing of it."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from support.words import flat

from attnlib import cli
from attnlib.core import require_plan
from attnlib.core.fa2.library import FA2_INFO
from attnlib.core.fa2.words import WORD

HERE = Path(__file__).parent
CASES = yaml.safe_load((HERE / "threads.yaml").read_text())
FOLDERS = {"$T": HERE / "lab" / "traces", "$D": HERE.parent / "data" / "traces"}
MAY_END_WITH = (0, cli.KNOWN_PROBLEM)

pytestmark = pytest.mark.usefixtures("published_records")


@pytest.fixture
def told(capsys):
    def run(line):
        for name, folder in FOLDERS.items():
            line = line.replace(name, str(folder))
        assert cli.main(shlex.split(line)) in MAY_END_WITH
        return flat(capsys.readouterr().out)

    return run


def has(text, words):
    """Whether a text has one of words that stand between bars."""
    return any(word in text for word in words.split("|"))


@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_right_and_its_twin_silent(name, told):
    case = CASES[name]
    answer = told(case["run"])
    twin = told(case["twin"])
    for words in case["says"]:
        assert has(answer, words), words
    for words in case.get("unlike", case["says"]):
        assert not has(twin, words), words


def plan_of_eight(tail):
    """A plan of fa2 for a graph, without split KV: 66 blocks are launched, 8 entries written."""
    info = dict.fromkeys(FA2_INFO, 0)
    for place, name in enumerate(name for name in FA2_INFO if name.endswith("_offset")):
        info[name] = place * 1024
    info |= {"padded_batch_size": 66, "total_num_rows": 8, "cta_tile_q": 16}
    info |= {"enable_cuda_graph": 1, "split_kv": 0}
    words = torch.zeros(1 << 16, dtype=torch.int32)
    first = info["request_indices_offset"] // WORD
    words[first : first + 8] = torch.arange(8)
    words[first + 8 : first + 66] = tail
    return SimpleNamespace(
        _plan_info=[info[name] for name in FA2_INFO],
        _int_workspace_buffer=words.view(torch.uint8),
        _window_left=-1,
    )


def test_the_tail_of_a_plan_names_requests_that_there_are():  # FlashInfer #4002, #4794
    lens = torch.full((8,), 4096)
    words = r"request_indices in 0\.\.7 in every block that runs, got 123456789 in block 8 of 66"
    with pytest.raises(RuntimeError, match=words):
        require_plan(plan_of_eight(123456789), lens)
    require_plan(plan_of_eight(0), lens)
