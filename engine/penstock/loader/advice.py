"""A model's own advice: the sampling parameters of its generation_config.json."""

from __future__ import annotations

import logging
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


def read_advice(folder: Path) -> dict[str, object]:
    """What requests get that don't say otherwise; {} if there is no such file. As in vLLM, do_sample is not
    looked at: a file without a temperature means the default temperature of 1.

    A value that no request may have is left out with a warning, as transformers warns when it reads the file:
    otherwise every request would fail by a value that its client did not send. Raises CorruptFile."""
    path = folder / "generation_config.json"
    content = read_json(path) if path.is_file() else {}
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
