"""The whole of it: a real process, the real engine, the demo model, the real `openai` package."""

from __future__ import annotations

import io
import json
import shlex
import signal
import socket
import struct
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from penstock_server import cli
from warm_python import run_warm

from .conftest import MODEL
from .server_process import ServerProcess

PROMPT = "Once upon a time"
#: For tests that need an answer of some length, whatever the model makes of the prompt.
GO_ON = {"ignore_eos": True}
MESSAGES: list[Any] = [{"role": "user", "content": "Hello!"}]


def complete(client: openai.OpenAI, **fields: Any) -> str:
    return client.completions.create(**({"model": MODEL, "prompt": PROMPT} | fields)).choices[0].text


def metric(server: ServerProcess, name: str) -> float:
    text = httpx2.get(f"{server.url}/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith(name + "{")]
    return float(line.rpartition(" ")[2])


def wait_until_idle(server: ServerProcess) -> None:
    """Waits without a limit of its own until no sequence runs or waits."""
    ticker = threading.Event()
    while metric(server, "vllm:num_requests_running") or metric(server, "vllm:num_requests_waiting"):
        ticker.wait(0.05)


def test_the_greeting_is_a_command_that_works(server: ServerProcess) -> None:
    words = shlex.split(server.greeting[-1])
    header, _, value = words[words.index("-H") + 1].partition(": ")
    body = json.loads(words[-1]) | {"max_tokens": 4, "ignore_eos": True}
    answer = httpx2.post(words[1], headers={header: value}, json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4


def test_model_and_probes(server: ServerProcess, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 512
    for path in ("/health", "/health/live", "/health/ready", "/ping", "/version"):
        assert httpx2.get(server.url + path).status_code == 200


def test_streamed_is_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    for usage in (last.usage, whole.usage):
        usage.prompt_tokens_details = None  # the second time the prompt is in the cache
        # How many guesses a step takes depends on how fast the machine is at that moment.
        usage.completion_tokens_details = None
    assert last.usage == whole.usage


def test_an_answer_does_not_depend_on_its_company(client: openai.OpenAI) -> None:
    """The same seed gives the same text alone, among choices, and among other clients' requests."""
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 7, "extra_body": GO_ON}
    alone = complete(client, **fields)
    choices = client.completions.create(model=MODEL, prompt=PROMPT, n=3, **fields).choices
    assert choices[0].text == alone
    assert len({choice.text for choice in choices}) == 3
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(complete, client, **(fields | {"seed": i})) for i in range(3)]
        mine = threads.submit(complete, client, **fields)
        assert mine.result() == alone
        assert all(other.result() for other in others)


def test_stop_strings_end_an_answer(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=24, temperature=0, extra_body=GO_ON)
    stop = whole[8:11]
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop], extra_body=GO_ON
    ).choices[0]
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop" and answer.model_dump()["stop_reason"] == stop


def test_logprobs_and_echo(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]
    assert answer.logprobs is not None and answer.logprobs.content
    for token in answer.logprobs.content:
        assert token.logprob == max(top.logprob for top in token.top_logprobs) <= 0
    joined = b"".join(bytes(token.bytes or []) for token in answer.logprobs.content)
    assert joined.decode(errors="replace") == answer.message.content
    assert complete(client, max_tokens=4, echo=True).startswith(PROMPT)


def test_several_prompts_of_both_kinds(client: openai.OpenAI) -> None:
    texts = client.completions.create(
        model=MODEL, prompt=["Once", "A girl"], n=2, max_tokens=6, temperature=0
    )
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert texts.choices[0].text == texts.choices[1].text
    ids = client.completions.create(model=MODEL, prompt=[[5, 6], [7]], max_tokens=6)
    assert len(ids.choices) == 2 and ids.usage is not None and ids.usage.prompt_tokens == 3


