"""Simulated decode batches: against a server that goes token by token, and refused arguments.

Most tests run on an invented trace. Those of a published trace skip where it was not imported.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from support import traffic

README = Path(__file__).resolve().parents[2] / "data" / "traffic" / "README.md"
INVENTED = "kimi-synthetic"
TOO_LONG = (9, 5000, 3000)
NO_OUTPUT = (9, 7, 0)
LONGEST = 6000
PINNED = [
    [952, 1723, 4653, 1000],
    [2647, 554, 4687, 3992],
    [466, 3057, 199, 4026],
]
"""Three steps of four requests of the invented trace, seed 7."""
MEASURED = ("kimi-conversation", "kimi-synthetic", "azure-conversation", "azure-code")
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51,10,1
"""


def invented_rows(count=90):
    """Requests with outputs of 1 to 60 tokens, and two that are to be skipped."""
    rng = random.Random(5)
    drawn = [(1 + int(rng.random() * 5000), 1 + int(rng.random() * 60)) for _ in range(count)]
    rows = [(30 * index, *lengths) for index, lengths in enumerate(drawn)]
    rows.insert(4, NO_OUTPUT)
    rows.insert(40, TOO_LONG)
    return rows


def write_kimi(path, rows):
    objects = [dict(zip(traffic.KIMI_FIELDS, row, strict=True), hash_ids=[1]) for row in rows]
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))


@pytest.fixture(autouse=True)
def forget():
    """A test that moves the folder leaves no rows of it to the next."""
    traffic.requests.cache_clear()
    yield
    traffic.requests.cache_clear()


@pytest.fixture
def empty(monkeypatch, tmp_path):
    monkeypatch.setattr(traffic, "FOLDER", tmp_path / "traffic")
    return tmp_path


@pytest.fixture
def invented(empty):
    """The rows of an imported trace."""
    rows = invented_rows()
    write_kimi(empty / "trace.jsonl", rows)
    traffic.import_trace(INVENTED, empty / "trace.jsonl")
    return rows


@pytest.fixture(params=MEASURED)
def published(request):
    if not (traffic.FOLDER / f"{request.param}.csv.xz").exists():
        pytest.skip(f"{request.param} was not imported: data/traffic/README.md")
    return request.param


class Slot:
    def __init__(self, request, number):
        self.prompt, self.output = request
        self.number = number
        self.generated = 0


class Server:
    """The oracle: every request in flight gets one token a step."""

    def __init__(self, pool, in_flight, first):
        self.pool = pool
        self.next = first
        self.slots = [self.take() for _ in range(in_flight)]

    def take(self):
        slot = Slot(self.pool[self.next % len(self.pool)], self.next)
        self.next += 1
        return slot

    def step(self):
        """Lengths and numbers of the requests in this step."""
        for index, slot in enumerate(self.slots):
            if slot.generated == slot.output:
                self.slots[index] = self.take()
        for slot in self.slots:
            slot.generated += 1
        lengths = [slot.prompt + slot.generated for slot in self.slots]
        return lengths, [slot.number for slot in self.slots]


def token_by_token(rows, in_flight, count, seed, longest):
    """The lengths that `decode_steps` must give, and which requests they are of."""
    pool = [(prompt, output) for _, prompt, output in rows if output and prompt + output <= longest]
    gap = slow_spacing([output for _, output in pool])
    first = int(random.Random(seed).random() * len(pool))
    server = Server(pool, in_flight, first)
    seen = [server.step()]
    while any(number < first + in_flight for number in seen[-1][1]):
        seen.append(server.step())
    taken = seen[-1:]
    while len(taken) < count:
        taken.append([server.step() for _ in range(gap)][-1])
    return taken


def slow_spacing(outputs):
    gap = 1
    while 4 * sum(output - gap for output in outputs if output > gap) > sum(outputs):
        gap += 1
    return gap


