"""What `penstock fill` refuses before it loads the model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, InvalidParameter
from penstock_server.commands import filling
from penstock_server.commands.filling import fill
from penstock_server.commands.terminal import _SAMPLING_FLAGS
from penstock_server.settings.settings import Settings


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"blank": ""}, ConfigError, "--blank is empty"),
        ({"blank": "[..]"}, InvalidParameter, r"mark each blank by '\[..\]'"),
        ({"blank": "x" * 65, "text": "x" * 65}, ConfigError, "--blank: .*64"),
        ({"max_tokens_per_blank": 0}, ConfigError, "--max-tokens-per-blank: .* greater than or equal to 1"),
        ({"length_penalty": 2.0}, ConfigError, "add --num-beams"),
    ],
)
def test_wrong_flags(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fill(Settings(model="there is none"), options(**given))


def test_a_model_that_fills_in_no_blanks_is_not_loaded(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "load_engine", None)
    with pytest.raises(InvalidParameter, match="use `penstock generate` or `penstock chat`") as refused:
        fill(Settings(model=str(tiny_llama)), options())
    assert "/v1" not in str(refused.value)


def options(**given: Any) -> argparse.Namespace:
    beams = ["num_beams", "length_penalty", "early_stopping"]
    names = [*_SAMPLING_FLAGS, *beams, "stop", "blank", "max_tokens_per_blank"]
    return argparse.Namespace(**dict.fromkeys(names) | {"text": "a ____ b"} | given)
