"""A model's own advice: the sampling parameters of generation_config.json or of a GGUF file's metadata."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import InvalidParameter
from penstock.generation.requests.generation_request import SamplingParams
from penstock.weights.checkpoints.checkpoint import read_json

logger = logging.getLogger(__name__)

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_WHOLE_NUMBERS = ("top_k", "no_repeat_ngram_size")
#: What a request's whole numbers fit, too.
LARGEST = 2**31 - 1


#: What llama-server takes for requests that don't say otherwise. People know a GGUF file's model by it.
_OF_LLAMA_CPP: dict[str, object] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
#: Where a GGUF file has advice of its own.
_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
#: Metadata has float32: 0.6 is 0.60000002 there.
_DECIMALS = 6


def read_advice(folder: Path) -> dict[str, object]:
    """What requests get that don't say otherwise; {} if there is no such file. As in vLLM, do_sample is not
    looked at: a file without a temperature means the default temperature of 1. A GGUF file has its own
    values, and llama-server's where it has none.

    A value that no request may have is left out with a warning, as transformers warns when it reads the file:
    otherwise every request would fail by a value that its client did not send. Raises CorruptFile."""
    if folder.is_file():
        from penstock.gguf_file import read_metadata

        return _OF_LLAMA_CPP | _checked_advice(folder, _in_metadata(read_metadata(folder)))
    path = folder / "generation_config.json"
    return _checked_advice(path, read_json(path) if path.is_file() else {})


def _in_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: metadata[key] for name, key in _GGUF_KEYS.items() if key in metadata}
    return {
        name: round(value, _DECIMALS) if isinstance(value, float) else value for name, value in found.items()
    }


def _checked_advice(path: Path, content: Mapping[str, Any]) -> dict[str, object]:
    """path: the file that has the content, for warnings."""
    advice: dict[str, object] = {}
    for name in (*_NUMBERS, *_WHOLE_NUMBERS):
        if (value := content.get(name)) is None:
            continue
        try:
            advice[name] = _checked(name, value)
        except InvalidParameter as error:
            usual = getattr(SamplingParams(), name)
            logger.warning(
                "%s: %s. The value is left out: requests without %s get %s", path, error, name, usual
            )
    return advice


def _checked(name: str, value: Any) -> float:
    """The value as a request may have it. Raises InvalidParameter."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(name, f"{name} is {value!r}; it must be a number")
    if name in _WHOLE_NUMBERS and value != value // 1:
        raise InvalidParameter(name, f"{name} is {value!r}; it must be a whole number")
    if abs(value) > LARGEST:
        raise InvalidParameter(name, f"{name} is too large")
    params: dict[str, Any] = {name: int(value) if name in _WHOLE_NUMBERS else value}
    SamplingParams(**params)
    return params[name]  # type: ignore[no-any-return]
