"""What the server costs beside the model: streamed answers from an engine whose steps take no time.

    python tests/bench/server_overhead.py [--streams 64] [--tokens 128] [--requests 512] [--api chat]

The real application, uvicorn and the engine's thread run in a process of their own; each token is a step, and
a step begins when the event loop has seen the one before. Beside it, as the ceiling, the least application
that sends as many chunks of the same size. CPU seconds are of the server's process; what one more token costs
is the difference between long and short answers. Prints a card, and one line of JSON last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Container
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

_PROBE_PAUSE_S = 0.02
_SAMPLE_BYTES = 2048
_TEXT = "Once upon a time"
_MESSAGES = [{"role": "user", "content": _TEXT}]


def asking(api: str, num_tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request for a streamed answer of so many tokens."""
    path, body = {
        "chat": ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": num_tokens}),
        "completions": ("/v1/completions", {"prompt": _TEXT, "max_tokens": num_tokens}),
        "responses": ("/v1/responses", {"input": _TEXT, "max_output_tokens": num_tokens}),
        "messages": ("/v1/messages", {"messages": _MESSAGES, "max_tokens": num_tokens}),
        "ollama": ("/api/chat", {"messages": _MESSAGES, "options": {"num_predict": num_tokens}}),
    }[api]
    return path, body | {"model": "instant", "stream": True}


# -- servers, each in a process of its own ------------------------------------------------------


def serve_penstock(port: Any) -> None:
    from fakes import FakeModel
    from penstock import GenerationRequest, demo_model
    from penstock.async_engine import AsyncEngine
    from penstock.generation.requests.request import RequestOutput
    from penstock.generation.sequence import FinishReason
    from penstock.text.tokenizer import Tokenizer
    from penstock_server.api.app import create_app
    from penstock_server.facade.engine import ServedEngine
    from penstock_server.settings.settings import Settings
    from penstock_server.telemetry import logs

    class InstantEngine(FakeModel):
        """Each step gives every request a token, and takes no time; the next waits for the event loop."""

        def __init__(self) -> None:
            super().__init__(max_model_len=100_000)
            tokenizer: Any = Tokenizer.load(Path(demo_model.__file__).parent)
            self.tokenizer = tokenizer
            self.spec = replace(self.spec, vocab_size=tokenizer.vocab_size)
            self._requests: dict[str, list[int]] = {}
            self._token_id = tokenizer.encode(" the")[-1]
            self._is_delivered = threading.Event()
            self._is_delivered.set()

        @property
        def has_work(self) -> bool:
            return bool(self._requests)

        def add(self, request: GenerationRequest) -> None:
            lengths = [len(request.prompt_token_ids), 0, request.params.max_tokens or 0]
            self._requests[request.request_id] = lengths

        def abort(self, key: str) -> None:
            self._requests.pop(key, None)

        def expire(self, now: float) -> list[RequestOutput]:
            return []

        def close(self) -> None:
            pass

        def step(self, aborted: Container[str] = ()) -> list[RequestOutput]:
            self._is_delivered.wait()
            self._is_delivered.clear()
            # Behind the delivery of this step, and behind the tasks that it wakes.
            loop.call_soon_threadsafe(lambda: loop.call_soon(loop.call_soon, self._is_delivered.set))
            return [self._advance(key) for key in list(self._requests)]

        def _advance(self, key: str) -> RequestOutput:
            request = self._requests[key]
            num_prompt, num_output, max_tokens = request
            request[1] = num_output = num_output + 1
            reason = FinishReason.LENGTH if num_output == max_tokens else None
            if reason:
                del self._requests[key]
            ids = (self._token_id,)
            return RequestOutput(key, " the", ids, (), num_prompt, num_output, reason, started=started)

    started = time.monotonic()
    logs.configure("warning", "text")
    engine: Any = InstantEngine()
    app = create_app(ServedEngine(AsyncEngine(lambda report: engine)), Settings(model="instant"))
    loop = asyncio.new_event_loop()
    _run(loop, app, port)


def serve_bare(port: Any, chunk: bytes) -> None:
    """`max_tokens` times the same chunk, one in each round of the event loop."""
    head = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"text/event-stream")],
    }

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        body = b""
        if scope["method"] == "POST":
            body = (await receive())["body"]
        num_chunks = json.loads(body)["max_tokens"] if body else 0
        await send(head)
        for _ in range(num_chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    _run(asyncio.new_event_loop(), app, port)


def _run(loop: asyncio.AbstractEventLoop, app: Any, port: Any) -> None:
    """As `penstock serve` runs uvicorn."""
    import uvicorn

    from penstock_server.facade.loading import spare_the_collector
    from penstock_server.serving.listener import bind

    spare_the_collector()
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False)
    port.send(listener.getsockname()[1])
    loop.run_until_complete(uvicorn.Server(config).serve(sockets=[listener]))


@contextmanager
def server(target: Any, *arguments: Any) -> Any:
    """Its port and process id."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()  # so that a server that fails is an EOFError here
    try:
        yield here.recv(), process.pid
    finally:
        process.kill()
        process.join()


# -- the client ---------------------------------------------------------------------------------


class StreamReader(asyncio.Protocol):
    """One connection: asks for answers, one after the other, and counts events; it doesn't read them."""

    def __init__(self, request: bytes, left: list[None]) -> None:
        self._request, self._left = request, left
        self.num_events = 0
        self.sample = b""
        self.done = asyncio.get_running_loop().create_future()
        self._rest = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        if not self._left:
            self._transport.close()
            self.done.set_result(None)
            return
        self._left.pop()
        self._rest = b""
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if len(self.sample) < _SAMPLE_BYTES:
            self.sample += data
            if not self.sample.startswith(b"HTTP/1.1 200"):
                raise ConnectionError(f"the server answered {self.sample!r}")
        data = self._rest + data
        self.num_events += data.count(b"data: ")
        self._rest = data[-5:]  # may be the beginning of one that is not counted
        if data.endswith(b"\r\n0\r\n\r\n"):
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server closed a connection"))


