"""The process that renders chat templates: text_process.py starts it. Model files are foreign, and a template
may loop or grow without end. So each request has limits, and one that meets them ends the process.

This process imports no torch and no transformers, so that it starts in a tenth of a second."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from penstock.text.template_environment import TemplateEnvironment
from penstock.text.text_process import FOREIGN, OUT_OF_MEMORY, OWN, Rendering, Trial
from penstock.text.traced_text import Traced, origins_of

#: Members of a message with the model's reasoning; a template reads one of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: What stands at the end of a message that the answer continues, to find its place.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
#: Templates are compiled once. A server has one or two for each model.
_MAX_COMPILED = 16


def render(asked: Rendering) -> Traced:
    """What the template writes. Raises what the template raises, and ValueError and TypeError for messages
    that can't be continued or are no messages."""
    messages = [_message(message) for message in asked.messages]
    if not messages:
        raise ValueError("there is no message; send at least one")
    last = _mark_end(messages, asked.template) if asked.continue_final_message else None
    own = {name: Traced(text, OWN) for name, text in asked.special_tokens.items()}
    variables = {"tools": None, "documents": None} | own | _foreign(asked.variables)
    text: Traced = _compiled(asked.template).render(
        messages=messages,
        **{"add_generation_prompt": asked.add_generation_prompt} | variables,
    )
    return text if last is None else _continued(text, last)


@lru_cache(maxsize=_MAX_COMPILED)
def _compiled(template: str) -> Any:
    return TemplateEnvironment().from_string(template)


def try_rules(trial: Trial) -> Traced:
    """Splits a text by rules of a tokenizer. It has no vocabulary: each piece becomes one token."""
    _splitter(trial.rules).encode(trial.text, add_special_tokens=False)
    return Traced()


@lru_cache(maxsize=_MAX_COMPILED)
def _splitter(rules: str) -> Any:
    from tokenizers import Tokenizer  # a server whose tokenizers are known never needs it here

    model = {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}
    return Tokenizer.from_str(
        json.dumps(json.loads(rules) | {"version": "1.0", "added_tokens": [], "model": model})
    )


def _message(message: Any) -> dict[Any, Any]:
    """A message as templates expect it: without members that are null, and with the model's reasoning under
    each of its names. The role is the server's word, which it has checked."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a {type(message).__name__}; it must be an object")
    found = {name: value for name, value in message.items() if value is not None}
    foreign: dict[Any, Any] = _foreign(found)
    if isinstance(role := found.get("role"), str):
        foreign["role"] = Traced(role, OWN)
    reasoning = next((foreign[name] for name in _REASONING if name in foreign), None)
    if reasoning is not None:
        foreign = {"thinking": reasoning} | foreign | {"reasoning_content": reasoning}
    return foreign


def _foreign(value: Any) -> Any:
    """A value whose texts are no part of the template. What is no JSON becomes its type's name: a template
    sees no object with methods."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return Traced(value, FOREIGN)
        case Mapping():
            return {_foreign(key): _foreign(item) for key, item in value.items()}
        case list():
            return [_foreign(item) for item in value]
        case tuple():
            return tuple(_foreign(item) for item in value)
    return Traced(f"<{type(value).__name__}>", FOREIGN)


def _mark_end(messages: list[dict[Any, Any]], template: str) -> str:
    """Puts the mark at the end of the last message's text. The text without the mark."""
    content = messages[-1].get("content")
    if "content" not in template:
        raise ValueError("continue_final_message is set, and the chat template shows no content")
    parts = content if isinstance(content, list | tuple) else ()
    if last := next((part for part in reversed(parts) if isinstance(part, dict) and "text" in part), None):
        text = last["text"]
        last["text"] = text + Traced(_END_MARK)
    elif isinstance(content, str):
        text = content
        messages[-1]["content"] = text + Traced(_END_MARK)
    else:
        raise ValueError("continue_final_message is set, and the last message has no text to continue")
    return str(text)


def _continued(text: Traced, last: str) -> Traced:
    """The text up to the mark. A template that strips the message strips the mark's space, too; then the
    message's own space goes as well."""
    place = text.rfind(_END_MARK.strip())
    if place < 0 or last.strip() not in text:
        raise ValueError(
            "continue_final_message is set, and the chat template does not show the last message whole"
        )
    is_kept = text.startswith(_END_MARK, place)
    return text[:place] if is_kept else text[:place].rstrip()


# ------------------------------------------------------------ the process


def receive(pipe: IO[bytes]) -> Any:
    """The next request. None at the end."""
    head = pipe.read(8)
    return pickle.loads(pipe.read(struct.unpack("<Q", head)[0])) if len(head) == 8 else None


def send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(struct.pack("<Q", len(data)) + data)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers requests until there are no more: (seconds, bytes), with a Rendering or a Trial after it, gets
    a byte, "+" or "-", and a number of characters. "text" gets the text that was written, or the error's, and
    the origins of its characters."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory_limits = resource.getrlimit(resource.RLIMIT_AS)
    text = Traced()
    while (request := receive(requests)) is not None:
        if request == "text":
            send(answers, str.encode(text, "utf-8", "surrogatepass"))
            send(answers, origins_of(text))
            text = Traced()
        else:
            seconds, most_bytes = request
            asked = receive(requests)
            _limit_memory(most_bytes, memory_limits)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            try:
                text, sign = (render(asked) if isinstance(asked, Rendering) else try_rules(asked)), b"+"
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            except BaseException as error:  # a template's errors are of any type, and tokenizers' panics
                text, sign = Traced(_why(error)), b"-"
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, memory_limits)
            answers.write(sign + struct.pack("<Q", len(text)))
        answers.flush()


def _why(error: BaseException) -> str:
    return f"{error}" or type(error).__name__


def _limit_memory(most_bytes: int, limits: tuple[int, int]) -> None:
    """Lets the process have so many bytes more than it has now, within the limits it was started with."""
    soft, hard = limits
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + most_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard)
    )
