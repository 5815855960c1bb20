"""Chat: messages -> token ids, by the model's own template, in a process that may be lost (text_process.py).
EVA's tokenizer has a form of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import InvalidParameter, TemplateLost
from penstock.text.text_process import Rendering, TextLost, text_process
from penstock.text.tokenizer import Tokenizer

#: The most characters of a template's own words in an error.
_MAX_SHOWN = 1000


def can_chat(tokenizer: Tokenizer) -> bool:
    """Whether render_chat() can write a conversation for the model."""
    return tokenizer.has_chat_template or _own_form(tokenizer) is not None


def render_chat(
    tokenizer: Tokenizer,
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
    """Token ids of a conversation, ready for the assistant's answer.

    allow_special_tokens: a control token's name in a message is this token. Otherwise it is ordinary text, so
        that no message can end its turn.
    check_length, check_text: get the number of characters of the written conversation, and then its text,
        before it is tokenized, which takes long for a long text; an exception that they raise ends the work.

    Raises InvalidParameter if the model has no template, if the template refuses the messages or takes too
    much for them (TemplateLost), or if there are variables and no template.
    """
    if not (chat_template or tokenizer.has_chat_template):
        if (encode_dialogue := _own_form(tokenizer)) is not None:
            for name in template_kwargs:
                raise InvalidParameter(
                    name,
                    f"{name} is a variable of chat templates, and EVA has no chat template: leave {name} out "
                    "(or out of chat_template_kwargs)",
                )
            contents = [message.get("content") or "" for message in messages]
            check_length(sum(map(len, contents)))
            check_text("\n".join(contents))
            return encode_dialogue(messages, add_generation_prompt, continue_final_message)
        raise InvalidParameter(
            "messages",
            "this model has no chat template, so it can't answer messages: use /v1/completions with a "
            "prompt, or put a chat_template.jinja into the model's folder",
        )
    asked = Rendering(
        _template(tokenizer, chat_template, has_tools=template_kwargs.get("tools") is not None),
        messages,
        tokenizer.backend.special_tokens_map,
        template_kwargs,
        add_generation_prompt,
        continue_final_message,
    )
    text, origins = _rendered(asked, check_length)
    check_text(text)
    if allow_special_tokens or not tokenizer.control_tokens.has_foreign(text, origins):
        # The template has written the special tokens already.
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.control_tokens.encode(text, origins)


def _own_form(tokenizer: Tokenizer) -> Callable[[list[dict[str, Any]], bool, bool], list[int]] | None:
    """(messages, begins_answer, goes_on) -> token ids, where the tokenizer itself writes conversations."""
    return getattr(getattr(tokenizer, "backend", None), "encode_dialogue", None)


def _template(tokenizer: Tokenizer, chosen: str | None, has_tools: bool) -> str:
    """The source of the template. Raises InvalidParameter if none of several is the usual one."""
    known = tokenizer.backend.chat_template
    if not isinstance(known, dict):
        return chosen or known or ""
    if chosen is not None:
        return str(known.get(chosen, chosen))
    name = "tool_use" if has_tools and "tool_use" in known else "default"
    if name not in known:
        names = ", ".join(sorted(known))
        raise InvalidParameter(
            "messages", f"the model has several chat templates and none is the usual one; there are: {names}"
        )
    return str(known[name])


def _rendered(asked: Rendering, check_length: Callable[[int], None]) -> tuple[str, bytes]:
    """What the template writes. Raises InvalidParameter if it refuses, TemplateLost if it takes too much, and
    what `check_length` raises."""
    if asked.add_generation_prompt and asked.continue_final_message:
        raise InvalidParameter(
            "messages", "continue_final_message and add_generation_prompt exclude each other: choose one"
        )
    try:
        return text_process().render(asked, check_length)
    except TextLost:
        raise TemplateLost from None
    except ValueError as error:
        words = str(error)  # perhaps the whole conversation
        shown = words if len(words) <= _MAX_SHOWN else f"{words[:_MAX_SHOWN]}..."
        raise InvalidParameter(
            "messages", f"the model's chat template refuses these messages: {shown}"
        ) from error
