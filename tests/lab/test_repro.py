"""What `repro` prints stands alone, has the models' caps, and judges what a library answers."""

import ast
import importlib.metadata
import random
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attnlib import cli
from attnlib.core import SchedulerFacts
from attnlib.core.schedule import caps
from attnlib.lab import repro

TEXT = repro.script("split_cap")
H100 = SimpleNamespace(name="Test GPU", major=9, minor=0, multi_processor_count=132)
SMALL = {"DEVICE": "cpu", "CONTEXT": 2048, "REQUESTS": 3, "MEDIAN": 99, "LONGEST": 300}
SMALL |= {"CALLS": 2, "REPLAYS": 3}
RELEASES = {"0.4.4": "sglang-0.4.4", "0.4.5": "sglang", "0.4.10.post1": "sglang"}
LAYERS = [
    (True, 128, 1),
    (True, 128, 1),
    (True, 16, 4),
    (False, 8, 1),
]
"""Of the script's four batches: whether MLA, query heads, query tokens."""
ROW = re.compile(r"^(0|\d+|bounded)(?:, (?:picks )?(\d+))? +([\d.]+) +([\d.]+) +(\S+)$", re.M)


class Clock:
    """CUDA's timers, graphs and allocator for a library whose call takes what `times` says, in
    units of 100 us by its `num_splits`, and as many MiB as splits."""

    def __init__(self, times):
        self.times = times
        self.now = 0.0
        self.open = None
        self.splits = 0

    def call(self, num_splits):
        self.splits = max(num_splits, 1)
        if self.open is not None:
            self.open.took += self.times(num_splits) / 10

    @contextmanager
    def graph(self, graph):
        self.open = graph
        yield
        self.open = None

    def new_graph(self):
        def replay():
            self.now += graph.took

        graph = SimpleNamespace(took=0.0, replay=replay)
        return graph

    def new_event(self, enable_timing):
        event = SimpleNamespace(at=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    @property
    def cuda(self):
        nothing = dict.fromkeys(("synchronize", "reset_peak_memory_stats"), lambda: None)
        return nothing | {
            "is_available": lambda: True,
            "get_device_properties": lambda device: H100,
            "CUDAGraph": self.new_graph,
            "graph": self.graph,
            "Event": self.new_event,
            "memory_allocated": lambda: 5 * 2**20,
            "max_memory_allocated": lambda: (5 + self.splits) * 2**20,
        }


def attention(clock, spoil):
    """FlashAttention-3's function of sgl_kernel, in float32, as far as the script calls it."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        qv=None,
        *,
        cache_seqlens,
        page_table,
        cu_seqlens_q,
        max_seqlen_q,
        softmax_scale,
        causal,
        num_splits,
        ver,
    ):
        assert causal
        assert ver == 3
        assert q.dtype == k_cache.dtype == torch.bfloat16
        assert {t.dtype for t in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
        clock.call(num_splits)
        out = []
        for first, last, length, pages in zip(
            cu_seqlens_q[:-1].tolist(),
            cu_seqlens_q[1:].tolist(),
            cache_seqlens.tolist(),
            page_table,
            strict=True,
        ):
            assert last - first == max_seqlen_q
            assert len(set(pages[:length].tolist())) == length
            query = q[first:last]
            k = k_cache[pages[:length], 0]
            v = v_cache[pages[:length], 0]
            if qv is not None:
                query = torch.cat([query, qv[first:last]], -1)
                k = torch.cat([k, v], -1)
            scores = torch.einsum("qhd,kod->hqk", query.float(), k.float()) * softmax_scale
            for token in range(max_seqlen_q):
                scores[:, token, length - max_seqlen_q + token + 1 :] = -torch.inf
            out.append(
                torch.einsum(
                    "hqk,kod->qhd",
                    scores.softmax(-1),
                    v.float(),
                )
            )
        out = torch.cat(out).bfloat16()
        return spoil(out, num_splits)

    return flash_attn_with_kvcache


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script over a library with these times and outputs: exit status, stdout, stderr."""

    def run(
        release="0.4.10",
        times=lambda splits: 8 / max(splits, 1),
        spoil=lambda out, splits: out,
        kernel=None,
        cuda=None,
        **names,
    ):
        def version(name):
            assert name == "sglang-kernel"
            if isinstance(release, Exception):
                raise release
            return release

        clock = Clock(times)
        for name, value in {**clock.cuda, **(cuda or {})}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(importlib.metadata, "version", version)
        module = ModuleType("sgl_kernel.flash_attn")
        module.flash_attn_with_kvcache = kernel or attention(clock, spoil)
        monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        script = loaded()
        status = 0
        script.update(SMALL | names)
        try:
            script["main"]()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def loaded():
    """The names that the script defines."""
    names = {"__name__": "split_cap"}
    exec(compile(TEXT, "split_cap.py", "exec"), names)
    return names


def facts_of(mla, heads, tokens, *, batch_size, context, build):
    dims = {"head_dim": 64, "head_dim_v": 512} if mla else {"head_dim": 128}
    return SchedulerFacts(
        batch_size=batch_size,
        num_qo_heads=heads,
        num_kv_heads=1,
        max_seqlen_q=tokens,
        max_seqlen_k=context,
        num_sms=132,
        page_size=1,
        causal=True,
        varlen_q=True,
        build=build,
        **dims,
    )


def test_the_script_is_short_and_needs_torch_the_library_and_python_alone():
    tree = ast.parse(TEXT, feature_version=(3, 10))
    lines = TEXT.splitlines()
    assert len(lines) <= 185
    assert max(map(len, lines)) <= 100
    documented = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.FunctionDef)]
    texts = [node.body[0] for node in documented if ast.get_docstring(node)]
    others = {n for text in texts for n in range(text.lineno, text.end_lineno + 1)}
    others |= {n for n, line in enumerate(lines, 1) if line.strip()[:1] in ("", "#")}
    assert len(lines) - len(others) <= 130
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    named = {
        getattr(node, "module", None) or alias.name for node in imports for alias in node.names
    }
    roots = {name.partition(".")[0] for name in named}
    assert roots - sys.stdlib_module_names == {"torch", "sgl_kernel"}


