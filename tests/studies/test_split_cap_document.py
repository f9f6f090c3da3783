"""Every number of data/upstream/split_cap.md is computed from the records, or names a thing.

The document is written by hand. Its tables and the phrases with numbers are computed here and must
stand in it word for word; what is left may have no number but those of `NAMES`.
"""

import json
import re
from functools import cache

import pandas as pd
import pytest

from attnlib.core.schedule.caps import MOST_QUERY_TOKENS, PARTIAL_BYTES, num_splits, split_bytes
from attnlib.core.schedule.facts import SchedulerFacts
from attnlib.kinds.traffic import IN_FLIGHT
from attnlib.lab import repro
from attnlib.measure.stats import FASTER, SLOWER
from attnlib.run.store import PUBLISHED
from attnlib.studies import split_cap
from attnlib.studies.split_cap import (
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
    SMS,
    TRAFFIC_STEPS,
)

DOCUMENT = PUBLISHED / "upstream" / "split_cap.md"
MOST_WORDS = 900
"""Without tables and code."""
NAMES = """
    sgl-flash-attn#46 sglang#29551 sglang#34888 sglang#37208 sglang#39968 sglang#27786
    flashinfer#4832 flashinfer#3379 tokenspeed#1693 flash-attention#2445 flash-attention#176
    flash-attention#190 vllm#35899 vllm#51320 vllm#51995 46 07a9b0cc 2026-06-24 2026-11-28 2023
    0.5.16 0.5.23 13.0 H100 H200 FlashAttention-3 fa3 L2 bfloat16 float64 int64_t num_splits=0
    95 90th
""".split()
"""What has a number in it and was not measured: threads, dates, releases of SGLang, names."""
QUOTES = ("1 long sequence and the rest are short", "PR 46 reports 29 splits and 14.5 GiB")
"""From a comment in get_num_splits, and of the description of sgl-flash-attn #46."""
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
    measured = [("H100", h100(), TRAFFIC_STEPS), ("H200", h200(), (MLA, MLA_VERIFY))]
    for gpu, rows, layouts in measured:
        for layout in layouts:
            judged = split_cap.sides_of(rows, layout, "default")
            found[gpu, layout] = judged[judged.trace != ""]
    return found


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
            try:
                pages_of_one = rows[rows.page_size == 1]
                table = split_cap.sides_of(pages_of_one, layout, "bounded", "default")
            except ValueError:  # a layout that this GPU was not measured with
                continue
            tables.append(table[table.rows == layout.group])
        sides.append(pd.concat(tables).set_index(["layout", "batch"]))
    return sides[0].add_suffix("_100").join(sides[1].add_suffix("_200"))


