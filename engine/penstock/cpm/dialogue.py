"""EVA's form of a conversation, which no chat template can write: its markers are tokens, and no text is
encoded as one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvalidParameter

#: Ends each utterance.
_END = "<sep>"
#: Stands for the answer. The decoder begins with this token.
_ANSWER = "<s_0>"


def encode_dialogue(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], begins_answer: bool, goes_on: bool
) -> list[int]:
    """All utterances of both speakers in their order, each with `<sep>` after, and `<s_0>` for the answer.
    `tokenizer` is a ChineseTokenizer.

    Raises InvalidParameter for messages that a dialogue does not have."""
    if goes_on:
        raise InvalidParameter(
            "continue_final_message",
            "EVA can't go on with a message that has begun: leave continue_final_message out",
        )
    vocab, ids = tokenizer.get_vocab(), list[int]()
    for message in messages:
        if message.get("role") not in ("user", "assistant"):
            raise InvalidParameter(
                "messages",
                f"EVA knows what people say to each other, and no {message.get('role')} messages "
                "(instructions or tools): send messages of user and assistant alone",
            )
        ids += [*tokenizer.encode(message.get("content") or "", add_special_tokens=False), vocab[_END]]
    return [*ids, vocab[_ANSWER]] if begins_answer else ids