def test_the_command_prints_a_script_as_it_is_and_lists_all_there_are(capsys, fails):
    assert repro.names() == ["split_cap"]
    assert cli.main(["repro", "split_cap"]) == 0
    assert capsys.readouterr() == (TEXT, "")
    assert fails("repro", "nope").endswith("NAME must be one of split_cap, got 'nope'")


@pytest.mark.parametrize("release", RELEASES)
def test_caps_of_its_layouts_are_those_of_the_models(run, release):
    """At full size, with nothing computed."""
    full = {name: loaded()[name] for name in SMALL}
    batches = []

    def make_call(*batch):
        batches.append(batch)
        return {}

    status, out, _ = run(
        release,
        kernel=lambda num_splits: torch.zeros(64 * 4, 1, 1),
        make_call=make_call,
        reference=lambda call, request: 0.0,
        measure=lambda kernel, num_splits: (8.0, 1.0),
        **full,
    )
    assert status == 0
    assert [batch[:3] for batch in batches] == LAYERS
    differ, alike, again, one_long = (lengths for *_, lengths in batches)
    assert differ == again
    assert sum(differ) == sum(alike)
    assert max(alike) - min(alike) <= 1
    assert one_long == [131_072] + [1024] * 63
    assert len(differ) == 64
    assert len(alike) == 64
    assert 16 <= min(differ) < max(differ) <= 32_768
    named = {"picks": [], "bounded": []}
    for name, splits in re.findall(r"(picks|bounded),? (\d+)", out):
        named[name].append(int(splits))
    for kind, layer in enumerate(LAYERS):
        size = {"batch_size": 64, "context": 131_072}
        ran = facts_of(*layer, **size, build=RELEASES[release])
        now = facts_of(*layer, **size, build="sglang")
        assert named["picks"][kind] == ran.split_cap
        assert named["bounded"][kind] == caps.num_splits(now, "bounded")


def drawn_facts(pick):
    """A decode or verification of any layer, whose query rows stay below the branch left out."""
    while True:
        mla = pick.random() < 0.5
        kv_heads = pick.choice((1, 2, 4, 8))
        dims = {"head_dim": 64, "head_dim_v": 512}
        facts = SchedulerFacts(
            batch_size=pick.randint(1, pick.choice((4, 64, 512))),
            num_qo_heads=pick.choice((1, 4, 8, 16, 128)) * (1 if mla else kv_heads),
            num_kv_heads=1 if mla else kv_heads,
            max_seqlen_q=pick.randint(1, 8),
            max_seqlen_k=pick.choice(
                (
                    pick.randint(1, 3000),
                    pick.randint(1, 300_000),
                )
            ),
            num_sms=pick.choice((78, 114, 132, pick.randint(60, 160))),
            page_size=1,
            causal=True,
            varlen_q=True,
            build="sglang",
            **(dims if mla else {"head_dim": pick.choice((64, 128))}),
        )
        if m_blocks(facts, facts.batch_size) < 2 * facts.num_sms:
            return facts


def m_blocks(facts, requests):
    return ceil(requests * facts.max_seqlen_q * facts.group_size / facts.tile[0])


def test_its_rules_are_those_of_the_models_over_drawn_layouts():
    script = loaded()
    pick = random.Random(0)
    seen = set()
    for _ in range(1000):
        facts = drawn_facts(pick)
        n_blocks = ceil(facts.max_seqlen_k / facts.tile[1])
        own, upstream = (
            script["efficient_splits"](
                tiles=facts.num_kv_heads * m_blocks(facts, requests),
                sms=facts.num_sms,
                n_blocks=n_blocks,
            )
            for requests in (facts.batch_size, 1)
        )
        assert own == facts.split_cap, facts
        assert upstream == replace(facts, build="sglang-0.4.4").split_cap, facts
        bounded = script["bounded"](
            own=own,
            upstream=upstream,
            query_tokens=facts.batch_size * facts.max_seqlen_q,
            query_heads=facts.num_qo_heads,
            head_dim_v=facts.head_dim_v,
        )
        assert bounded == caps.num_splits(facts, "bounded"), facts
        seen.add((bounded > own, bounded < upstream))
    assert seen == {(True, True), (True, False), (False, False)}
    # A prefill like that of #46 gets what it has.
    assert script["bounded"](1, 57, query_tokens=8192, query_heads=128, head_dim_v=512) == 1


