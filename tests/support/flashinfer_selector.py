"""FlashInfer's own wrappers, asked for drawn calls on a CPU: the answers in data/vectors.

Asked by `engine_selectors`. How a wrapper is planned without a GPU is in `flashinfer_wrappers`.
"""

import random
import sys
from pathlib import Path

from packaging.version import Version
from support.flashinfer_wrappers import as_if_on, installed, resolve

from attnlib.core.spec import AttnSpec
from attnlib.select import GPUS, Call

LENGTH_OF_DRAW = 150
FP8 = "float8_e4m3fn"
DTYPES = (("bfloat16", ""), ("float16", ""), (FP8, FP8), ("bfloat16", FP8), (FP8, "bfloat16"))
HEAD_DIMS = (64, 80, 96, 128, 128, 256, 512)
HEADS = ((32, 8), (8, 8), (8, 1), (28, 4), (64, 8), (64, 4), (96, 8), (4, 1), (48, 8), (16, 16))
MODES = ("decode", "decode", "prefill_paged", "target_verify", "prefill_ragged", "mla", "mla")
RARE = {  # share of the calls of a mode that have a fact
    "decode": {"positions": 0.1, "window": 0.1, "softcap": 0.1, "fixed_split": 0.1, "graph": 0.3},
    "prefill_paged": {"positions": 0.15, "fp16_qk": 0.15, "custom_mask": 0.2, "window": 0.1},
    "target_verify": {"positions": 0.1, "custom_mask": 0.7, "softcap": 0.1},
    "prefill_ragged": {
        **{"positions": 0.1, "fp16_qk": 0.25, "custom_mask": 0.1, "window": 0.1},
        **{"softcap": 0.1, "sinks": 0.1, "graph": 0.3},
    },
    "mla": {"causal": 0.4, "graph": 0.4, "base2_lse": 0.2, "sinks": 0.1},
}
LONGEST = (16, 40, 200, 256, 300, 512, 1024, 2048, 4096, 4097, 8192, 32768, 131072)


def drawn_calls(folder, seed="third draw", count=LENGTH_OF_DRAW):
    """Layers and calls of a release, by our names; what is usual goes unsaid.

    From 0.7.1 on MLA goes by work on Blackwell: four times as many calls, most of them so.
    """
    release = folder.name
    draw, newest = random.Random(f"flashinfer {release}, {seed}"), Version(release)
    by_work = newest >= Version("0.7.1")
    for _ in range(count * (4 if by_work else 1)):
        mode, gpu = draw.choice(MODES), draw.choice(tuple(GPUS))
        if by_work and draw.random() < 0.6:
            mode, gpu = "mla", draw.choice(("sm100", "sm103"))
        if mode == "mla" and newest < Version("0.2.2"):
            mode = "decode"
        call = {name: True for name, share in RARE[mode].items() if draw.random() < share}
        if "custom_mask" in call:  # in a graph it needs a buffer
            call.pop("graph", None)
        if newest < Version("0.4.0"):
            call.pop("fixed_split", None)
        batch = draw.choice((1, 2, 7, 16, 31, 32, 100))
        longest = draw.choice(LONGEST if mode in ("decode", "mla") else LONGEST[:7])
        short = draw.randrange(batch)
        kv_lens = [longest] * (batch - short) + [max(1, longest // 2)] * short
        heads, head_dim, page = (
            draw.choice(HEADS),
            draw.choice((64, 80, 96, 128, 128, 256, 512)),
            16,
        )
        if mode == "mla":
            heads, head_dim = (draw.choice((4, 8, 16, 20, 32, 64, 96, 128)), 1), 576
            page = draw.choice((1, 32, 64, 64, 128))
            call = {"causal": False} | call
            call |= {"packed": False} if draw.random() < 0.2 else {}
            if by_work:
                longest_q = draw.choice((1, 1, 1, 2, 4, 8, 16, 128))
                few = draw.choice((0, 0, batch // 2))
                call["q_lens"] = [longest_q] * (batch - few) + [max(1, longest_q - 1)] * few
        elif mode == "decode":
            page = draw.choice((1, 8, 16, 64))
            call |= {"tensor_cores": False} if draw.random() < 0.2 else {}
            if newest >= Version("0.7.2"):
                call["q_lens"] = [draw.choice((1, 2, 4, 8))] * batch
        elif mode == "prefill_ragged":
            if newest >= Version("0.2.2") and draw.random() < 0.25:
                heads, head_dim, call["head_dim_vo"] = (32, 32), 192, 128
            if draw.random() < 0.2:
                call["q_lens"] = [1] * batch
        else:
            page = draw.choice((1, 16, 64))
            if mode == "target_verify":
                call["q_lens"] = [4] * batch
        if call.get("graph") and draw.random() < 0.5 and mode in ("decode", "mla"):
            call["block_tables"] = True
        yield {
            "release": release,
            "gpu": gpu,
            "mode": mode,
            "layer": [*heads, head_dim, page, *draw.choice(DTYPES)],
            "call": {"kv_lens": kv_lens, **call},
        }


def layer_and_call(line):
    """The `AttnSpec` and the `Call` of a line."""
    facts = {name: tuple(v) if isinstance(v, list) else v for name, v in line["call"].items()}
    return AttnSpec(*line["layer"]), Call(**facts)


def answer(line):
    """The backend that the wrapper takes, or why it takes none."""
    spec, call = layer_and_call(line)
    try:
        return {"answer": resolve(spec, call, mode=line["mode"])}
    except (ValueError, NotImplementedError) as error:
        return {"refused": str(error).split("\n")[0][:90]}


def answers(folder, lines):
    """Each call with its answer; the release that answers is that of the folder."""
    sys.path.insert(0, str(folder))
    installed()
    assert folder.resolve() in Path(sys.modules["flashinfer"].__file__).parents
    for line in lines:
        with as_if_on(line["gpu"]):
            yield line | answer(line)
