"""Translation of the library's exceptions, and what goes over the wire besides the body.

What needs a misbehaving server is tested with both clients in test_client.py.
"""

import math
import shutil
import ssl
import subprocess

import httpx2
import pytest

from penstock_client._sync.transport import Transport
from penstock_client.errors import ConnectionFailed, ProtocolError, StreamInterrupted, Timeout
from penstock_client.exchange import Request
from penstock_client.http_library import RequestOptions, translated
from penstock_client.settings import Settings
from penstock_client.version import USER_AGENT

from . import samples
from .fake_server import Answer, Events, FakeServer, Hangup

GET = Request("GET", "/v1/models")
POST = Request("POST", "/v1/completions", {"prompt": "Grüße"})


def settings(url: str = "http://127.0.0.1:8000", key: str | None = None) -> Settings:
    return Settings(url, key, 600.0, 5.0)


@pytest.mark.parametrize(
    ("error", "request_", "has_begun", "kind", "is_retryable"),
    [
        (httpx2.ConnectTimeout, POST, False, Timeout, True),
        (httpx2.PoolTimeout, POST, False, Timeout, False),
        (httpx2.ReadTimeout, GET, False, Timeout, False),
        (httpx2.WriteTimeout, POST, False, Timeout, False),
        (httpx2.ReadTimeout, POST, True, Timeout, False),
        (httpx2.ConnectError, POST, False, ConnectionFailed, True),
        (httpx2.ReadError, POST, False, ConnectionFailed, True),
        (httpx2.ReadError, GET, False, ConnectionFailed, True),
        (httpx2.WriteError, POST, False, ConnectionFailed, True),
        (httpx2.RemoteProtocolError, POST, False, ConnectionFailed, True),
        (httpx2.ReadError, POST, True, StreamInterrupted, True),
        (httpx2.RemoteProtocolError, POST, True, StreamInterrupted, True),
        (httpx2.ProxyError, POST, False, ConnectionFailed, False),
        (httpx2.DecodingError, POST, False, ProtocolError, False),
        (httpx2.DecodingError, POST, True, ProtocolError, False),
    ],
)
def test_translation(error, request_, has_begun, kind, is_retryable):
    with (
        pytest.raises(kind) as caught,
        translated(request_, "req-1", has_begun=has_begun),
    ):
        raise error("", request=httpx2.Request("GET", "http://host:8000/v1/models"))
    assert type(caught.value) is kind
    assert caught.value.is_retryable is is_retryable
    assert caught.value.request_id == "req-1"
    assert f"{request_.method} {request_.path}" in str(caught.value)
    assert isinstance(caught.value.__cause__, error)


def test_an_exception_without_text_is_named():
    with pytest.raises(ConnectionFailed, match="ReadError"), translated(POST, None):
        raise httpx2.ReadError("")


def test_other_exceptions_pass():
    with pytest.raises(KeyError), translated(POST, None):
        raise KeyError("a bug of the caller")


def test_limits_hold_between_reads():
    options, _ = RequestOptions(settings())(POST)
    assert (options["timeout"].connect, options["timeout"].read) == (5.0, 600.0)


@pytest.mark.parametrize(("seconds", "limit"), [(7.0, 7.0), (math.inf, None)])
def test_a_request_may_have_its_own_limit(seconds, limit):
    options, _ = RequestOptions(settings())(POST.with_timeout(seconds))
    assert (options["timeout"].connect, options["timeout"].read) == (5.0, limit)


def test_each_request_has_an_id_of_its_own(server):
    server.script += [Answer.json(samples.MODELS)] * 2
    transport = Transport(settings(server.url))
    transport.send(GET)
    transport.send(GET)
    transport.close()
    first, second = (received.headers["x-request-id"] for received in server.received)
    assert first != second


def test_the_id_is_known_without_an_answer(server):
    server.script.append(Hangup())
    transport = Transport(settings(server.url))
    with pytest.raises(ConnectionFailed) as caught:
        transport.send(POST)
    transport.close()
    assert caught.value.request_id == server.received[0].headers["x-request-id"]


