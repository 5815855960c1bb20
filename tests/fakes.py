"""Stand-ins for the engine that do what a test tells them, when it tells them.

A `Script` is what the answer to a prompt shall be: each string is the text of one output, an event
is waited for, an exception is raised. Nothing here depends on time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

from penstock.config import EngineConfig
from penstock.engine_thread import EngineStatus
from penstock.errors import EngineDead, RequestError
from penstock.generation.grammars.grammar_matcher import GrammarCompiler
from penstock.generation.logprobs import TokenLogprobs
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams, ValidRequest
from penstock.generation.requests.request import RequestOutput
from penstock.generation.requests.request_limits import BeamRoom, RequestLimits
from penstock.generation.sequence import FinishReason
from penstock.memory.planning.cost import UNKNOWN
from penstock.memory.planning.plan import LayerPlacement, MemoryPlan
from penstock.metrics import EngineMetrics
from penstock.nodes.member import NodeStatus
from penstock.spec import ModelSpec
from penstock.step_watch import Trouble
from penstock.text.prompt_forms import PromptForms
from penstock.weights.weight_facts import WeightFacts
from penstock_server.facade import inside
from penstock_server.facade.engine import ServedEngine
from penstock_server.facade.model import ServedModel
from penstock_server.models.served_models import OneModel
from penstock_server.settings.settings import Settings
from penstock_server.telemetry.metrics import ModelMetrics, RequestMetrics

EOS = 256
VOCAB_SIZE = 257


class Event(Protocol):
    def wait(self) -> Awaitable[Any]: ...


class Gate:
    """An event that another thread than the loop's may set."""

    def __init__(self) -> None:
        self._lock, self._is_set = threading.Lock(), False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def set(self) -> None:
        with self._lock:
            self._is_set = True
        for loop, event in self._waiting:
            loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self._is_set:
                return
            self._waiting.append((asyncio.get_running_loop(), event))
        await event.wait()


Script = Sequence[str | Event | BaseException]
#: Prompt and parameters -> script.
Scripts = Callable[[list[int], SamplingParams], Script]


class FakeTokenizer:
    """One token per byte, and an end token."""

    vocab_size = VOCAB_SIZE
    max_token_chars = 1
    eos_token_ids = frozenset({EOS})
    bos_token_id = None

    special_token_ids = frozenset({EOS})
    #: Of a template that knows no tools.
    tool_template = ""
    sentinels = ()

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{token_id}>" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == EOS else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


def render_chat(
    tokenizer: FakeTokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    check_length: Callable[[int], None] = lambda num_chars: None,
    check_text: Callable[[str], None] = lambda text: None,
    allow_special_tokens: bool = False,
    **template_kwargs: Any,
) -> list[int]:
    """A chat template that shows all it was given: "system: Be kind\\nuser: Hi\\nassistant:"."""
    if not tokenizer.has_chat_template:
        raise RequestError("the model has no chat template")
    text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    if template_kwargs:
        text += f"\n{sorted(template_kwargs.items())}"
    if add_generation_prompt:
        text += "\nassistant:"
    check_length(len(text))
    check_text(text)
    return tokenizer.encode(text + ("..." if continue_final_message else ""))


#: One layer in memory.
PLAN = MemoryPlan(
    layers=(LayerPlacement("host", True, 4096),),
    embedding_bytes=4096,
    head_bytes=4096,
    num_staging_slots=0,
    num_host_slots=0,
    staging_slot_bytes=0,
    block_size=16,
    num_kv_blocks=64,
    kv_bytes=65536,
    workspace_bytes=4096,
    is_workspace_measured=True,
    has_gpu=False,
    host_budget_bytes=1 << 20,
    device_budget_bytes=0,
)

WEIGHTS = WeightFacts("safetensors", "fake", "INT8", 1_500_000, 3 * 4096)


def model_spec() -> ModelSpec:
    """Of a decoder with this vocabulary, whose other numbers nobody asks for."""
    return ModelSpec("Fake", 8, 1, 1, 1, 8, 8, VOCAB_SIZE, 1000, 1e-5)