@pytest.mark.parametrize("in_flight", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_the_lengths_are_those_of_a_server_that_goes_token_by_token(invented, in_flight, seed):
    steps = traffic.decode_steps(INVENTED, in_flight, 9, seed=seed, longest=LONGEST)
    expected = token_by_token(invented, in_flight, 9, seed, LONGEST)
    assert [step.tolist() for step in steps] == [lengths for lengths, _ in expected]
    assert {(step.dtype, step.shape) for step in steps} == {(np.dtype(np.int32), (in_flight,))}


def test_two_steps_in_a_row_share_a_quarter_of_their_requests(invented):
    taken = [set(numbers) for _, numbers in token_by_token(invented, 32, 200, 0, LONGEST)]
    shares = [len(one & other) / 32 for one, other in zip(taken, taken[1:], strict=False)]
    assert 0.15 < np.mean(shares) <= 0.27


@pytest.mark.parametrize(
    "outputs",
    [
        [1],
        [8, 8],
        [1, 1, 90],
        [5, 60, 2, 2, 31],
    ],
)
def test_the_spacing_is_the_least_after_which_a_quarter_is_left(outputs):
    assert traffic.spacing(np.array(outputs)) == slow_spacing(outputs)


def test_a_request_leaves_with_its_last_token(empty):
    write_kimi(empty / "trace.jsonl", [(0, 100, 2)])
    traffic.import_trace(INVENTED, empty / "trace.jsonl")
    # Lengths 101, 102, 101, 102, ...: the slot is refilled in step 2, and the spacing is 2.
    assert [step.tolist() for step in traffic.decode_steps(INVENTED, 2, 3)] == [[101, 101]] * 3
    assert traffic.spacing(np.array([2])) == 2


def test_the_numbers_are_the_same_on_every_machine(invented):
    steps = traffic.decode_steps(INVENTED, 4, 3, seed=7, longest=LONGEST)
    assert [step.tolist() for step in steps] == PINNED
    other = traffic.decode_steps(INVENTED, 4, 3, seed=8, longest=LONGEST)
    assert [step.tolist() for step in other] != PINNED


def test_what_is_too_long_or_has_no_output_is_skipped(invented):
    lengths = np.concatenate(traffic.decode_steps(INVENTED, 8, 200, longest=LONGEST))
    assert 1 <= lengths.min() and lengths.max() <= LONGEST
    assert NO_OUTPUT[1] + 1 not in lengths
    every = np.concatenate(
        traffic.decode_steps(
            INVENTED,
            8,
            200,
            longest=sum(TOO_LONG[1:]),
        )
    )
    assert every.max() > LONGEST


def test_an_imported_trace_has_every_request_in_order(invented):
    rows = traffic.requests(INVENTED)
    assert rows.dtype == np.int64
    assert [tuple(row) for row in rows.tolist()] == invented
    assert traffic.requests(INVENTED) is rows
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 0


def test_a_second_import_replaces_the_first(empty):
    for request in ((0, 100, 2), (0, 300, 5)):
        write_kimi(empty / "trace.jsonl", [request])
        rows = traffic.import_trace(INVENTED, empty / "trace.jsonl")
        assert rows.tolist() == [list(request)]


def test_the_shortest_request_may_be_the_longest_allowed(invented):
    least = min(prompt + output for _, prompt, output in invented if output)
    assert traffic.decode_steps(INVENTED, 1, 1, longest=least)[0] <= least
    words = f"longest must be at least {least} tokens, .* {INVENTED}, got {least - 1}$"
    with pytest.raises(ValueError, match=words):
        traffic.decode_steps(INVENTED, 1, 1, longest=least - 1)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_times_of_azure_count_in_milliseconds_from_the_first_request(empty, mark):
    source = empty / "trace.csv"
    source.write_text(mark + AZURE, encoding="utf-8")
    rows = traffic.import_trace("azure-code", source).tolist()
    assert rows == [
        [0, 374, 44],
        [4314, 396, 109],
        [4319, 10, 1],
    ]


def test_a_file_that_lacks_a_field_is_refused(empty):
    (empty / "trace.csv").write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n")
    with pytest.raises(KeyError, match="GeneratedTokens"):
        traffic.import_trace("azure-code", empty / "trace.csv")
    assert not traffic.FOLDER.exists()


def test_a_trace_that_was_not_imported_says_how(empty):
    words = "azure-code.csv.xz in data/traffic, got 'azure-code', which was not: data/traffic/READ"
    with pytest.raises(FileNotFoundError, match=words):
        traffic.requests("azure-code")


def test_other_columns_are_refused(invented):
    path = traffic.FOLDER / f"{INVENTED}.csv.xz"
    path.write_bytes(traffic.lzma.compress(b"input_tokens,output_tokens\n1,2\n"))
    traffic.requests.cache_clear()
    words = "must be arrival_ms,input_tokens,output_tokens, got input_tokens,output_tokens$"
    with pytest.raises(ValueError, match=words):
        traffic.requests(INVENTED)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"in_flight": 0}, "in_flight must be an integer in 1..1024, got 0"),
        ({"in_flight": 1025}, "in_flight must be an integer in 1..1024, got 1025"),
        ({"in_flight": 2.0}, "in_flight must be an integer in 1..1024, got 2.0"),
        ({"count": 0}, "count must be an integer >= 1, got 0"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"longest": 0}, "longest must be an integer >= 1, got 0"),
        ({"longest": 1}, "longest must be at least"),
        ({"trace": "azure"}, "trace must be one of kimi-conversation, kimi-synthetic, "),
    ],
)
def test_a_wrong_argument_is_named(invented, wrong, words):
    right = {"trace": INVENTED, "in_flight": 4, "count": 2}
    with pytest.raises(ValueError, match=words):
        traffic.decode_steps(**(right | wrong))


