"""What wrong and huge bodies cost a server before it refuses or takes them.

    PYTHONPATH=tests python tests/bench/hostile_bodies.py [--size 16] [--kinds "ids"] [--routes /api/chat]

Starts a server of the demo model, and sends each kind of body to each route, one after the other, while
another thread asks for /health all the time. Prints for each kind, over all routes: the most processor
seconds of a request, the most memory above what the server had before (by the size of the body), the longest
wait for /health, and the statuses. One line of JSON comes last. The heads of the columns have the limits."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2

sys.path.insert(0, str(Path(__file__).parents[1]))

from end_to_end.server_process import ServerProcess  # noqa: E402

MIB = 1 << 20
_TICKS = os.sysconf("SC_CLK_TCK")
#: A field of each route that holds a text, so that a body can be right but for its size.
TEXTS = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/fill": "prompt",
    "/v1/tokenize": "prompt",
    "/v1/detokenize": "tokens",
    "/v1/embeddings": "input",
    "/v1/score": "text_1",
    "/v1/rerank": "query",
    "/api/chat": "messages",
    "/api/generate": "prompt",
    "/api/embed": "input",
    "/api/show": "system",
}


def repeated(start: str, part: str, end: str, size: int) -> bytes:
    return (start + part * max(1, (size - len(start) - len(end)) // len(part)) + end).encode()


def numbered(start: str, part: str, end: str, size: int) -> bytes:
    """part has {} where a number stands."""
    num = max(1, (size - len(start) - len(end)) // (len(part) + 5))
    return (start + "".join(part.format(1_000_000 + each) for each in range(num)) + end).encode()


#: field, size -> a body. The list is what a fuzzer would try first.
KINDS: dict[str, Callable[[str, int], bytes]] = {
    "empty lists": lambda field, size: repeated(f'{{"{field}":[', "[],", "[]]}", size),
    "empty objects": lambda field, size: repeated(f'{{"{field}":[', "{},", "{}]}", size),
    "objects": lambda field, size: repeated(f'{{"{field}":[', '{"role":"user","content":"x"},', "{}]}", size),
    "wrong messages": lambda field, size: repeated(f'{{"{field}":[', '{"role":1,"x":[]},', "{}]}", size),
    "parts": lambda field, size: repeated(
        f'{{"{field}":[{{"role":"user","content":[', '{"type":"text","text":"x"},', "{}]}]}", size
    ),
    "calls": lambda field, size: repeated(
        f'{{"{field}":[{{"role":"assistant","tool_calls":[',
        '{"id":"a","function":{"name":"f","arguments":"[[],[],[]]"}},',
        "{}]}]}",
        size,
    ),
    "empty strings": lambda field, size: repeated(f'{{"{field}":[', '"",', '""]}', size),
    "strings": lambda field, size: numbered(f'{{"{field}":[', '"{}",', '""]}', size),
    "wrong ids": lambda field, size: repeated('{"prompt":"x","stop_token_ids":[', '"",', "1]}", size),
    "ids": lambda field, size: numbered(f'{{"{field}":[', "{},", "1]}", size),
    "small ids": lambda field, size: repeated(f'{{"{field}":[', "1,", "1]}", size),
    "id lists": lambda field, size: repeated(f'{{"{field}":[', "[1,2,3],", "[1]]}", size),
    "nulls": lambda field, size: repeated(f'{{"{field}":[', "null,", "null]}", size),
    "floats": lambda field, size: repeated(f'{{"{field}":[', "0.123,", "1]}", size),
    "long numbers": lambda field, size: repeated(f'{{"{field}":[', "9" * 4000 + ",", "1]}", size),
    "a long number": lambda field, size: repeated(f'{{"{field}":', "9", "}", size),
    "members": lambda field, size: numbered('{"a":1', ',"{}":1', "}", size),
    "metadata": lambda field, size: numbered('{"metadata":{"a":1', ',"{}":1', "}}", size),
    "biases": lambda field, size: numbered('{"logit_bias":{"a":1', ',"{}":1', "}}", size),
    "equal members": lambda field, size: repeated('{"a":1', ',"a":1', "}", size),
    "schema": lambda field, size: numbered(
        '{"response_format":{"type":"json_schema","json_schema":{"schema":{"properties":{"a":{}',
        ',"{}":{{"type":"string"}}',
        "}}}}}",
        size,
    ),
    "choices": lambda field, size: numbered('{"structured_outputs":{"choice":["a"', ',"{}"', "]}}", size),
    "tools": lambda field, size: repeated(
        '{"tools":[', '{"type":"function","function":{"name":"f"}},', "{}]}", size
    ),
    "deep lists": lambda field, size: repeated(f'{{"{field}":', "[", "", size),
    "deep objects": lambda field, size: repeated(f'{{"{field}":', '{"a":', "", size),
    "text": lambda field, size: repeated(f'{{"{field}":"', "a", '"}', size),
    "wide text": lambda field, size: repeated(f'{{"{field}":"\U0001f600', "a", '"}', size),
    "chinese": lambda field, size: repeated(f'{{"{field}":"', "\u597d", '"}', size // 3),
    "escapes": lambda field, size: repeated(f'{{"{field}":"', "\\n", '"}', size),
    "backslashes": lambda field, size: repeated(f'{{"{field}":"', "\\\\", '"}', size),
    "half a pair": lambda field, size: repeated(f'{{"{field}":"', "a", '\\ud800"}', size),
    "code": lambda field, size: repeated(f'{{"{field}":"', 'a[1]={b:\\"c\\"},', '"}', size),
    "a long name": lambda field, size: repeated('{"', "n", '":1}', size),
    "a long model": lambda field, size: repeated('{"model":"', "n", f'","{field}":"x"}}', size),
    "a long type": lambda field, size: repeated('{"response_format":{"type":"', "n", '"}}', size),
    "white space": lambda field, size: repeated(f'{{"{field}":"x"', " ", "}", size),
    "no json": lambda field, size: b"\xff" * size,
}


@dataclass
class Cost:
    statuses: set[int]
    processor_s: float = 0.0
    memory: float = 0.0
    health_s: float = 0.0
    route: str = ""


class Watched:
    """The figures of a process."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    def processor_s(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def forget_peak(self) -> None:
        (self._folder / "clear_refs").write_text("5")

    def memory(self, name: str) -> int:
        """Bytes: VmRSS now, or VmHWM at the most since forget_peak()."""
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) << 10
        raise KeyError(name)


