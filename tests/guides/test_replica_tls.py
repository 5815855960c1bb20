"""A replica of clients/ray whose process serves https with a private CA's certificate. Ray itself is not
needed: its part is a name."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest

#: In the place of `penstock`.
PROCESS = """
import http.server, ssl, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1])
server.socket = context.wrap_socket(server.socket, server_side=True)
print(f"listening at https://127.0.0.1:{server.server_address[1]}; loading", file=sys.stderr, flush=True)
server.serve_forever()
"""


@pytest.fixture
def replicas(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    serve = SimpleNamespace(Application=object)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    monkeypatch.delitem(sys.modules, "replicas", raising=False)
    yield importlib.import_module("replicas")
    del sys.modules["replicas"]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of another name than 127.0.0.1, signed by a CA that nobody knows; in one file with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    new = "openssl req -newkey rsa:2048 -nodes"
    for words in (
        f"{new} -x509 -subj /CN=ca -keyout ca.key -out ca.pem",
        f"{new} -subj /CN=penstock.example -keyout key -out request",
        f"{new} -x509 -subj /CN=other -keyout other.key -out other.pem",
        "openssl x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -out cert",
    ):
        subprocess.run(words.split(), cwd=tmp_path, check=True, capture_output=True)
    both = tmp_path / "both.pem"
    both.write_text((tmp_path / "key").read_text() + (tmp_path / "cert").read_text())
    return both


def test_a_replica_trusts_the_certificate_of_its_process(replicas: ModuleType, certificate: Path) -> None:
    async def answered() -> int:
        command = [sys.executable, "-c", PROCESS, str(certificate)]
        replica: Any = replicas.Replica.__new__(replicas.Replica)
        try:
            await asyncio.wait_for(replica.__init__(replicas.ReplicaArgs(command=command)), 60)
            await replica.check_health()
            async with replica._http.get("/v1/models") as response:
                return int(response.status)
        finally:
            await replica._http.close()
            replica._process.end(5)

    assert asyncio.run(answered()) == 200


def test_no_other_certificate_is_trusted(
    replicas: ModuleType, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of whoever got the port after the process was gone."""
    other = (tmp_path / "other.pem").read_text()
    monkeypatch.setattr(replicas.ssl, "get_server_certificate", lambda *_, **__: other)

    async def refused() -> None:
        command = [sys.executable, "-c", PROCESS, str(certificate)]
        process = replicas.PenstockProcess(replicas.ReplicaArgs(command=command))
        connector = aiohttp.TCPConnector(ssl=process.tls)
        try:
            async with aiohttp.ClientSession(process.url, connector=connector) as http:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await http.get("/health/live")
        finally:
            process.end(5)

    asyncio.run(refused())