class FakeModel:
    """The parts of an Engine that the server looks at."""

    def __init__(self, max_model_len: int = 1000, has_chat_template: bool = True) -> None:
        self.tokenizer = FakeTokenizer(has_chat_template)
        self.max_model_len = max_model_len
        self.metrics = EngineMetrics()
        self.config = EngineConfig()
        self.nodes: tuple[NodeStatus, ...] = ()
        self.streamer = SimpleNamespace(
            current_layer=None, layer_places={}, tiers=SimpleNamespace(nearest_experts=None)
        )
        self.plan = PLAN
        self.meter = SimpleNamespace(predict=lambda *numbers: UNKNOWN, known_s=lambda num_tokens: 0.0)
        self.draft_model: Any = None
        self.pooling = None
        self.adapters = SimpleNamespace(by_name={})
        self.spec = model_spec()
        self.model = SimpleNamespace(is_invariant=True, spec=self.spec, store=SimpleNamespace(facts=WEIGHTS))
        self.default_sampling: dict[str, object] = {}
        tokenizer: Any = self.tokenizer
        self.grammars = GrammarCompiler(tokenizer, VOCAB_SIZE)
        self.forms = PromptForms(tokenizer, has_encoder=False)

    def validate(self, request: GenerationRequest) -> ValidRequest:
        limits = RequestLimits(
            self.spec,
            self.max_model_len,
            is_context_cut=False,
            grammars=self.grammars,
            beam_room=BeamRoom(self.config.max_num_seqs, PLAN.num_kv_blocks, PLAN.block_size),
        )
        return limits.validate(request)


def one_model(fake: Any) -> OneModel:
    """A FakeAsyncEngine's model, as a server of this one model has it."""
    return OneModel(ServedEngine(fake), Settings(model="tiny"))


def metrics_of(fake: Any) -> ModelMetrics:
    return RequestMetrics(one_model(fake)).of("tiny")


def model_of(fake: FakeModel) -> ServedModel:
    """As the server sees it."""
    engine: Any = fake
    return inside.model_of(engine)


def echo_script(prompt: list[int], params: SamplingParams) -> Script:
    """The default: the answer to anything."""
    return ["Hel", "lo", "!"]


class FakeStream:
    """A RequestStream over a script."""

    def __init__(self, request_id: str, prompt: list[int], params: SamplingParams, script: Script) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.is_aborted = False
        self._script = list(script)
        self._num_output_tokens = 0
        self._is_finished = False
        self._started = time.monotonic()
        self._has_begun = False
        self.request: GenerationRequest | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.params.beams is None:
            return await self._next()
        outputs = [await self._next()]
        while outputs[-1].finish_reason is None:
            outputs.append(await self._next())
        whole = replace(
            outputs[-1],
            text="".join(each.text for each in outputs),
            token_ids=tuple(token_id for each in outputs for token_id in each.token_ids),
            logprobs=tuple(token for each in outputs for token in each.logprobs),
            prompt_logprobs=outputs[0].prompt_logprobs,
        )
        return replace(whole, others=(whole,) * (self.params.beams.num_answers - 1))

    async def _next(self) -> RequestOutput:
        if self._is_finished:
            raise StopAsyncIteration
        while self._script and not isinstance(self._script[0], str):
            await self._obey(self._script.pop(0))
        if not self._script:
            return self._output("", FinishReason.STOP)
        text = self._script.pop(0)
        assert isinstance(text, str)
        limit = self.params.max_tokens
        if limit is not None and self._num_output_tokens + len(text.encode()) >= limit:
            text = text[: limit - self._num_output_tokens]
            return self._output(text, FinishReason.LENGTH)
        return self._output(text, None)

    async def _obey(self, item: Any) -> None:
        if isinstance(item, BaseException):
            raise item
        await item.wait()

    def _output(self, text: str, finish_reason: FinishReason | None) -> RequestOutput:
        """The end token is a token like any other, but without text."""
        self._is_finished = finish_reason is not None
        is_stop = finish_reason is FinishReason.STOP
        token_ids = (EOS,) if is_stop else tuple(text.encode())
        self._num_output_tokens += len(token_ids)
        logprobs: tuple[TokenLogprobs, ...] = ()
        prompt_logprobs = None
        if (num_top := self.params.prompt_logprobs) is not None and not self._has_begun:
            top = tuple((ord("z") - i, -0.5 - i) for i in range(num_top))
            scored = (TokenLogprobs(token_id, -0.75, top, 9) for token_id in self.prompt[1:])
            prompt_logprobs = (None, *scored)
        self._has_begun = True
        if (count := self.params.logprobs) is not None:
            top = tuple((ord("z") - i, -0.5 - i) for i in range(count))
            logprobs = tuple(TokenLogprobs(token_id, -0.25, top) for token_id in token_ids)
        return RequestOutput(
            request_id=self.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            num_prompt_tokens=len(self.prompt),
            num_output_tokens=self._num_output_tokens,
            finish_reason=finish_reason,
            started=self._started,
            stop_reason=self.params.stop_token_ids[0] if is_stop and self.params.stop_token_ids else None,
            prompt_logprobs=prompt_logprobs,
            has_end_token=is_stop,
        )

    def abort(self) -> None:
        self.is_aborted = True


