"""Both clients against a real server: `client` and `make_client` give first one, then the other."""

import httpx2
import pytest

from penstock_client import (
    AuthenticationFailed,
    BadRequest,
    Client,
    ConnectionFailed,
    NotFound,
    PermissionDenied,
    ProtocolError,
    RateLimited,
    ServerBusy,
    ServerError,
    Timeout,
    Usage,
)

from . import samples
from .fake_server import Answer, Events, Hangup, Silence


def test_complete(client, server):
    server.script.append(Answer.json(samples.completion("Hello")))
    answer = client.complete("Once", max_tokens=3, seed=1, extra={"min_tokens": 2})
    assert (answer.text, answer.finish_reason) == ("Hello", "length")
    assert answer.usage == Usage(5, 2, 7, cached_tokens=3)
    assert answer.request_id == "req-1"
    (received,) = server.received
    assert (received.method, received.path) == ("POST", "/v1/completions")
    assert received.body == {
        "prompt": "Once",
        "max_tokens": 3,
        "seed": 1,
        "min_tokens": 2,
        "stream": False,
        "model": "tiny",
    }


def test_chat(client, server):
    server.script.append(Answer.json(samples.chat("Hello")))
    server.script.append(Answer.json(samples.chat("Bye")))
    first = client.chat("Hi")
    history = [{"role": "user", "content": "Hi"}, first.message, {"role": "user", "content": "?"}]
    assert client.chat(history).text == "Bye"
    assert server.received[1].path == "/v1/chat/completions"
    messages = server.received[1].body["messages"]
    assert [message["content"] for message in messages] == ["Hi", "Hello", "?"]


def test_models(client, server):
    server.script.append(Answer.json(samples.MODELS))
    assert [model.id for model in client.models()] == ["tiny"]


def test_the_only_model_is_looked_up_once(make_client, server):
    client = make_client(server.url, model=None)
    server.script += [
        Answer.json(samples.MODELS),
        Answer.json(samples.completion()),
        Answer.json(samples.chat()),
        Events([samples.completion_stream()]),
    ]
    client.complete("a")
    client.chat("b")
    client.drain(client.stream_complete("c"))
    paths = [received.path for received in server.received]
    assert paths.count("/v1/models") == 1
    assert [received.body["model"] for received in server.received[1:]] == ["tiny"] * 3


def test_a_stream_looks_the_model_up_when_it_is_read(make_client, server):
    client = make_client(server.url, model=None)
    server.script += [Answer.json(samples.MODELS), Events([samples.chat_stream()])]
    stream = client.stream_chat("Hi")
    assert server.received == []
    assert client.drain(stream).error is None
    assert server.received[1].body["model"] == "tiny"


def test_a_call_may_name_another_model(client, server):
    server.script.append(Answer.json(samples.completion()))
    client.complete("Once", model="other")
    assert server.received[0].body["model"] == "other"


def test_a_choice_between_models_is_the_callers(make_client, server):
    client = make_client(server.url, model=None)
    server.script.append(Answer.json({"data": [{"id": "a"}, {"id": "b"}]}))
    with pytest.raises(ValueError, match="a, b"):
        client.complete("Once")


@pytest.mark.parametrize("method", ["complete", "chat", "stream_complete", "stream_chat"])
def test_unknown_keyword_is_refused_before_anything_is_sent(make_client, server, method):
    client = make_client(server.url, model=None)
    with pytest.raises(TypeError, match=rf"{method}\(\) got an unexpected .* 'temprature'"):
        getattr(client, method)("Once", temprature=1.0)
    assert server.received == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, AuthenticationFailed),
        (403, PermissionDenied),
        (404, NotFound),
        (500, ServerError),
    ],
)
def test_error_status(client, server, status, kind):
    error = {"message": "no", "type": "t", "code": "c", "param": "p"}
    server.script.append(Answer.json({"error": error}, status))
    with pytest.raises(kind) as caught:
        client.complete("Once")
    assert caught.value.status == status
    assert (caught.value.message, caught.value.type) == ("no", "t")
    assert (caught.value.code, caught.value.param) == ("c", "p")
    assert caught.value.request_id == "req-1"
    assert client.sleeps == []


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"choices": [{"text": 1}]}'])
def test_garbage(client, server, body):
    server.script.append(Answer(body))
    with pytest.raises(ProtocolError) as caught:
        client.complete("Once")
    assert caught.value.request_id == "req-1"


