"""A leader and a worker as real processes, `penstock serve` and `penstock worker`, and what clients get."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from warm_python import WarmProcess

from .network_namespaces import Link

#: Seconds of silence after which a machine is lost, for which requests wait for it, and until each request
#: has to be answered.
TIMEOUT_S, RETURN_S, DEADLINE_S = 1.0, 30.0, 60.0
#: Seconds after which something hangs. No slow computer needs so many.
STUCK_S = 300.0
_TESTS = str(Path(__file__).parents[1])
_PROGRAM = """
import runpy, sys
sys.path.insert(0, {tests!r})
sys.argv = {words!r}
if {space!r}:
    from machines.network_namespaces import enter
    enter({space!r})
runpy.run_module("penstock_server", run_name="__main__", alter_sys=True)
"""


class Held(NamedTuple):
    """What a process has."""

    num_threads: int
    num_files: int
    num_bytes: int


class Machine:
    """A process, and another one in its place after replace()."""

    def __init__(self, space: str, *words: str) -> None:
        self._program = _PROGRAM.format(tests=_TESTS, words=["", *words], space=space)
        self.log: list[str] = []
        self.start()

    def start(self) -> None:
        self._process = WarmProcess("-c", self._program)
        for stream in (self._process.stdout, self._process.stderr):
            threading.Thread(target=self._keep, args=(stream,), daemon=True).start()

    def _keep(self, stream: Any) -> None:
        with stream:
            self.log.extend(stream)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def replace(self) -> None:
        self.kill()
        self.start()

    def pause(self, seconds: float) -> None:
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)

    def holds(self) -> Held:
        place = Path("/proc", str(self._process.pid))
        pages = int((place / "statm").read_text().split()[1])
        num_threads, num_files = (len(os.listdir(place / each)) for each in ("task", "fd"))
        return Held(num_threads, num_files, pages * os.sysconf("SC_PAGE_SIZE"))


class Outcome(NamedTuple):
    """What a client got."""

    #: "answered", "closed" (the connection ended), or the code of an error.
    kind: str
    #: Token and log-probability, one after the other.
    tokens: list[tuple[int, float]]
    seconds: float


class Machines:
    """A leader at rank 0, and a worker. All methods that ask the leader are for threads in its namespace."""

    def __init__(self, model: Path, link: Link | None = None, return_s: float = RETURN_S) -> None:
        """link: None puts both on the loopback device. return_s: requests wait so long for the worker."""
        self.link = link
        spaces, address = (link.spaces, link.addresses[0]) if link else (("", ""), "127.0.0.1")
        self._port, nodes_port = _free_port(), _free_port()
        secret = model / "nodes-secret"
        secret.write_text("known to these tests alone")
        own = "--threads", "1", "--device", "cpu"
        both = "--nodes-secret-file", str(secret), "--nodes-timeout", f"{TIMEOUT_S}"
        place = f"{address}:{nodes_port}"
        limits = (
            *("--nodes-return-limit", f"{return_s}", "--request-timeout", f"{DEADLINE_S}"),
            *("--max-num-batched-tokens", "48", "--kv-tokens", "2048"),
        )
        self.worker = Machine(spaces[1], "worker", "--rank", "1", "--leader", place, *own, *both)
        self.leader = Machine(
            spaces[0], "serve", str(model), "--nodes", "2", "--nodes-listen", place, "--port",
            f"{self._port}", "--speculation", "off", *own, *both, *limits,
        )  # fmt: skip

    def close(self) -> None:
        self.leader.kill()
        self.worker.kill()

    def get(self, path: str) -> tuple[int, Any]:
        """Raises OSError and HTTPException."""
        connection = self._connect()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def wait_until_ready(self) -> None:
        until_s = time.monotonic() + STUCK_S
        while time.monotonic() < until_s:
            try:
                if self.get("/health")[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.05)
        raise AssertionError(
            "the machines are not ready:\n" + "".join(self.leader.log[-20:] + self.worker.log[-20:])
        )

    def ask(self, body: dict[str, Any]) -> Outcome:
        """A completion, whole or as a stream."""
        began_s, found = time.monotonic(), list[tuple[int, float]]()
        kind = self._ask(body | {"return_token_ids": True, "logprobs": 1}, found)
        return Outcome(kind, found, time.monotonic() - began_s)

    def ask_until_answered(self, body: dict[str, Any]) -> Outcome:
        """On a computer that is busy, machines are lost though nobody does anything to them."""
        until_s = time.monotonic() + STUCK_S
        while (outcome := self.ask(body)).kind != "answered" and time.monotonic() < until_s:
            self.wait_until_ready()
        return outcome

    def _ask(self, body: dict[str, Any], found: list[tuple[int, float]]) -> str:
        connection = self._connect()
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer, ends = connection.getresponse(), False
            for event in _events(answer, is_stream=answer.status == 200 and bool(body.get("stream"))):
                if error := event.get("error"):
                    return str(error["code"])
                for choice in event["choices"]:
                    found += zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
                    ends = ends or choice["finish_reason"] is not None
            return "answered" if ends else "closed"
        except (OSError, http.client.HTTPException):
            return "closed"
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=DEADLINE_S + 30)


def _events(answer: http.client.HTTPResponse, is_stream: bool) -> Iterator[dict[str, Any]]:
    if not is_stream:
        yield json.loads(answer.read())
        return
    for line in answer:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