class FakeAsyncEngine:
    """An AsyncEngine that is ready from the start, unless `status` is set to something else."""

    def __init__(self, scripts: Scripts = echo_script, model: FakeModel | None = None) -> None:
        self.scripts = scripts
        self.model = model or FakeModel()
        self.status = EngineStatus("ready", 4, 4)
        self.streams: list[FakeStream] = []
        self.max_requests = 10_000
        self.is_started = False
        self.is_stopped = False
        self.ended = asyncio.Event()
        self.trouble: Trouble | None = None

    def start(self) -> None:
        self.is_started = True

    async def wait_until_ended(self) -> None:
        """Until stop(), or until a test sets a status and `ended`."""
        await self.ended.wait()
        if self.status.state == "dead":
            raise EngineDead(self.status.error or "")

    async def wait_until_ready(self) -> None:
        return

    async def stop(self, timeout_s: float | None = None) -> bool:
        self.is_stopped = True
        self.ended.set()
        return True

    @property
    def engine(self) -> FakeModel:
        if self.status.state != "ready":
            raise EngineDead(self.status.error or f"the engine is {self.status.state}")
        return self.model

    def submit(self, request: ValidRequest) -> FakeStream:
        assert isinstance(request, ValidRequest)
        prompt = list(request.prompt_token_ids)
        stream = FakeStream(
            f"r{len(self.streams)}", prompt, request.params, self.scripts(prompt, request.params)
        )
        stream.request = request
        self.streams.append(stream)
        return stream


class FakeEngine(FakeModel):
    """A synchronous Engine with one request at a time: each step gives one string of the script.
    Anything callable in the script is called, in place of a step."""

    def __init__(self, script: Sequence[str | Callable[[], None]] = ("Hel", "lo", "!")) -> None:
        super().__init__()
        self.script = script
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.num_aborted = 0
        self.is_closed = False
        self._left: list[str | Callable[[], None]] = []
        self._num_output_tokens = 0

    def add(self, request: GenerationRequest) -> None:
        self.validate(request)
        self.prompts.append(self.tokenizer.decode(list(request.prompt_token_ids)))
        self.params.append(request.params)
        self._left = list(self.script)
        self._num_output_tokens = 0

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def abort(self, request_id: str) -> None:
        self.num_aborted += 1
        self._left = []

    def step(self, aborted: Container[str] = ()) -> list[RequestOutput]:
        item = self._left.pop(0)
        if callable(item):
            item()
            return []
        token_ids = tuple(item.encode())
        self._num_output_tokens += len(token_ids)
        reason = None if self._left else FinishReason.STOP
        counts = len(self.prompts[-1].encode()), self._num_output_tokens
        return [RequestOutput("r", item, token_ids, (), *counts, reason)]
