"""FlashInfer's own wrappers, asked for drawn calls on a CPU: the answers in data/vectors.

Asked by `engine_selectors`. How a wrapper is planned without a GPU is in `flashinfer_wrappers`.
"""

import importlib
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from packaging.version import Version
from support.flashinfer_wrappers import as_if_on, installed, resolve

from attnlib.core import AttnSpec
from attnlib.select import GPUS, Call

LENGTH_OF_DRAW = 150
FP8 = "float8_e4m3fn"
DTYPES = (
    ("bfloat16", ""),
    ("float16", ""),
    (FP8, FP8),
    ("bfloat16", FP8),
    (FP8, "bfloat16"),
)
HEAD_DIMS = (64, 80, 96, 128, 128, 256, 512)
HEADS = (
    (32, 8),
    (8, 8),
    (8, 1),
    (28, 4),
    (64, 8),
    (64, 4),
    (96, 8),
    (4, 1),
    (48, 8),
    (16, 16),
)
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


WORK_HEADS = (4, 8, 16, 17, 20, 31, 32, 63, 64, 80, 96, 127, 128, 256)
WORK_QUERIES = (1, 1, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 32, 33, 127, 128, 512)
WORK_BATCHES = (1, 2, 3, 7, 16, 31, 32, 64, 96, 100, 256)
WORK_LENGTHS = (
    *(16, 32, 33, 64, 128, 200, 256, 300, 512, 513, 1024, 1025, 2047, 2048, 2049, 4095, 4096),
    *(4097, 5120, 8191, 8192, 10240, 16384, 32767, 32768, 40960, 65536, 81919, 81920, 131072),
)
MOST_ROWS = 2**17
"""Rows of a query tensor that a draw makes."""
RAGGED = (
    (8, 8, 64),
    (16, 16, 128),
    (8, 8, 256),
    (32, 8, 128),
    (32, 32, 192),
    (8, 8, 96),
)


def edge_calls(folder, seed="edges", count=LENGTH_OF_DRAW):
    """As `drawn_calls`, around the bounds of the rules that ask for lengths."""
    release = folder.name
    draw = random.Random(f"flashinfer {release}, {seed}")
    newest = Version(release)
    for number in range(count * (8 if newest >= Version("0.7.1") else 1)):
        edges = (_mla_edge, _mla_edge, _mla_edge, _decode_edge, _ragged_edge)[number % 5]
        gpu, mode, layer, call = edges(draw, newest)
        yield {"release": release, "gpu": gpu, "mode": mode, "layer": layer, "call": call}


def orders(folder, seed="orders", count=6000):
    """Calls of MLA on Blackwell with the order in which the release's policy asks its backends."""
    sys.path.insert(0, str(folder))
    installed()
    policy = importlib.import_module("flashinfer.mla._batch_mla._auto_policy")
    draw = random.Random(f"flashinfer {folder.name}, {seed}")
    for _ in range(count):
        _, mode, layer, call = _mla_edge(draw, Version(folder.name))
        gpu = "sm100" if folder.name == "0.7.1" else draw.choice(("sm100", "sm103"))
        line = {
            "release": folder.name,
            "gpu": gpu,
            "mode": mode,
            "layer": layer,
            "call": call,
        }
        yield line | {"order": policy.ordered_sm100_backends(_asked(*layer_and_call(line)))}


def _asked(spec, call):
    """What the policy reads of a plan's arguments."""
    ends = torch.tensor([0, *call.q_lens]).cumsum(0)
    csr = SimpleNamespace(qo_indptr=ends, kv_len_arr=torch.tensor(call.kv_lens))
    return SimpleNamespace(
        csr=lambda: csr,
        num_heads=spec.num_qo_heads,
        causal=call.causal,
        lse_mode="base2" if call.base2_lse else "none",
        _use_cuda_graph=call.graph,
    )


