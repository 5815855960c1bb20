"""A model on two machines, one of which is killed, stopped or cut off at a random moment under load, or is
killed while nothing is asked, between the same requests. Each request gets the answer of one machine, or a
clear error within its deadline. Afterwards requests are answered, and nothing is left of those before: no
block is used, and machines have no more open files.

    PYTHONPATH=tests .venv/bin/python -m machines.killed_machines --rounds 100
    PYTHONPATH=tests .venv/bin/python -m machines.killed_machines --rounds 200 --kills-only --requests 8

As root, the machines are in network namespaces, and the link between them fails as well: it is down for 5 s,
and with `nft` it cuts connections and loses 5% of the packets. Otherwise both are on the loopback device.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from conftest import save_tiny_llama
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import SamplingParams

from .network_namespaces import Link, can_make_namespaces, enter
from .real_machines import DEADLINE_S, RETURN_S, STUCK_S, TIMEOUT_S, Held, Machines, Outcome

#: Seconds in which an answer may be on its way behind its deadline.
PATIENCE_S = 5.0
#: Seconds for which a link is down.
DOWN_S = 5.0
#: What clients may be told while machines fail.
_CLEAR = frozenset({"machine_away", "deadline_exceeded", "step_failed", "model_loading"})
WORKER_KILLED, LEADER_KILLED, BOTH_KILLED = "worker killed", "leader killed", "both killed"
AT_REST = " at rest"
KILLS = tuple(kind + when for when in ("", AT_REST) for kind in (WORKER_KILLED, LEADER_KILLED, BOTH_KILLED))
Body = dict[str, Any]
Answers = Sequence["Future[Outcome]"]
Expected = list[tuple[int, float]]


class Round:
    """Requests, and one thing that happens to the machines meanwhile."""

    def __init__(self, machines: Machines, pool: ThreadPoolExecutor, down_s: float = DOWN_S) -> None:
        """pool: threads in the leader's namespace."""
        self._machines, self._pool, self._down_s = machines, pool, down_s

    @property
    def kinds(self) -> dict[str, Callable[[Answers], None]]:
        """What can happen."""
        worker, leader = self._machines.worker, self._machines.leader
        return {
            WORKER_KILLED: lambda answers: worker.replace(),
            "worker stopped": lambda answers: worker.pause(TIMEOUT_S / 3),
            "worker stopped for long": lambda answers: worker.pause(1.5 * TIMEOUT_S),
            LEADER_KILLED: lambda answers: leader.replace(),
            BOTH_KILLED: lambda answers: self._kill_both(),
            **self.link_kinds,
        }

    @property
    def link_kinds(self) -> dict[str, Callable[[Answers], None]]:
        """What can happen to the link."""
        if (link := self._machines.link) is None:
            return {}
        down = {f"link down for {self._down_s:g} s": lambda answers: _sleep_in(link.down(), self._down_s)}
        if not link.can_filter:
            return down
        return down | {
            "link cut": lambda answers: _sleep_in(link.rejecting(), 0.1),
            "5% of the packets lost": lambda answers: _wait_in(link.lossy(5), answers),
        }

    def run(self, kind: str, bodies: list[Body], expected: list[Expected], delay_s: float) -> list[Outcome]:
        """What clients got. Raises AssertionError for a wrong answer, and for what is left of requests."""
        if kind.endswith(AT_REST):
            return self._run_at_rest(kind.removesuffix(AT_REST), bodies, expected)
        answers = [self._pool.submit(self._machines.ask, body) for body in bodies]
        time.sleep(delay_s)
        self.kinds[kind](answers)
        outcomes = [answer.result() for answer in answers]
        others = _CLEAR | {"closed"} if kind in (LEADER_KILLED, BOTH_KILLED) else _CLEAR
        for outcome, right in zip(outcomes, expected, strict=True):
            check(outcome, right, others)
        self._pool.submit(self._settle).result()
        check(self._pool.submit(self._machines.ask_until_answered, bodies[0]).result(), expected[0])
        return outcomes

    def _run_at_rest(self, kind: str, bodies: list[Body], expected: list[Expected]) -> list[Outcome]:
        """The same requests before and after: nothing may be found that went with a machine."""
        self._ask_all(bodies, expected)
        self._pool.submit(self._settle).result()
        self.kinds[kind]([])
        self._pool.submit(self._settle).result()
        return self._ask_all(bodies, expected)

    def _ask_all(self, bodies: list[Body], expected: list[Expected]) -> list[Outcome]:
        answers = [self._pool.submit(self._machines.ask_until_answered, body) for body in bodies]
        outcomes = [answer.result() for answer in answers]
        for outcome, right in zip(outcomes, expected, strict=True):
            check(outcome, right)
        return outcomes

    def _kill_both(self) -> None:
        self._machines.leader.kill()
        self._machines.worker.replace()
        self._machines.leader.start()

    @property
    def held(self) -> tuple[Held, Held]:
        """What the leader's process has, and the worker's."""
        return self._machines.leader.holds(), self._machines.worker.holds()

    def _settle(self) -> None:
        self._machines.wait_until_ready()
        until_s = time.monotonic() + STUCK_S
        while any(left := self._left()) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not any(left), f"requests, blocks: {left} are left"

    def _left(self) -> list[int]:
        stats = self._machines.get("/v1/engine/stats")[1]
        return [stats[name] for name in ("num_running", "num_waiting", "kv_blocks_used")]


def check(outcome: Outcome, expected: Expected, others: Collection[str] = ()) -> None:
    """Raises AssertionError. `others`: what a client may be told in place of an answer."""
    if outcome.kind == "answered":
        assert outcome.tokens == expected, "a wrong answer"
    else:
        assert outcome.kind in others, outcome
        assert outcome.tokens == expected[: len(outcome.tokens)], "a wrong part of an answer"


