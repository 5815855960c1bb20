import dataclasses
import doctest
import inspect

import pydantic
import pytest

from penstock_client import chunks, results, server_info
from penstock_client.errors import AnswerCutOff, ProtocolError
from penstock_client.results import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Message,
    Parseable,
    ToolCall,
    Usage,
)

MODULES = (results, chunks, server_info)
CLASSES = [
    value
    for module in MODULES
    for _, value in inspect.getmembers(module, inspect.isclass)
    if value.__module__ == module.__name__ and value is not Parseable
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
    choices = (
        CompletionChoice(0, "a", finish_reason="stop"),
        CompletionChoice(1, "b", finish_reason="length"),
    )
    answer = Completion("id", "tiny", 0, choices)
    assert (answer.text, answer.finish_reason) == ("a", "stop")


def test_shortcuts_of_a_chat_are_of_its_first_choice():
    choices = (
        ChatChoice(0, Message("assistant", "a"), finish_reason="stop"),
        ChatChoice(1, Message("assistant", "b"), finish_reason="length"),
    )
    answer = ChatCompletion("id", "tiny", 0, choices)
    assert (answer.text, answer.finish_reason) == ("a", "stop")
    assert answer.message == Message("assistant", "a")


def test_a_message_without_content_has_empty_text():
    assert ChatChoice(0, Message("assistant", None)).text == ""


def chat_of(text: str, finish_reason: str = "stop") -> ChatCompletion:
    choice = ChatChoice(0, Message("assistant", text), finish_reason=finish_reason)
    return ChatCompletion("id", "tiny", 0, (choice,))


def test_parse():
    class Pet(pydantic.BaseModel):
        name: str

    text = '{"name": "Rex"}'
    for answer in (chat_of(text), Completion("id", "tiny", 0, (CompletionChoice(0, text),))):
        assert answer.parse() == {"name": "Rex"}
        assert answer.parse(Pet) == Pet(name="Rex")
    with pytest.raises(pydantic.ValidationError):
        chat_of('{"name": 1}').parse(Pet)


def test_parse_of_what_is_no_json():
    with pytest.raises(ProtocolError, match="no JSON: 'Rex'"):
        chat_of("Rex").parse()
    with pytest.raises(AnswerCutOff, match="max_tokens") as caught:
        chat_of('{"name"', "length").parse()
    assert caught.value.text == '{"name"' and not isinstance(caught.value, ProtocolError)


def test_wrong_arguments_of_a_call():
    for arguments in ("", "{", "[]"):
        with pytest.raises(ProtocolError):
            ToolCall("call_1", "weather", arguments).parsed_arguments()


def test_examples_in_the_docstrings():
    result = doctest.testmod(results)
    assert result.attempted and not result.failed