@pytest.mark.parametrize("release", RELEASES)
def test_it_prints_versions_and_a_table_for_each_batch(run, release):
    status, out, err = run(release)
    assert status == 0
    assert err == ""
    first, *tables = out.split("\n\n")
    assert first == f"Test GPU, 132 SMs; torch {torch.__version__}; sglang-kernel {release}"
    assert len(tables) == len(LAYERS)
    size = {"batch_size": 3, "context": 2048}
    for table, layer in zip(tables, LAYERS, strict=True):
        rows = ROW.findall(table)
        own = facts_of(*layer, **size, build=RELEASES[release]).split_cap
        cap = caps.num_splits(facts_of(*layer, **size, build="sglang"), "bounded")
        fixed = [(str(splits), "") for splits in (1, 2, 4, 8, 16, 32)]
        assert [row[:2] for row in rows] == [
            ("0", str(own)),
            *fixed,
            ("bounded", str(cap)),
        ]
        splits = [1, 1, 2, 4, 8, 16, 32, cap]
        assert [row[2] for row in rows] == [f"{800 / n:.1f}" for n in splits]
        assert [row[3] for row in rows] == [f"{n:.1f}" for n in splits]
        assert {row[4] for row in rows} == {"0.0000"}
        assert f"0 / best: {max(32, cap):.2f}, 0 / bounded: {cap:.2f}\n" in table
        widths = {len(line) for line in table.splitlines()[1:-2]}
        assert len(widths) == 1
        (error,) = re.findall(r"longest request: (\S+)$", table, re.M)
        assert 0 < float(error) < 0.01


def test_a_cap_of_its_own_that_is_no_slower_shows_no_ratio(run):
    _, out, _ = run(times=lambda splits: 3)
    assert out.count("0 / best: 1.00, 0 / bounded: 1.00") == len(LAYERS)


@pytest.mark.parametrize("mla", [False, True])
def test_its_reference_hides_later_tokens_from_a_draft(mla):
    script = loaded()
    script.update(SMALL)
    torch.manual_seed(0)
    lengths = [9, 5, 6]
    call = script["make_call"](mla=mla, heads=8, tokens=4, lengths=lengths)
    attend = attention(Clock(lambda splits: 1), lambda out, splits: out)
    out = attend(**call, num_splits=1)
    for request, output in enumerate(out.split(4)):
        assert (output - script["reference"](call, request)).abs().max() < 0.01


def one_value(out, error):
    spoiled = out.clone()
    spoiled[-1, -1, -1] += error
    return spoiled


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, splits: one_value(out, 0.1) if splits == 8 else out,
        lambda out, splits: one_value(out, 0.1) if splits == 0 else out,
        lambda out, splits: one_value(out, torch.nan) if splits == 32 else out,
        lambda out, splits: out + 0.1,
    ],
    ids=["eight splits", "its own cap", "not a number", "all alike"],
)
def test_a_wrong_output_ends_with_status_1_after_all_tables(run, spoil):
    status, out, err = run(spoil=spoil)
    assert status == 1
    assert out.count("0 / best") == len(LAYERS)
    assert err == "WRONG: an output is off by more than 0.02\n"


def test_outputs_are_large_enough_to_show_that_tokens_were_left_out(run):
    _, out, _ = run(spoil=lambda out, splits: out * (splits != 4))
    differences = [float(row[4]) for row in ROW.findall(out) if row[0] == "4"]
    assert len(differences) == len(LAYERS) and min(differences) > 0.5


A100 = SimpleNamespace(name="An A100", major=8, minor=0, multi_processor_count=108)
NO_CUDA = {"is_available": lambda: False}
AMPERE = {"get_device_properties": lambda device: A100}
NEEDS = "needs sglang-kernel"


@pytest.mark.parametrize(
    "how, words",
    [
        ({"cuda": NO_CUDA}, "needs a CUDA GPU; torch finds none"),
        ({"cuda": AMPERE}, "needs a Hopper GPU (compute capability 9.x), found An A100"),
        ({"release": importlib.metadata.PackageNotFoundError("it")}, f"{NEEDS} (pip install "),
        ({"release": ImportError("a\nlong\nstory " * 99)}, "kernel): a long story a long"),
        ({"release": "0.3.21"}, f"{NEEDS} 0.4.0 or later, found 0.3.21"),
    ],
    ids=["no GPU", "another GPU", "not installed", "not loaded", "too old"],
)
def test_what_it_cannot_run_on_is_refused_in_one_line(run, how, words):
    status, out, err = run(**how)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("split_cap.py: ")
    assert words in err
    assert len(err) < 600


@pytest.mark.gpu
def test_it_runs_on_a_hopper_gpu(tmp_path):
    pytest.importorskip("sgl_kernel", reason="needs sglang-kernel")
    path = tmp_path / "split_cap.py"
    path.write_text(TEXT)
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
