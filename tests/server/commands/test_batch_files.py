"""Lines in and lines out: nothing lost, nothing twice, nothing torn."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock_server.commands.batch_files import (
    BatchOutput,
    BatchRequest,
    answer_line,
    check_ids,
    error_line,
    parse_line,
    read_requests,
)

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def test_a_good_line() -> None:
    assert parse_line(3, json.dumps(GOOD).encode()) == BatchRequest(
        3, "a", "/v1/completions", {"prompt": "x"}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_id": None}, "no custom_id"),
        ({"custom_id": ""}, "no custom_id"),
        ({"custom_id": 7}, "no custom_id"),
        ({"method": "GET"}, "method is 'GET'"),
        ({"method": None}, "method is None"),
        ({"url": None}, "url is None"),
        ({"url": "/metrics"}, "url is '/metrics'"),
        ({"url": "/v1/\ud800"}, "url is"),
        ({"body": None}, "body must be"),
        ({"body": {"stream": True}}, "stream"),
    ],
)
def test_what_is_wrong_with_a_line_is_told_with_its_number(change: dict[str, Any], message: str) -> None:
    error = parse_line(3, json.dumps(GOOD | change).encode()).error
    assert error is not None and message in error and "line 3" in error


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b"\xff\xfe", b'{"custom_id": "a"', b"[" * 100_000])
def test_no_object_at_all(line: bytes) -> None:
    assert parse_line(1, line).error


def test_a_slash_too_many_at_the_end_of_an_url() -> None:
    """The application would answer a redirect, which has no JSON."""
    line = json.dumps(GOOD | {"url": "/v1/completions/"}).encode()
    assert parse_line(1, line).url == "/v1/completions"


def test_pipes_are_refused(tmp_path: Path) -> None:
    """A batch reads its input several times, and its output in the next run."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="several times"):
        check_ids(pipe)
    with pytest.raises(ConfigError, match="read again"):
        BatchOutput(pipe)


def test_empty_lines_are_nothing_but_count(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text("\n" + json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | {"custom_id": "b"}))
    assert [(each.number, each.custom_id) for each in read_requests(path)] == [(2, "a"), (4, "b")]


def test_duplicates_are_refused_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "in"
    ids = ["a", "b", "a", "a"]
    path.write_text("\n".join(json.dumps(GOOD | {"custom_id": each}) for each in ids))
    with pytest.raises(ConfigError, match="'a' in lines 1 and 3, 'a' in lines 1 and 4"):
        check_ids(path)
    with pytest.raises(ConfigError, match="cannot read"):
        check_ids(tmp_path / "gone")


def test_lines_are_openais() -> None:
    request = BatchRequest(1, "a")
    answer = answer_line(request, 200, "r1", {"id": "x"})
    assert answer.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "r1", "body": {"id": "x"}}
    assert answer == {"custom_id": "a", "response": response, "error": None}
    error = error_line(BatchRequest(4, None, error="line 4 is not JSON"))
    assert error["response"] is None and error["error"]["code"] == "invalid_line"


def test_what_is_written_is_done_in_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchOutput(path) as output:
        output.append(answer_line(BatchRequest(1, "a"), 200, "r", {}))
        output.append(error_line(BatchRequest(2, None, error="bad")))
    with BatchOutput(path) as output:
        assert output.is_done(BatchRequest(1, "a")) and output.is_done(BatchRequest(2))
        assert not output.is_done(BatchRequest(3, "b")) and not output.is_done(BatchRequest(4))


@pytest.mark.parametrize(
    "torn", ['{"id": "batch_req_1", "cust', "{", '{"id": "batch_req_1", "custom_id": "b"}']
)
def test_what_a_kill_left_of_a_line_is_cut_off(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "out"
    with BatchOutput(path) as output:
        output.append(answer_line(BatchRequest(1, "a"), 200, "r", {}))
    whole = path.read_text()
    path.write_text(whole + torn)
    with BatchOutput(path) as output:
        assert not output.is_done(BatchRequest(2, "b"))
        output.append(answer_line(BatchRequest(2, "b"), 200, "r", {}))
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "b"]


REQUEST = json.dumps(GOOD)


@pytest.mark.parametrize(
    "text",
    [
        "a letter to my aunt\nand more",
        '{"prompt": "x"}\n',
        "[]\n",
        "one line",
        REQUEST,
        f"{REQUEST}\n{REQUEST}",
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    """Also a file of requests, which a user may name by mistake as the output."""
    path = tmp_path / "out"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no answer of a batch"):
        BatchOutput(path)
    assert path.read_text() == text


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    with BatchOutput(tmp_path / "out"), pytest.raises(ConfigError, match="another batch"):
        BatchOutput(tmp_path / "out")
    with BatchOutput(tmp_path / "out"):
        pass


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        BatchOutput(tmp_path / "gone" / "out")
