"""A file of requests is answered like requests, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeAsyncEngine
from penstock.async_engine import EngineStatus
from penstock.errors import CapacityError, ConfigError, EngineDead, QueueFull
from penstock_server.commands import batch, batch_files
from penstock_server.facade import engine as facade
from penstock_server.settings.settings import Settings
from warm_python import run_warm

pytestmark = pytest.mark.usefixtures("own_logging")


def request(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"say {custom_id}"} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, *requests: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def lines_of(path: Path) -> dict[str, Any]:
    """By custom_id; each is there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(*requests, engine=..., **settings): the lines of the output, by custom_id."""

    def run_batch(*requests: Any, engine: FakeAsyncEngine | None = None, **settings: Any) -> dict[str, Any]:
        monkeypatch.setattr(facade, "AsyncEngine", lambda load: engine or FakeAsyncEngine())
        source = write(tmp_path / "in", *requests)
        assert batch.run_batch(Settings(model="tiny", **settings), source, tmp_path / "out") == 0
        return lines_of(tmp_path / "out")

    return run_batch


def test_answers_and_errors_of_the_application(run: Any) -> None:
    chat = request("chat") | {"url": "/v1/chat/completions"}
    chat["body"] = {"messages": [{"role": "user", "content": "Hi"}]}
    found = run(
        request("good"), chat, request("wrong", temperature=-1), request("other", model="x"),
        request("nowhere") | {"url": "/v1/nowhere"}, request("streamed", stream=True), {"method": "POST"},
        api_key=("secret",), rate_limit_requests=1, request_timeout=1e-9,
    )  # fmt: skip
    assert found["good"]["response"]["body"]["choices"][0]["text"] == "Hello!"
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello!"
    for name in ("good", "chat"):
        assert found[name]["error"] is None and found[name]["response"]["status_code"] == 200
        assert found[name]["response"]["request_id"] in found[name]["response"]["body"]["id"]
    for name, status in (("wrong", 400), ("other", 404), ("nowhere", 404)):
        response = found[name]["response"]
        assert response["status_code"] == status and response["body"]["error"]["message"]
    for strange in ("streamed", None):
        assert found[strange]["response"] is None and found[strange]["error"]["code"] == "invalid_line"


def test_a_second_run_asks_only_what_is_not_answered(run: Any) -> None:
    first = run(request("a"), request("b"))
    engine = FakeAsyncEngine()
    second = run(request("a"), request("b"), request("c"), engine=engine)
    assert [bytes(stream.prompt) for stream in engine.streams] == [b"say c"]
    assert first.items() <= second.items()


def test_a_finished_batch_loads_nothing(run: Any) -> None:
    run(request("a"))
    engine = FakeAsyncEngine()
    run(request("a"), engine=engine)
    assert not engine.is_started


def test_output_of_other_requests_is_not_gone_on_with(run: Any) -> None:
    run(request("a"))
    with pytest.raises(ConfigError, match="'a'"):
        run(request("b"))


def test_a_file_for_another_model_is_refused_as_a_whole(run: Any, tmp_path: Path) -> None:
    """Before it is loaded: each line would get the same error, and a second run would ask none again."""
    requests = [request("a", model="gpt-x"), request("b", model="gpt-x"), {"method": "POST"}]
    with pytest.raises(ConfigError, match="'gpt-x' and never for tiny: add --served-model-name gpt-x"):
        run(*requests)
    assert (tmp_path / "out").read_text() == ""
    found = run(*requests, served_model_name=("gpt-x",))
    assert found["b"]["response"]["status_code"] == 200 and found[None]["response"] is None


def test_as_many_run_at_once_as_the_engine_takes(run: Any) -> None:
    """Two steps' worth; the rest waits in the file."""
    most = 0

    class Counting:
        num_running = 0

        async def wait(self) -> None:
            nonlocal most
            Counting.num_running += 1
            most = max(most, Counting.num_running)
            if most == width:
                is_full.set()
            await asyncio.wait_for(is_full.wait(), 60)
            Counting.num_running -= 1

    is_full = asyncio.Event()
    engine = FakeAsyncEngine(lambda prompt, params: [Counting(), "x"])
    width = 2 * engine.model.config.max_num_seqs
    assert len(run(*(request(str(i)) for i in range(3 * width)), engine=engine)) == 3 * width
    assert most == width


