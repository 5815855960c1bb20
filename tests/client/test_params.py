import doctest

import pytest

from penstock_client import params
from penstock_client.params import (
    ChatParams,
    CompletionParams,
    StructuredOutputs,
    TokenizeParams,
    check_keywords,
)
from penstock_server.api.tokenization import TokenizeRequest
from penstock_server.protocol.output_formats import StructuredOutputs as ServerStructuredOutputs
from penstock_server.protocol.requests import ChatCompletionRequest, CompletionRequest


def test_no_keyword_is_required():
    assert CompletionParams.__required_keys__ == frozenset()
    assert ChatParams.__required_keys__ == frozenset()


@pytest.mark.parametrize(
    ("keywords", "request_"),
    [
        (CompletionParams, CompletionRequest),
        (ChatParams, ChatCompletionRequest),
        (TokenizeParams, TokenizeRequest),
    ],
)
def test_the_server_knows_every_keyword(keywords, request_):
    names = {field.alias or name for name, field in request_.model_fields.items()}
    assert keywords.__optional_keys__ - names == {"extra", "timeout"}


def test_the_server_knows_every_kind_of_structured_output():
    names = {field.alias or name for name, field in ServerStructuredOutputs.model_fields.items()}
    assert StructuredOutputs.__optional_keys__ == names - {"structural_tag"}


def test_known_keywords_pass():
    check_keywords("chat", {"seed": 1, "top_logprobs": 2}, ChatParams.__optional_keys__)


def test_unknown_keyword_without_a_likely_meaning_points_to_extra():
    with pytest.raises(TypeError, match=r"chat\(\) got .* 'zzz'; .* extra="):
        check_keywords("chat", {"zzz": 1}, ChatParams.__optional_keys__)


def test_examples_in_the_docstrings():
    result = doctest.testmod(params)
    assert result.attempted and not result.failed
