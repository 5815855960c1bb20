"""Penstock's engine: language models larger than the memory they run in. Knows nothing of HTTP.

>>> from penstock import Engine, SamplingParams
>>> engine = Engine.load("demo")
>>> prompt = engine.tokenizer.encode("Once upon a time")
>>> engine.generate([prompt], SamplingParams(temperature=0, max_tokens=20))[0].text  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.async_engine import AsyncEngine
    from penstock.config import EngineConfig
    from penstock.engine import Completion, Engine
    from penstock.engine_thread import EngineStatus
    from penstock.generation.beam_search import BeamParams
    from penstock.generation.grammars.blanks import Blanks
    from penstock.generation.grammars.grammar import Grammar
    from penstock.generation.grammars.thinking import Thinking
    from penstock.generation.logprobs import TokenLogprobs
    from penstock.generation.requests.generation_request import (
        MAX_LOGPROBS,
        GenerationRequest,
        PoolingParams,
        SamplingParams,
        ValidRequest,
        without_draws,
    )
    from penstock.generation.requests.prompt_embeds import PromptEmbeds
    from penstock.generation.requests.request import RequestOutput
    from penstock.generation.sequence import FinishReason
    from penstock.memory.spare_memory import SpareMemory
    from penstock.model.pooling.pooling_spec import PoolingSpec
    from penstock.request_stream import RequestStream
    from penstock.step_watch import Trouble
    from penstock.text.chat import can_chat, render_chat
    from penstock.text.detokenizer import Detokenizer
    from penstock.text.pairs import encode_pair
    from penstock.text.prompt_forms import BlankText, FormedPrompt, PromptForms
    from penstock.text.tokenizer import Tokenizer
    from penstock.weights.adapters.adapter import Adapter
    from penstock.weights.weight_facts import WeightFacts

__version__ = "0.1.0"

#: Imported when they are asked for: torch takes a second, and `penstock --help` shall not wait for it.
_HOMES = {
    "Adapter": "penstock.weights.adapters.adapter",
    "AsyncEngine": "penstock.async_engine",
    "BeamParams": "penstock.generation.beam_search",
    "BlankText": "penstock.text.prompt_forms",
    "Blanks": "penstock.generation.grammars.blanks",
    "Thinking": "penstock.generation.grammars.thinking",
    "Completion": "penstock.engine",
    "Detokenizer": "penstock.text.detokenizer",
    "Engine": "penstock.engine",
    "EngineConfig": "penstock.config",
    "EngineStatus": "penstock.engine_thread",
    "FinishReason": "penstock.generation.sequence",
    "FormedPrompt": "penstock.text.prompt_forms",
    "GenerationRequest": "penstock.generation.requests.generation_request",
    "Grammar": "penstock.generation.grammars.grammar",
    "MAX_LOGPROBS": "penstock.generation.requests.generation_request",
    "PoolingParams": "penstock.generation.requests.generation_request",
    "PoolingSpec": "penstock.model.pooling.pooling_spec",
    "PromptEmbeds": "penstock.generation.requests.prompt_embeds",
    "PromptForms": "penstock.text.prompt_forms",
    "RequestOutput": "penstock.generation.requests.request",
    "RequestStream": "penstock.request_stream",
    "SamplingParams": "penstock.generation.requests.generation_request",
    "SpareMemory": "penstock.memory.spare_memory",
    "TokenLogprobs": "penstock.generation.logprobs",
    "Trouble": "penstock.step_watch",
    "Tokenizer": "penstock.text.tokenizer",
    "ValidRequest": "penstock.generation.requests.generation_request",
    "WeightFacts": "penstock.weights.weight_facts",
    "can_chat": "penstock.text.chat",
    "encode_pair": "penstock.text.pairs",
    "render_chat": "penstock.text.chat",
    "without_draws": "penstock.generation.requests.generation_request",
}

__all__ = [
    "Adapter",
    "AsyncEngine",
    "BeamParams",
    "BlankText",
    "Blanks",
    "Thinking",
    "Completion",
    "Detokenizer",
    "Engine",
    "EngineConfig",
    "EngineStatus",
    "FinishReason",
    "FormedPrompt",
    "GenerationRequest",
    "Grammar",
    "MAX_LOGPROBS",
    "PoolingParams",
    "PoolingSpec",
    "PromptEmbeds",
    "PromptForms",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "SpareMemory",
    "TokenLogprobs",
    "ValidRequest",
    "Tokenizer",
    "Trouble",
    "WeightFacts",
    "can_chat",
    "encode_pair",
    "render_chat",
    "without_draws",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
