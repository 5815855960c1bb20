"""Models whose attention chooses tokens by an indexer: up to index_topk tokens ours is transformers', beyond
it would not be, and longer contexts are refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from test_convert import Ids
from test_families import MAX_LEN, TOLERANCE, Model, dequantized, oracle_logits
from tiny_models import build

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock_server import cli

LIMIT = 120


@pytest.mark.parametrize("name", [pytest.param("DeepSeek V3.2", marks=pytest.mark.slow), "GLM-5"])
def test_attention_to_all_tokens_is_the_models_up_to_the_limit(name: str, tmp_path: Path) -> None:
    oracle = build(name, tmp_path, index_topk=LIMIT)
    text = torch.randint(3, 160, (MAX_LEN,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = oracle_logits(dequantized(oracle, tmp_path), [text])
    model = Model(tmp_path, EngineConfig(kv_dtype="float32"))
    error = (model.all_logits(model.sequences([text])) - expected).abs().amax(dim=1)
    tolerance = TOLERANCE["float32"] * float(expected.max() - expected.min())
    assert float(error[:LIMIT].max()) <= tolerance
    assert float(error[LIMIT:].max()) > 4 * tolerance


def test_the_context_is_limited_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    build("GLM-5", tmp_path, index_topk=LIMIT)
    with caplog.at_level(logging.WARNING), Engine.load(tmp_path, EngineConfig(), tokenizer=Ids()) as engine:
        assert engine.max_model_len == LIMIT
    reason = f"the context is limited to {LIMIT} tokens, index_topk in config.json"
    assert reason in caplog.text and "(self_attn.indexer) are left out" in caplog.text
    with pytest.raises(ConfigError, match=f"max_model_len is {LIMIT + 1}; {reason}"):
        Engine.load(tmp_path, EngineConfig(max_model_len=LIMIT + 1), tokenizer=Ids())
    assert cli.main(["plan", str(tmp_path)]) == 0
    assert reason in capsys.readouterr().out
