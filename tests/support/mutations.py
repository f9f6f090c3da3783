"""Inputs of the commands with faults in them: traces, captured steps, files of cases, arguments.

`pick` is a `random.Random` everywhere, so that a seed names an input.
"""

import copy
import gzip
import json
import re
import sqlite3
from contextlib import closing

from .traces import FA2_16, FA3, HEAD, METADATA, Writer, runs

LONG = 60_000
"""Characters of a name that is far too long."""
DEEP = 20_000
"""Brackets in brackets."""
NAMES = (
    "",
    "x" * LONG,
    "f" + "<int" * (LONG // 5) + ">" * (LONG // 5),
    "f" + "<" * LONG,
    "(" * LONG,
    "a::" * (LONG // 3),
    "a>::type " * (LONG // 9),
    "device_kernel<" + "a::" * (LONG // 3),
    "_Z" + "1a" * (LONG // 2),
    "_Z" + "N" * LONG,
    "_Z999999999a",
    "BatchPrefillWithPagedKVCacheKernel<" + "KernelTraits" * (LONG // 12),
    "step[DECODE bs=" + "9" * LONG,
    "execute_" + "context_" * (LONG // 8),
    "\x1b[2J\x1b]0;title\x07",
    "\r\n\t\x00\x7f\x9b",
    "\u202eabc\u2066\u2028",
    "\ud800",
    "$\\frac$ a$x_1$b",
    "<script>alert(1)</script>",
    "Memcpy DtoH (" * 99,
)
VALUES = (
    None,
    True,
    -1,
    0,
    7,
    2**31,
    2**63,
    10**400,
    1.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    {"a": 1},
    [None],
    "7",
    *NAMES,
)
KEYS = (
    "heads=32/8 page=16 lens=8192x16",
    "heads=8/1 page=16 lens=33+1+9",
    "heads=32/8 page=16 lens=chat:8192x16",
    "mode=prefill_paged q_len=128 heads=32/8 page=16 lens=8192",
    "# words",
)
STEP = {
    "mode": "decode",
    "batch_size": 3,
    "lengths": "33+1+60",
    "q_lengths": "",
    "num_qo_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "page_size": 1,
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "kind": "mha",
    "backend": "fa3",
    "release": "0.5.23",
    "draft": False,
}
WORDS = (
    *(name[:2000] for name in NAMES if "\ud800" not in name),
    "-1",
    "0",
    "1e9",
    "nan",
    "999999999",
    "9" * 98,
    "1..2",
    "9..1",
    "1..999999999x7",
    "1x99999999",
    "8192x16",
    "33+1+60",
    "32/8",
    "8/0",
    "7/3",
    "heads=32/8",
    "kv_len=0",
    "graph",
    "kv_lens=8192x16",
    "model=gpt-oss",
    "flashinfer==0.6.3",
    "flashinfer==9",
    "sglang==0.5.23",
    "sglang==0.5.23,flashinfer==0.7.2.post1",
    "vllm==0.33.0",
    "sm90",
    "sm90,sm100",
    "b200",
    "decode",
    "mla",
    "sparse_mla",
    "target_verify",
    "fa3",
    "float8_e4m3fn",
    "Llama-3.1-8B",
    "DeepSeek MLA",
    "2%",
    "99.9%",
    "--",
    "--json",
    "--tp",
    "--heads",
    "--lens",
    "--batch",
    "--call",
    "--diff",
    "--policy",
    "--kv-dtype",
    "/dev/null",
    ".",
)
LINES = (
    "explain --library flashinfer==0.6.3 --mode decode --heads 32/8 --gpu sm90 --call graph",
    "explain --library sglang==0.5.23 --mode mla --gpu sm90 --call kv_lens=8192x16 --json",
    "explain --diff flashinfer==0.6.13 flashinfer==0.7.2 --model Llama-3.1-8B --mode decode",
    "advise --model Llama-3.1-70B --tp 8 --lens 9..99x64 --engine sglang==0.5.23 --gpu h100",
    "advise --heads 8/1 --lens 33+1+60 --backend flashinfer --dtype fp16",
    "compare --base 0.6.3 --new 0.6.4 --heads 32/8 --lens 8192x16 --not-slower 2%",
    "bisect --package flashinfer-python --good 0.5.3 --bad 0.6.3 --study auto_resolution --case x",
    "claims mini-sglang-99-fa3-5x-slower --json",
    "publish auto_resolution --machine h200",
    "repro split_cap",
)
"""Right command lines of commands that write nothing where nothing was measured."""


def mutated_arguments(pick, folder):
    """A command line with one to three words changed, lost, doubled or put in."""
    command, *words = pick.choice(LINES).split()
    for _ in range(pick.choice([1, 1, 1, 2, 3])):
        place = pick.randrange(len(words) + 1)
        how = pick.randrange(6)
        if how >= 3 and place < len(words):
            words[place] = _near(pick, words[place])
        elif how == 0:
            words.insert(place, pick.choice(WORDS))
        elif how == 1:
            words[place : place + 1] = [pick.choice(WORDS)]
        else:
            del words[place : place + 1]
    return [command, *words]


def mutated_trace(pick, folder):
    """`diagnose` of a trace of torch.profiler or of Nsight Systems."""
    writer = Writer()
    attention = pick.choice([FA2_16, FA3])
    for _ in range(5):
        writer.step(
            [runs(attention)],
            layers=2,
            ahead=[runs(METADATA)],
            mark=pick.choice(["step[DECODE bs=16]", ""]),
        )
    path = folder / pick.choice(["trace.json", "trace.json.gz", "trace\x1b[2J.json"])
    if pick.random() < 0.3:
        path = _mutated_export(pick, writer, folder)
    else:
        document = {**copy.deepcopy(HEAD), "traceEvents": writer.events}
        for _ in range(pick.randint(1, 3)):
            _mutate_json(pick, document)
        text = json.dumps(document)
        if pick.random() < 0.1:
            opens, closes = pick.choice([("[", "]"), ('{"a":', "}")])
            nested = opens * DEEP + "1" + closes * DEEP
            text = text.replace('"args": {', f'"args": {{"deep": {nested}, ', 1)
        data = _mutated_bytes(pick, text.encode())
        data = gzip.compress(data, mtime=0) if path.suffix == ".gz" else data
        path.write_bytes(_mutated_bytes(pick, data))
    more = pick.choice(
        [
            [],
            ["--json"],
            [str(path)],
            ["--shape", pick.choice(WORDS)],
        ]
    )
    return ["diagnose", str(path), *more]


def _mutated_export(pick, writer, folder):
    path = writer.export(folder / "trace.sqlite")
    table = pick.choice(["CUPTI_ACTIVITY_KIND_KERNEL", "StringIds", "TARGET_INFO_GPU"])
    with closing(sqlite3.connect(path)) as base:
        columns = [row[1] for row in base.execute(f"PRAGMA table_info({table})")]
        column = pick.choice(columns)
        how = pick.randrange(10)
        if how == 0:
            base.execute(f"DELETE FROM {table}")
        elif how == 1:
            base.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        elif how < 4:
            base.execute(f"DROP TABLE {table}")
            endless = "WITH RECURSIVE t(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM t)"
            base.execute(f"CREATE VIEW {table} AS {endless} SELECT * FROM t")
        else:
            value = pick.choice([None, -1, 2**62, 1.5, b"x", *NAMES[:-4]])
            base.execute(f"UPDATE {table} SET {column} = ? WHERE rowid % 3 = 0", [value])
        base.commit()
    path.write_bytes(_mutated_bytes(pick, path.read_bytes()))
    return path


def mutated_capture(pick, folder):
    """`measure` or `compare` over a file of captured steps."""
    steps = [dict(STEP) for _ in range(3)]
    _mutate_json(pick, steps)
    lines = [json.dumps(step) for step in steps]
    data = "\n".join(lines).encode()
    path = folder / "steps.jsonl"
    path.write_bytes(_mutated_bytes(pick, data))
    if pick.random() < 0.5:
        return ["measure", str(path)]
    return _compared(path)


def mutated_cases(pick, folder):
    """`compare` over a file of cases."""
    lines = [pick.choice(KEYS) for _ in range(3)]
    number = pick.randrange(3)
    parts = lines[number].split(",")
    place = pick.randrange(len(parts))
    if pick.random() < 0.7:
        parts[place] = _near(pick, parts[place])
    else:
        parts[place] = pick.choice(WORDS)
    lines[number] = ",".join(parts)
    path = folder / "cases.txt"
    path.write_bytes(_mutated_bytes(pick, "\n".join(lines).encode()))
    return _compared(path)


def _near(pick, word):
    """The word with one of its numbers, or else one of its letters, changed."""
    numbers = list(re.finditer(r"\d+", word))
    if numbers and pick.random() < 0.7:
        number = pick.choice(numbers)
        other = pick.choice(["0", "1", "2", "3", "16", "64", "100", "8191", "99999", "4294967296"])
        return word[: number.start()] + other + word[number.end() :]
    place = pick.randrange(len(word) + 1)
    return word[:place] + pick.choice(["", "x", "-", ",", "=", "."]) + word[place + 1 :]


def _compared(path):
    return ["compare", "--base", "0.6.3", "--new", "0.6.4", "--cases", str(path)]


MUTATED = (mutated_arguments, mutated_trace, mutated_capture, mutated_cases)


def _mutate_json(pick, document):
    """Change, lose or add one value somewhere in a document."""
    owner = document
    value = copy.deepcopy(pick.choice(VALUES))
    while True:
        places = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
        if not places:
            break
        place = pick.choice(places)
        inner = owner[place]
        if not isinstance(inner, dict | list) or pick.random() < 0.1:
            break
        owner = inner
    if not places or (isinstance(owner, dict) and pick.random() < 0.1):
        if isinstance(owner, dict):
            owner[pick.choice(NAMES)] = value
        else:
            owner.append(value)
    elif pick.random() < 0.2:
        del owner[place]
    else:
        owner[place] = value


def _mutated_bytes(pick, data):
    """The bytes as they are, or with some of them changed, lost or doubled."""
    how = pick.randrange(8)
    place = pick.randrange(len(data) + 1)
    if how == 0:
        return data[:place]
    if how == 1:
        return data[:place] + pick.randbytes(3) + data[place + 1 :]
    if how == 2:
        return data[:place] + data[place : place + 50] + data[place:]
    if how == 3:
        return b"\xef\xbb\xbf" + data
    return data
