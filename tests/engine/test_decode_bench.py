"""tests/bench/decode.py's share of a step outside of products, with a clock that only work moves on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.kernels.cpu_builds import compiled_builds

#: 9 products of 1 second: four of each layer, and the head. A step takes 20 seconds beside those it shows.
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.skipif(not compiled_builds(), reason="the C kernels are not compiled")
def test_products_inside_of_sublayers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    import decode
    from synthetic import synthetic_engine

    now_s = 0.0

    def costs(seconds: float, function: Any) -> Any:
        def work(*args: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            return function(*args)

        return work

    config = EngineConfig(kernels="native", num_threads=1)
    with synthetic_engine(SHAPE, config, num_kv_tokens=256) as engine:
        kernels = engine.model.executor.family.kernels
        assert getattr(kernels, "sublayers", None) is not None
        monkeypatch.setattr(type(kernels), "linear", costs(1, type(kernels).linear))
        monkeypatch.setattr(Engine, "step", costs(20, Engine.step))
        monkeypatch.setattr(time, "perf_counter", lambda: now_s)
        assert decode.outside_matrices(engine) == pytest.approx(1 - 9 / 21)
        assert kernels.sublayers is not None and "linear" not in vars(kernels)