def test_headers_of_a_request(server):
    server.script.append(Answer.json(samples.completion()))
    transport = Transport(settings(server.url, "secret"))
    transport.send(POST)
    transport.close()
    (received,) = server.received
    assert received.body == {"prompt": "Grüße"}
    assert received.headers["authorization"] == "Bearer secret"
    assert received.headers["content-type"] == "application/json"
    assert received.headers["user-agent"] == USER_AGENT


def test_default_headers_come_with_every_request(server):
    server.script += [Answer.json(samples.MODELS)] * 2
    told = Settings(server.url, "secret", 600.0, 5.0, {"X-Team": "water", "Authorization": "Basic abc"})
    transport = Transport(told)
    transport.send(GET)
    transport.close()
    assert server.received[0].headers["x-team"] == "water"
    assert server.received[0].headers["authorization"] == "Basic abc"
    assert "abc" not in repr(told) and "secret" not in repr(told)


def test_a_client_that_is_given_sends_and_stays_open(server):
    server.script += [Answer.json(samples.MODELS)] * 2
    asked = []
    with httpx2.Client(event_hooks={"request": [asked.append]}) as http_client:
        transport = Transport(settings(server.url, "secret"), http_client)
        transport.send(GET)
        transport.close()
        assert http_client.get(f"{server.url}/v1/models").status_code == 200
    assert [str(request.url) for request in asked] == [f"{server.url}/v1/models"] * 2
    assert server.received[0].headers["authorization"] == "Bearer secret"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes a certificate")
def test_a_bundle_of_certificates(tmp_path):
    """Of a server whose certificate no system trusts."""
    words = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    files = ("-keyout", tmp_path / "key.pem", "-out", tmp_path / "ca.pem")
    subprocess.run([*words.split(), *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.pem", tmp_path / "key.pem")
    server = FakeServer()
    server._http.socket = context.wrap_socket(server._http.socket, server_side=True)
    server.start()
    url = server.url.replace("http:", "https:")
    server.script.append(Answer.json(samples.MODELS))
    trusting = Transport(Settings(url, None, 600.0, 5.0, ca_bundle=str(tmp_path / "ca.pem")))
    assert trusting.send(GET).status == 200
    trusting.close()
    with pytest.raises(ConnectionFailed, match="certificate"):
        Transport(settings(url)).send(GET)
    server.stop()
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ValueError, match="holds no certificates"):
        Transport(Settings(url, None, 600.0, 5.0, ca_bundle=str(tmp_path / "ca.pem")))


def test_headers_without_key_and_body(server):
    server.script.append(Answer.json(samples.MODELS))
    transport = Transport(settings(server.url))
    transport.send(GET)
    transport.close()
    assert "authorization" not in server.received[0].headers
    assert "content-type" not in server.received[0].headers


def test_a_stream_is_not_to_be_compressed(server):
    server.script.append(Events([samples.completion_stream()]))
    transport = Transport(settings(server.url))
    reply = transport.open(POST)
    assert b"".join(iter(reply.next_block, None)) == samples.completion_stream()
    reply.close()
    transport.close()
    assert server.received[0].headers["accept"] == "text/event-stream"
    assert server.received[0].headers["accept-encoding"] == "identity"
    assert reply.request_id == "req-1"


def test_reply_has_status_headers_and_body(server):
    server.script.append(Answer(b"teapot", 418, {"X-Kind": "Brown Betty"}))
    transport = Transport(settings(server.url))
    reply = transport.send(GET)
    transport.close()
    assert (reply.status, reply.headers["x-kind"], reply.body) == (418, "Brown Betty", b"teapot")


def test_base_url_may_have_a_path(server):
    server.script.append(Answer.json(samples.MODELS))
    transport = Transport(settings(server.url + "/behind/proxy"))
    transport.send(GET)
    transport.close()
    assert server.received[0].path == "/behind/proxy/v1/models"


@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY"])
def test_loopback_does_not_go_through_a_proxy(server, monkeypatch, name):
    monkeypatch.setenv(name, "http://proxy.invalid:1")
    server.script.append(Answer.json(samples.MODELS))
    transport = Transport(settings(server.url))
    assert transport.send(GET).status == 200
    transport.close()


def test_unusable_url_is_refused():
    with pytest.raises(ValueError, match="base_url"):
        Transport(settings("http://\0"))
