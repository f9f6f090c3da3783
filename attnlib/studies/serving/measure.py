"""Drives a load and reduces it to the columns of a record.

Time between tokens: the gap between two events of a request, shared evenly by the tokens of the
second one where it brings several. Tokens are counted in a window: of a closed loop from when every
client has its first token until the first client has no request left, of an open loop from the
first arrival to the last.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .case import CACHED, Request, ServingCase
from .client import Reply, stream
from .engine import ServerError
from .gpu import Memory
from .server import Server

STALL_S = 120.0
"""Without one new token for so long, a server hangs."""
WATCH_S = 0.5
MOST_SAMPLES = 200
"""Times between tokens that a record keeps, evenly chosen; percentiles are of all of them."""
TIMER = "served"
PERCENTILES = (50, 90, 99)


class OutOfTimeError(Exception):
    """The run's time was up: what was being measured has no record."""


@dataclass(frozen=True)
class Answer:
    """What came of a request: its tokens, and when each came, in seconds after the load began."""

    request: Request
    started: float
    tokens: tuple[int, ...]
    at: tuple[float, ...]
    gaps: tuple[float, ...]
    """Seconds between each token and the one before; of all but the first."""

    @property
    def first(self) -> float:
        """When its first token came."""
        return self.at[0]

    @property
    def end(self) -> float:
        """When its last token came."""
        return self.at[-1]


def measure(
    server: Server,
    case: ServingCase,
    memory: Memory,
    *,
    rate: float = 0.0,
    until: float = float("inf"),
) -> dict[str, Any]:
    """The fields of the record of a load on a server that is ready.

    `rate` is that of an open loop, requests a second; `until` the second of `time.monotonic` after
    which OutOfTimeError is raised. ServerError with the end of the log for a server that fails.
    """
    try:
        warm_up(server, case, until)
        runs = server.runs()
        with memory.watched() as peak:
            answers = asyncio.run(_load(server, case, rate, until))
        server.require_alive()
        found = reduced(case, answers, rate)
    except ServerError as error:
        if "its log ends" in str(error):
            raise
        raise server.error(f"failed: {error}") from error
    tokens = [answer.tokens for answer in answers]
    digest = hashlib.sha256(repr(tokens).encode())
    return {
        **found,
        "peak_bytes": peak.bytes,
        "reported_backend": f"{runs}; tokens {digest.hexdigest()[:8]}",
    }


def warm_up(server: Server, case: ServingCase, until: float) -> None:
    """Bring the prompts into the prefix cache and run the path that reads them; or one request."""
    turns = [request for request in case.requests() if request.turn == 0]
    firsts = [request._replace(output=2) for request in turns]
    if case.prompts != CACHED:
        firsts = [request._replace(turn=case.turns) for request in firsts[:4]]
    for _ in range(2):
        asyncio.run(_together(server, case, firsts, until))


# ---- the load


async def _together(
    server: Server,
    case: ServingCase,
    requests: Sequence[Request],
    until: float,
) -> None:
    path = server.setup.engine.path
    replies = [Reply() for _ in requests]
    bodies = [_body(server, case, request) for request in requests]
    asked = []
    for reply, body in zip(replies, bodies, strict=True):
        sent = stream(server.port, path, body, reply)
        asked.append(sent)
    await _watched(server, asked, replies, until)
    for request, reply in zip(requests, replies, strict=True):
        answer_of(server, request, reply, 0.0)


