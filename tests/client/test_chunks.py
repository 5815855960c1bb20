import pytest

from penstock_client.chunks import (
    ChatChunkChoice,
    ChatCompletionChunk,
    CompletionChunk,
    Delta,
)
from penstock_client.results import CompletionChoice


def test_a_delta_without_content_has_empty_text():
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
