"""Chat: messages -> token ids, by the model's own template, in transformers' sandbox. EVA has a form of its
own: dialogue.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2.exceptions import TemplateError

from penstock.errors import InvalidParameter
from penstock.text.dialogue import encode_dialogue, has_dialogue_form
from penstock.text.tokenizer import Tokenizer

#: Errors that a template raises, on purpose or because a message is not what the template expects.
_REFUSALS = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def can_chat(tokenizer: Tokenizer) -> bool:
    """Whether render_chat() can write a conversation for the model."""
    return tokenizer.has_chat_template or has_dialogue_form(tokenizer)


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    check_length: Callable[[int], None] = lambda num_chars: None,
    **template_kwargs: Any,
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer.

    check_length: gets the number of characters of the written conversation before it is tokenized, which
        takes long for a long text; an exception that it raises ends the work.

    Raises InvalidParameter if the model has no template, if the template refuses the messages, or if there
    are variables and no template.
    """
    if not (chat_template or tokenizer.has_chat_template):
        if has_dialogue_form(tokenizer):
            for name in template_kwargs:
                raise InvalidParameter(
                    name,
                    f"{name} is a variable of chat templates, and EVA has no chat template: leave {name} out "
                    "(or out of chat_template_kwargs)",
                )
            check_length(sum(len(message.get("content") or "") for message in messages))
            return encode_dialogue(tokenizer, messages, add_generation_prompt, continue_final_message)
        raise InvalidParameter(
            "messages",
            "this model has no chat template, so it can't answer messages: use /v1/completions with a "
            "prompt, or put a chat_template.jinja into the model's folder",
        )
    try:
        text: str = tokenizer.backend.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **template_kwargs,
        )
    except _REFUSALS as error:
        raise InvalidParameter(
            "messages", f"the model's chat template refuses these messages: {error}"
        ) from error
    check_length(len(text))
    # The template has written the special tokens already.
    return tokenizer.encode(text, add_special_tokens=False)
