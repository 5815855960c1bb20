"""What a pass over a model's upper planes takes, by its places: a chain behind the end of a short text.
Beside it the price that guesses are chosen by, and what a pass takes with activations in 16 bits.

    python tests/bench/planes_passes.py TARGET [--host-memory-gib 6.5] [--rounds 3]

TARGET is a folder in planes (`penstock bench --shape solar-10.7b --weights planes` makes one).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from penstock.config import EngineConfig
from penstock.drafters.planes_drafter import PlanesDrafter
from penstock.engine import Engine
from penstock.generation.drafting.asking import Place
from penstock.generation.drafting.drafter import NO_DRAFTS
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence
from penstock.measure import measure_hardware
from penstock.text.tokenizer import NoText

PLACES = (1, 2, 4, 6, 8, 12, 16)


def pass_s(planes: PlanesDrafter, sequence: Sequence, num_places: int) -> float:
    """Seconds of one pass."""
    assert planes.start([sequence])
    line = [Place(sequence), *(Place(sequence, node, node - 1, 100 + node) for node in range(num_places - 1))]
    began = time.perf_counter()
    planes.expand_lines([line])
    taken = time.perf_counter() - began
    planes.finish()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--host-memory-gib", type=float, default=6.5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config = EngineConfig(
        host_memory_bytes=int(options.host_memory_gib * 2**30), num_kv_tokens=1024, max_model_len=512,
        max_num_seqs=4, max_num_batched_tokens=128, draft_with_planes=True,
    )  # fmt: skip
    hardware = measure_hardware(options.target, config, Path.home() / ".cache" / "penstock" / "hardware.json")
    with Engine.load(
        options.target, config, hardware=hardware, tokenizer=NoText(), drafter=NO_DRAFTS
    ) as engine:
        planes = engine.draft_model
        assert isinstance(planes, PlanesDrafter)
        dice = random.Random(0)
        prompt = [dice.randrange(3, 2000) for _ in range(32)]
        engine.add(GenerationRequest(prompt, SamplingParams(max_tokens=64, ignore_eos=True)))
        engine.step()
        (sequence,) = engine.scheduler.admission.running
        rough, exact = (
            planes._executor,
            engine.model.executor.beside(planes._planes, engine.model.executor.family),
        )
        taken: dict[tuple[bool, int], list[float]] = {}
        for number in range(options.rounds + 1):
            for is_rough, executor in ((True, rough), (False, exact)):
                planes._executor = executor
                for num_places in PLACES:
                    seconds = pass_s(planes, sequence, num_places)
                    if number:  # the first round fetches what is not in memory yet
                        taken.setdefault((is_rough, num_places), []).append(seconds)
        print("places   int8 s   its price   int16 s")
        for num_places in PLACES:
            int8, int16 = (statistics.median(taken[each, num_places]) for each in (True, False))
            print(f"{num_places:6} {int8:8.3f} {planes.seconds(num_places):11.3f} {int16:9.3f}")


if __name__ == "__main__":
    main()
