"""A small HTTP client that streams: what came of a request, and when. Standard library alone.

Nothing is parsed while tokens come: an event is kept as it is, with its time.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from .engine import Event, ServerError

SEPARATOR = b"\n\n"
DATA = b"data:"
DONE = b"[DONE]"
READ = 1 << 16


@dataclass
class Reply:
    """A request's events, raw, and the second at which each came (`time.perf_counter`)."""

    started: float = 0.0
    at: list[float] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    def events(self) -> list[tuple[float, Event]]:
        """The events with their times; ServerError for one that is an error or no JSON."""
        found = []
        for at, data in zip(self.at, self.raw, strict=True):
            try:
                event = json.loads(data)
            except ValueError as error:
                raise ServerError(f"the server sent no JSON: {data[:200]!r}") from error
            if "error" in event:
                raise ServerError(f"the server refused a request: {event['error']}")
            found.append((at, event))
        return found


async def stream(port: int, path: str, data: bytes, reply: Reply) -> None:
    """Send a request and fill `reply`; ServerError if it is refused or ends in the middle."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            reply.started = time.perf_counter()
            writer.write(head.encode() + data)
            await writer.drain()
            await _read(reader, reply)
        finally:
            writer.close()
    except (OSError, EOFError, ValueError) as error:
        raise ServerError(f"the server ended an answer in the middle: {error!r}") from error


async def _read(reader: asyncio.StreamReader, reply: Reply) -> None:
    """Read an answer to its end."""
    status = (await reader.readline()).split()
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip().lower()
    is_chunked = headers.get(b"transfer-encoding") == b"chunked"
    pieces = _chunks(reader) if is_chunked else _rest(reader)
    if len(status) < 2 or status[1] != b"200":
        said = b"".join([piece async for piece in pieces])
        words = b" ".join(status).decode(errors="replace") or "nothing"
        raise ServerError(f"the server answered {words}: {said[:500].decode(errors='replace')}")
    left = b""
    async for piece in pieces:
        now = time.perf_counter()
        *events, left = (left + piece).split(SEPARATOR)
        for event in events:
            data = event.removeprefix(DATA).strip()
            if data == DONE:
                return
            if data:
                reply.at.append(now)
                reply.raw.append(data)
    raise EOFError("no [DONE]")


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of a chunked answer."""
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size + 2)
        yield chunk[:size]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """What comes until the server hangs up."""
    while piece := await reader.read(READ):
        yield piece
