"""Replicas of one model with Ray Serve: each has a `penstock serve` process, and hands requests on.

    PYTHONPATH=clients/ray serve run replicas:app model=demo num_replicas=2

The process has a port, threads and a memory budget of its own. A replica gets requests when its process has
loaded the model, and Ray replaces a replica whose process ended or does not answer. Answers are streamed as
they come.
"""

# No `from __future__ import annotations` here: Ray reads the type of `args` in `app`.
import asyncio
import collections
import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ConfigDict, field_validator
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

#: Headers that belong to one connection and not to the request or answer (RFC 9110, 7.6.1).
_OF_THE_CONNECTION = {
    "connection", "content-length", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "te",
    "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip


class ReplicaArgs(BaseModel):
    """What the application is built from: `args` of Serve's configuration, or NAME=VALUE behind `serve run`.

    num_cpus, memory: what Ray reserves for a replica on a node, and what its process plans with (`threads`,
    `host-memory`); memory in bytes, 0 reserves none.
    settings: further settings of `penstock serve` by name, such as {"max-num-seqs": 8}; not host and port,
    and no log-level above info, since the log says where the process listens.
    max_ongoing_requests: of one replica; more than max-num-seqs, so that its process always has a full batch.
    """

    model_config = ConfigDict(extra="forbid")
    model: str = "demo"
    num_replicas: int = 1
    num_cpus: float = 1
    memory: int = 0
    max_ongoing_requests: int = 256
    settings: dict[str, str | int | float | bool] = {}
    command: list[str] = ["penstock"]

    @field_validator("settings")
    @classmethod
    def _leave_the_address(cls, settings: dict[str, object]) -> dict[str, object]:
        given = {name.replace("_", "-"): value for name, value in settings.items()}
        if own := given.keys() & {"host", "port"}:
            raise ValueError(f"{min(own)}: each replica chooses it for its process; leave it out")
        if (level := given.get("log-level", "info")) not in ("info", "debug"):
            raise ValueError(f"log-level {level}: replicas read the log; it can be info or debug")
        return given


class PenstockProcess:
    """`penstock serve` on a free port of this machine, without a page and for this machine alone.

    url: where it listens. tls: how its own certificate is trusted, True for http. Raises RuntimeError with
    its last lines if it ends before it listens."""

    def __init__(self, args: ReplicaArgs) -> None:
        shares = {"log-level": "info", "threads": max(1, int(args.num_cpus))} | (
            {"host-memory": args.memory} if args.memory else {}
        )
        settings = (shares | args.settings).items()
        own = {f"PENSTOCK_{name.replace('-', '_').upper()}": str(value) for name, value in settings}
        self._process = subprocess.Popen(
            [*args.command, "serve", args.model, "--host", "127.0.0.1", "--port", "0"],
            env=os.environ | own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
        self._last: collections.deque[str] = collections.deque(maxlen=20)
        self.url = self._find_url()
        threading.Thread(target=self._pass_on_the_log, daemon=True).start()
        self.tls = trust(self.url) if self.url.startswith("https:") else True

    def _find_url(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log(line)
            if found := re.search(r"listening at (\S+);", line):
                return found[1]
        raise RuntimeError(self.last_words())

    def _pass_on_the_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log(line)

    def _log(self, line: str) -> None:
        self._last.append(line)
        sys.stderr.write(line)

    def last_words(self) -> str:
        return f"penstock serve ended with code {self._process.wait()}:\n{''.join(self._last)}"

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def end(self, timeout_s: float) -> None:
        """Lets running requests finish, as SIGTERM does; after timeout_s the process is killed."""
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()


def trust(url: str) -> ssl.SSLContext:
    """Trusts the certificate that is shown at a url of this machine, and no other one. It may be signed by a
    private CA, and has the name that clients use, not 127.0.0.1."""
    at = urlsplit(url)
    assert at.hostname is not None and at.port is not None
    shown = ssl.get_server_certificate((at.hostname, at.port), timeout=30)
    context = ssl.create_default_context(cadata=shown)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself, without its CA
    return context


class Replica:
    """One `penstock serve` process behind Serve's proxy."""

    # Serve awaits __init__, which no type allows.
    async def __init__(self, args: ReplicaArgs) -> None:  # type: ignore[misc]
        """Returns when the model is loaded: Serve sends requests to a replica that has been made."""
        self._process = await asyncio.to_thread(PenstockProcess, args)
        no_limit = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._http = aiohttp.ClientSession(
            self._process.url,
            timeout=no_limit,
            connector=aiohttp.TCPConnector(limit=0, ssl=self._process.tls),
            auto_decompress=False,
        )
        while not await self._answers("/health/ready"):
            if self._process.is_over:
                raise RuntimeError(self._process.last_words())
            await asyncio.sleep(0.2)

    async def check_health(self) -> None:
        """Serve replaces the replica if this raises."""
        if self._process.is_over:
            raise RuntimeError(self._process.last_words())
        if not await self._answers("/health/live"):
            raise RuntimeError(f"{self._process.url}/health/live is not 200")

    async def _answers(self, path: str) -> bool:
        try:
            async with self._http.get(path, timeout=aiohttp.ClientTimeout(total=10)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def __call__(self, request: Request) -> Response:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        try:
            response = await self._http.request(
                request.method, path, headers=_end_to_end(request.headers), data=await request.body()
            )
        except aiohttp.ClientConnectionError as error:
            return _unavailable(f"this replica is about to be replaced: {error}")
        return StreamingResponse(_body(response), response.status, headers=_end_to_end(response.headers))

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self._process.end(timeout_s=35)


async def _body(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """When the client goes away, the connection is closed, and the process stops computing the answer."""
    async with response:
        async for piece in response.content.iter_any():
            yield piece


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _OF_THE_CONNECTION}


def _unavailable(message: str) -> JSONResponse:
    """The error of OpenAI's API that makes clients wait and try again."""
    error = {"message": message, "type": "server_error", "param": None, "code": "replica_lost"}
    return JSONResponse({"error": error}, status_code=503, headers={"Retry-After": "1"})


def app(args: ReplicaArgs) -> serve.Application:
    """The application that `serve run` and a RayService build."""
    deployment = serve.deployment(
        Replica,
        name="penstock",
        num_replicas=args.num_replicas,
        max_ongoing_requests=args.max_ongoing_requests,
        ray_actor_options={"num_cpus": args.num_cpus, "memory": args.memory or None},
        graceful_shutdown_timeout_s=40,
        health_check_period_s=2,
        health_check_timeout_s=30,
    )
    return deployment.bind(args)
