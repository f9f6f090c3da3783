"""Every number of data/upstream/split_cap.md is computed from the records, or names a thing.

The document is written by hand. Its tables and the phrases with numbers are computed here and must
stand in it word for word; what is left may have no number but those of `NAMES`.
"""

import json
import re
from functools import cache

import pandas as pd
import pytest

from attnlib.core.gpu import HOPPER_SMS
from attnlib.core.schedule.caps import (
    FLOAT32_BYTES,
    MOST_QUERY_TOKENS,
    PARTIAL_BYTES,
    num_splits,
    split_bytes,
)
from attnlib.core.schedule.facts import MAX_SPLITS, SchedulerFacts
from attnlib.core.spec import LATENT_DIM
from attnlib.lab import repro
from attnlib.lab.serve import lengths_of
from attnlib.measure.stats import FASTER, SAME, SLOWER
from attnlib.run.store import PUBLISHED
from attnlib.studies.serving import served
from attnlib.studies.serving.models import MODELS
from attnlib.studies.splits import split_cap
from attnlib.studies.splits.split_cap import (
    BEFORE,
    CHANGED,
    CONTEXT,
    GROUPED,
    LAYOUTS,
    LONG_CONTEXT,
    LOSES_FROM,
    MLA,
    MLA_LAYOUTS,
    MLA_TP8,
    MLA_VERIFY,
    NOW,
    SHORT_PREFILL,
    TRAFFIC_STEPS,
)
from attnlib.studies.splits.traffic import IN_FLIGHT, TRACES

DOCUMENT = PUBLISHED / "upstream" / "split_cap.md"
MOST_WORDS = 1_210
"""Without tables and code."""
NAMES = """
    sgl-flash-attn#46 sglang#29551 sglang#34888 sglang#37208 sglang#39968 sglang#27786
    flashinfer#4832 flashinfer#3379 tokenspeed#1693 flash-attention#2445 flash-attention#176
    flash-attention#190 vllm#35899 vllm#51320 vllm#51995 46 07a9b0cc f89bc23 10d7867 2026-06-24
    2026-11-28 2023 0.5.16 0.5.18 0.5.23 13.0 H100 H200 FlashAttention-3 fa3 L2 bfloat16 float64
    int64_t num_splits=0 TP8 DeepSeek-V3.2 95 90th
""".split()
"""What has a number in it and was not measured: threads, commits, dates, releases, names."""
QUOTES = (
    "1 long sequence and the rest are short",
    "PR 46 reports 29 splits and 14.5 GiB",
    "params.total_q > 0 ?",
    "leaves `params.total_q` 0;",
    "std::max<int64_t>(split_bytes, 1)",
    "With one split it returns at once",
)
"""Of get_num_splits and its callers, and of the description of sgl-flash-attn #46."""
COSTLY = 200
"""Query rows per KV head x longest / mean from which MLA traffic is slower as a rule."""
WORST = 8
"""Rows of the table of named batches."""


@cache
def h100():
    return split_cap.load_all("h100")


@cache
def h200():
    return split_cap.load_all("h200")


@cache
def by_traffic():
    """Calls over traffic: (GPU, layout) -> time by the default over time by `bounded`, judged."""
    found = {}
    for gpu, rows in (("H100", h100()), ("H200", h200())):
        for layout in TRAFFIC_STEPS:
            judged = split_cap.sides_of(rows, layout, "default")
            found[gpu, layout] = judged[judged.trace != ""]
    return found


def of_h100(layouts):
    """All calls over traffic of these layouts on the H100."""
    return pd.concat([by_traffic()["H100", layout] for layout in layouts])


@cache
def named():
    return split_cap.named_table(h100(), LAYOUTS)


@cache
def alike():
    """(layout, batch) -> `bounded` over the default on both GPUs, where all requests are alike."""
    sides = []
    for rows in (h100(), h200()):
        tables = []
        for layout in LAYOUTS:
            pages_of_one = rows[rows.page_size == 1]
            table = split_cap.sides_of(pages_of_one, layout, "bounded", "default")
            tables.append(table[table.rows == layout.group])
        sides.append(pd.concat(tables).set_index(["layout", "batch"]))
    return sides[0].add_suffix("_100").join(sides[1].add_suffix("_200"))


