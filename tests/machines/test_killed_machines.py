"""Machines that are killed or cut off, as real processes: each request gets one machine's answer or a clear
error, and nothing is left of it. `killed_machines.py` is the long form."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from .killed_machines import (
    AT_REST,
    BOTH_KILLED,
    LEADER_KILLED,
    WORKER_KILLED,
    Round,
    Told,
    answers_of_one,
    check,
    questions,
    report,
    running,
)
from .real_machines import Held


@pytest.mark.slow
def test_machines_that_fail_under_load(tiny_llama: Path) -> None:
    bodies = questions(random.Random(1), num_seqs=8, num_tokens=30)
    expected = answers_of_one(tiny_llama, bodies)
    with running(tiny_llama) as (machines, pool):
        each_round = Round(machines, pool, down_s=0.5)
        before = machines.worker.holds()
        kinds = [LEADER_KILLED, *each_round.link_kinds]
        for kind in kinds:
            each_round.run(kind, bodies, expected, delay_s=0.1)
        assert machines.worker.holds().num_files <= before.num_files + 1
        each_round.run(WORKER_KILLED, bodies, expected, delay_s=0.1)
        each_round.run(WORKER_KILLED + AT_REST, bodies, expected, delay_s=0.0)


@pytest.mark.parametrize("kinds", [[], [WORKER_KILLED], [LEADER_KILLED], [BOTH_KILLED], ["other"] * 2])
def test_the_report_of_few_rounds(kinds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    held = Held(num_threads=9, num_files=20, num_bytes=10**8)
    report([Told(kind, Counter({"answered": 8}), 2.0, held, held) for kind in kinds])
    told = capsys.readouterr().out
    assert f"{len(kinds)} rounds, no wrong answer" in told
    assert (
        told.count("killed in every round") == {BOTH_KILLED: 2, "other": 0}.get(kinds[0], 1) if kinds else 2
    )


def test_probes_and_requests_while_a_worker_is_away(tiny_llama: Path) -> None:
    bodies = questions(random.Random(1), num_seqs=2, num_tokens=20)
    expected = answers_of_one(tiny_llama, bodies)
    with running(tiny_llama, return_s=0.5) as (machines, pool):
        machines.worker.kill()
        for body, right in zip(bodies, expected, strict=True):
            outcome = pool.submit(machines.ask, body).result()
            assert outcome.kind == "machine_away"
            check(outcome, right, {outcome.kind})
        away = {"status": "waiting", "message": "rank 1 is away"}
        assert pool.submit(machines.get, "/health").result() == (503, away)
        assert pool.submit(machines.get, "/health/live").result() == (200, away)
        machines.worker.start()
        pool.submit(machines.wait_until_ready).result()
        for body, right in zip(bodies, expected, strict=True):
            check(pool.submit(machines.ask_until_answered, body).result(), right)