def line(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def traffic_lines():
    for (gpu, layout), part in by_traffic().items():
        lost = part.case.map(split_cap.loses_splits).mean()
        slowdown = part.slowdown
        times = slowdown.median(), slowdown.quantile(0.9), slowdown.max()
        cells = (f"{time:.2f}" for time in times)
        yield line(gpu, layout.name, len(part), f"{lost:.0%}", *cells)


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
    return "not measured" if pd.isna(ratio) else f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def environment_phrases():
    pairs, gpus = set(), {}
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
    words = {2: "two", 4: "four"}
    assert torch[BEFORE] == torch[CHANGED] == "2.11.0" and len(torch) == 3
    yield f"sglang-kernel {NOW} with torch {torch[NOW]}"
    yield f"sglang-kernel {CHANGED}, SGLang 0.5.16"
    yield f"`num_splits=0` of {NOW}"
    yield f"With {BEFORE} the first line is"
    yield f"{BEFORE} and {CHANGED} with torch {torch[CHANGED]}"
    yield f"a context of {CONTEXT:,} tokens ({LONG_CONTEXT:,} where a request is longer)"
    for gpu, machines in gpus.items():
        yield f"{words[len(machines)]} {gpu.removeprefix('NVIDIA ')}"
    assert h100()["round"].nunique() == h200()["round"].nunique() == 3


def script_lines():
    """What the script printed on an H100: the first table, of both releases."""
    runs = json.loads((PUBLISHED / "captures" / "repro_split_cap.json").read_text())["runs"]
    for release, wanted in ((NOW, "0,|8 |bounded"), (BEFORE, "0,")):
        head, table = runs[release].split("\n\n")[:2]
        assert head.startswith("NVIDIA H100") and head.endswith(f"sglang-kernel {release}")
        yield from (row for row in table.splitlines() if re.match(wanted, row))
    yield runs[NOW].split("\n\n")[1].splitlines()[0]


def summary_phrases():
    traffic = by_traffic()["H100", MLA].slowdown
    times = f"{traffic.median():.2f} times as long in the median and {traffic.max():.2f} times"
    call = f"an MLA call with {MLA.heads} heads over batches of published traces"
    yield f"{call} takes {times} at worst on an H100"
    yield f"with {min(IN_FLIGHT)} to {max(IN_FLIGHT)} requests in flight"
    table = split_cap.sides_of(h200(), MLA, "default")
    yield f"The first row takes {table.slowdown.max():.2f} on an H200"
    releases = split_cap.release_table(h100(), MLA)
    before, changed = releases[BEFORE], releases[CHANGED]
    yield f"{BEFORE} takes {before.min():.2f} to {before.max():.2f} times the time of `bounded`"
    yield f"{CHANGED} up to {changed.max():.2f}"
    yield f"the {len(releases)} named batches of MLA with {MLA.heads} heads"


def rule_phrases():
    yield f"about {LOSES_FROM} / (query heads per KV head x query tokens)"
    llama = GROUPED[0]
    yield f"{LOSES_FROM / llama.group:.1f} for 32/8 (Llama-3.1-8B)"
    yield f"{LOSES_FROM / GROUPED[2].group:.1f} for 8/1 (Llama-3.1-70B, TP8)"
    yield f"{LOSES_FROM / GROUPED[3].group:.1f} for 16/1"
    yield f"{LOSES_FROM / MLA_VERIFY.group:.1f} for MLA with 16 heads and 4 query tokens"
    yield f"{LOSES_FROM / MLA.group:.2f} for MLA with {MLA.heads} heads"
    tables = pd.concat([part for (gpu, _), part in by_traffic().items() if gpu == "H100"])
    loses = tables.case.map(split_cap.loses_splits)
    agrees = (loses == (tables.rows > LOSES_FROM)).sum()
    yield f"{agrees} of {len(tables)} traffic calls"


def bound_phrases():
    yield f"params.seqlen_q <= {MOST_QUERY_TOKENS}"
    mib = PARTIAL_BYTES >> 20
    assert mib << 20 == PARTIAL_BYTES
    yield f"({mib} << 20) / split_bytes"
    yield f"{mib} MiB"
    prefill = SchedulerFacts(
        batch_size=4096,
        num_qo_heads=64,
        num_kv_heads=1,
        head_dim=64,
        head_dim_v=512,
        max_seqlen_q=1,
        max_seqlen_k=2048,
        num_sms=SMS,
        page_size=1,
        causal=True,
        varlen_q=True,
        build="sglang",
    )
    upstream, bounded = (num_splits(prefill, cap) for cap in ("upstream", "bounded"))
    gib = upstream * split_bytes(prefill) / 2**30
    yield f"{prefill.batch_size:,} segments of {prefill.max_seqlen_q} token, 64 heads"
    yield f"over {prefill.max_seqlen_k:,} tokens of KV by the model"
    yield f"{upstream} splits and {gib:.1f} GiB by the old cap, {bounded} split by the bound"
    assert prefill.split_cap == bounded


def memory_phrases():
    table = split_cap.memory_table(h100()).set_index(["layout", "batch"])
    short = split_cap.SHORT_PREFILL
    _, row = next(table.iterrows())
    assert table.index[0][1] == "prefill of short segments"
    text = f"prefill of {short.batch_size} segments of {short.q_len} tokens"
    text += f" ({short.spec.num_qo_heads} heads, {short.kv_len:,} tokens of KV)"
    text += f" allocates {row.upstream:,} MiB by the old cap, {row.default} by today's"
    yield f"{text} and {row.bounded} by the bound"
    decode = table.iloc[1:]
    _, most = next(decode.iterrows())
    assert most.bounded == decode.bounded.max() and decode.index[0] == (MLA.name, "128 x 2k")
    text = f"{most.upstream:,}, {most.default} and {most.bounded} MiB for 128 x 2k of MLA"
    yield f"{text} with {MLA.heads} heads"
    yield f"at most {decode.bounded.max()} MiB a call"


def alike_phrases():
    slower = [(alike()[f"verdict_{gpu}"] == SLOWER).sum() for gpu in ("100", "200")]
    count = [alike()[f"ratio_{gpu}"].notna().sum() for gpu in ("100", "200")]
    pairs = [f"{few} of {all_}" for few, all_ in zip(slower, count, strict=True)]
    yield f"{pairs[0]} batches on the H100 and {pairs[1]} on the H200"
    worst = [alike()[f"ratio_{gpu}"].max() for gpu in ("100", "200")]
    yield f"up to {worst[0]:.3f} and {worst[1]:.3f} times the default"


def objection_phrases():
    latent = pd.concat([by_traffic()["H100", layout] for layout in (MLA, MLA_VERIFY)])
    faster = latent[latent.verdict == FASTER]
    assert set(faster.trace) == {"azure-conversation"}
    counts = f"{len(faster)} of {len(latent)} MLA traffic calls on the H100"
    yield f"{counts}, down to {faster.slowdown.min():.2f}"
    longest = max(split_cap.lengths_of(case)[1].max() for case in faster.case)
    yield f"longest request at most {longest:,} tokens"
    row = named()[(named().layout == MLA_TP8.name) & (named().batch == "8 x 32k + 56 x 2k")].iloc[0]
    assert row.verdict == FASTER
    times = f"{row['default, us']} us by the default, {row['bounded, us']} by the bound"
    yield f"{MLA_TP8.name}, {row.batch}: {times}"
    medians = [by_traffic()["H100", layout].slowdown.median() for layout in GROUPED[2:]]
    both = " and ".join(layout.name for layout in GROUPED[2:])
    yield f"The median over traffic is {medians[0]:.2f} ({both})"
    assert f"{medians[0]:.2f}" == f"{medians[1]:.2f}"
    grouped = named()[named().layout.isin([layout.name for layout in GROUPED])].iloc[0]
    yield f"costs up to {grouped.slowdown:.2f} ({grouped.layout}, {grouped.batch})"
    table = split_cap.rival_table(h100(), MLA_LAYOUTS)
    table = table[table.page == 64]
    ratio = table["flashmla-dense"] / table.bounded
    yield f"FlashMLA, with pages of 64, takes {ratio.min():.2f} to {ratio.max():.2f} times"
    yield f"faster in {(ratio < 1).sum()} of {len(ratio)} calls"


def engine_phrases():
    text = (PUBLISHED / "captures" / "split_cap_engine.jsonl").read_text()
    arms = {}
    for run in map(json.loads, text.splitlines()):
        arms.setdefault(run["model"], {})[run["arm"]] = run
    for both in arms.values():
        assert both["default"]["first"]["sha256"] == both["bounded"]["first"]["sha256"]
        assert both["default"]["prefill"]["rise_mib"] == both["bounded"]["prefill"]["rise_mib"]
    words = {4: "four"}
    yield f"all {words[len(arms)]} pairs of runs have the same tokens"
    prefill = arms["mla"]["bounded"]["prefill"]
    yield f"a prefill of {prefill['answered']} x 2,048 tokens adds the same memory"
    yield f"({prefill['rise_mib']:,} MiB with MLA)"


PARTS = (
    traffic_lines,
    named_lines,
    alike_lines,
    environment_phrases,
    script_lines,
    summary_phrases,
    rule_phrases,
    bound_phrases,
    memory_phrases,
    alike_phrases,
    objection_phrases,
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
            assert (row.batches, row.worst) == (len(part), round(part.slowdown.max(), 2))
            assert row["slowdown, median"] == round(part.slowdown.median(), 2)


def test_a_number_that_is_changed_is_found(text):
    unseen = []
    for found in re.finditer(r"\d+", text):
        number = str(int(found[0]) + 1).zfill(len(found[0]))
        if not faults(text[: found.start()] + number + text[found.end() :]):
            unseen.append((found[0], text[found.start() - 30 : found.end() + 10]))
    assert unseen == []


def test_the_document_is_short_and_its_script_is_there(text):
    prose = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    prose = "\n".join(row for row in prose.splitlines() if not row.startswith("|"))
    assert len(prose.split()) <= MOST_WORDS
    assert "python -m attnlib repro split_cap" in text and "split_cap" in repro.names()
    # A bare #N would link to the repository that the document is posted in.
    assert not re.search(r"(?<![\w/])#\d", text)