def test_tools_go_around(client: openai.OpenAI) -> None:
    """A forced call, its result, and an answer to it; streamed, the call is the same."""
    place = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": place}}]
    messages: Any = [{"role": "user", "content": "How is the weather?"}]
    fields: Any = {"model": MODEL, "tools": tools, "temperature": 0, "max_tokens": 80}
    forced = fields | {"messages": messages, "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(**forced).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**forced, stream=True)]
    streamed = [delta.tool_calls[0].function.arguments for delta in deltas if delta.tool_calls]
    assert "".join(streamed) == call.function.arguments
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(**fields, messages=messages)
    assert answer.choices[0].message.content


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, max_tokens=600)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unknown:
        complete(client, extra_body={"made_up": 1})
    assert unknown.value.param == "made_up"
    with pytest.raises(openai.NotFoundError):
        complete(client, model="other")
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=[2**31 - 1], echo=True)


def test_health_answers_while_steps_run(server: ServerProcess, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, n=4, max_tokens=100, stream=True, extra_body=GO_ON
    )
    next(stream)
    for path in ("/health", "/v1/models", "/metrics"):
        assert httpx2.get(server.url + path).status_code == 200
    stream.close()
    wait_until_idle(server)


def test_clients_that_leave_free_their_sequences(server: ServerProcess, client: openai.OpenAI) -> None:
    for _ in range(5):
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, n=3, max_tokens=400, stream=True, extra_body=GO_ON
        )
        next(stream)
        stream.close()
    wait_until_idle(server)
    assert metric(server, "vllm:kv_cache_usage_perc") == 0
    assert complete(client, max_tokens=4)


