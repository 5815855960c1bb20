"""A small model with random weights on a card, against the same model on the processor: streamed, and with
products that both share. `penstock doctor --card` runs this file as a process of its own, with launches that
block, so that an error shows where it happens."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import Engine, EngineConfig, SamplingParams
from penstock.engine import Completion
from penstock.memory.hardware import DeviceProfile, HardwareProfile, capacities
from penstock.memory.lane import find_lane
from penstock.model.shapes import write_random
from penstock.text.tokenizer import NoText

#: The model, as config.json has it: some MB.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
PROMPTS = [[5, 9, 3], [7] * 20, list(range(2, 60))]
NUM_TOKENS = 4
#: Log-probabilities of norms and attention that add up in another order.
LOGPROB_TOLERANCE = 5e-3
SIZES = EngineConfig(
    num_kv_tokens=512, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, speculation="off"
)


def trial(device: str, cache_folder: Path | None = None) -> dict[str, str]:
    """`device` is a card, such as cuda:1. How the model is placed -> "ok", or what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_random(CONFIG, path)
        on_host = replace(SIZES, device="cpu", kernels="reference")
        expected = _answers(path, on_host, None, cache_folder)
        on_card, found = replace(SIZES, device=device, share_products="off"), dict[str, str]()
        streamed: list[Completion] = []
        for name, config, hardware in (
            ("all layers stay on the card", replace(on_card, num_resident_layers=4), None),
            ("all layers are streamed", replace(on_card, num_resident_layers=0), None),
            (
                "card and processor share products",
                replace(on_card, num_resident_layers=1, share_products="auto"),
                _balanced(device),
            ),
        ):
            try:
                answers = _answers(path, config, hardware, cache_folder)
            except Exception as error:  # whatever it is, the report tells of it
                found[name] = f"{type(error).__name__}: {error}"
                continue
            streamed = streamed or answers
            found[name] = _difference(answers, expected) or (
                "ok" if answers == streamed else "not the bits of another placement"
            )
        return found


def _answers(
    folder: Path, config: EngineConfig, hardware: HardwareProfile | None, cache_folder: Path | None
) -> list[Completion]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    with Engine.load(
        folder, config, tokenizer=NoText(), hardware=hardware, cache_folder=cache_folder
    ) as engine:
        if config.share_products == "auto" and engine.plan.kept_share is None and config.device != "cpu":
            raise RuntimeError("the plan does not share products")
        return engine.generate(PROMPTS, params)


def _balanced(device: str) -> HardwareProfile:
    """The machine with invented rates, by which link and processor both have something to do."""
    lane = find_lane(device)
    try:
        card = lane.describe(capacities()).device
    finally:
        lane.close()
    assert isinstance(card, DeviceProfile)
    card = replace(card, memory_gbps=100.0, host_to_device_gbps=0.001, int8_gops=1000.0)
    return replace(capacities(), memory_read_gbps=40.0, int8_gops=0.1, device=card)


def _difference(found: list[Completion], expected: list[Completion]) -> str:
    """ "" for the same tokens and nearly the same log-probabilities."""
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if mine.token_ids != theirs.token_ids:
            return f"prompt {number}: tokens {mine.token_ids} instead of {theirs.token_ids}"
        for at, of in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            if not abs(at.logprob - of.logprob) <= LOGPROB_TOLERANCE:
                return f"prompt {number}: a log-probability of {at.logprob} instead of {of.logprob}"
    return ""


if __name__ == "__main__":
    print(json.dumps(trial(sys.argv[1])))