def _lengths(draw, batch, length):
    """`batch` requests of a length, some of them of half of it."""
    short = draw.choice((0, 0, draw.randrange(batch)))
    return [length] * (batch - short) + [max(1, length // 2)] * short


def _mla_edge(draw, newest):
    batch = draw.choice(WORK_BATCHES)
    gpu = draw.choice(("sm100", "sm100", "sm103", "sm103", *GPUS))
    heads = draw.choice(WORK_HEADS)
    page = draw.choice((1, 16, 32, 64, 64, 64, 128))
    head_dim = draw.choice((576, 576, 576, 576, 512))
    dtypes = draw.choice(
        (
            *DTYPES,
            DTYPES[0],
            DTYPES[0],
            DTYPES[2],
        )
    )
    call = {"kv_lens": _lengths(draw, batch, draw.choice(WORK_LENGTHS))}
    longest = draw.choice(WORK_QUERIES)
    if batch * longest * heads > MOST_ROWS:
        longest = 1
    call["q_lens"] = _lengths(draw, batch, longest)
    call["causal"] = draw.random() < 0.6
    if draw.random() < 0.5:
        call |= {"graph": True, "block_tables": draw.random() < 0.8}
    for name, share in {"base2_lse": 0.2, "sinks": 0.08}.items():
        if draw.random() < share:
            call[name] = True
    if draw.random() < 0.1:
        call["packed"] = False
    return gpu, "mla", [heads, 1, head_dim, page, *dtypes], call


def _decode_edge(draw, newest):
    batch = draw.choice((1, 7, 8, 16, 32, 64))
    gpu = draw.choice(("sm90", "sm100", "sm100", "sm103", *GPUS))
    heads = draw.choice(
        (
            (64, 8),
            (32, 4),
            (96, 8),
            (128, 8),
            (32, 32),
            (8, 1),
            (64, 1),
            (28, 4),
        )
    )
    head_dim = draw.choice((64, 128, 128, 128, 256, 512, 96))
    page = draw.choice((1, 4, 8, 16, 64))
    dtypes = draw.choice((*DTYPES, DTYPES[0], DTYPES[0]))
    call = {"kv_lens": _lengths(draw, batch, draw.choice((512, 4096)))}
    if newest >= Version("0.7.2"):
        call["q_lens"] = [draw.choice((1, 2, 2, 3, 4, 4, 5, 8))] * batch
    for name, share in RARE["decode"].items():
        if draw.random() < share / 2:
            call[name] = True
    if newest < Version("0.4.0"):
        call.pop("fixed_split", None)
    if call.get("graph") and draw.random() < 0.5:
        call["block_tables"] = True
    if draw.random() < 0.35:
        call["tensor_cores"] = False
    return gpu, "decode", [*heads, head_dim, page, *dtypes], call


def _ragged_edge(draw, newest):
    batch = draw.choice((1, 2, 7))
    gpu = draw.choice(("sm90", "sm100", "sm100", "sm103", "sm120", "sm120", "sm121", *GPUS))
    query, kv, head_dim = draw.choice(RAGGED)
    dtypes = draw.choice(
        (
            *DTYPES,
            DTYPES[0],
            DTYPES[0],
            DTYPES[1],
        )
    )
    call = {
        "kv_lens": _lengths(
            draw,
            batch,
            draw.choice((128, 255, 256, 300, 4096)),
        )
    }
    if head_dim == 192:
        call["head_dim_vo"] = 128
    if draw.random() < 0.3:
        call["q_lens"] = [draw.choice((1, 2, 64))] * batch
    for name, share in RARE["prefill_ragged"].items():
        if draw.random() < share / 2:
            call[name] = True
    if draw.random() < 0.5:
        call["fp16_qk"] = True
    if "custom_mask" in call:  # in a graph it needs a buffer
        call.pop("graph", None)
    return gpu, "prefill_ragged", [query, kv, head_dim, 16, *dtypes], call


def drawn_calls(folder, seed="third draw", count=LENGTH_OF_DRAW):
    """Layers and calls of a release, by our names; what is usual goes unsaid.

    From 0.7.1 on MLA goes by work on Blackwell: four times as many calls, most of them so.
    """
    release = folder.name
    draw = random.Random(f"flashinfer {release}, {seed}")
    newest = Version(release)
    by_work = newest >= Version("0.7.1")
    for _ in range(count * (4 if by_work else 1)):
        mode = draw.choice(MODES)
        gpu = draw.choice(tuple(GPUS))
        if by_work and draw.random() < 0.6:
            mode = "mla"
            gpu = draw.choice(("sm100", "sm103"))
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
        heads = draw.choice(HEADS)
        head_dim = draw.choice((64, 80, 96, 128, 128, 256, 512))
        page = 16
        if mode == "mla":
            heads = (draw.choice((4, 8, 16, 20, 32, 64, 96, 128)), 1)
            head_dim = 576
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
