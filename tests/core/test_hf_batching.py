"""Lengths and schedule once a step in transformers' decode path, over stand-ins of its parts."""

from types import SimpleNamespace

import pytest
import torch
from support import sglang_fakes as fakes

from attnlib.core.engines import arms, hf

WINDOWS = ((-1, -1), (-1, -1), (31, 0), (-1, -1), (31, 0))
"""Of each layer; those with a window are of a second group."""
LENS, WIDTH, BLOCK = torch.tensor([40, 7, 64]), 3, 32


class Cache(SimpleNamespace):
    block_size, num_key_value_heads, head_dim = BLOCK, 2, 4
    layer_index_to_group_indices = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (0, 2), 4: (1, 1)}
    key_cache = value_cache = [torch.zeros(9 * BLOCK, 2, 4) for _ in range(3)]

    def get_block_table_key(self, attend):
        return "page_table"


@pytest.fixture
def path(monkeypatch):
    """The module of its decode path, and what schedules were asked for, on the tried release."""
    asked = []

    def schedule(**told):
        asked.append(told | {"cache_seqlens": told["cache_seqlens"].tolist()})
        return torch.tensor([len(asked)])

    own = {"_paged_decode_forward": lambda *_, **__: "its own"}
    parts = {hf.PATH: own, "flash_attn_interface": {"get_scheduler_metadata": schedule}}
    monkeypatch.setattr(arms, "installed_version", lambda name: "5.17.0")
    module = fakes.installed(monkeypatch, parts)
    return SimpleNamespace(module=hf.import_module(hf.PATH), asked=asked, parts=module)


def step(module, lens, seen):
    """All layers of a step: q, k and v are those of transformers, [1, heads, batch, head_dim]."""
    q, kv = torch.randn(1, 8, 3, 4), torch.randn(1, 2, 3, 4)
    sums = torch.nn.functional.pad((lens + 1).cumsum(0), (1, 3), value=int((lens + 1).sum()))
    sums[0] = 0
    table = torch.arange(2 * 3 * WIDTH).view(2, 3, WIDTH)

    def attend(**told):
        seen.append(told)
        return told["q"] * 2, "its second value"

    for layer, window in enumerate(WINDOWS):
        part = SimpleNamespace(layer_idx=layer, scaling=0.5)
        given = (part, q, kv, kv, Cache(), sums, window, attend, table)
        out = module._paged_decode_forward(*given, s_aux="sinks")
        assert torch.equal(out, q[0].transpose(0, 1) * 2)


def test_layers_of_a_step_share_lengths_and_one_schedule_a_window(path):
    seen = []
    with hf.decode("once") as calls:
        step(path.module, LENS, seen)
        step(path.module, LENS + 1, seen)
    assert [each["cache_seqlens"].tolist() for each in seen] == [LENS.tolist()] * 5 + [
        (LENS + 1).tolist()
    ] * 5
    assert [int(each["scheduler_metadata"]) for each in seen] == [1, 1, 2, 1, 2, 3, 3, 4, 3, 4]
    first = {"batch_size": 3, "max_seqlen_q": 1, "max_seqlen_k": WIDTH * BLOCK, "num_heads": 8}
    first |= {"num_heads_k": 2, "headdim": 4, "cache_seqlens": LENS.tolist(), "page_size": BLOCK}
    first |= {"max_seqlen_k_new": 1, "causal": True, "window_size": (-1, -1)}
    assert path.asked[0] == first | {"qkv_dtype": torch.float32}
    assert [each["window_size"] for each in seen[:5]] == list(WINDOWS)
    assert seen[2]["page_table"].tolist() == [[9, 10, 11], [12, 13, 14], [15, 16, 17]]
    assert seen[0]["k_cache"].shape == (9, BLOCK, 2, 4) and seen[0]["s_aux"] == "sinks"
    assert seen[0]["q"].shape == (3, 1, 8, 4) and calls == {"metadata=once": 10}


def test_its_own_path_is_counted_and_put_back(path):
    own = path.module._paged_decode_forward
    with hf.decode("own") as calls:
        assert path.module._paged_decode_forward(1, q=2) == "its own"
    assert calls == {"metadata=own": 1} and path.module._paged_decode_forward is own
    with pytest.raises(KeyError), hf.decode("once"):
        raise KeyError
    assert path.module._paged_decode_forward is own


def test_what_cannot_be_run_says_so(path, monkeypatch):
    with pytest.raises(ValueError, match="arm must be one of own, once, got 'never'"):
        hf.decode("never").__enter__()
    monkeypatch.setattr(arms, "installed_version", lambda name: "5.6.0")
    with pytest.raises(RuntimeError, match=r"tried \(5.17.0\), got 5.6.0: pip install transfor"):
        hf.decode("once").__enter__()
