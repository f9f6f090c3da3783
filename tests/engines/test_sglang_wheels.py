"""The hook points against SGLang's own source: the wheels of the oldest and the newest release,
and of the first one with the hooks of SPLITS.

They are downloaded once into build/wheels; without a package index these tests skip.
"""

import ast
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from zipfile import ZipFile

import pytest
from support import sglang_code
from support.records import measure

from attnlib.engines import arms, sglang, sglang_hooks
from attnlib.engines.points import known_in, unfit
from attnlib.measure.calls.form import Item
from attnlib.studies.metadata import sglang as rival
from attnlib.studies.metadata.case import MetadataCase

FLASH = "sglang/srt/layers/attention/flashattention_backend.py"
INFER = "sglang/srt/layers/attention/flashinfer_backend.py"
MEMBERS = {
    FLASH: "decode_cuda_graph_metadata num_attention_heads num_kv_heads head_dim num_splits "
    "kv_cache_dtype has_softcap scheduler_metadata use_mla device",
    INFER: "decode_use_tensor_cores decode_backend decode_wrappers workspace_buffer num_wrappers "
    "enable_deterministic max_context_len attn_backend",
    "sglang/srt/model_executor/model_runner.py": "model_config page_size dtype kv_cache_dtype "
    "server_args is_draft_worker req_to_token_pool max_total_num_tokens",
}
"""What the hooks read off SGLang's objects, by file."""


SPLIT_MEMBERS = (
    *("fa_impl_ver", "num_splits", "attn_cp_size", "is_prefill_aware_swa", "has_local_attention"),
    *("topk", "page_size", "kv_cache_dtype", "forward_metadata", "use_mla", "device"),
    "_disable_scheduler_metadata_precompute",
)
"""What the hooks of SPLITS read off a backend."""
METADATA_MEMBERS = (
    *("cache_seqlens_int32", "max_seq_len_q", "cu_seqlens_q", "page_table", "scheduler_metadata"),
    "local_attn_metadata",
)
LAYER_MEMBERS = (
    *("tp_q_head_num", "tp_k_head_num", "head_dim", "v_head_dim", "sliding_window_size"),
    *("is_cross_attention", "use_irope", "attn_type", "logit_cap"),
)


@pytest.fixture(scope="module", params=[sglang.OLDEST, sglang.NEWEST])
def wheel(request):
    """A release, and its wheel."""
    with ZipFile(sglang_code.wheel_of(request.param)) as archive:
        yield request.param, archive


@pytest.fixture(scope="module", params=[arms.OWN_CAP, sglang.NEWEST])
def capping(request):
    """A release whose cap of splits can be changed, and its wheel."""
    with ZipFile(sglang_code.wheel_of(request.param)) as archive:
        yield request.param, archive


def body_of(archive, path, *names):
    """Source of a definition in a file: `names` lead to it."""
    node = ast.parse(text := archive.read(path).decode())
    for name in names:
        node = next(each for each in node.body if getattr(each, "name", "") == name)
    return ast.get_source_segment(text, node)


def source(archive, module):
    return archive.read(f"{module.replace('.', '/')}.py").decode()


def parameters(archive, path):
    """Of the function at `module:name`, which its module may have from another."""
    module, name = path.split(":")
    body = ast.parse(source(archive, module)).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", "") == part]
        if not found:
            (moved,) = (
                node
                for node in body
                if isinstance(node, ast.ImportFrom) and part in {each.name for each in node.names}
            )
            return parameters(archive, f"{moved.module}:{name}")
        node = found[0]
        body = found[0].body
    return [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]


def test_every_hook_point_has_the_parameters_that_are_read(wheel):
    release, archive = wheel
    points = known_in(release, sglang_hooks.POINTS)
    later = {"splits", "metadata=one-launch"}
    with_caps = set() if release == sglang.OLDEST else later
    assert {point.arms[0] for point in points} & later == with_caps
    of_one = [point.arms for point in points if point.arms != (*arms.ARMS,)]
    hooked = {arm.partition("=")[0] for names in of_one for arm in names}
    assert hooked == {*arms.ARMS, "capture"}, "each arm has a row of POINTS in sglang_hooks.py"
    assert [words for p in points if (words := unfit(p, {*parameters(archive, p.path)}))] == []


def test_sglang_has_what_the_hooks_read_of_its_objects(wheel):
    release, archive = wheel
    for path, names in MEMBERS.items():
        text = archive.read(path).decode()
        assert [name for name in names.split() if f".{name}" not in text] == []
    if release != sglang.OLDEST:
        assert "self.decode_num_splits =" in archive.read(FLASH).decode()


