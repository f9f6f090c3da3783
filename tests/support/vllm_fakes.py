"""Stand-ins for the few parts of vLLM 0.33.0 that the plugin hooks, and what it reads of others."""

import sys
from types import SimpleNamespace

import torch

from .library_fakes import PlannedWrapper
from .sglang_code import copies

FLASHINFER = "vllm.v1.attention.backends.flashinfer"
LENS = torch.tensor([33, 1, 60, 0], dtype=torch.int32)
PAGE = 16
ROWS = 4
READ = """
config.cache:CacheConfig cache_dtype num_gpu_blocks
config.model:ModelConfig dtype max_model_len
config.parallel:ParallelConfig decode_context_parallel_size prefill_context_parallel_size
config.parallel:ParallelConfig use_ubatching
config.vllm:VllmConfig parallel_config model_config cache_config speculative_config
v1.attention.backend:AttentionBackend get_name is_mla
v1.attention.backend:AttentionMetadataBuilder vllm_config kv_cache_spec layer_names
v1.attention.backend:CommonAttentionMetadata query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound
v1.attention.backend:CommonAttentionMetadata block_table_tensor
v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder aot_schedule
v1.attention.backends.flashinfer:FlashInferMetadataBuilder use_trtllm_decode_attention model_config
v1.attention.backends.flashinfer:FlashInferMetadataBuilder use_dcp enable_cuda_graph window_left
v1.attention.backends.flashinfer:FlashInferMetadataBuilder disable_split_kv
v1.attention.backends.mla.flashattn_mla:FlashAttnMLAMetadataBuilder fa_aot_schedule
v1.attention.backends.utils get_num_attention_heads_from_layers
v1.kv_cache_interface:AttentionSpec num_kv_heads head_size dtype kv_quant_mode
v1.kv_cache_interface:FullAttentionSpec sliding_window attention_chunk_size non_causal
v1.kv_cache_interface:KVCacheSpec block_size
v1.worker.utils:AttentionGroup backend kv_cache_spec layer_names metadata_builders
v1.worker.worker_base:WorkerBase rank
v1.worker.worker_base:WorkerWrapperBase worker
"""
"""A class or module of vLLM, and names of it that the hooks read."""


def batch(q_lens=(1, 1, 1, 0), lens=LENS):
    """A batch whose last request pads a graph."""
    return SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, *q_lens]).cumsum(0),
        seq_lens_cpu_upper_bound=lens,
        seq_lens=lens,
        block_table_tensor=torch.arange(ROWS * 6, dtype=torch.int32).view(ROWS, 6)[:, :4],
    )


class FullAttentionSpec(SimpleNamespace):
    num_kv_heads = 8
    head_size = 128
    block_size = PAGE
    dtype = torch.uint8
    sliding_window = attention_chunk_size = None
    non_causal = False
    kv_quant_mode = SimpleNamespace(name="FP8_PER_TENSOR")


class FlashInferMetadataBuilder:
    """A wrapper with a graph and one without, planned in every step."""

    use_trtllm_decode_attention = False
    window_left = -1
    use_dcp = False
    enable_cuda_graph = True
    disable_split_kv = False

    def __init__(self, kv_cache_spec, vllm_config):
        self.kv_cache_spec = kv_cache_spec
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.layer_names = ["layers.0", "layers.1"]
        self.graph = PlannedWrapper.of_graph(ROWS, 64)
        self.plain = PlannedWrapper(self.graph._float_workspace_buffer, "HND", "fa2", True)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        for wrapper in (self.graph, self.plain):
            sys.modules[FLASHINFER].fast_plan_decode(wrapper, LENS, 128, page_size=PAGE)


def fast_plan_decode(self, last_page_len_cpu, head_dim, page_size):
    self.begin_forward()


class AttentionGroup:
    """Layers alike; `changes` are of their builder, or of vLLM's config."""

    layer_names = ("layers.0",)

    def __init__(self, name="FLASHINFER", spec=None, speculative_config=None, **changes):
        self.backend = SimpleNamespace(get_name=lambda: name, is_mla=lambda: False)
        self.kv_cache_spec = spec or FullAttentionSpec()
        self.changes = changes
        ranks = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(use_ubatching=False, **ranks),
            model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=64),
            cache_config=SimpleNamespace(cache_dtype="fp8", num_gpu_blocks=24),
            speculative_config=speculative_config,
        )
        self.create_metadata_builders(config)

    def create_metadata_builders(self, vllm_config):
        builder = sys.modules[FLASHINFER].FlashInferMetadataBuilder(self.kv_cache_spec, vllm_config)
        vars(builder).update(self.changes)
        self.metadata_builders = [builder]

    def build_metadata(self, common_attn_metadata, ubatch_idx=0, **kwargs):
        self.metadata_builders[0].build(0, common_attn_metadata)


class WorkerWrapperBase:
    def __init__(self, *groups, rank=0):
        self.worker = SimpleNamespace(rank=rank)
        self.groups = groups

    def execute_model(self, scheduler_output):
        for group in self.groups:
            group.build_metadata(scheduler_output)
        return "logits"


def parts():
    """What is imported of vLLM, by module; classes are copies, which a hook may change."""
    heads = {"get_num_attention_heads_from_layers": lambda config, names: 32}
    return {
        "vllm.v1.worker.worker_base": copies(WorkerWrapperBase),
        "vllm.v1.worker.utils": copies(AttentionGroup),
        FLASHINFER: copies(FlashInferMetadataBuilder) | {"fast_plan_decode": fast_plan_decode},
        "vllm.v1.attention.backends.utils": heads,
    }
