"""The HTTP session of `dataset.py`. Ray's HTTP processor makes one for each batch of rows
(`session_factory`), and uses `post` as that of `aiohttp.ClientSession`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

#: The server is busy, loads or restarts: the request is sent again.
_LATER = {408, 429, 502, 503}
#: The key, the path or the model's name is wrong: every row would get this answer.
_FOR_ALL_ROWS = {401, 403, 404, 405}
#: A row whose connection breaks so often may be what breaks the server.
_MAX_CUTS = 5
#: Seconds before a request is sent again: the first time, and at most.
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0


class JobRefused(RuntimeError):
    """The server refuses all rows, or is gone for too long. The job ends here and can be resumed."""


class Answer:
    """What Ray's stage reads of a response: the new columns of a row. A row's own error is an answer too."""

    status = 200
    reason = "OK"

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns

    async def json(self) -> dict[str, Any]:
        return self._columns

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


class PatientSession:
    """Sends the rows of a batch at once, and waits for a server that is busy, loads or restarts.

    aiohttp's own `post` sends nothing before it is awaited. Ray's stage awaits a batch's rows one after the
    other, so that a server would compute one row of each batch at a time. Here `post` starts a request.

    patience_s: the longest silence of the server, in seconds, while it is away or before an answer.
    Raises JobRefused after this time without any answer, and for answers that all rows would get.
    """

    def __init__(self, patience_s: float = 3600.0) -> None:
        self._patience_s = patience_s
        self._sent: set[asyncio.Task[Answer]] = set()
        self._heard_s = 0.0

    async def __aenter__(self) -> PatientSession:
        silence = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=self._patience_s)
        self._http = aiohttp.ClientSession(timeout=silence, connector=aiohttp.TCPConnector(limit=0))
        self._heard_s = asyncio.get_running_loop().time()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._sent:
            task.cancel()
        await asyncio.gather(*self._sent, return_exceptions=True)
        await self._http.close()

    def post(self, url: str, *, headers: dict[str, str], data: str) -> asyncio.Task[Answer]:
        task = asyncio.create_task(self._answer(url, headers, data))
        self._sent.add(task)
        return task

    async def _answer(self, url: str, headers: dict[str, str], data: str) -> Answer:
        wait_s, num_cuts = _FIRST_WAIT_S, 0
        while True:
            try:
                async with self._http.post(url, headers=headers, data=data) as response:
                    columns = columns_of(response.status, await response.text())
                reason = columns["error"]
                if response.status not in _LATER:
                    self._heard_s = asyncio.get_running_loop().time()
                    if response.status in _FOR_ALL_ROWS:
                        raise JobRefused(f"the server refuses this job: {reason} (HTTP {response.status})")
                    return Answer(columns)
                after = response.headers.get("Retry-After", "")
                wait_s = max(float(after), _FIRST_WAIT_S) if after.isdigit() else wait_s
            except aiohttp.ClientConnectorError as error:
                reason = str(error)
            except (aiohttp.ClientError, TimeoutError) as error:
                num_cuts, reason = num_cuts + 1, f"the connection broke: {error!r}"
                if num_cuts == _MAX_CUTS:
                    return Answer(columns_of(500, f"{_MAX_CUTS} times, {reason}"))
            await self._wait(wait_s, reason)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _wait(self, wait_s: float, reason: str) -> None:
        silence_s = asyncio.get_running_loop().time() - self._heard_s
        if silence_s + wait_s > self._patience_s:
            raise JobRefused(
                f"no answer for {silence_s:.0f} s ({reason}); start the server and the job again"
            )
        await asyncio.sleep(wait_s)


def columns_of(status: int, text: str) -> dict[str, Any]:
    """The new columns of a row. All are always there and never null, so that all files get one schema."""
    body = _json_object(text)
    choice = (body.get("choices") or [{}])[0]
    usage = body.get("usage") or {}
    error = body.get("error")
    if not isinstance(error, dict) or not error:
        # Such as a proxy's page, or its {"error": "no healthy upstream"}.
        error = {} if choice else {"message": f"HTTP {status}: {text[:300]}"}
    return {
        "answer": (choice["message"]["content"] if "message" in choice else choice.get("text")) or "",
        "finish_reason": choice.get("finish_reason") or "",
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "completion_tokens": usage.get("completion_tokens", 0),
        "error": str(error.get("message", "")),
    }


def _json_object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
