"""A worker that is killed, stopped for a while, or cut off at random moments under load. All answers are
compared with those of one machine, and all blocks are free at the end of each round:

    PYTHONPATH=tests .venv/bin/python tests/engine/killed_workers.py --rounds 100
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from node_cluster import CONFIG, SECRET, free_port
from test_convert import Ids
from tiny_models import VOCAB_SIZE, build

from penstock.engine import Completion, Engine
from penstock.errors import StepFailed
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.nodes_config import NodesConfig
from warm_python import WarmProcess

PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
#: Seconds of silence after which a machine is lost, and for which requests wait for it.
TIMEOUT_S, RETURN_S = 1.0, 30.0
_WORKER = """
import sys
from penstock.config import EngineConfig
from penstock.nodes.worker import Worker
from penstock.nodes_config import NodesConfig
nodes = NodesConfig({secret!r}, 2, 1, "127.0.0.1", {port}, timeout_s={timeout})
Worker(nodes, EngineConfig(num_threads=1, device="cpu")).run()
"""


def worker(port: int) -> WarmProcess:
    return WarmProcess("-c", _WORKER.format(secret=SECRET, port=port, timeout=TIMEOUT_S))


class Disturber:
    """Does one thing to the worker at a random moment of each round."""

    def __init__(self, port: int, dice: random.Random) -> None:
        self.port, self.dice, self.process = port, dice, worker(port)
        self.done: Counter[str] = Counter()

    def disturb(self, engine: Engine) -> None:
        time.sleep(self.dice.random() * 0.2)
        what = self.dice.choice(("kill", "stop", "long stop", "cut"))
        self.done[what] += 1
        if what == "kill":
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = worker(self.port)
        elif what == "cut":
            assert engine.leader is not None
            if (peer := engine.leader.members[0].peer) is not None:
                peer.close("the link was cut")
        else:
            os.kill(self.process.pid, signal.SIGSTOP)
            time.sleep(0.3 if what == "stop" else 1.5 * TIMEOUT_S)
            os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def answer(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    for index, prompt in enumerate(prompts):
        engine.add(GenerationRequest(prompt, PARAMS, str(index)))
    found = {str(index): Completion() for index in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].extend(output)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds, dice = parser.parse_args().rounds, random.Random(1)
    model = Path(tempfile.mkdtemp()) / "model"
    build("Llama", model)
    prompts = [[dice.randrange(3, VOCAB_SIZE) for _ in range(dice.choice((5, 60, 100)))] for _ in range(8)]
    with Engine.load(model, CONFIG, tokenizer=Ids()) as engine:
        expected = engine.generate(prompts, PARAMS)
    port, failed = free_port(), 0
    disturber = Disturber(port, dice)
    nodes = NodesConfig(SECRET, 2, 0, "127.0.0.1", port, timeout_s=TIMEOUT_S, return_s=RETURN_S)
    try:
        with Engine.load(model, CONFIG, tokenizer=Ids(), nodes=nodes) as engine:
            for _ in range(rounds):
                thread = threading.Thread(target=disturber.disturb, args=(engine,))
                thread.start()
                try:
                    assert answer(engine, prompts) == expected, "a wrong answer"
                except StepFailed as error:
                    failed += 1
                    print("requests ended with an error:", error)
                thread.join()
                assert engine.metrics.kv_blocks_used == 0, "blocks are lost"
            losses = engine.leader.members[0].num_losses if engine.leader is not None else 0
    finally:
        disturber.end()
    print(f"{rounds} rounds, {dict(disturber.done)}: {losses} losses, no wrong answer")
    print(f"rounds that ended with an error: {failed}")


if __name__ == "__main__":
    main()