def test_connections_that_break_leave_nothing_behind(server: ServerProcess, client: openai.OpenAI) -> None:
    """Cut with a reset in the head, in the body, and in the middle of an answer; and garbage."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "n": 2} | GO_ON).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    port = int(server.url.rpartition(":")[2])
    pieces = (b"", head, head + length, head + length + body[:20], head + length + body, b"\x16\x03\x01" * 99)
    for _ in range(4):
        for piece in pieces:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(piece)
                linger = struct.pack("ii", 1, 0)  # close() sends a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    wait_until_idle(server)
    assert metric(server, "vllm:kv_cache_usage_perc") == 0
    assert complete(client, max_tokens=4)
    assert not any("Traceback" in line for line in server.log)


def test_metrics_count_tokens(server: ServerProcess, client: openai.OpenAI) -> None:
    before = metric(server, "vllm:generation_tokens_total")
    complete(client, max_tokens=5, extra_body=GO_ON)
    assert metric(server, "vllm:generation_tokens_total") == before + 5
    assert metric(server, "penstock:steps_total") > 0


@pytest.mark.inner
def test_streamed_layers_give_the_same_answer_and_sigterm_lets_an_answer_finish(
    client: openai.OpenAI,
) -> None:
    """A server that keeps no layer in memory, guarded by a key."""
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    here = complete(client, **fields)
    with ServerProcess(MODEL, "--resident-layers", "0", "--api-key", "secret") as server:
        server.wait_until_ready()
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as other:
            assert complete(other, **fields) == here
            stream = other.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=60, stream=True, extra_body=GO_ON
            )
            next(stream)
            ending = threading.Thread(target=server.end)
            ending.start()
            *_, last = stream
            ending.join()
        assert last.choices[0].finish_reason == "length"
        assert server.end() == 0


@pytest.mark.slow
def test_a_read_that_hangs_ends_neither_the_limits_nor_the_shutdown(tmp_path: Path) -> None:
    """The layers come from a disk that stops answering between two requests."""
    flag, script = tmp_path / "hang", Path(__file__).with_name("hanging_reads.py")
    options = ("--resident-layers", "0", "--request-timeout", "2", "--shutdown-timeout", "1")
    program = (str(script), str(flag))
    with ServerProcess(MODEL, *options, is_warm=False, program=program) as server:
        server.wait_until_ready()
        body = {"prompt": PROMPT, "max_tokens": 4}
        assert httpx2.post(f"{server.url}/v1/completions", json=body).status_code == 200
        flag.touch()
        late = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=None)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        stream = httpx2.post(f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=None)
        assert "deadline_exceeded" in stream.text
        assert httpx2.get(f"{server.url}/health/live").status_code == 200
        assert server.end() == 1, "the thread that reads can't be ended, and the process ends all the same"
        assert not any("Traceback" in line for line in server.log)


def test_sigint_ends_it_cleanly_in_the_middle_of_an_answer() -> None:
    body = {"prompt": PROMPT, "stream": True, "ignore_eos": True}
    with ServerProcess(MODEL, "--shutdown-timeout", "0") as server:
        server.wait_until_ready()
        limit = httpx2.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
        body["max_tokens"] = limit - 100
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            ending = threading.Thread(target=server.end, args=(signal.SIGINT,))
            ending.start()
            *_, error, done = [line for line in lines if line.startswith("data: ")]
            ending.join()
        assert "error" in json.loads(error.removeprefix("data: ")) and done == "data: [DONE]"
        assert server.end() == 0
        assert not any("Traceback" in line for line in server.log)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StuckHub(BaseHTTPRequestHandler):
    """A hub whose files come so slowly that they never end."""

    was_asked = threading.Event()
    is_over = threading.Event()

    def do_GET(self) -> None:
        names = ("config.json", "model.safetensors")
        if "/tree/" in self.path:
            files = [{"type": "file", "path": name, "size": 100_000, "oid": COMMIT} for name in names]
            self.answer(json.dumps(files).encode())
        elif self.path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in names]
            self.answer(json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode())
        else:
            self.answer(b"{" * 1000)
            self.wfile.flush()
            self.was_asked.set()
            while not self.is_over.wait(0.1):  # so that nobody gives up
                self.wfile.write(b" ")
                self.wfile.flush()

    def do_HEAD(self) -> None:
        self.answer(b"")

    def answer(self, body: bytes) -> None:
        length = len(body) if self.path.startswith("/api/") else 100_000
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"tag"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_signal_ends_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the rest of the file waits for hours."""
    with ThreadingHTTPServer(("127.0.0.1", 0), StuckHub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        for name, value in (("ENDPOINT", f"http://127.0.0.1:{hub.server_port}"), ("HOME", str(tmp_path))):
            monkeypatch.setenv(f"HF_{name}", value)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        # huggingface_hub reads the variables when it is imported.
        with ServerProcess("owner/name", is_warm=False) as server:
            StuckHub.was_asked.wait()
            assert httpx2.get(f"{server.url}/health/live").json()["status"] == "loading"
            assert server.end() == 0
            assert not any("Traceback" in line for line in server.log)
        StuckHub.is_over.set()
        hub.shutdown()
    # What looks whole is whole: nothing is.
    assert not list(tmp_path.rglob("snapshots/*/*"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_warm("-m", "penstock_server", *arguments)


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    done = run("serve", "/no/such/folder", "--port", "0")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "/no/such/folder" in line]
    assert "ERROR" in line and "can't be loaded" in line
    assert cli.main(["generate", "/no/such/folder", "--prompt", "x"]) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if "/no/such/folder" in line]
    assert line.startswith("penstock: ")


@pytest.mark.inner
def test_generate_and_chat_print_what_the_server_answers(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: test_cli.py shows that a process of its own does the same."""
    flags = ("--max-tokens", "12", "--temperature", "0")
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert cli.main(["generate", MODEL, *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out == complete(client, max_tokens=12, temperature=0) + "\n"
    assert "tokens/s" in printed.err
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n/quit\n"))
    assert cli.main(["chat", MODEL, *flags]) == 0
    printed = capsys.readouterr()
    assert str(whole.choices[0].message.content) in printed.out
    assert "tokens/s" in printed.err


def test_a_batch_is_answered_as_requests_are(client: openai.OpenAI, tmp_path: Path) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": fields} for i in range(3)
    ]
    lines.append({"custom_id": "wrong", "method": "POST", "url": "/v1/completions", "body": {"made_up": 1}})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("batch", "--model", MODEL, str(source), str(target))
    assert done.returncode == 0, done.stderr
    assert "4 of 4 lines answered, 1 of them with an error" in done.stderr
    found = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    expected = complete(client, max_tokens=12, temperature=0)
    for name in "012":
        assert found[name]["response"]["body"]["choices"][0]["text"] == expected
    assert found["wrong"]["response"]["status_code"] == 400
