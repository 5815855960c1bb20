"""/tokenize and /detokenize, in vLLM's shape and in llama-server's.

vLLM's clients send `prompt` or `messages`, llama-server's clients `content`. As in the two originals, special
tokens around a text are added by default to `prompt`, and only on request to `content`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from penstock import Tokenizer
from penstock_server.facade.model import ServedModel
from penstock_server.models.served_models import ServedModels
from penstock_server.prompts.inputs import read_conversation
from penstock_server.prompts.text_thread import TextThread
from penstock_server.protocol.conversation import Conversation, tool_offer
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.messages import Message
from penstock_server.protocol.requests import MAX_MESSAGES
from penstock_server.protocol.tools import MAX_TOOLS, Tool
from penstock_server.protocol.wire import Count, OnlyTrue, Text, Unsupported, Wire, invalid
from penstock_server.routing.body_route import BodyRoute
from penstock_server.routing.checks import check_length, use_model
from penstock_server.routing.descriptions import ERRORS
from penstock_server.settings.settings import Settings
from penstock_server.tools.use import ToolUse


class TokenizeRequest(Wire):
    """Body of POST /tokenize: one of `prompt`, `messages` and `content`."""

    model: str | None = None
    prompt: Text | None = None
    add_special_tokens: bool | None = Field(None, description="true if null; not with messages")
    return_token_strs: bool | None = Field(None, description="The tokens as the vocabulary spells them.")

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool | None = Field(None, description="true if null")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Text | bool | int | float] | None = None
    chat_template: Unsupported = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None

    # llama-server's
    content: Text | None = None
    add_special: bool | None = Field(None, description="false if null")
    parse_special: OnlyTrue = None
    with_pieces: bool | None = Field(None, description="Each token with its text, or its bytes.")

    @model_validator(mode="after")
    def _check_combinations(self) -> TokenizeRequest:
        given = [name for name in ("prompt", "messages", "content") if getattr(self, name) is not None]
        if len(given) != 1:
            raise invalid(given[-1] if given else "prompt", "send one of prompt, messages and content")
        if self.messages is not None and self.add_special_tokens:
            raise invalid("add_special_tokens", "the chat template writes the special tokens itself")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message", "contradicts add_generation_prompt")
        if self.tools and self.messages is None:
            raise invalid("tools", "only allowed with messages")
        return self

    def token_ids(self, model: ServedModel, settings: Settings) -> list[int]:
        if (conversation := self.as_conversation) is not None:
            use = ToolUse.of(conversation.tools, model.tokenizer, settings.tool_call_parser)
            return read_conversation(
                model,
                conversation,
                use.prompt,
                settings.chat_rules,
                lambda number: _check("messages", number, model),
            )
        if self.content is not None:
            return model.tokenizer.encode(self.content, bool(self.add_special or self.add_special_tokens))
        return model.tokenizer.encode(self.prompt or "", self.add_special_tokens is not False)

    @cached_property
    def as_conversation(self) -> Conversation | None:
        """The messages, if there are any."""
        if self.messages is None:
            return None
        goes_on = bool(self.continue_final_message)
        return Conversation(
            tuple(message.turn for message in self.messages),
            tool_offer(self.tools),
            self.chat_template_kwargs or {},
            not goes_on if self.add_generation_prompt is None else self.add_generation_prompt,
            goes_on,
        )


class TokenPiece(BaseModel):
    id: int
    #: The token's text, or its bytes where the bytes alone are no text.
    piece: str | list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, token_id: int) -> TokenPiece:
        data = tokenizer.token_bytes(token_id)
        try:
            return cls(id=token_id, piece=data.decode())
        except UnicodeDecodeError:
            return cls(id=token_id, piece=list(data))


class Tokens(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int] | list[TokenPiece]
    token_strs: list[str] | None = None


class DetokenizeRequest(Wire):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[Count]


class DetokenizedText(BaseModel):
    """The answer of /detokenize; `content` is llama-server's name for the same."""

    prompt: str
    content: str


class TokenizationRoutes:
    def __init__(self, models: ServedModels, settings: Settings, texts: TextThread) -> None:
        self._models = models
        self._settings = settings
        self._texts = texts

    def router(self) -> APIRouter:
        errors: dict[int | str, dict[str, Any]] = ERRORS
        router = APIRouter(tags=["tokens"], responses=errors, route_class=BodyRoute)
        router.post("/tokenize", response_model=Tokens)(self.tokenize)
        router.post("/detokenize")(self.detokenize)
        return router

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        model = (await use_model(self._models, body.model, request)).model
        _check("prompt", len(body.prompt or ""), model)
        _check("content", len(body.content or ""), model)
        # The JSON is written on the text thread, too: with pieces it has an object for each token.
        content = await self._texts.run(lambda: tokens_of(model, body, self._settings).model_dump_json())
        return Response(content, media_type="application/json")

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> DetokenizedText:
        model = (await use_model(self._models, body.model, request)).model
        check_length("tokens", len(body.tokens), "tokens", model.max_model_len)
        if max(body.tokens, default=0) >= model.vocab_size:
            message = f"tokens has an id above {model.vocab_size - 1}, the model's last."
            raise ApiError(400, message, code="invalid_value", param="tokens")
        text = await self._texts.run(lambda: model.tokenizer.decode(body.tokens, skip_special_tokens=False))
        return DetokenizedText(prompt=text, content=text)


def _check(field: str, num_chars: int, model: ServedModel) -> None:
    check_length(field, num_chars, "characters", 8 * model.max_model_len)


def tokens_of(model: ServedModel, body: TokenizeRequest, settings: Settings) -> Tokens:
    token_ids = body.token_ids(model, settings)
    pieces = [TokenPiece.of(model.tokenizer, each) for each in token_ids] if body.with_pieces else token_ids
    strings = model.tokenizer.pieces(token_ids) if body.return_token_strs else None
    return Tokens(count=len(token_ids), max_model_len=model.max_model_len, tokens=pieces, token_strs=strings)
