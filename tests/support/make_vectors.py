"""Ask FlashAttention-3 on this GPU for the metadata of random calls.

    python tests/support/make_vectors.py OUT.jsonl.xz --count 2400 --seed 0
    python tests/support/make_vectors.py OUT.jsonl.xz --steps --count 600 --most-requests 100

With `--steps` they are calls of full, window and MLA layers in decode and verification.
`tests/core/test_splits.py` reads the file, and says where model and library disagree.
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
from attnlib.core.schedule import flash_attn3, library

DEVICE = "cuda"


def ask_library(call):
    """The line of one call: its words, or the refusal."""
    seq_lens, q_lens = call.lengths()
    line = drawn_calls.to_line(call)
    cu_seqlens_q = None
    if q_lens is not None:
        sums = np.concatenate(
            [
                [0],
                np.cumsum(q_lens),
            ]
        ).astype(np.int32)
        cu_seqlens_q = torch.from_numpy(sums).to(DEVICE)
    try:
        words = flash_attn3.ask_library(
            call.facts, torch.from_numpy(seq_lens).to(DEVICE), cu_seqlens_q
        )
    except RuntimeError as error:
        return {**line, "refused": str(error).splitlines()[0][:200]}
    return {**line, "words": words.cpu().tolist()}


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
        "build": library.build(),
        "seed": seed,
        "count": count,
    }


def draw(options, head):
    """The calls that the options ask for, without end."""
    num_sms = head["num_sms"]
    build = head["build"]
    if not options.steps:
        return drawn_calls.draw_calls(
            options.seed,
            num_sms=num_sms,
            hdim96=head["hdim96"],
            build=build,
        )
    return drawn_calls.draw_step_calls(
        options.seed,
        num_sms=num_sms,
        build=build,
        most_requests=options.most_requests,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--most-requests", type=int, default=100)
    options = parser.parse_args()
    head = header(options.seed, options.count)
    if options.steps:
        head["most_requests"] = options.most_requests
    calls = draw(options, head)
    lines = [ask_library(call) for call in itertools.islice(calls, options.count)]
    drawn_calls.write(options.out, [head, *lines])
    refusals = Counter(line["refused"] for line in lines if "refused" in line)
    print(json.dumps(head))
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.2f} MiB; refusals {refusals}")


if __name__ == "__main__":
    main()
