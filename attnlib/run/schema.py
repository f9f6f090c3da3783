"""The columns of a record, each with its type and its meaning: the one place that declares them.

A record is a row. In memory it is a dict (`rows.row_of`) or a row of a table, on disk a JSON object
or a row of a Parquet file, and these are its columns everywhere. A new column is one entry here:
readers, frames and the worker take it from the table.
"""

import datetime
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

from ..core.backends.table import RECORDED

VERSION = 1
STATUSES = ("ok", "incorrect", "refused", "error", "crashed", "timeout")
TEXT = pa.string()
COUNT = pa.int64()
NUMBER = pa.float64()
FLAG = pa.bool_()
KERNEL = {"name": TEXT, "launches": NUMBER, "gpu_us": NUMBER}
KERNELS = pa.list_(pa.struct(KERNEL))
NUMBERS = pa.list_(NUMBER)
COUNTS = pa.list_(COUNT)


def now(device: str = "") -> str:
    """UTC to the microsecond: records are sorted by it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


class Column(NamedTuple):
    """A column: its Arrow type and its meaning.

    `in_frame`: a frame has it too, without the name of its group. `ask` gives the value for a
    device, such as `cuda`, just before an item is measured; what is not asked is a subject's.
    """

    name: str
    type: pa.DataType
    meaning: str
    in_frame: bool = False
    ask: Callable[[str], object] | None = None

    @property
    def is_member(self) -> bool:
        """Whether a record may lack it: it has a dot in its name, as one of a group."""
        return "." in self.name

    @property
    def empty(self) -> object:
        """What stands in a record that says nothing of the column."""
        if self.is_member or self.name in (*REQUIRED, *NULLABLE):
            return None
        if pa.types.is_list(self.type):
            return []
        return "" if self.type == TEXT else 0


STATE = {
    "memory_clock_mhz": "clock of the GPU's memory",
    "power_w": "watts",
    "sm_clock_mhz": "SM clock",
    "temperature_c": "temperature",
    "throttle_reasons": "NVML's bits, why clocks are held down,",
}
"""What changes of a GPU while it works (`measure.machine.describe_state`)."""
STATE_COLUMNS = []
for _when in ("before", "after"):
    for _name, _meaning in STATE.items():
        _words = f"{_meaning} {_when} the measurement"
        STATE_COLUMNS.append(Column(f"state_{_when}.{_name}", COUNT, _words))
VERSION_COLUMNS = []
for _name in sorted((*RECORDED, "python", "cuda")):
    VERSION_COLUMNS.append(Column(f"versions.{_name}", TEXT, f"release of `{_name}`"))
COLUMNS = (
    Column(
        "id",
        TEXT,
        "16 hex digits of SHA-256 over study, round, backend, timer, case, release and GPU",
        in_frame=True,
    ),
    Column(
        "study",
        TEXT,
        "name in `attnlib.studies`; `bisect_` and that name: the steps of a version bisect; "
        "`explorer`: what the explorer measured",
        in_frame=True,
    ),
    Column("round", COUNT, "number of the fresh process: the unit of statistics", in_frame=True),
    Column(
        "status",
        TEXT,
        "`ok`, `incorrect`, `refused`, `error`, `crashed` or `timeout`; only `ok` has times",
        in_frame=True,
    ),
    Column("command", TEXT, "the command that measures the study again", in_frame=True),
    Column("started_at", TEXT, "UTC, ISO 8601", in_frame=True, ask=now),
    Column("reason", TEXT, "why it is not `ok`", in_frame=True),
    Column(
        "reported_backend",
        TEXT,
        "the library's own word for what it chose, after `plan`; of an engine, its arm and a "
        "hash of tokens and logits; of a server what its log says, and a hash of all tokens",
        in_frame=True,
    ),
    Column(
        "kernel_family",
        TEXT,
        "what the traced kernel names prove to have run: a family of "
        "`attnlib/core/backends/table.py`, or empty",
        in_frame=True,
    ),
    Column(
        "kernels",
        KERNELS,
        "every kernel of a call: its name, launches per call and microseconds per call "
        "(torch.profiler)",
    ),
    Column(
        "run_us",
        NUMBERS,
        "microseconds of a call of `run`, a value per sample; of a server the time between two "
        "tokens of a request, at most 1,000 of them, evenly chosen",
    ),
    Column("calls_per_sample", COUNT, "calls between the two events of a sample"),
    Column(
        "settle_us",
        NUMBER,
        "microseconds of the same work before the first sample, until clocks and power had "
        "settled; 0: the timer did not wait",
    ),
    Column("power_w", pa.list_(COUNT), "watts, read while each sample ran"),
    Column("sm_clock_mhz", pa.list_(COUNT), "the SM clock, read while each sample ran"),
    Column(
        "plan_us",
        pa.list_(NUMBER),
        "microseconds of the host in a call of `plan`, a value per call",
    ),
    Column(
        "oracle_error",
        NUMBER,
        "worst relative L2 error of an output row against float64; of metadata, how many "
        "words differ; of an engine's `steps`, relative error of a request's logits; of "
        "`offline` and of a server, requests or tokens that are missing",
        in_frame=True,
    ),
    Column(
        "oracle_budget",
        NUMBER,
        "the largest `oracle_error` with which the record is `ok`",
    ),
    Column("oracle_rows", COUNT, "output rows (request, query head) that were checked"),
    Column(
        "peak_bytes",
        COUNT,
        "bytes of GPU memory that one call, or a load, allocates on top of what is held: output, "
        "partial outputs, words; 0 or null: not measured",
    ),
    Column(
        "work_per_call",
        NUMBER,
        "bytes that a call must move (attention, `copy`), or FLOPs (`matmul`)",
        in_frame=True,
    ),
    Column("schema", COUNT, "version of this table", in_frame=True),
    Column(
        "backend",
        TEXT,
        "what was asked for: a backend, a design of the metadata, or a ceiling (`copy`, `matmul`); "
        "of a server the engine and its arm",
        in_frame=True,
    ),
    Column(
        "timer",
        TEXT,
        "`graph`, `graph-cold`, `graph-behind`, `eager`, `profiler`, `host`, `ahead` or `served`; "
        "`attnlib/measure/timer.py` says what each of them times, "
        "`attnlib/studies/engine/case.py` what of an engine, "
        "`attnlib/studies/serving/measure.py` what of a server",
        in_frame=True,
    ),
    Column(
        "release",
        TEXT,
        "release of the backend's distribution; empty where none is compared",
        in_frame=True,
    ),
    Column(
        "again",
        COUNT,
        "null, or 1: the same measured once more in the same process (A/A; in one of its own "
        "where items are isolated), to say how far one thing lies from itself",
    ),
    Column("case.batch_size", COUNT, "requests"),
    Column(
        "case.builder",
        TEXT,
        "of metadata: what is built, `decode` (lengths, prefix sums, page table) or `kv_indices`",
    ),
    Column(
        "case.context",
        COUNT,
        "longest request that the engine was started for, so the width of the page table in "
        "tokens; 0 or null: the driver's own, of metadata as `max_ctx`, of a call as wide as "
        "its longest request",
    ),
    Column("case.dp", COUNT, "of an engine: groups of GPUs with requests of their own"),
    Column(
        "case.driver",
        TEXT,
        "of an engine: who asks for steps, `steps` one at a time, `offline` as users do",
    ),
    Column("case.dtype", TEXT, "of the query"),
    Column("case.head_dim", COUNT, "of query and KV heads"),
    Column(
        "case.kind",
        TEXT,
        "what a call is: `extend`, `mla`, or a folder of `attnlib/studies` that has cases of its "
        "own, such as `metadata`, `step`, `plan`, `serving` and `engine` (read only); null: decode",
    ),
    Column("case.kv_dtype", TEXT, "of the cache"),
    Column(
        "case.kv_format",
        TEXT,
        "of a token in an MLA cache: `bfloat16`, `fp8-656` (FlashMLA) or `fp8-576` (FlashInfer)",
    ),
    Column("case.kv_len", COUNT, "the most tokens of a request after the call"),
    Column("case.late_s", COUNT, "of a server: seconds until the first client begins"),
    Column("case.layers", COUNT, "of a step: attention calls, one per layer"),
    Column(
        "case.lengths",
        TEXT,
        "how lengths are drawn (`attnlib/measure/calls/lengths.py`), or all of them: `33+1+60`",
    ),
    Column(
        "case.load",
        COUNT,
        "of a server: percent of the rate that the base has served at which requests arrive; 0: "
        "clients wait for their answers",
    ),
    Column("case.mask", TEXT, "`causal`, `full`, or drafts as a custom one, `chain` or `tree`"),
    Column("case.max_ctx", COUNT, "of metadata: tokens of the longest request"),
    Column(
        "case.mode",
        TEXT,
        "of an extend call: `target_verify`, `draft_extend`, `dllm_extend`, `prefill_paged` "
        "or `prefill_ragged`",
    ),
    Column("case.model", TEXT, "of an engine"),
    Column("case.num_kv_heads", COUNT, "KV heads, of one GPU"),
    Column("case.num_qo_heads", COUNT, "query heads, of one GPU"),
    Column("case.output_len", COUNT, "of an engine: decode steps; of a server: tokens to make"),
    Column("case.page_size", COUNT, "tokens of a KV page"),
    Column(
        "case.pool_size",
        COUNT,
        "of metadata: rows of the pool of requests, at least as many as requests",
    ),
    Column("case.prompts", TEXT, "of a server: `cached` in its prefix cache before, or `new`"),
    Column("case.q_len", COUNT, "query tokens per request; of ragged ones the most"),
    Column("case.q_lengths", TEXT, "all query tokens, where they differ: `1+1+512`"),
    Column("case.seed", COUNT, "of lengths, pages and inputs"),
    Column("case.seq_len_delta", COUNT, "of metadata: added to every length"),
    Column("case.swa", FLAG, "of metadata: whether the sliding window's page table is built too"),
    Column("case.top_k", COUNT, "of MLA: tokens of a request that are attended to; 0: all"),
    Column("case.tp", COUNT, "of an engine: GPUs that the model is split over"),
    Column("case.turns", COUNT, "of a server: requests of each client, one after the other"),
    Column("case.window", COUNT, "tokens that a layer with a sliding window sees; null: all"),
    Column("machine.compute_capability", TEXT, "of the GPU, such as `9.0`", in_frame=True),
    Column("machine.cores", COUNT, "cores of the host's CPU"),
    Column("machine.cpu", TEXT, "architecture of the CPU, where no GPU was measured on"),
    Column("machine.driver", TEXT, "release of NVIDIA's driver"),
    Column("machine.gpu", TEXT, "name of the GPU; empty: measured on a CPU", in_frame=True),
    Column(
        "machine.gpu_id",
        TEXT,
        "eight hex digits of SHA-256 of the GPU's UUID, or `cpu`",
        in_frame=True,
    ),
    Column("machine.l2_mib", NUMBER, "L2 cache of the GPU", in_frame=True),
    Column("machine.max_sm_clock_mhz", COUNT, "the highest SM clock that the GPU has"),
    Column("machine.memory_gib", NUMBER, "memory of the GPU"),
    Column("machine.num_sms", COUNT, "multiprocessors of the GPU", in_frame=True),
    Column("machine.power_limit_w", COUNT, "power limit of the GPU in watts", in_frame=True),
    Column("served.ended_us", NUMBERS, "of a server: when each request's last token came"),
    Column("served.first_us", NUMBERS, "when its first token came"),
    Column("served.itl_p50_us", NUMBER, "of a server: median time between tokens of a request"),
    Column("served.itl_p90_us", NUMBER, "the 90th percentile of it"),
    Column("served.itl_p99_us", NUMBER, "the 99th percentile of it"),
    Column("served.output", COUNTS, "tokens that each request made"),
    Column("served.prompt", COUNTS, "tokens of each request's prompt"),
    Column("served.rate", NUMBER, "of an open loop: requests that arrive in a second, on average"),
    Column(
        "served.started_us",
        NUMBERS,
        "when each request was sent, microseconds after the load began",
    ),
    Column("served.token_at_us", NUMBERS, "when the token of each sample of `run_us` came"),
    Column("served.tokens", COUNT, "of a server: tokens that came in the window"),
    Column("served.tokens_per_s", NUMBER, "tokens of all requests in a second of the window"),
    Column("served.ttft_p50_us", NUMBER, "of a server: median time to a request's first token"),
    Column("served.ttft_p90_us", NUMBER, "the 90th percentile of it"),
    Column("served.ttft_p99_us", NUMBER, "the 99th percentile of it"),
    Column("served.window_s", NUMBER, "seconds in which tokens were counted"),
    *STATE_COLUMNS,
    *VERSION_COLUMNS,
)
REQUIRED = (
    "id",
    "schema",
    "study",
    "round",
    "backend",
    "timer",
    "status",
    "command",
    "started_at",
    "machine.gpu",
    "machine.gpu_id",
)
"""Columns without which a row is no record."""
NULLABLE = ("oracle_error", "oracle_budget", "again")
"""Columns that are null where a record says nothing of them; others but members are empty."""
BY_NAME = {column.name: column for column in COLUMNS}
PLAIN = frozenset(column.name for column in COLUMNS if not column.is_member)
"""Columns that every table has: they are in no group."""
EMPTY = {column.name: column.empty for column in COLUMNS}
"""What stands in a record that says nothing of a column."""