def readme_row(trace):
    """The row of the README's table of numbers."""
    rows = [line for line in README.read_text().splitlines() if line.startswith(f"| {trace} |")]
    return [float(cell) for cell in rows[1].strip("|").split("|")[1:]]


def test_the_readme_has_the_numbers_of_the_files(published):
    rows = traffic.requests(published)
    expected = [len(rows)]
    for tokens in rows[:, 1:].T:
        expected += [
            tokens.mean(),
            np.median(tokens),
            np.percentile(tokens, 99),
        ]
    assert readme_row(published) == [round(float(number), 1) for number in expected]


def test_a_published_trace_is_served_as_token_by_token(published):
    steps = traffic.decode_steps(published, 16, 5, seed=3)
    expected = token_by_token(traffic.requests(published).tolist(), 16, 5, 3, 131_072)
    assert [step.tolist() for step in steps] == [lengths for lengths, _ in expected]


def test_the_readme_lists_every_trace():
    text = README.read_text()
    assert all(f"| {trace} |" in text for trace in traffic.TRACES)


def test_the_batches_that_are_measured_are_of_every_trace_and_size():
    batches = traffic.batches()
    counts = {}
    for batch in batches:
        assert len(batch.tokens) == batch.in_flight
        assert batch.longest == max(batch.tokens)
        assert 1 <= min(batch.tokens) <= batch.longest <= 131_072
        counts.setdefault((batch.trace, batch.in_flight), []).append(batch.step)
    assert set(counts) == {(t, n) for t in traffic.TRACES for n in traffic.IN_FLIGHT}
    assert {tuple(steps) for steps in counts.values()} == {tuple(range(traffic.STEPS))}
    assert len(batches) == len({(batch.in_flight, batch.lengths) for batch in batches}) == 112


def test_the_batches_that_are_measured_are_drawn_from_the_traces():
    for trace in traffic.TRACES:
        if not (traffic.FOLDER / f"{trace}.csv.xz").exists():
            pytest.skip(f"{trace} was not imported: data/traffic/README.md")
    assert tuple(traffic.draw_batches()) == traffic.batches()