def probe(url: str, waits: list[float], stop: threading.Event) -> None:
    with httpx2.Client(base_url=url, timeout=600) as client:
        while not stop.is_set():
            start = time.perf_counter()
            client.get("/health")
            waits.append(time.perf_counter() - start)
            time.sleep(0.005)


def measure(
    url: str, watched: Watched, kinds: list[str], routes: list[str], size: int
) -> Iterator[tuple[str, Cost]]:
    waits: list[float] = []
    stop = threading.Event()
    prober = threading.Thread(target=probe, args=(url, waits, stop))
    prober.start()
    try:
        with httpx2.Client(base_url=url, timeout=600) as client:
            for kind in kinds:
                cost = Cost(set())
                for route in routes:
                    body = KINDS[kind](TEXTS[route], size)
                    watched.forget_peak()
                    before, processor_s = watched.memory("VmRSS"), watched.processor_s()
                    waits.clear()
                    answer = client.post(route, content=body, headers={"Content-Type": "application/json"})
                    time.sleep(0.01)
                    processor_s = watched.processor_s() - processor_s
                    memory = (watched.memory("VmHWM") - before) / len(body)
                    cost.statuses.add(answer.status_code)
                    cost.health_s = max([cost.health_s, *waits])
                    cost.memory = max(cost.memory, memory)
                    if processor_s >= cost.processor_s:
                        cost.processor_s, cost.route = processor_s, route
                yield kind, cost
    finally:
        stop.set()
        prober.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=16.0, help="MiB of each body")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--routes", nargs="+", default=[*TEXTS], choices=[*TEXTS])
    args = parser.parse_args()
    size = int(args.size * MIB)
    worst = {"processor_s": 0.0, "memory": 0.0, "health_s": 0.0}
    with ServerProcess("demo", "--speculation", "off") as server:
        server.wait_until_ready()
        watched = Watched(server.pid)
        heads = ("processor s (1)", "memory (4)", "/health s (0.5)")
        print("body            " + "".join(f"{head:>16}" for head in heads) + "  status, slowest route")
        for kind, cost in measure(server.url, watched, args.kinds, args.routes, size):
            statuses = " ".join(map(str, sorted(cost.statuses)))
            figures = f"{cost.processor_s:>16.2f}{cost.memory:>16.2f}{cost.health_s:>16.3f}"
            print(f"{kind:<16}{figures}  {statuses}, {cost.route}", flush=True)
            for name in worst:
                worst[name] = max(worst[name], getattr(cost, name))
    print(json.dumps({"size_mib": args.size, **{name: round(value, 3) for name, value in worst.items()}}))


if __name__ == "__main__":
    main()
