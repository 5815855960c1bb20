import doctest

import pytest

from penstock_client import params
from penstock_client.params import ChatParams, CompletionParams, check_keywords


def test_no_keyword_is_required():
    assert CompletionParams.__required_keys__ == frozenset()
    assert ChatParams.__required_keys__ == frozenset()


def test_known_keywords_pass():
    check_keywords("chat", {"seed": 1, "top_logprobs": 2}, ChatParams.__optional_keys__)


def test_unknown_keyword_without_a_likely_meaning_points_to_extra():
    with pytest.raises(TypeError, match=r"chat\(\) got .* 'zzz'; .* extra="):
        check_keywords("chat", {"zzz": 1}, ChatParams.__optional_keys__)


def test_examples_in_the_docstrings():
    result = doctest.testmod(params)
    assert result.attempted and not result.failed
