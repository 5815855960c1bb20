"""Models, health and token ids as the server tells them: frozen values, and their parsing."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_client.errors import ProtocolError
from penstock_client.exchange import JSONObject, Reply
from penstock_client.fields import get, integers, number, objects, require, strings
from penstock_client.parsing import traceable
from penstock_client.results import raw_field


@dataclass(frozen=True)
class Model:
    """A name under which the server offers a model. Names with the same root are one model.

    max_model_len: the most tokens of prompt and answer together; None while the model loads.
    task: what it is for: "generate", "embed" (vectors) or "score"; None while it loads, and if the server
        does not say.
    """

    id: str
    created: int = 0
    owned_by: str = ""
    max_model_len: int | None = None
    root: str | None = None
    task: str | None = None
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class Health:
    """Whether the server can answer now, and how much of the model is loaded.

    status: "ok", or the server's word for its state, such as "loading"; "unavailable" if the server
    has no word. progress: the share of the model that is loaded, 0.0 to 1.0; None if unknown.
    """

    status: str
    is_ready: bool
    progress: float | None = None
    message: str | None = None
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class Tokens:
    """A text, or a chat as the model's template writes it, as token ids.

    max_model_len: the most tokens of prompt and answer together; None if the server does not tell.
    token_strs: the tokens as the vocabulary spells them; None without return_token_strs.
    """

    token_ids: tuple[int, ...]
    count: int
    max_model_len: int | None = None
    token_strs: tuple[str, ...] | None = None
    raw: JSONObject = raw_field()


@traceable
def parse_models(reply: Reply) -> tuple[Model, ...]:
    return tuple(
        Model(
            id=require(model, "id", str),
            created=get(model, "created", int, 0),
            owned_by=get(model, "owned_by", str, ""),
            max_model_len=get(model, "max_model_len", int, None),
            root=get(model, "root", str, None),
            task=get(model, "task", str, None),
            raw=model,
        )
        for model in objects(reply.json_object(), "data")
    )


def only_model(models: tuple[Model, ...]) -> str:
    """The first name of the server's only model. Raises ValueError if the server has several models."""
    if not models:
        raise ProtocolError("the server lists no model")
    if len({model.root or model.id for model in models}) > 1:
        names = ", ".join(model.id for model in models)
        raise ValueError(f"the server has {len(models)} models, choose one with model=: {names}")
    return models[0].id


@traceable
def parse_health(reply: Reply) -> Health:
    """The health in a reply with status 200 or 503. The body may also be empty or plain text."""
    try:
        data = reply.json_object()
    except ProtocolError:
        data = {}
    error = data.get("error")
    details = error if isinstance(error, dict) else {}
    return Health(
        status=get(data, "status", str, "ok" if reply.is_success else "unavailable"),
        is_ready=reply.is_success,
        progress=_progress({**details, **data}),
        message=get({**details, **data}, "message", str, None),
        raw=data,
    )


def _progress(data: JSONObject) -> float | None:
    progress = number(data, "progress")
    loaded, total = get(data, "loaded_layers", int, None), get(data, "total_layers", int, None)
    if progress is None and loaded is not None and total:
        progress = loaded / total
    return progress


@traceable
def parse_tokens(reply: Reply) -> Tokens:
    data = reply.json_object()
    token_ids = integers(data, "tokens")
    if token_ids is None:
        raise ProtocolError(f"'tokens' is missing in {data!r:.200}")
    return Tokens(
        token_ids=token_ids,
        count=get(data, "count", int, len(token_ids)),
        max_model_len=get(data, "max_model_len", int, None),
        token_strs=strings(data, "token_strs"),
        raw=data,
    )


@traceable
def parse_text_of_tokens(reply: Reply) -> str:
    """The text in a reply of /detokenize: `prompt` is vLLM's field, `content` llama-server's."""
    data = reply.json_object()
    text = get(data, "prompt", str, None)
    return require(data, "content", str) if text is None else text