async def _load(
    server: Server,
    case: ServingCase,
    rate: float,
    until: float,
) -> list[Answer]:
    requests = list(case.requests())
    bodies = {request: _body(server, case, request) for request in requests}
    replies = {request: Reply() for request in requests}
    path = server.setup.engine.path

    async def client(number: int) -> None:
        if number == 0:
            await asyncio.sleep(case.late_s)
        for request in requests[number :: case.batch_size]:
            await stream(server.port, path, bodies[request], replies[request])

    async def arrive(request: Request, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await stream(server.port, path, bodies[request], replies[request])

    began = time.perf_counter()
    if case.is_open:
        asked = []
        times = case.arrivals_s(rate)
        for request, after_s in zip(requests, times, strict=True):
            asked.append(arrive(request, after_s))
    else:
        asked = [client(number) for number in range(case.batch_size)]
    await _watched(server, asked, list(replies.values()), until)
    answers = []
    for request, reply in replies.items():
        answer = answer_of(server, request, reply, began)
        answers.append(answer)
    return answers


def _body(server: Server, case: ServingCase, request: Request) -> bytes:
    """What is sent, made before the load begins."""
    setup = server.setup
    body = setup.engine.body(
        str(setup.model),
        case.tokens_of(request),
        request.output,
    )
    return json.dumps(body).encode()


async def _watched(
    server: Server,
    asked: Sequence[Awaitable[None]],
    replies: Sequence[Reply],
    until: float,
) -> None:
    """Wait for all; ServerError if the server dies or no token comes, OutOfTimeError at `until`."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    seen = 0
    last = time.monotonic()
    try:
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(
                waiting,
                timeout=WATCH_S,
                return_when=asyncio.FIRST_EXCEPTION,
            )
            for task in done:
                task.result()
            now = time.monotonic()
            count = sum(len(reply.at) for reply in replies)
            if count > seen or done:
                seen, last = count, now
            server.require_alive()
            if now > until:
                raise OutOfTimeError
            if now - last > STALL_S:
                raise ServerError(f"no token came for {STALL_S:.0f} s")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer_of(server: Server, request: Request, reply: Reply, began: float) -> Answer:
    """What a reply holds; ServerError for another number of tokens than was asked for."""
    tokens: list[int] = []
    at: list[float] = []
    gaps: list[float] = []
    for when, new in _arrivals(server, reply):
        count = len(new)
        after_s = when - began
        if tokens:
            gap = (after_s - at[-1]) / count
            gaps += [gap] * count
        else:
            gaps += [0.0] * (count - 1)
        tokens += new
        at += [after_s] * count
    if len(tokens) != request.output:
        raise ServerError(f"a request must make {request.output} tokens, got {len(tokens)}")
    return Answer(
        request=request,
        started=reply.started - began,
        tokens=tuple(tokens),
        at=tuple(at),
        gaps=tuple(gaps),
    )


def _arrivals(server: Server, reply: Reply) -> list[tuple[float, list[int]]]:
    """The tokens that came at one time, and when."""
    found: list[tuple[float, list[int]]] = []
    count = 0
    for when, event in reply.events():
        new = server.setup.engine.new_tokens(event, count)
        count += len(new)
        last_at, last_tokens = found[-1] if found else (None, [])
        if last_at == when:
            last_tokens.extend(new)
        elif new:
            found.append((when, list(new)))
    return found


# ---- what a record keeps


def reduced(case: ServingCase, answers: Sequence[Answer], rate: float = 0.0) -> dict[str, Any]:
    """The fields of a record: samples, a value of each request, and `served`."""
    start, end = window(case, answers)
    at = np.concatenate([answer.at for answer in answers])
    is_counted = (start < at) & (at <= end)
    tokens = int(is_counted.sum())
    later = np.concatenate([answer.at[1:] for answer in answers])
    gaps_us = 1e6 * np.concatenate([answer.gaps for answer in answers])
    order = np.argsort(later, kind="stable")
    later = later[order]
    gaps_us = gaps_us[order]
    is_inside = (start < later) & (later <= end)
    inside = is_inside & (gaps_us > 0)
    if tokens == 0 or not inside.any():
        raise ServerError("no token came while all clients were served: ask for more tokens")
    itl_us = np.percentile(gaps_us[inside], PERCENTILES)
    waits_us = [1e6 * (answer.first - answer.started) for answer in answers]
    ttft_us = np.percentile(waits_us, PERCENTILES)
    kept = np.flatnonzero(gaps_us > 0)
    if len(kept) > MOST_SAMPLES:
        last = len(kept) - 1
        evenly = np.linspace(0, last, MOST_SAMPLES)
        kept = kept[evenly.astype(int)]
    started = [answer.started for answer in answers]
    firsts = [answer.first for answer in answers]
    ends = [answer.end for answer in answers]
    return {
        "status": "ok",
        "run_us": _rounded(gaps_us[kept]),
        "calls_per_sample": 1,
        "oracle_error": 0.0,
        "oracle_budget": 0.0,
        "oracle_rows": len(answers),
        "served": {
            "ended_us": _in_us(ends),
            "first_us": _in_us(firsts),
            "started_us": _in_us(started),
            "output": [answer.request.output for answer in answers],
            "prompt": [answer.request.prompt for answer in answers],
            "token_at_us": _in_us(later[kept]),
            "itl_p50_us": float(itl_us[0]),
            "itl_p90_us": float(itl_us[1]),
            "itl_p99_us": float(itl_us[2]),
            "ttft_p50_us": float(ttft_us[0]),
            "ttft_p90_us": float(ttft_us[1]),
            "ttft_p99_us": float(ttft_us[2]),
            "tokens_per_s": tokens / (end - start),
            "tokens": tokens,
            "window_s": end - start,
            "rate": rate,
        },
    }


def window(case: ServingCase, answers: Sequence[Answer]) -> tuple[float, float]:
    """Start and end of the time in which tokens are counted; ServerError if there is none."""
    if case.is_open:
        starts = [answer.started for answer in answers]
        return min(starts), max(starts)
    firsts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for answer in answers:
        client = answer.request.client
        first = firsts.get(client, answer.first)
        end = ends.get(client, answer.end)
        firsts[client] = min(answer.first, first)
        ends[client] = max(answer.end, end)
    if case.late_s and case.batch_size > 1:
        del firsts[0]
    start = max(firsts.values())
    end = min(ends.values())
    if start >= end:
        raise ServerError(
            "the first client had ended before the last one began: ask for more tokens or turns"
        )
    return start, end


def _in_us(seconds: Any) -> list[float]:
    return _rounded([1e6 * value for value in seconds])


def _rounded(values_us: Any) -> list[float]:
    return [round(float(value), 1) for value in values_us]