def _sleep_in(failure: contextlib.AbstractContextManager[None], seconds: float) -> None:
    with failure:
        time.sleep(seconds)


def _wait_in(failure: contextlib.AbstractContextManager[None], answers: Answers) -> None:
    with failure:
        wait(answers)


def questions(dice: random.Random, num_seqs: int, num_tokens: int) -> list[Body]:
    """Requests, half of which are streams; prompts of one step and of several."""
    lengths = (5, 60, 100, 7, 61, 101, 9, 30)
    return [
        {
            "prompt": [dice.randrange(3, 270) for _ in range(length)],
            "max_tokens": num_tokens,
            "temperature": 1,
            "seed": index,
            "ignore_eos": True,
            "stream": index % 2 == 0,
        }
        for index, length in zip(range(num_seqs), itertools.cycle(lengths), strict=False)
    ]


def answers_of_one(model: Path, bodies: list[Body]) -> list[Expected]:
    """What one machine answers."""
    params = [
        SamplingParams(
            temperature=1, seed=body["seed"], max_tokens=body["max_tokens"], ignore_eos=True, logprobs=1
        )
        for body in bodies
    ]
    config = EngineConfig(num_threads=1, device="cpu", max_num_batched_tokens=48, num_kv_tokens=2048)
    with Engine.load(model, config) as engine:
        found = engine.generate([body["prompt"] for body in bodies], params)
    return [[(token.token_id, token.logprob) for token in completion.logprobs] for completion in found]


@contextlib.contextmanager
def running(model: Path, return_s: float = RETURN_S) -> Iterator[tuple[Machines, ThreadPoolExecutor]]:
    """Two machines that are ready, and threads that can ask them."""
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(Link()) if can_make_namespaces() else None
        machines = Machines(model, link, return_s)
        stack.callback(machines.close)
        begin = functools.partial(enter, link.spaces[0]) if link is not None else lambda: None
        pool = stack.enter_context(ThreadPoolExecutor(8, initializer=begin))
        pool.submit(machines.wait_until_ready).result()
        yield machines, pool


def plan_of(kinds: Sequence[str], num_rounds: int, dice: random.Random) -> list[str]:
    """What happens in each round: each kind equally often. The worker is killed in the last rounds alone, and
    the leader in the first ones, so that each process lives through most rounds."""
    each = [kinds[number % len(kinds)] for number in range(num_rounds)]
    dice.shuffle(each)
    return sorted(
        each, key=lambda kind: (_kills(kind, WORKER_KILLED)) - _kills(kind, LEADER_KILLED, BOTH_KILLED)
    )


def _kills(kind: str, *others: str) -> bool:
    """Whether what happens is one of the others, under load or at rest."""
    return kind.removesuffix(AT_REST) in others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--kills-only", action="store_true", help="half of them at rest")
    parser.add_argument("--requests", type=int, default=24, help="of a round")
    parser.add_argument("--tokens", type=int, default=140, help="of an answer")
    options, dice = parser.parse_args(), random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        save_tiny_llama(model)
        bodies = questions(dice, options.requests, options.tokens)
        expected = answers_of_one(model, bodies)
        with running(model) as (machines, pool):
            each_round = Round(machines, pool)
            kinds = KILLS if options.kills_only else [*each_round.kinds, *KILLS[len(KILLS) // 2 :]]
            plan = plan_of(kinds, options.rounds, dice)
            report(run(each_round, plan, bodies, expected, dice))


class Told(NamedTuple):
    """What came of a round."""

    kind: str
    outcomes: Counter[str]
    seconds: float
    leader: Held
    worker: Held


def run(
    each_round: Round, plan: list[str], bodies: list[Body], expected: list[Expected], dice: random.Random
) -> list[Told]:
    """All rounds."""
    told = list[Told]()
    for number, kind in enumerate(plan, 1):
        began_s = time.monotonic()
        found = each_round.run(kind, bodies, expected, delay_s=dice.random())
        slowest_s = max(outcome.seconds for outcome in found)
        assert slowest_s < DEADLINE_S + PATIENCE_S, f"an answer came after {slowest_s:.0f} s"
        outcomes = Counter(outcome.kind for outcome in found)
        told.append(Told(kind, outcomes, time.monotonic() - began_s, *each_round.held))
        print(f"{number:>3} {kind}, {told[-1].seconds:.1f} s: {dict(outcomes)}", flush=True)
    return told


def report(told: list[Told]) -> None:
    """Raises AssertionError if a process has kept threads or files of requests that are gone."""
    for kind in dict.fromkeys(each.kind for each in told):
        rounds = [each for each in told if each.kind == kind]
        outcomes, longest = (
            sum((each.outcomes for each in rounds), Counter()),
            max(each.seconds for each in rounds),
        )
        print(f"{len(rounds):>3} times {kind}: {dict(outcomes)}; the longest round took {longest:.1f} s")
    lives = {
        "worker": [each.worker for each in told if not _kills(each.kind, WORKER_KILLED, BOTH_KILLED)],
        "leader": [each.leader for each in told if not _kills(each.kind, LEADER_KILLED, BOTH_KILLED)],
    }
    for name, held in lives.items():
        if not held:
            print(f"{name}: killed in every round")
            continue
        print(f"{name}, {len(held)} rounds: {_words(held[0])} at first, {_words(held[-1])} at last")
        assert held[-1].num_files <= held[0].num_files + 1, "files are left open"
    print(f"{len(told)} rounds, no wrong answer, no blocks left")


def _words(held: Held) -> str:
    return f"{held.num_threads} threads, {held.num_files} files, {held.num_bytes / 1e6:.0f} MB"


if __name__ == "__main__":
    main()
