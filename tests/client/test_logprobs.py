import pytest

from penstock_client.errors import ProtocolError
from penstock_client.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from penstock_client.results import PromptLogprob, TokenLogprob


def test_none_were_asked_for():
    assert completion_logprobs(None) is None
    assert chat_logprobs(None) is None
    assert prompt_logprobs({}) is None


def test_of_a_completion():
    logprobs = {
        "tokens": ["He", "llo"],
        "token_logprobs": [None, -1],
        "top_logprobs": [None, {"llo": -1.0, "y": -2.5}],
        "text_offset": [0, 2],
    }
    assert completion_logprobs(logprobs) == (
        TokenLogprob("He", None),
        TokenLogprob("llo", -1.0, (TokenLogprob("llo", -1.0), TokenLogprob("y", -2.5))),
    )


def test_of_a_completion_without_rivals():
    logprobs = {"tokens": ["He"], "token_logprobs": [-0.5], "top_logprobs": None}
    assert completion_logprobs(logprobs) == (TokenLogprob("He", -0.5),)


def test_of_a_chat():
    rival = {"token": "y", "logprob": -2, "bytes": [121]}
    entry = {"token": "He", "logprob": -0.5, "bytes": [72, 101], "top_logprobs": [rival]}
    expected = (TokenLogprob("He", -0.5, (TokenLogprob("y", -2.0),)),)
    assert chat_logprobs({"content": [entry], "refusal": None}) == expected


def test_of_a_prompt():
    position = {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}, "8": {"logprob": -2}}
    assert prompt_logprobs({"prompt_logprobs": [None, position]}) == (
        None,
        {7: PromptLogprob(-0.5, 1, "a"), 8: PromptLogprob(-2.0)},
    )


@pytest.mark.parametrize("top", [["a"], {"a": "b"}])
def test_wrong_rivals(top):
    with pytest.raises(ProtocolError):
        completion_logprobs({"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [top]})


def test_lists_of_different_length():
    with pytest.raises(ProtocolError, match="length"):
        completion_logprobs({"tokens": ["a", "b"], "token_logprobs": [-1.0]})


@pytest.mark.parametrize(
    "position", [7, [], {"a": {"logprob": -1.0}}, {"7": -1.0}, {"7": {}}, {"7": {"logprob": "x"}}]
)
def test_wrong_positions(position):
    with pytest.raises(ProtocolError):
        prompt_logprobs({"prompt_logprobs": [position]})
