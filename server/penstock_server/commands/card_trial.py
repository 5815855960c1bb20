"""Small models with random weights on a card, against the same models on the processor: streamed, and with
products or experts that both share. `penstock doctor --card` runs this file as a process of its own, with
launches that block, so that an error shows where it happens."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock import Engine, EngineConfig, SamplingParams
from penstock.engine import Completion
from penstock.memory import kept_uses
from penstock.memory.hardware import DeviceProfile, HardwareProfile, capacities
from penstock.memory.lane import find_lane
from penstock.model.shapes import write_random
from penstock.text.tokenizer import NoText

#: A dense model, as config.json has it: some MB.
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
#: A mixture of 128 experts.
MIXTURE: dict[str, Any] = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PROMPTS = [[5, 9, 3], [7] * 20, list(range(2, 60))]
NUM_TOKENS = 4
#: Log-probabilities of norms and attention that add up in another order.
LOGPROB_TOLERANCE = 5e-3
SIZES = EngineConfig(
    num_kv_tokens=512, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, speculation="off"
)


class Placement(NamedTuple):
    """Where a model lies, for people, and what makes it lie there."""

    name: str
    config: EngineConfig
    hardware: HardwareProfile | None = None


def trial(device: str, cache_folder: Path | None = None) -> dict[str, str]:
    """`device` is a card, such as cuda:1. How a model is placed -> "ok", or what is wrong. `cache_folder` may
    have compiled kernels, and nothing of these models stays in it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _trial(device, cache_folder, Path(folder) / "dense", Path(folder) / "mixture")
        finally:
            if cache_folder is not None:
                kept_uses.path_of(cache_folder, Path(folder) / "mixture").unlink(missing_ok=True)


def _trial(device: str, cache_folder: Path | None, dense: Path, mixture: Path) -> dict[str, str]:
    on_card = replace(SIZES, device=device, share_products="off")
    write_random(CONFIG, dense)
    write_random(MIXTURE, mixture)
    shared = replace(on_card, share_products="auto")
    placements = (
        Placement("all layers stay on the card", replace(on_card, num_resident_layers=4)),
        Placement("all layers are streamed", replace(on_card, num_resident_layers=0)),
        Placement(
            "card and processor share products",
            replace(shared, num_resident_layers=1),
            _balanced(device),
        ),
    )
    found = _tried(dense, placements, cache_folder)
    try:
        room = _room_for_experts(mixture, on_card, cache_folder)
    except Exception as error:
        return found | {"a mixture on the card": f"{type(error).__name__}: {error}"}
    placements = (
        Placement("all experts stay on the card", on_card),
        Placement("experts are streamed", replace(on_card, device_memory_bytes=room)),
        Placement(
            "card and processor share experts",
            replace(shared, device_memory_bytes=room),
            _balanced(device),
        ),
    )
    return found | _tried(mixture, placements, cache_folder)


def _tried(folder: Path, placements: Sequence[Placement], cache_folder: Path | None) -> dict[str, str]:
    """trial() of one model."""
    expected = _answers(folder, replace(SIZES, device="cpu", kernels="reference"), None, cache_folder)
    found, first = dict[str, str](), list[Completion]()
    for name, config, hardware in placements:
        try:
            answers = _answers(folder, config, hardware, cache_folder)
        except Exception as error:  # whatever it is, the report tells of it
            found[name] = f"{type(error).__name__}: {error}"
            continue
        first = first or answers
        found[name] = _difference(answers, expected) or (
            "ok" if answers == first else "not the bits of another placement"
        )
    return found


def _room_for_experts(folder: Path, config: EngineConfig, cache_folder: Path | None) -> int:
    """Bytes of the card with which half of the model's experts don't fit."""
    with Engine.load(folder, config, tokenizer=NoText(), cache_folder=cache_folder) as engine:
        plan = engine.plan
    return plan.device_used_bytes - plan.num_expert_slots // 2 * plan.expert_slot_bytes


def _answers(
    folder: Path, config: EngineConfig, hardware: HardwareProfile | None, cache_folder: Path | None
) -> list[Completion]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    with Engine.load(
        folder, config, tokenizer=NoText(), hardware=hardware, cache_folder=cache_folder
    ) as engine:
        is_shared = engine.plan.kept_share is not None or engine.plan.shares_experts
        if config.share_products == "auto" and config.device != "cpu" and not is_shared:
            raise RuntimeError("the plan shares neither products nor experts")
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
    print(json.dumps(trial(sys.argv[1], Path(sys.argv[2]))))
