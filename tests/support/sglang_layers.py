"""SGLang's own FlashAttention backend of a release, hooked, with layers and steps it is run on.

What the library is asked for is kept, in place of attention.
"""

from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from support import sglang_code
from support.sglang_code import FLASH, AttentionType

from attnlib.engines import points, sglang, sglang_splits

RELEASE = "attnlib.engines.points.installed_version"
WIDE = 131_072
"""Tokens of the context of models whose splits are capped."""
MODES = {
    "decode": {"is_decode", "is_decode_or_idle"},
    "draft_decode": {"is_decode", "is_decode_or_idle"},
    "target_verify": {"is_target_verify", "is_extend"},
    "extend": {"is_extend"},
    "draft_extend_v2": {"is_draft_extend_v2", "is_extend"},
}
"""What is true of SGLang's forward modes."""
TOKENS = {"decode": 1, "draft_decode": 1, "target_verify": 4, "extend": 9, "draft_extend_v2": 4}
"""Query tokens of a request in each of them."""
GQA = {"tp_q_head_num": 32, "tp_k_head_num": 8, "head_dim": 128, "v_head_dim": 128}
MLA = {"tp_q_head_num": 128, "tp_k_head_num": 1, "head_dim": 576, "v_head_dim": 512}


class Mode:
    """A forward mode of SGLang."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, asked):
        return lambda *_, **__: asked in MODES[self.name]


def layer_of(shape, **own):
    """SGLang's RadixAttention of a layer, without a cache."""
    plain = {"sliding_window_size": -1, "is_cross_attention": False, "use_irope": False}
    plain |= {"attn_type": AttentionType.DECODER, "logit_cap": 0.0, "k_scale": None}
    plain |= {"tp_v_head_num": shape["tp_k_head_num"], "layer_id": 0, "scaling": 0.1}
    return SimpleNamespace(**shape | plain | own)


def step_of(mode, requests=64, longest=WIDE):
    """SGLang's ForwardBatch."""
    lens = torch.full((requests,), longest)
    spec = None if mode == "decode" else SimpleNamespace()
    given = {"seq_lens": lens, "seq_lens_cpu": lens, "req_pool_indices": torch.zeros_like(lens)}
    given |= dict.fromkeys(("encoder_lens", "out_cache_loc", "kv_loc_plan", "attn_cp_metadata"))
    given |= {"spec_algorithm": SimpleNamespace(is_uno=lambda: False)}
    given |= {"seq_lens_sum": requests * longest}
    given |= {"attn_attend_prefix_cache": None, "batch_size": requests, "spec_info": spec}
    positions = torch.zeros(requests * TOKENS[mode])
    return SimpleNamespace(forward_mode=Mode(mode), positions=positions, **given)