def test_what_finds_no_room_is_asked_again(run: Any) -> None:
    """Requests of several answers, of which two have room."""
    engine = FakeAsyncEngine()

    class Yielding:
        async def wait(self) -> None:
            for _ in range(20):
                await asyncio.sleep(0)

    def script(prompt: Any, params: Any) -> Any:
        running = [each for each in engine.streams if not each._is_finished and not each.is_aborted]
        if len(running) >= 4:
            raise QueueFull("full")
        return [Yielding(), "x"]

    engine.scripts = script
    found = run(*(request(str(i), n=2) for i in range(12)), engine=engine)
    assert len(found) == 12
    assert all(len(line["response"]["body"]["choices"]) == 2 for line in found.values())


def test_an_engine_that_dies_ends_it_and_its_requests_stay_open(run: Any, tmp_path: Path) -> None:
    engine = FakeAsyncEngine()

    class Dying:
        async def wait(self) -> None:
            engine.status = EngineStatus("dead", 4, 4, "out of luck")
            engine.ended.set()
            raise EngineDead("out of luck")

    def script(prompt: list[int], params: Any) -> Any:
        return [Dying()] if b"b" in bytes(prompt) else ["x"]

    engine.scripts = script
    with pytest.raises(EngineDead, match="out of luck"):
        run(request("a"), request("b"), request("c"), engine=engine)
    assert "b" not in lines_of(tmp_path / "out")
    assert lines_of(tmp_path / "out").keys() < run(request("a"), request("b"), request("c")).keys()


def test_a_full_disk_ends_it_and_the_next_run_goes_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, fd: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return os.write(fd, data[:-10])

    with monkeypatch.context() as patch:
        patch.setattr(batch_files, "os", FullDisk())
        with pytest.raises(CapacityError, match="No space"):
            run(request("a"))
    assert run(request("a"))["a"]["error"] is None


#: Runs a batch over a fake engine, over and over. Each run is a process, killed at its write number `kill_at`
#: after so many bytes. What was written by then is kept as out.0, out.1, ... Prints how each process ended.
KILLED = """
import json, os, shutil, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from fakes import FakeAsyncEngine
from penstock_server.commands import batch
from penstock_server.commands import batch_files
from penstock_server.facade import engine as facade
from penstock_server.settings.settings import Settings

source, target = map(Path, sys.argv[2:])
write, num_written = os.write, 0

def run(kill_at, num_bytes):
    def write_or_die(fd, data):
        global num_written
        num_written += 1
        if num_written == kill_at:
            write(fd, bytes(data)[:num_bytes])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, data)

    class Os:
        def __getattr__(self, name):
            return write_or_die if name == "write" else getattr(os, name)

    batch_files.os = Os()
    facade.AsyncEngine = lambda load: FakeAsyncEngine()
    os._exit(batch.run_batch(Settings(model="tiny"), source, target))

ends = []
for number, point in enumerate(json.loads(sys.argv[1])):
    child = os.fork()  # a start takes seconds
    if child == 0:
        run(*point)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    shutil.copy(target, f"{{target}}.{{number}}")
print(json.dumps(ends))
"""


def test_kill_9_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Killed before a line, in the middle of one, and right after one, over and over, until it is done."""
    source = write(tmp_path / "in", *(request(str(i)) for i in range(8)), "no request")
    target = tmp_path / "out"
    points = ((1, 0), (2, 30), (3, 10**6), (1, 1), (2, 10**6), (100, 0))
    script = KILLED.format(tests=str(Path(__file__).parents[2]))
    done = run_warm("-c", script, json.dumps(points), str(source), str(target))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [-9, -9, -9, -9, -9, 0], done.stderr
    before: dict[str, Any] = {}
    for number in range(len(points)):
        whole = (tmp_path / f"out.{number}").read_bytes().rpartition(b"\n")[0].splitlines()
        now = {json.loads(line)["custom_id"]: json.loads(line) for line in whole}
        assert len(now) == len(whole) and before.items() <= now.items()
        before = now
    assert lines_of(target).keys() == {*map(str, range(8)), None}
    assert all(line["response"]["status_code"] == 200 for name, line in lines_of(target).items() if name)
