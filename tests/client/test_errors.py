import copy
import inspect
import pickle
import re

import pytest

from penstock_client import errors
from penstock_client.errors import (
    APIError,
    BadRequest,
    ContextOverflow,
    DeadlineExceeded,
    PenstockError,
    ServerBusy,
    ServerError,
    StreamError,
    StreamInterrupted,
)

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", CLASSES)
def test_one_except_clause_catches_all(kind):
    assert issubclass(kind, PenstockError)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_docstring_shows_the_tree(kind):
    assert re.search(rf"\b{kind.__name__}\b", errors.__doc__)


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_survive_pickling_and_copying(kind):
    error = kind("why", request_id="req-1", is_retryable=True)
    error.retry_after = 2.5
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert vars(twin) == vars(error)
        assert str(twin) == str(error)


def test_text_of_an_api_error_has_what_a_log_needs():
    error = BadRequest(
        "too long", status=400, code="context_length_exceeded", param="prompt", request_id="req-1"
    )
    text = "too long (HTTP 400, code context_length_exceeded, param prompt, request req-1)"
    assert str(error) == text
    assert error.message == "too long"


def test_text_without_details_is_the_message():
    assert str(PenstockError("why")) == "why"
    assert str(StreamError("why")) == "why"


def test_branches():
    assert issubclass(StreamInterrupted, StreamError)
    assert issubclass(ServerBusy, APIError)
    # To be told apart: one passes by itself, the other is to be reported.
    assert not issubclass(ServerBusy, ServerError)
    assert not issubclass(StreamError, APIError)
    assert issubclass(ContextOverflow, BadRequest)
    assert issubclass(DeadlineExceeded, ServerError)