class Capped:
    """SGLang's own backend of a release, hooked; what the library is asked for by it."""

    def __init__(self, release, monkeypatch):
        self.asked = []
        self.raises = False

        def library(*, scheduler_metadata=None, **call):
            return self._library(scheduler_metadata=scheduler_metadata, **call)

        found = sglang_code.flash_of(release, library)
        self.made = found["FlashAttentionBackend"]
        self.metadata = found["FlashAttentionMetadata"]
        has_two = points.order(release) >= points.order("0.5.18")
        self.own = {"num_splits": 0} | ({"decode_num_splits": 0} if has_two else {})
        attributes = self._attributes
        self.made.__init__ = lambda self, **own: vars(self).update({**attributes(), **own})
        monkeypatch.setattr(RELEASE, lambda _: release)
        monkeypatch.setattr(sglang_splits, "sm_count", lambda _: 132)
        monkeypatch.setattr(sglang_splits, "sglang_build", lambda: "sglang")
        parts = sglang_code.parts() | {FLASH: found}
        self.engine = sglang_code.installed(monkeypatch, parts)
        self.setenv = monkeypatch.setenv

    def load(self, splits="", *, metadata="", **own):
        """A backend of SGLang's that is made with the plugin on."""
        for name, value in {"SPLITS": splits, "METADATA": metadata}.items():
            if value:
                self.setenv(f"ATTNLIB_SGLANG_{name}", value)
        sglang.register()
        self.engine.HookRegistry.apply_hooks()
        self.backend = self.made(**own)
        return self

    def call(self, mode, layer, *, graph=True, step=None):
        """Prepare a step, run one layer; the `num_splits` that the library got, words' first."""
        step, backend, self.asked[:] = step or step_of(mode), self.backend, []
        if mode in ("extend", "draft_extend_v2"):
            backend.forward_metadata = self._prefill(step, TOKENS[mode])
        elif graph:
            backend.init_forward_metadata_out_graph(step, in_capture=True)
        else:
            backend.init_forward_metadata(step)
        return self.attend(layer, step)

    def attend(self, layer, step):
        """Run one layer over the metadata that is there."""
        is_decode = step.forward_mode.is_decode()
        run = self.backend.forward_decode if is_decode else self.backend.forward_extend
        tokens = step.positions.numel()
        q = torch.zeros(1, dtype=torch.bfloat16).expand(
            tokens,
            layer.tp_q_head_num,
            layer.head_dim,
        )
        try:
            run(q, None, None, layer, step, save_kv_cache=False)
        finally:
            own = {name: getattr(self.backend, name) for name in self.own}
            assert own == self.own, "SGLang's numbers are back"
        return [call["num_splits"] for call in self.asked]

    def _library(self, **call):
        if self.raises:
            raise RuntimeError("out of memory")
        self.asked.append(call)
        value = call["q"] if call.get("qv") is None else call["qv"]
        output = torch.zeros(1).expand(value.shape)
        return (output, torch.zeros(1, 1)) if call.get("return_softmax_lse") else output

    def _words(self, batch_size, **call):
        self.asked.append({"batch_size": batch_size, **call})
        return torch.full(
            (1 + -(-batch_size // 4) * 4,),
            7,
            dtype=torch.int32,
        )

    def _prefill(self, step, tokens):
        """What a prefill leaves, of which the cap must not know."""
        ends = torch.arange(step.batch_size + 1, dtype=torch.int32) * tokens
        table = torch.zeros(1, 1, dtype=torch.int32).expand(step.batch_size, WIDE)
        facts = {"cache_seqlens_int32": step.seq_lens.int(), "page_table": table}
        return self.metadata(max_seq_len_q=tokens, cu_seqlens_q=ends, cu_seqlens_k=ends, **facts)

    def _attributes(self):
        requests = 64
        table = torch.zeros(1, 1, dtype=torch.int32).expand(64, WIDE)
        caches = torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16)
        key_value = (
            torch.zeros(1, 1, 8, 128),
            torch.zeros(1, 1, 8, 128),
        )
        pool = SimpleNamespace(
            get_key_buffer=lambda _: caches[0],
            get_kv_buffer=lambda _: key_value,
        )
        buffers = {
            "cache_seqlens": torch.zeros(requests, dtype=torch.int32),
            "cu_seqlens_q": torch.arange(requests + 1, dtype=torch.int32),
            "cu_seqlens_k": torch.zeros(requests + 1, dtype=torch.int32),
            "page_table": table,
            "page_table_draft_decode": table,
            "strided_indices": torch.arange(WIDE),
        }
        rows = SimpleNamespace(req_to_token=table)
        not_set = (
            *("use_mla", "has_local_attention", "is_prefill_aware_swa", "kv_cache_is_mxfp8"),
            *("_decode_uses_static_max_seqlen_k", "fa_skip_kv_cache", "has_swa", "has_softcap"),
            *("use_sliding_window_kv_pool", "needs_cpu_seq_lens", "is_encoder_decoder"),
            *("_disable_scheduler_metadata_precompute", "_unified_dense", "_unified_read"),
        )
        return {
            **dict.fromkeys(not_set, False),
            **dict.fromkeys(("local_attn_builder", "attention_chunk_size", "forward_metadata")),
            **self.own,
            **{"topk": 1, "speculative_step_id": 0, "speculative_num_steps": 3, "attn_cp_size": 1},
            **{"speculative_num_draft_tokens": 4, "fa_impl_ver": 3, "device": "cpu"},
            **{"kv_cache_dtype": torch.bfloat16, "kv_cache_dtype_str": "auto", "page_size": 1},
            **{"max_context_len": WIDE, "max_num_pages": WIDE, "head_dim": 128},
            **{"num_attention_heads": 32, "num_kv_heads": 8, "req_to_token": table},
            "full_cg_prefill_metadata": None,
            "kv_index_translator": MagicMock(reads_are_translated=False, is_translating=False),
            "kv_read_tables": None,
            "_unified_hooks": MagicMock(enabled=False),
            "token_to_kv_pool": pool,
            "req_to_token_pool": rows,
            "decode_cuda_graph_metadata": buffers,
            "target_verify_metadata": dict(buffers, cu_seqlens_q=buffers["cu_seqlens_q"] * 4),
            "_get_scheduler_metadata": self._words,
            "_sched_meta_buf": torch.zeros(1 + requests * 4, dtype=torch.int32),
        }
