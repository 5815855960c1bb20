"""Steps of a sequence that is longer than the KV cache, beside the floor that the plan gives.

    .venv/bin/python tests/bench/kv_spill.py FOLDER --tokens 32000 --kv-tokens 16000 --host-memory 6GiB

FOLDER is a converted one. Nothing computes the prompt, which would take a quarter of an hour: its blocks get
random numbers, which takes a step as long to read. The positions that the model was made for don't limit the
prompt: a folder of links says that there are enough.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.cache.spill.spilled_cache import SpilledKVCache
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.measure import measure_hardware
from penstock.memory.direct_io import aligned_buffer
from penstock.metrics import StepStats
from penstock.text.tokenizer import NoText
from penstock_server.settings.values import parse_bytes

CACHE = Path.home() / ".cache" / "penstock" / "hardware.json"


@contextmanager
def with_positions(folder: Path, num_positions: int) -> Iterator[Path]:
    """A folder of links to a model's files, whose config.json has so many positions."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        for file in folder.iterdir():
            (Path(name) / file.name).symlink_to(file)
        config = json.loads((folder / "config.json").read_text())
        (Path(name) / "config.json").unlink()
        text = json.dumps(config | {"max_position_embeddings": num_positions})
        (Path(name) / "config.json").write_text(text)
        yield Path(name)


def fill(engine: Engine) -> None:
    """Write blocks to the disk, which would not read what was never written."""
    cache = engine.model.executor.kv_cache
    if isinstance(cache, SpilledKVCache):
        content = aligned_buffer(cache.block_bytes)
        content.view(torch.float16).normal_()
        for block in range(cache.num_resident, cache.num_blocks):
            cache.write_block(block, content)


def steps(engine: Engine, num_tokens: int, num_steps: int) -> list[StepStats]:
    """Steps of one token each, behind a prompt that counts as computed."""
    blocks = engine.scheduler.block_manager
    blocks.adopt = lambda sequence: sequence.num_tokens - 1  # type: ignore[method-assign]
    fill(engine)
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    engine.add(GenerationRequest([7] * num_tokens, params))
    found = []
    while engine.has_work:
        engine.step()
        assert engine.metrics.last_step is not None
        found.append(engine.metrics.last_step)
    return found


def tell(engine: Engine, found: list[StepStats]) -> None:
    plan = engine.plan
    print(
        f"{plan.num_resident_layers} layers in memory, {plan.streamed_bytes / 1e9:.2f} GB streamed; keys and "
        f"values: {plan.kv_bytes / 1e9:.2f} GB of memory, {plan.num_spilled_tokens} of {plan.num_kv_tokens} "
        f"tokens on disk; {plan.host_used_bytes / 2**30:.2f} GiB in all"
    )
    median = statistics.median
    ratios = [step.duration_s / step.floor_s for step in found]
    print(
        f"{len(found)} steps, each with {found[-1].spilled_bytes / 1e9:.2f} GB of keys and values: "
        f"{median(step.duration_s for step in found):.3f} s, of which {median(s.stall_s for s in found):.3f} "
        f"s waiting; floor {median(step.floor_s for step in found):.3f} s; the step takes "
        f"{median(ratios):.3f} times that ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path, help="a converted folder")
    parser.add_argument("--kv-spill", help="default: a folder beside the model's")
    parser.add_argument("--host-memory", type=parse_bytes)
    parser.add_argument("--tokens", type=int, default=32000)
    parser.add_argument("--kv-tokens", type=int, help="default: half of the tokens")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--without", action="store_true", help="the same with all keys and values in memory")
    options = parser.parse_args()
    longest = options.tokens + options.steps + 1
    config = EngineConfig(
        host_memory_bytes=options.host_memory,
        max_model_len=longest,
        num_kv_tokens=longest + 16 if options.without else options.kv_tokens or options.tokens // 2,
        kv_spill=options.kv_spill or str(options.model.parent),
        enable_prefix_caching=False,
        max_num_seqs=1,
        speculation="off",
        device="cpu",
    )
    hardware = measure_hardware(options.model, config, CACHE)
    with (
        with_positions(options.model, longest) as folder,
        Engine.load(folder, config, tokenizer=NoText(), hardware=hardware) as engine,
    ):
        tell(engine, steps(engine, options.tokens, options.steps + 1)[1:])


if __name__ == "__main__":
    main()
