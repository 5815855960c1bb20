import dataclasses
import inspect

import pytest

from penstock_client import results
from penstock_client.results import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    CompletionChunk,
    Delta,
    Message,
    Usage,
)

CLASSES = [
    value for _, value in inspect.getmembers(results, inspect.isclass) if value.__module__ == results.__name__
]


@pytest.mark.parametrize("kind", CLASSES)
def test_results_are_frozen(kind):
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen


def test_raw_is_neither_compared_nor_shown():
    usage = Usage(1, 2, 3, raw={"energy": 4})
    assert usage == Usage(1, 2, 3)
    assert hash(usage) == hash(Usage(1, 2, 3))
    assert "energy" not in repr(usage)


def test_shortcuts_of_a_completion_are_of_its_first_choice():
    choices = (CompletionChoice(0, "a", "stop"), CompletionChoice(1, "b", "length"))
    answer = Completion("id", "tiny", 0, choices)
    assert (answer.text, answer.finish_reason) == ("a", "stop")


def test_shortcuts_of_a_chat_are_of_its_first_choice():
    choices = (
        ChatChoice(0, Message("assistant", "a"), "stop"),
        ChatChoice(1, Message("assistant", "b"), "length"),
    )
    answer = ChatCompletion("id", "tiny", 0, choices)
    assert (answer.text, answer.finish_reason) == ("a", "stop")
    assert answer.message == Message("assistant", "a")


def test_a_message_without_content_has_empty_text():
    assert ChatChoice(0, Message("assistant", None)).text == ""
    assert ChatChunkChoice(0, Delta()).text == ""


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        (CompletionChunk, lambda index, text: CompletionChoice(index, text)),
        (ChatCompletionChunk, lambda index, text: ChatChunkChoice(index, Delta(content=text))),
    ],
)
def test_text_of_a_chunk_is_of_choice_0(kind, choice):
    assert kind("id", "tiny", (choice(0, "a"), choice(1, "b"))).text == "a"
    assert kind("id", "tiny", (choice(1, "b"),)).text == ""
    assert kind("id", "tiny", ()).text == ""