@pytest.mark.parametrize(("status", "kind"), [(429, RateLimited), (503, ServerBusy)])
def test_retry_after_is_waited_for(client, server, status, kind):
    server.script += [Answer.error(status, retry_after="3")] * 2
    server.script.append(Answer.json(samples.completion("Hello")))
    assert client.complete("Once").text == "Hello"
    assert client.sleeps == [3.0, 3.0]
    assert [received.body for received in server.received] == [server.received[0].body] * 3


def test_without_retry_after_the_wait_grows(client, server):
    server.script += [Answer.error(503), Answer.error(503), Answer.json(samples.completion())]
    client.complete("Once")
    first, second = client.sleeps
    assert 0.25 <= first <= 0.5 <= second <= 1.0


def test_retries_end(client, server):
    server.script += [Answer.error(503, "full", retry_after="3")] * 3
    with pytest.raises(ServerBusy, match="full") as caught:
        client.complete("Once")
    assert caught.value.retry_after == 3.0
    assert client.sleeps == [3.0, 3.0]
    assert caught.value.request_id == "req-3"


@pytest.mark.parametrize("headers", [{"x_should_retry": "false", "retry_after": "3"}, {"retry_after": "121"}])
def test_what_the_server_does_not_want_back_is_not_sent_again(client, server, headers):
    server.script.append(Answer.error(503, **headers))
    with pytest.raises(ServerBusy):
        client.complete("Once")
    assert client.sleeps == []


def test_retries_can_be_turned_off(make_client, server):
    client = make_client(server.url, max_retries=0)
    server.script.append(Answer.error(503))
    with pytest.raises(ServerBusy):
        client.complete("Once")
    assert client.sleeps == []


def test_a_refused_connection_is_tried_again(make_client, sleeping_server):
    client = make_client(sleeping_server.url)
    client.on_sleep = sleeping_server.start
    sleeping_server.script.append(Answer.json(samples.completion("Hello")))
    assert client.complete("Once").text == "Hello"
    assert len(client.sleeps) == 1


def test_refused_for_good(make_client, sleeping_server):
    client = make_client(sleeping_server.url)
    with pytest.raises(
        ConnectionFailed, match=f"POST /v1/completions: cannot connect to {sleeping_server.url}"
    ):
        client.complete("Once")
    assert len(client.sleeps) == 2


def test_a_request_whose_connection_broke_is_sent_again(client, server):
    server.script += [Hangup(), Answer.json(samples.completion("Hello"))]
    assert client.complete("Once").text == "Hello"
    server.script += [Hangup(), Answer.json(samples.MODELS)]
    assert client.models()[0].id == "tiny"
    assert len(client.sleeps) == 2


@pytest.mark.parametrize("status", [500, 501, 504])
def test_what_would_only_fail_again_is_not_sent_again(client, server, status):
    server.script.append(Answer.error(status))
    with pytest.raises(ServerError):
        client.complete("Once")
    assert client.sleeps == []


def test_silence(make_client, server):
    client = make_client(server.url, timeout=0.05)
    server.script.append(Silence())
    with pytest.raises(Timeout, match="timeout="):
        client.complete("Once")
    assert client.sleeps == []


def test_a_call_may_have_its_own_timeout(client, server):
    server.script.append(Silence())
    with pytest.raises(Timeout) as caught:
        client.complete("Once", timeout=0.05)
    assert caught.value.request_id == server.received[0].headers["x-request-id"]
    assert "timeout" not in server.received[0].body