async def load(
    port: int, num_streams: int, num_requests: int, num_tokens: int, api: str
) -> tuple[int, bytes]:
    """Number of events, and what one connection got first."""
    path, fields = asking(api, num_tokens)
    body = json.dumps(fields)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    loop, left = asyncio.get_running_loop(), [None] * num_requests
    readers: list[StreamReader] = []
    for _ in range(num_streams):
        _, reader = await loop.create_connection(lambda: StreamReader(request, left), "127.0.0.1", port)
        readers.append(reader)
    await asyncio.gather(*(reader.done for reader in readers))
    return sum(reader.num_events for reader in readers), readers[0].sample


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    server_of: tuple[int, int], num_streams: int, num_requests: int, num_tokens: int, api: str
) -> dict[str, Any]:
    port, pid = server_of
    client = resource.getrusage(resource.RUSAGE_SELF)
    began, server_s = time.perf_counter(), cpu_s(pid)
    num_events, sample = asyncio.run(load(port, num_streams, num_requests, num_tokens, api))
    wall_s, server_s = time.perf_counter() - began, cpu_s(pid) - server_s
    now = resource.getrusage(resource.RUSAGE_SELF)
    client_s = now.ru_utime + now.ru_stime - client.ru_utime - client.ru_stime
    return {
        "wall_s": wall_s,
        "server_s": server_s,
        "client_s": client_s,
        "tokens_per_s": num_requests * num_tokens / wall_s,
        "num_events": num_events,
        "sample": sample,
    }


def probe(port: int, stop: Any, found: Any) -> None:
    """Seconds of each GET /health over one kept connection, until told to stop; in a process of its own."""
    connection, latencies = HTTPConnection("127.0.0.1", port), []
    while not stop.is_set():
        began = time.perf_counter()
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        latencies.append(time.perf_counter() - began)
        time.sleep(_PROBE_PAUSE_S)
    found.send(latencies)


@contextmanager
def health_probe(port: int, latencies: list[float]) -> Any:
    context = multiprocessing.get_context("spawn")
    stop, (here, there) = context.Event(), context.Pipe()
    process = context.Process(target=probe, args=(port, stop, there))
    process.start()
    yield
    stop.set()
    latencies.extend(here.recv())
    process.join()


def costs(server_of: tuple[int, int], options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of the process per request and per further token; the rest is of the fastest round."""
    streams, requests, tokens, api = options.streams, options.requests, options.tokens, options.api
    measure(server_of, streams, streams, tokens, api)  # warm up
    shorts = [measure(server_of, streams, requests, 1, api) for _ in range(options.rounds)]
    longs = [measure(server_of, streams, requests, tokens, api) for _ in range(options.rounds)]
    short_s, long_s = (min(each["server_s"] for each in found) for found in (shorts, longs))
    best = max(longs, key=lambda each: float(each["tokens_per_s"]))
    latencies: list[float] = []
    with health_probe(server_of[0], latencies):
        measure(server_of, streams, options.rounds * requests, tokens, api)
    latencies.sort()
    return {
        "tokens_per_s": best["tokens_per_s"],
        "client_share": best["client_s"] / (best["client_s"] + best["server_s"]),
        "cpus_used": (best["client_s"] + best["server_s"]) / best["wall_s"],
        "request_us": 1e6 * short_s / requests,
        "token_us": 1e6 * (long_s - short_s) / requests / (tokens - 1),
        "health_median_ms": 1000 * statistics.median(latencies),
        "health_p99_ms": 1000 * latencies[int(0.99 * len(latencies))],
        "num_events": longs[0]["num_events"],
        "sample": longs[0]["sample"],
    }


def one_chunk(sample: bytes) -> bytes:
    """The event of a token, out of the beginning of an answer."""
    return next(event for event in sample.split(b"\r\n") if b'"content":" the"' in event)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--streams", type=int, default=64, help="connections at the same time")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="per answer")
    parser.add_argument("--rounds", type=int, default=3)
    apis = ("chat", "completions", "responses", "messages", "ollama")
    parser.add_argument("--api", choices=apis, default="chat", help="only chat is compared with the ceiling")
    options = parser.parse_args()
    with server(serve_penstock) as ours:
        wait_until_ready(ours[0])
        found = costs(ours, options)
    sample = found.pop("sample")
    print(f"{options.streams} streams of {options.api}, {options.tokens} tokens each")
    if options.api == "chat":
        # A chunk for the role, one per token, and [DONE].
        assert found["num_events"] == options.requests * (options.tokens + 2), found["num_events"]
        chunk = one_chunk(sample)
        with server(serve_bare, chunk) as bare:
            wait_until_ready(bare[0])
            ceiling = costs(bare, options)
        del ceiling["sample"], ceiling["num_events"]
        found |= {f"bare_{name}": value for name, value in ceiling.items()}
        print(f"chunks of {len(chunk)} bytes")
    for name, value in found.items():
        print(f"  {name:18} {value:10.3f}")
    print(
        json.dumps(
            {"bench": "server_overhead", "api": options.api}
            | {name: round(value, 3) for name, value in found.items()}
        )
    )


def wait_until_ready(port: int) -> None:
    while True:
        connection = HTTPConnection("127.0.0.1", port)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except ConnectionError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
