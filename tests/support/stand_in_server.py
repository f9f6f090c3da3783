"""A server that behaves as an engine's does, or badly: without a GPU, a model or a package.

It takes the arguments of SGLang's server; `STAND_IN` says how it behaves, and what its log says is
`STAND_IN_BACKEND`. A token takes `STAND_IN_TOKEN_S` seconds.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

HOW = os.environ.get("STAND_IN", "")
TOKEN_S = float(os.environ.get("STAND_IN_TOKEN_S", "0.002"))
PORT = int(sys.argv[sys.argv.index("--port") + 1])
IS_VLLM = "--model" in sys.argv
LATE_S = 1.0


def chunk(event):
    data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode()
    data += b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event_of(tokens, count):
    if IS_VLLM:
        return {"choices": [{"index": 0, "text": "", "token_ids": tokens}]}
    if HOW == "cumulative":
        tokens = list(range(count))
    return {"output_ids": tokens, "meta_info": {"completion_tokens": count}}


async def answer(reader, writer):
    try:
        await answered(reader, writer)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def answered(reader, writer):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    if head.startswith("GET /health"):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        return
    length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    count = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
    if HOW == "refuses":
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\ntoo long a prompt")
        return
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    made = 0
    while made < count:
        await asyncio.sleep(TOKEN_S)
        new = min(2 if HOW == "pairs" else 1, count - made)
        made += new
        if made >= 10:
            if HOW == "dies":
                print("CUDA error: an illegal memory access", flush=True)
                os._exit(3)
            if HOW == "stalls":
                await asyncio.sleep(1000)
            if HOW == "hangs up":
                return
            if HOW == "errors":
                writer.write(chunk({"error": {"message": "out of memory"}}))
            if HOW in ("short", "ends early") and made >= 12:
                break
        writer.write(chunk(event_of(list(range(made - new, made)), made)))
        await writer.drain()
    if HOW != "ends early":
        writer.write(chunk(b"data: [DONE]"))
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def serve():
    server = await asyncio.start_server(answer, "127.0.0.1", PORT)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    child = subprocess.Popen(sleep, start_new_session=True)
    print(f"child {child.pid}", flush=True)
    if HOW == "never ready":
        time.sleep(1000)
    if HOW == "ends at once":
        sys.exit("no such model")
    if HOW == "late":
        time.sleep(LATE_S)
    backend = os.environ.get("STAND_IN_BACKEND", "fa3")
    if backend and IS_VLLM:
        print(f"Using {backend} attention backend out of potential backends: [...].", flush=True)
    elif backend:
        print(f"Attention backend not specified. Use {backend} backend by default.", flush=True)
    for variable, value in os.environ.items():
        name = variable.removeprefix("ATTNLIB_SGLANG_").lower()
        if variable.startswith("ATTNLIB_SGLANG_") and HOW != "ignores the arm":
            print(f"attnlib runs {name}={value}", flush=True)
    if "ATTNLIB_SGLANG_SPLITS" in os.environ and HOW != "ignores the arm":
        TOKEN_S *= float(os.environ.get("STAND_IN_RATIO", "0.5"))
    asyncio.run(serve())
