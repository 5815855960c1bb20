"""From texts to what the engine pools: token ids, and what is wanted of them. Not for the event loop: long
texts take long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock import PoolingParams, encode_pair
from penstock_server.facade.model import ServedModel
from penstock_server.prompts.inputs import (
    refuse_endless_text,
    refuse_long_text,
    refuse_many_chars,
    refuse_overlong,
)
from penstock_server.protocol.errors import ApiError


@dataclass(frozen=True)
class PooledText:
    """A text, or a pair of texts, for the engine."""

    token_ids: list[int]
    params: PoolingParams


@dataclass(frozen=True)
class TextRules:
    """How texts are read."""

    #: A text has so many tokens at most, and its end is left out. -1: as many as the model takes. None: a
    #: longer text than the model takes is refused.
    most_tokens: int | None = None
    #: The name of a text of the model's own that stands in front of each text. None: the model's usual one.
    prompt_name: str | None = None
    add_special_tokens: bool = True


def read_texts(
    model: ServedModel, inputs: Sequence[str | list[int]], params: PoolingParams, rules: TextRules
) -> list[PooledText]:
    """Texts whose vectors are wanted. Token ids stay as they are, but for those beyond most_tokens. Raises
    ContextOverflow, and 400 for a prompt that the model does not have."""
    front = _prompt(model, rules.prompt_name)
    limit = _limit(model, rules.most_tokens)
    refuse_many_chars(model, "input", sum(len(front) + len(each) for each in inputs if isinstance(each, str)))
    found = []
    for each in inputs:
        if isinstance(each, str):
            text = _cased(model, front + each)
            token_ids = _encoded(model, text, limit, rules.add_special_tokens)
        else:
            token_ids = each if limit is None else each[:limit]
        found.append(PooledText(token_ids, params))
    return found


def read_pairs(
    model: ServedModel,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None = None,
    most_tokens: int | None = None,
    most_second: int | None = None,
) -> list[PooledText]:
    """Pairs whose scores are wanted. most_second: the most tokens of a second text. Ends of second texts are
    left out. Raises ContextOverflow, and InvalidParameter for an instruction that has no place."""
    limit = _limit(model, most_tokens)
    refuse_many_chars(model, "documents", num_pair_chars(pairs, instruction))
    return [_read_pair(model, first, second, instruction, limit, most_second) for first, second in pairs]


def num_pair_chars(pairs: Sequence[tuple[str, str]], instruction: str | None) -> int:
    """Characters that are tokenized for pairs. A query is tokenized with each document again."""
    return sum(len(first) + len(second) for first, second in pairs) + len(pairs) * len(instruction or "")


def _read_pair(
    model: ServedModel,
    first: str,
    second: str,
    instruction: str | None,
    limit: int | None,
    most_second: int | None,
) -> PooledText:
    by_tokens = model.pooling is not None and model.pooling.score_tokens is not None
    check = refuse_long_text if limit is None and most_second is None else refuse_endless_text
    check(model, len(first) + len(second))
    first, second = _cased(model, first), _cased(model, second)
    if most_second is not None:
        second = _beginning(model, second, most_second)
    token_ids, second_from = encode_pair(model.tokenizer, first, second, instruction, by_tokens)
    while limit is not None and len(token_ids) > limit and second:
        # Tokens of a beginning that is encoded again may be others, so that one round may leave too many.
        num_left = len(model.tokenizer.encode(second, add_special_tokens=False)) - (len(token_ids) - limit)
        second = _beginning(model, second, num_left)
        token_ids, second_from = encode_pair(model.tokenizer, first, second, instruction, by_tokens)
    return PooledText(token_ids, PoolingParams(second_from=second_from))


def _cased(model: ServedModel, text: str) -> str:
    return text.lower() if model.pooling is not None and model.pooling.lowers_case else text


def _beginning(model: ServedModel, text: str, num_tokens: int) -> str:
    token_ids = model.tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) <= num_tokens:
        return text
    return model.tokenizer.decode(token_ids[: max(0, num_tokens)], skip_special_tokens=False)


def _encoded(model: ServedModel, text: str, limit: int | None, add_special_tokens: bool) -> list[int]:
    if limit is None:
        refuse_long_text(model, len(text))
        refuse_overlong(model, text)
        return model.tokenizer.encode(text, add_special_tokens)
    refuse_endless_text(model, len(text))
    if add_special_tokens:
        return model.tokenizer.cut(text, limit)
    return model.tokenizer.encode(text, add_special_tokens=False)[:limit]


def _limit(model: ServedModel, most_tokens: int | None) -> int | None:
    if most_tokens is None:
        return None
    return model.max_model_len if most_tokens < 0 else min(most_tokens, model.max_model_len)


def _prompt(model: ServedModel, name: str | None) -> str:
    assert model.pooling is not None, "checked by the route"
    known = model.pooling.prompts
    if name is None:
        name = model.pooling.default_prompt
        return known[name] if name is not None else ""
    if name not in known:
        names = ", ".join(known) or "none"
        message = f"prompt_name is {name!r}; the prompts of this model are: {names}."
        raise ApiError(400, message, code="invalid_value", param="prompt_name")
    return known[name]