def test_tokenize_and_detokenize(client, server):
    server.script += [Answer.json({"tokens": [5, 6], "count": 2, "max_model_len": 9})] * 2
    server.script.append(Answer.json({"prompt": "ab"}))
    tokens = client.tokenize("ab", add_special_tokens=False)
    assert (tokens.token_ids, tokens.count, tokens.max_model_len) == ((5, 6), 2, 9)
    client.tokenize([{"role": "user", "content": "ab"}])
    assert client.detokenize(tokens.token_ids) == "ab"
    assert [(each.path, each.body) for each in server.received] == [
        ("/tokenize", {"prompt": "ab", "add_special_tokens": False, "model": "tiny"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "ab"}], "model": "tiny"}),
        ("/detokenize", {"tokens": [5, 6], "model": "tiny"}),
    ]


def test_health_of_a_ready_server(client, server):
    server.script.append(Answer.json({"status": "ok"}))
    health = client.health()
    assert (health.status, health.is_ready) == ("ok", True)
    assert server.received[0].path == "/health"


def test_health_of_a_server_that_loads_is_an_answer(client, server):
    body = {"status": "loading", "loaded_layers": 8, "total_layers": 32}
    server.script.append(Answer.json(body, 503, retry_after="3"))
    health = client.health()
    assert (health.status, health.is_ready, health.progress) == ("loading", False, 0.25)
    assert client.sleeps == []


def test_health_raises_other_errors(client, server):
    server.script.append(Answer.error(500))
    with pytest.raises(ServerError):
        client.health()


def test_health_of_no_server_is_known_at_once(make_client, sleeping_server):
    client = make_client(sleeping_server.url)
    with pytest.raises(ConnectionFailed):
        client.health()
    assert client.sleeps == []


def test_waiting_for_a_server_that_starts_and_loads(make_client, sleeping_server):
    client = make_client(sleeping_server.url)

    def start() -> None:
        client.on_sleep = lambda: None
        sleeping_server.start()

    client.on_sleep = start
    loading = [{"status": "loading", "loaded_layers": number, "total_layers": 4} for number in (0, 0, 3)]
    sleeping_server.script += [Answer.json(body, 503) for body in loading]
    sleeping_server.script.append(Answer.json({"status": "ok"}))
    seen = []
    health = client.wait_until_ready(on_progress=lambda health: seen.append((health.status, health.progress)))
    assert health.is_ready
    assert seen == [("loading", 0.0), ("loading", 0.75), ("ok", None)]
    assert len(client.sleeps) == 4


def test_waiting_is_no_use_without_a_key(client, server):
    server.script.append(Answer.error(401))
    with pytest.raises(AuthenticationFailed):
        client.wait_until_ready()


def test_settings_from_the_environment(make_client, server, monkeypatch):
    monkeypatch.setenv("PENSTOCK_BASE_URL", server.url + "/v1")
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    server.script.append(Answer.json(samples.completion()))
    make_client(None).complete("Once")
    assert server.received[0].path == "/v1/completions"
    assert server.received[0].headers["authorization"] == "Bearer secret"


def test_leaving_the_client_closes_its_connections(server):
    server.script.append(Events([samples.completion_event("a")], ending="hold"))
    with Client(server.url, model="tiny") as client:
        stream = client.stream_complete("Once")
        assert next(stream).text == "a"
    stream.close()
    assert server.client_gone.wait(60.0)
    with pytest.raises(RuntimeError, match="closed"):
        client.models()


def test_what_a_client_says_of_itself(make_client):
    client = make_client("http://user:hidden@host:1/v1/", model="tiny", api_key="secret")
    assert client.base_url == "http://user:hidden@host:1"
    kind = type(client.client).__name__
    assert repr(client.client) == f"{kind}('http://host:1', model='tiny')"


def test_settings_that_can_not_be(make_client, tmp_path):
    with pytest.raises(ValueError, match="ca_bundle"):
        make_client("http://host", ca_bundle=tmp_path / "missing.pem")
    with pytest.raises(ValueError, match="default_headers"):
        make_client("http://host", default_headers={"X": "a\nb"})


def test_a_given_http_client_has_no_batches():
    with httpx2.Client() as http_client, pytest.raises(ValueError, match="AsyncClient"):
        Client("http://host", http_client=http_client).batch(["a"])
