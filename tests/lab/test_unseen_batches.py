"""What the advice loses on batches that no record had when its code was frozen.

Each was measured in one round by every backend that could run it. The first 24 were judged on
2026-11-28 by the mean over the nearest batches: in the mean and at worst FlashInfer lost 2.2 % and
22.2 %, SGLang 0.8 % and 6.6 %, vLLM 2.1 % and 13.7 %, where 2 % and 15 % were asked for. They have
taught since (`lab.expected`), so they judge no more; those with `judged` 2 are of another seed and
of other layers, and were judged once after that. Bounds are what came out.
"""

import json
from pathlib import Path

import pytest
from support.judge_advice import ENGINES, losses_of

from attnlib.lab.recorded import recorded_batches
from attnlib.measure.calls.cases import read_case

pytestmark = [pytest.mark.usefixtures("published_records"), pytest.mark.slow]
CAPTURE = Path(__file__).parents[2] / "data/captures/unseen_batches.jsonl"
BATCHES = [json.loads(line) for line in CAPTURE.read_text().splitlines()]
OUTCOMES = {
    ("flashinfer==0.7.2", 1): (24, 0.008, 0.124, 0.165),
    ("sglang==0.5.23", 1): (24, 0.004, 0.059, 0.107),
    ("vllm==0.33.0", 1): (17, 0.008, 0.048, 0.155),
}
"""Engine, judgement -> batches, the advice's mean and worst loss, the mean of the engine's pick."""


def judgement_of(batch):
    return batch.get("judged", 1)


@pytest.mark.parametrize(("engine", "judgement"), OUTCOMES)
def test_what_the_advice_loses_is_what_came_out(engine, judgement):
    count, mean, worst, mean_of_engine = OUTCOMES[engine, judgement]
    batches = [batch for batch in BATCHES if judgement_of(batch) == judgement]
    advised, by_engine = losses_of(engine, ENGINES[engine], batches)
    assert len(advised) == count
    assert advised.mean() == pytest.approx(mean, abs=0.0006)
    assert advised.max() == pytest.approx(worst, abs=0.0006)
    assert by_engine.mean() == pytest.approx(mean_of_engine, abs=0.001)


def test_every_judgement_is_held():
    judgements = {judgement_of(batch) for batch in BATCHES}
    assert {judgement for _, judgement in OUTCOMES} == judgements


def test_no_unseen_batch_is_on_record_and_no_layer_of_the_second_judgement_is():
    recorded = {
        case
        for draw in ("all rivals", "all layers", "h100")
        for case in recorded_batches(draw).case
    }
    layers = {case.spec for case in recorded}
    calls = [batch["call"] for batch in BATCHES]
    assert len(calls) == len({*calls}) >= 24
    for batch in BATCHES:
        case = read_case(batch["call"])
        assert case not in recorded
        if judgement_of(batch) == 2:
            assert case.spec not in layers
