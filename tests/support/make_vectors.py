"""Ask FlashAttention-3 on this GPU for the metadata of random calls, and compare it with the model.

    python tests/support/make_vectors.py OUT.jsonl.gz --count 2400 --seed 0

Writes the vectors that `tests/core/test_splits.py` reads; says where model and library disagree.
"""

import argparse
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from support import drawn_calls

from attnlib.core.backends.base import installed_version
from attnlib.core.schedule import fa3, library
from attnlib.studies.scheduler_metadata import vectors
from attnlib.studies.scheduler_metadata.words import candidates

SHOWN = 20
DEVICE = "cuda"


def ask_library(call):
    """The line of one call: its words, or the refusal."""
    seq_lens, q_lens = call.lengths()
    cu_seqlens_q = None
    if q_lens is not None:
        sums = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        cu_seqlens_q = torch.from_numpy(sums).to(DEVICE)
    try:
        words = fa3.ask_library(call.facts, torch.from_numpy(seq_lens).to(DEVICE), cu_seqlens_q)
    except RuntimeError as error:
        return {**drawn_calls.to_line(call), "refused": str(error).splitlines()[0][:200]}
    return {**drawn_calls.to_line(call), "words": words.cpu().tolist()}


def header(seed, count):
    """What wrote the file."""
    gpu = torch.cuda.get_device_properties(0)
    supplier = library.supplier()
    return {
        "gpu": gpu.name,
        "num_sms": gpu.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "library": supplier,
        "library_version": installed_version(supplier),
        "hdim96": library.has_hdim96(),
        "seed": seed,
        "count": count,
    }


def report(found):
    """Print where the model is wrong; returns the number of calls that it got wrong."""
    words_of, alike, bad = Counter(), Counter(), []
    for call, words in found:
        if words is not None:
            verdict = vectors.compare(call, words)
            words_of.update(verdict.counts)
            alike.update(verdict.open_alike)
            if verdict.wrong:
                plan = vectors.plan_splits(call.facts, *call.lengths())
                ways = [way.blocks_per_sm for way in candidates(plan)]
                bad.append((verdict.wrong, drawn_calls.to_line(call), ways, words[:8].tolist()))
    print(f"calls {len(found)}, model wrong on {len(bad)}; words {dict(words_of)}")
    print("open words that came out as the model's default:", dict(alike))
    print(*(json.dumps(each, default=str) for each in bad[:SHOWN]), sep="\n")
    return len(bad)


def main():
    """Write the file and the report; exit status 1 if the model is wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    head = header(options.seed, options.count)
    calls = drawn_calls.draw_calls(options.seed, num_sms=head["num_sms"], hdim96=head["hdim96"])
    lines = [ask_library(call) for call in itertools.islice(calls, options.count)]
    drawn_calls.write(options.out, [head, *lines])
    refusals = Counter(line["refused"] for line in lines if "refused" in line)
    print(json.dumps(head))
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.2f} MiB; refusals {refusals}")
    return bool(report(vectors.read(options.out)[1]))


if __name__ == "__main__":
    sys.exit(main())