def line(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def first_lines():
    """The table of the summary: traffic, and named batches where no traffic was measured."""
    verify = "(TP8, verification of drafts: target verify)"
    grouped = of_h100(GROUPED[2:])
    one = f"{MLA_TP8.name}, {MLA_TP8.q_len} query token"
    without = f"{one} (TP8 without drafts; no traffic measured)"
    assert not any(layout == MLA_TP8 for _, layout in by_traffic())
    yield first_line(f"{MLA.name} (DP attention)", by_traffic()["H100", MLA].slowdown)
    yield first_line(f"{MLA_VERIFY.name} {verify}", by_traffic()["H100", MLA_VERIFY].slowdown)
    for gpu, rows, name in (
        ("H100", h100(), without),
        (
            "H200",
            h200(),
            one,
        ),
    ):
        table = split_cap.sides_of(rows[rows.page_size == 1], MLA_TP8, "default")
        yield first_line(name, table[table.batch != ""].ratio, gpu, "named")
    both = " and ".join(layout.name for layout in GROUPED[2:])
    name = f"grouped queries (GQA), {GROUPED[2].q_len} query token, {both}"
    yield first_line(name, grouped.slowdown)
    yield "below 1 the bound loses"


def first_line(name, slowdown, gpu="H100", kind="of traffic"):
    summary = slowdown.agg(["min", "median", "max"])
    times = (f"{each:.2f}" for each in summary)
    return line(name, gpu, f"{len(slowdown)} {kind}", *times)


def traffic_lines():
    for (gpu, layout), part in by_traffic().items():
        lost = part.case.map(split_cap.loses_splits).mean()
        slowdown = part.slowdown
        times = slowdown.median(), slowdown.quantile(0.9), slowdown.max()
        cells = (f"{time:.2f}" for time in times)
        yield line(gpu, layout.name, len(part), f"{lost:.0%}", *cells)


def trace_lines():
    traces = sorted(TRACES, key=lambda trace: trace_medians(MLA)[trace])
    yield line("slowdown, median, H100", *traces)
    for layout in (MLA, MLA_VERIFY):
        yield line(layout.name, *(f"{trace_medians(layout)[trace]:.2f}" for trace in traces))


def trace_medians(layout):
    part = by_traffic()["H100", layout]
    return part.groupby("trace").slowdown.median()


def named_lines():
    for _, row in named().head(WORST).iterrows():
        times = (f"{row[f'{cap}, us']} ({row[f'splits, {cap}']})" for cap in ("default", "bounded"))
        yield line(row.layout, row.batch, *times, f"{row.slowdown:.2f} ({row['95 % CI']})")


def alike_lines():
    slower = (alike().verdict_100 == SLOWER) | (alike().verdict_200 == SLOWER)
    for (layout, batch), row in alike()[slower].iterrows():
        cells = (ratio_of(row, gpu) for gpu in ("100", "200"))
        yield line(layout, batch, *cells)


def ratio_of(row, gpu):
    ratio, low, high = (row[f"{name}_{gpu}"] for name in ("ratio", "low", "high"))
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def environment_phrases():
    pairs = set()
    gpus = {}
    for rows in (h100(), h200()):
        for machine in rows.machine.unique():
            path = PUBLISHED / "records" / machine / f"{split_cap.STUDY.name}.parquet"
            columns = ["release", "versions.torch", "versions.cuda", "machine.gpu"]
            table = pd.read_parquet(path, columns=columns)
            gpus.setdefault(table["machine.gpu"][0], []).append(machine)
            assert set(table["versions.cuda"]) == {"13.0"}
            torch = table["versions.torch"].str.partition("+")[0]
            pairs |= set(zip(table.release, torch, strict=True))
    torch = dict(sorted(pair for pair in pairs if pair[0]))
    assert torch[BEFORE] == torch[CHANGED] == "2.11.0"
    assert len(torch) == 3
    yield f"sglang-kernel {NOW} with torch {torch[NOW]}"
    yield f"sglang-kernel {CHANGED}, SGLang 0.5.16"
    yield f"`num_splits=0` of {NOW}"
    yield f"With {BEFORE} the first line is"
    yield f"{BEFORE} and {CHANGED} with torch {torch[CHANGED]}"
    yield f"a context of {CONTEXT:,} tokens ({LONG_CONTEXT:,} where a request is longer)"
    for gpu, machines in gpus.items():
        assert len(machines) == 4
        yield f"four {gpu.removeprefix('NVIDIA ')}"
    assert h100()["round"].nunique() == h200()["round"].nunique() == 3


@cache
def script_tables(release):
    """The lines that the script printed on an H100 with a release, a list per batch."""
    runs = json.loads((PUBLISHED / "captures" / "repro_split_cap.json").read_text())["runs"]
    head, *tables = runs[release].split("\n\n")
    assert head.startswith("NVIDIA H100") and head.endswith(f"sglang-kernel {release}")
    return [table.splitlines() for table in tables]


def script_lines():
    """What the document quotes: every batch's title, head, three rows and summary, in order."""
    for title, head, *rest in script_tables(NOW):
        yield "\n".join(
            [
                title,
                head,
                *(row for row in rest if re.match("0|8 |bounded", row)),
            ]
        )
    yield next(row for row in script_tables(BEFORE)[0] if row.startswith("0,"))


def script_times(table):
    """What was measured for 0, 8 and the bound: us and MiB of each."""
    times = []
    for word in ("0,", "8 ", "bounded"):
        row = next(row for row in table if row.startswith(word))
        us, mib = row.split()[-3:-1]
        times.append((float(us), float(mib)))
    return times


def script_phrases():
    *latent, grouped = map(script_times, script_tables(NOW))
    assert all(eight[0] <= bound[0] for _, eight, bound in latent)
    assert all(eight[1] < 0.52 * bound[1] for _, eight, bound in latent)
    own, _, bound = latent[1]
    slower = 100 * (bound[0] / own[0] - 1)
    yield f"In the second batch, of similar lengths, the bound is {slower:.0f} % slower"
    yield "In the MLA batches 8 splits are at least as fast"
    _, eight, bound = grouped
    yield f"in the last they take {eight[0] / bound[0]:.1f} times as long"


def summary_phrases():
    traffic = by_traffic()["H100", MLA].slowdown
    times = f"{traffic.median():.2f} times as long in the median of {len(traffic)} batches"
    call = f"an MLA call with {MLA.heads} heads takes {times}, {traffic.max():.2f} at worst (H100)"
    yield f"Against a cap bounded by bytes (below), {call}"
    yield f"with {min(IN_FLIGHT)} to {max(IN_FLIGHT)} requests in flight"
    releases = split_cap.release_table(h100(), MLA)
    before = releases[BEFORE]
    changed = releases[CHANGED]
    yield f"{BEFORE} takes {before.min():.2f} to {before.max():.2f} times the time of `bounded`"
    yield f"{CHANGED} up to {changed.max():.2f}"
    yield f"the {len(releases)} named batches of MLA with {MLA.heads} heads"


def without_drafts_phrases():
    """The named batch of MLA with 16 heads and one query token in which the bound loses most."""
    rows = named()[named().layout == MLA_TP8.name]
    row = rows[rows.batch == "8 x 32k + 56 x 2k"].iloc[0]
    assert row.verdict == FASTER
    assert row.slowdown == rows.slowdown.min()
    yield f"With {MLA_TP8.heads} heads and {MLA_TP8.q_len} token the bound can lose"
    times = f"{row['default, us']} us by the default, {row['bounded, us']} by the bound"
    yield f"{row.batch} takes {times}"


def rule_phrases():
    yield f"about {LOSES_FROM} / query rows per KV head"
    layouts = (GROUPED[0], GROUPED[2], GROUPED[3], MLA_VERIFY)
    limits = (f"{LOSES_FROM / each.group:.1f}" for each in layouts)
    yield line("longest / mean", *limits, f"{LOSES_FROM / MLA.group:.2f}")
    names = (each.name for each in (*layouts[1:], MLA))
    yield line("layout", f"{GROUPED[0].name} (Llama-3.1-8B)", *names)
    layouts = [layout for gpu, layout in by_traffic() if gpu == "H100"]
    grouped = of_h100(layout for layout in layouts if layout.kv_heads)
    loses = grouped.case.map(split_cap.loses_splits)
    agrees = (loses == (grouped.rows > LOSES_FROM)).sum()
    yield f"{agrees} of {len(grouped)} GQA traffic calls ({loses.sum()} lose splits)"
    latent = of_h100(layout for layout in layouts if not layout.kv_heads)
    is_costly = latent.rows >= COSTLY
    few = latent.slowdown[~is_costly].median()
    many = latent.slowdown[is_costly].median()
    yield f"below {COSTLY} has a median slowdown of {few:.2f}, from there on {many:.2f}"


def bound_phrases():
    yield f"params.seqlen_q > {MOST_QUERY_TOKENS}"
    mib = PARTIAL_BYTES >> 20
    assert mib << 20 == PARTIAL_BYTES
    yield f"(int64_t({mib}) << 20) / "
    yield f"size_one_kv_head, params.is_causal || params.is_local, {MAX_SPLITS})"
    yield f"take at most {mib} MiB, or what they take today"
    yield f"- {mib} MiB not swept"
    yield f"Why {MOST_QUERY_TOKENS} query tokens?"
    measured = {layout.q_len for layout in LAYOUTS}
    assert SHORT_PREFILL.q_len > MOST_QUERY_TOKENS >= max(measured)
    yield f"{' and '.join(map(str, sorted(measured)))} were measured"
    prefill = SchedulerFacts(
        batch_size=4096,
        num_qo_heads=64,
        num_kv_heads=1,
        head_dim=64,
        head_dim_v=512,
        max_seqlen_q=1,
        max_seqlen_k=2048,
        num_sms=HOPPER_SMS,
        page_size=1,
        causal=True,
        varlen_q=True,
        build="sglang",
    )
    upstream, bounded = (num_splits(prefill, cap) for cap in ("upstream", "bounded"))
    gib = upstream * split_bytes(prefill) / 2**30
    yield f"{prefill.batch_size:,} segments of {prefill.max_seqlen_q} token, 64 heads"
    yield f"By the model, over {prefill.max_seqlen_k:,} tokens of KV"
    yield f"{upstream} splits and {gib:.1f} GiB by the old cap, {bounded} split by the bound"
    assert prefill.split_cap == bounded


def memory_phrases():
    table = split_cap.memory_table(h100()).set_index(["layout", "batch"])
    short = SHORT_PREFILL
    _, row = next(table.iterrows())
    assert table.index[0][1] == "prefill of short segments"
    text = f"prefill of {short.batch_size} segments of {short.q_len} tokens"
    text += f" ({short.spec.num_qo_heads} heads, {short.kv_len:,} tokens of KV)"
    text += f" allocates {row.upstream:,} MiB by the old cap, {row.default} by today's"
    yield f"{text} and {row.bounded} by the bound"
    decode = table.iloc[1:]
    _, most = next(decode.iterrows())
    assert most.bounded == decode.bounded.max()
    assert decode.index[0] == (MLA.name, "128 x 2k")
    text = f"{most.upstream:,}, {most.default} and {most.bounded} MiB for 128 x 2k of MLA"
    yield f"{text} with {MLA.heads} heads"
    assert f"{most_mib(h100()):.0f}" == str(most.bounded)
    yield f"That is the most on an H100 (H200: {most_mib(h200()):.0f})"


def most_mib(rows):
    """MiB that a decode or verification by the bound allocates at most, traffic included."""
    bounded = (rows.release == NOW) & rows.backend.str.endswith("@bounded")
    return rows.peak_bytes[bounded & (rows.case != SHORT_PREFILL)].max() / 2**20


def alike_phrases():
    slower = [(alike()[f"verdict_{gpu}"] == SLOWER).sum() for gpu in ("100", "200")]
    count = [alike()[f"ratio_{gpu}"].notna().sum() for gpu in ("100", "200")]
    pairs = [f"{few} of {all_}" for few, all_ in zip(slower, count, strict=True)]
    yield f"{pairs[0]} batches on the H100 and {pairs[1]} on the H200"
    worst = [alike()[f"ratio_{gpu}"].max() for gpu in ("100", "200")]
    yield f"up to {worst[0]:.3f} and {worst[1]:.3f} times the default"


def objection_phrases():
    latent = of_h100((MLA, MLA_VERIFY))
    faster = latent[latent.verdict == FASTER]
    assert set(faster.trace) == {"azure-conversation"}
    counts = f"{len(faster)} of {len(latent)} MLA traffic calls on the H100"
    yield f"{counts}, down to {faster.slowdown.min():.2f}"
    longest = max(split_cap.lengths_of(case)[1].max() for case in faster.case)
    yield f"longest request at most {longest:,} tokens"
    table = split_cap.rival_table(h100(), MLA_LAYOUTS)
    table = table[table.page == 64]
    ratio = table["flashmla-dense"] / table.bounded
    yield f"FlashMLA's kernel, with pages of 64, takes {ratio.min():.2f} to {ratio.max():.2f} times"
    yield f"a lower median in {(ratio < 1).sum()} of {len(ratio)} calls"


@cache
def engine_runs():
    """Model -> arm -> the run inside SGLang."""
    text = (PUBLISHED / "captures" / "split_cap_engine.jsonl").read_text()
    arms = {}
    for run in map(json.loads, text.splitlines()):
        arms.setdefault(run["model"], {})[run["arm"]] = run
    return arms


def engine_lines():
    """Memory of the GPU by both caps, before a prefill and what it adds, MiB."""
    names = {"gqa": "GQA", "mla": "MLA", "gqa-verify": "GQA, drafts", "mla-verify": "MLA, drafts"}
    for model, name in names.items():
        default, bounded = (engine_runs()[model][arm]["prefill"] for arm in ("default", "bounded"))
        before = default["before_mib"], bounded["before_mib"]
        rise = default["rise_mib"], bounded["rise_mib"]
        cells = (f"{mib:,}" for mib in (*before, before[1] - before[0], *rise))
        yield line(name, *cells)


def engine_phrases():
    for both in engine_runs().values():
        assert {run["machine"]["sglang"] for run in both.values()} == {"0.5.23"}
        assert all("H100" in run["machine"]["gpu"] for run in both.values())
        assert both["default"]["first"]["sha256"] == both["bounded"]["first"]["sha256"]
        assert both["default"]["prefill"]["rise_mib"] == both["bounded"]["prefill"]["rise_mib"]
    assert len(engine_runs()) == 4
    yield "The four models above have the same tokens by both caps"
    default, bounded = (engine_runs()["mla"][arm] for arm in ("default", "bounded"))
    yield f"a prefill of {bounded['prefill']['answered']} x 2,048 tokens adds the same memory"
    (said,) = bounded["said"]
    splits, requests, _ = map(int, re.findall(r"\d+", said))
    yield f"graphs of up to {requests} requests"
    yield f"No graphs beyond {requests} requests"
    each = requests * MLA.heads * LATENT_DIM * FLOAT32_BYTES >> 20
    more = bounded["prefill"]["before_mib"] - default["prefill"]["before_mib"]
    assert splits * each == more
    yield f"The {more} MiB are {splits} splits of {each} MiB"


def served_phrases():
    frame = served.load_all()
    first, kimi = served.DEEPSEEK, served.CONVERSATION[0]
    assert lengths_of(f"kimi-conversation:{kimi.batch_size}")[0] == served_lengths(kimi)
    rates = served.served_rows(frame[frame.case == kimi]).groupby("backend").tokens_per_s.median()
    gains = served.speedups(frame, first).set_index("case")
    row = gains.loc[kimi]
    assert row.verdict == FASTER
    layers = MODELS[first]["num_hidden_layers"]
    yield f"DeepSeek-V3's attention with {MLA.heads} heads ({layers} dense layers"
    yield f"{kimi.batch_size} requests of kimi-conversation: {rates[served.NOW]:,.0f} tokens/s"
    yield f"by the default, {rates[served.BOUNDED]:,.0f} by the bound"
    yield f"{row.speedup:.2f} times as many (95 % CI {row.low:.2f} to {row.high:.2f}"
    yield f", {row.rounds} rounds)"
    options = f"--output {kimi.output_len} --turns {kimi.turns}"
    load = f"--traffic kimi-conversation:{kimi.batch_size}"
    yield f"serve --model {first} --arm default --arm splits=bounded {load} {options}"
    others = served.speedups(frame, served.LLAMA).set_index("case")
    row = others.loc[served.ONE_LONG[0]]
    assert row.verdict == FASTER
    one_long = "Llama-3.1-8B with 1 x 100,000 tokens among 40 x 512"
    assert served.ONE_LONG[0].lengths == "100000" + "+512" * 40
    yield f"{one_long}: {row.speedup:.2f} ({row.low:.2f} to {row.high:.2f})"
    latent, grouped = gains.loc[served.CONTROLS[0]], others.loc[served.CONTROLS[1]]
    assert latent.verdict == grouped.verdict == SAME
    yield f"requests of equal lengths: {latent.speedup:.2f} and {grouped.speedup:.2f}"


def served_lengths(case):
    """The prompts of a load, client by client."""
    return tuple(request.prompt for request in case.requests())


PARTS = (
    served_phrases,
    first_lines,
    traffic_lines,
    trace_lines,
    named_lines,
    alike_lines,
    environment_phrases,
    script_lines,
    script_phrases,
    summary_phrases,
    without_drafts_phrases,
    rule_phrases,
    bound_phrases,
    memory_phrases,
    alike_phrases,
    objection_phrases,
    engine_lines,
    engine_phrases,
)


@cache
def computed():
    """All lines and phrases that the document must have, long ones first."""
    found = {flat(text) for part in PARTS for text in part()}
    return sorted(found, key=len, reverse=True)


def flat(text):
    return " ".join(text.split())


def faults(text):
    """Computed words that the text lacks, and numbers in it that nothing accounts for."""
    rest = flat(text)
    missing = [words for words in computed() if words not in rest]
    for words in (*computed(), *QUOTES):
        rest = rest.replace(words, " ")
    numbers = re.findall(r"[#=\w.-]*\d[\w.%-]*", rest)
    return missing + [number for number in numbers if number.strip(".,:;%") not in NAMES]


@pytest.fixture
def text(published_records):
    return DOCUMENT.read_text(encoding="utf-8")


def test_every_number_of_the_document_is_computed(text):
    assert faults(text) == []


def test_traffic_is_the_table_of_the_study(published_records):
    table = split_cap.traffic_table(h100()).set_index("layout")
    for (gpu, layout), part in by_traffic().items():
        if gpu == "H100":
            row = table.loc[layout.name]
            assert row.batches == len(part)
            assert row.worst == round(part.slowdown.max(), 2)
            assert row["slowdown, median"] == round(part.slowdown.median(), 2)


def test_a_number_that_is_changed_is_found(text):
    unseen = []
    for found in re.finditer(r"\d+", text):
        number = str(int(found[0]) + 1).zfill(len(found[0]))
        changed = text[: found.start()] + number + text[found.end() :]
        if not faults(changed):
            around = text[found.start() - 30 : found.end() + 10]
            unseen.append((found[0], around))
    assert unseen == []


def test_the_document_is_short_and_its_script_is_there(text):
    prose = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    prose = "\n".join(row for row in prose.splitlines() if not row.startswith("|"))
    assert len(prose.split()) <= MOST_WORDS
    assert "python -m attnlib repro split_cap" in text and "split_cap" in repro.names()
    # A bare #N would link to the repository that the document is posted in.
    assert not re.search(r"(?<![\w/])#\d", text)
