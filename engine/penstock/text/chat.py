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
    allow_special_tokens: bool = False,
    **template_kwargs: Any,
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer.

    allow_special_tokens: a control token's name in a message is this token. Otherwise it is ordinary text, so
        that no message can end its turn.
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
    text = _written(
        tokenizer,
        messages if allow_special_tokens else tokenizer.control_tokens.mark(messages),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
        **(template_kwargs if allow_special_tokens else tokenizer.control_tokens.mark(template_kwargs)),
    )
    if allow_special_tokens or not tokenizer.control_tokens.has_marks(text):
        check_length(len(text))
        # The template has written the special tokens already.
        return tokenizer.encode(text, add_special_tokens=False)
    check_length(len(tokenizer.control_tokens.unmarked(text)))
    return tokenizer.control_tokens.encode(text)


def _written(tokenizer: Tokenizer, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """What the template writes. Raises InvalidParameter if it refuses."""
    try:
        text: str = tokenizer.backend.apply_chat_template(messages, tokenize=False, **kwargs)
    except _REFUSALS as error:
        why = tokenizer.control_tokens.unmarked(str(error))
        raise InvalidParameter(
            "messages", f"the model's chat template refuses these messages: {why}"
        ) from error
    return text
