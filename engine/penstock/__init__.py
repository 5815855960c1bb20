"""Penstock's engine: language models larger than the memory they run in. Knows nothing of HTTP.

>>> from penstock import Engine, SamplingParams
>>> engine = Engine.load("demo")
>>> prompt = engine.tokenizer.encode("Once upon a time")
>>> engine.generate([prompt], SamplingParams(temperature=0, max_tokens=20))[0].text  # doctest: +SKIP
"""

from penstock.async_engine import AsyncEngine, EngineStatus, RequestStream
from penstock.config import EngineConfig
from penstock.engine import Completion, Engine, RequestOutput
from penstock.generation.sequence import FinishReason, SamplingParams, TokenLogprobs

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStatus",
    "FinishReason",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "TokenLogprobs",
]
__version__ = "0.1.0"