def test_the_first_release_with_a_cap_of_its_own_has_the_points_of_splits(capping):
    release, archive = capping
    points = [p for p in known_in(release, sglang_hooks.POINTS) if "splits" in p.arms]
    assert len(points) == 5
    assert [words for p in points if (words := unfit(p, {*parameters(archive, p.path)}))] == []


def test_sglang_has_what_the_hooks_of_splits_read(capping):
    """Backends, metadata and layers have it, and both calls of words and of attention."""
    _, archive = capping
    init = body_of(archive, FLASH, "FlashAttentionBackend", "__init__")
    names = re.findall(r"self\.(\w+)(?:: [^=]+)? = ", init)
    assert not {*SPLIT_MEMBERS} - {*names}
    fields = body_of(archive, FLASH, "FlashAttentionMetadata")
    assert [name for name in METADATA_MEMBERS if f"\n    {name}: " not in fields] == []
    layer = body_of(archive, "sglang/srt/layers/radix_attention.py", "RadixAttention")
    assert [name for name in LAYER_MEMBERS if f"self.{name} =" not in layer] == []
    types = body_of(archive, "sglang/srt/layers/radix_attention.py", "AttentionType")
    assert 'ENCODER_ONLY = "encoder_only"' in types and "(Enum)" in types


def test_every_number_of_splits_in_a_call_is_one_that_the_hooks_set(capping):
    _, archive = capping
    for name in ("forward_decode", "forward_extend", "_compute_scheduler_metadata"):
        body = body_of(archive, FLASH, "FlashAttentionBackend", name)
        given = re.findall(r"num_splits=\(?\s*(self\.\w+|\w+)", body)
        assert given and {*given} <= {"self.num_splits", "self.decode_num_splits"}


def test_its_own_kernels_write_the_metadata_and_page_arrays_of_a_step(wheel, tmp_path, monkeypatch):
    release, archive = wheel
    monkeypatch.setattr(rival, "unavailable", lambda: "")
    monkeypatch.setattr(rival, "installed_version", lambda _: release)
    monkeypatch.setitem(sys.modules, rival.POOLS, ModuleType(rival.POOLS))
    if release == sglang.OLDEST:  # its kernels are in files that need the server
        own = SimpleNamespace(**sglang_code.parts()[sglang_code.FLASH])
        monkeypatch.setattr(rival, "_module", lambda name: own)
        assert f"from {rival.POOLS} import SWAKVPool" in source(archive, sglang_code.FLASH)
    else:
        for name in (rival.FUSED, rival.PAGES):
            archive.extract(f"{rival.FOLDERS[0]}/{name}", tmp_path)
        monkeypatch.setattr(rival, "_file", lambda name: tmp_path / rival.FOLDERS[0] / name)
        monkeypatch.setattr(rival, "_module", rival._module.__wrapped__)
    cases = [
        MetadataCase("decode", 5, page, 70, swa=swa) for page in (1, 4) for swa in (False, True)
    ]
    pages = MetadataCase("kv_indices", 5, 1, 700, lengths="700+1+512+513+9")
    for case in cases if release == sglang.OLDEST else [*cases, pages]:
        record = measure(Item("sglang-metadata", "host", case))
        assert record.status == "ok"
        assert record.reason == ""
        assert record.oracle_error == 0.0
    if release == sglang.OLDEST:
        assert sys.modules[rival.POOLS].SWAKVPool is SimpleNamespace
    record = measure(Item("sglang-metadata", "host", replace(pages, page_size=16)))
    assert (record.status, "page_size must be 1" in record.reason) == ("error", True)


def test_ranks_and_graphs_are_asked_where_a_release_has_them(wheel):
    release, archive = wheel
    files = {*archive.namelist()}
    has_graphs = "sglang/srt/model_executor/cuda_graph_config.py" in files
    assert has_graphs == ("sglang/srt/runtime_context.py" in files) == (release != sglang.OLDEST)
    if has_graphs:
        assert "def check_cuda_graph_backend(" in source(
            archive, "sglang.srt.model_executor.cuda_graph_config"
        )
        ranks = source(archive, "sglang.srt.runtime_context")
        assert "def get_parallel(" in ranks and {"attn_tp_rank", "attn_tp_size"} <= {
            *re.findall(r"\w+", ranks)
        }
    assert "def is_dp_attention_enabled(" in source(archive, "sglang.srt.layers.dp_attention")
    plain = {*sglang_hooks.PLAIN}
    assert not plain & {*known_in(release, sglang_hooks.POINTS)[1].reads}
