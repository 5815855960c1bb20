"""What a step of a mixture costs beside its products: layers, experts and choices of Qwen3-30B-A3B, with such
narrow matrices that Python and the calls of C take most of a step. Milliseconds of the stepping thread's
processor time, with a quarter of the experts in memory (the others come from the disk), and with all.

    python tests/bench/narrow_mixture.py [--steps 200]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from penstock import Engine
from penstock.model.known_shapes import find_shape
from penstock.model.shapes import write_random
from penstock.text.tokenizer import NoText
from penstock_server.commands import benchmark
from penstock_server.facade.inside import draw_routing
from penstock_server.facade.machine import profile
from penstock_server.settings.settings import Settings

SHAPE = find_shape("qwen3-30b-a3b") | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
#: Bytes of memory with which a quarter of the experts have slots, and with which all have.
MEMORY = {"a quarter": int(0.11 * 2**30), "all": int(0.4 * 2**30)}
#: Tokens of keys and values, and steps of a sample.
CONTEXT, AT_ONCE = 1024, 10


def samples(folder: Path, num_bytes: int, num_steps: int) -> tuple[list[float], float]:
    """Seconds of steps, each the mean of AT_ONCE, and the missing experts of a step."""
    settings = Settings(weights="int4", host_memory=num_bytes, kv_tokens=CONTEXT, model=str(folder))
    config = benchmark.engine_config(settings)
    size, hardware = benchmark.footprint_at(folder, config), profile(settings, folder)
    loaded = Engine.load(folder, config, tokenizer=NoText(), hardware=hardware, is_patient=False)
    with loaded as engine:
        draw_routing(engine, "usual", size, hardware)
        benchmark._first_token(engine, time.perf_counter())
        benchmark._fill_slots(engine)
        benchmark._add(engine, "0", benchmark.CONTEXT, 0)
        while not engine.step():
            pass
        found = list[float]()
        before = engine.streamer.tiers.expert_counts
        for _ in range(max(2, num_steps // AT_ONCE)):
            started = time.thread_time()
            for _ in range(AT_ONCE):
                engine.step()
            found.append((time.thread_time() - started) / AT_ONCE)
        num_missing = engine.streamer.tiers.expert_counts[1] - before[1]
    return found, num_missing / len(found) / AT_ONCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        write_random(SHAPE, Path(folder), None, "int4", None)
        for name, num_bytes in MEMORY.items():
            found, num_missing = samples(Path(folder), num_bytes, options.steps)
            median, least = 1e3 * statistics.median(found), 1e3 * min(found)
            print(f"{name}: median {median:.1f} ms, least {least:.1f}; {num_missing:.0f} experts missing")
            line = {"bench": "narrow_mixture", "in_memory": name, "s": median / 1e3, "least_s": least / 1e3}
            print(json.dumps(line | {"missing": num_missing}))


if __name__ == "__main__":
    main()
