"""Engines on a pretended card, and their plain twins on the CPU. Of this folder, only this file names parts
of the engine that are not public."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from test_convert import Ids

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.generation.requests.generation_request import SamplingParams
from penstock.kernels import on_a_card
from penstock.memory.cuda_lane import CudaLane
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.plan import INLET_BYTES, Home
from penstock.model.mixture.mixture import _order_of_one
from penstock.model.registry import open_model
from penstock.weights.conversion.convert import convert
from pretended_card.card import PretendedCard, pretend

#: One that fills a step and goes on in the next, one that fits into a block, and short ones.
PROMPTS = [[5, 9, 3], [7] * 20, [11, 2], list(range(2, 36))]
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)
#: Steps of more and of fewer tokens than are streams of weights to the product kernels, and no larger.
SIZES = {
    "num_kv_tokens": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "max_model_len": 48,
    "num_threads": 1,
}
#: What the pretended driver takes for compiled kernels.
IMAGE = b"\x7fELF, pretended"


@contextmanager
def card_with_kernels(
    capability: tuple[int, int] = (6, 1), image: bytes = IMAGE, **kwargs: int
) -> Iterator[PretendedCard]:
    """pretend(), with NVRTC left out: it would compile for seconds, and what it compiles can't run here. The
    kernels are not compared with the reference either, which takes seconds here."""
    with (
        pretend(capability, **kwargs) as card,
        patch.object(on_a_card, "find_nvrtc", lambda architecture: True),
        patch.object(on_a_card, "compile_kernels", lambda *_: image),
        patch.object(on_a_card, "check_card", lambda *_: []),
        patch.object(CudaLane, "_limits", {}),  # an engine that failed on another card leaves one there
    ):
        try:
            yield card
        finally:
            forget_orders()


def forget_orders() -> None:
    """The order of one token's experts stays on a card from one engine to the next."""
    _order_of_one.cache_clear()


def load(
    folder: Path, device: str = "cuda", hardware: HardwareProfile | None = None, **config: object
) -> Engine:
    return Engine.load(
        folder,
        EngineConfig(device=device, **(SIZES | config)),  # type: ignore[arg-type]
        tokenizer=Ids(),  # type: ignore[arg-type]
        hardware=hardware,
    )


def answer(engine: Engine, num_prompts: int = len(PROMPTS)) -> list[Completion]:
    """And close."""
    with engine:
        return engine.generate(PROMPTS[:num_prompts], PARAMS)


def homes(engine: Engine) -> set[Home]:
    return {layer.home for layer in engine.plan.layers}


def little_host_memory(folder: Path, num_layers: int) -> int:
    """What the host needs beside a card to keep so many layers, its staging slots among them, and no more."""
    engine = load(folder, "cpu", kernels="reference")
    engine.close()
    return (
        INLET_BYTES
        + engine.plan.embedding_bytes
        + num_layers * max(layer.num_bytes for layer in engine.plan.layers)
    )


def convert_for_streaming(source: Path, target: Path) -> None:
    opened = open_model(source)
    convert(opened.store, target)
    opened.store.close()
