"""What routes have in common: tools that fit together, calls before their results, words for the template."""

from __future__ import annotations

import pytest
from pydantic_core import PydanticCustomError

from penstock_server.protocol.conversation import (
    Call,
    Conversation,
    ToolOffer,
    Turn,
    WrongCall,
    template_kwargs,
    wrong_call,
)
from penstock_server.protocol.tools import Function

F, G = (Function.model_validate({"name": name}) for name in "fg")


@pytest.mark.parametrize(
    ("offer", "param"),
    [
        (ToolOffer(), None),
        (ToolOffer((F, G), "named", frozenset({"g"})), None),
        (ToolOffer((), "auto"), None),
        (ToolOffer((F, G, F), "auto"), "tools.2.name"),
        (ToolOffer((F, F), "auto", field="tools.{}.function"), "tools.1.function.name"),
        (ToolOffer((), "required"), "tool_choice"),
        (ToolOffer((), "auto", frozenset({"f"})), "tool_choice"),
        (ToolOffer((F,), "named", frozenset({"g"})), "tool_choice"),
    ],
)
def test_functions_and_their_choice_fit_together(offer: ToolOffer, param: str | None) -> None:
    """The field that is named is the one in the client's own request."""
    if param is None:
        offer.check()
        return
    with pytest.raises(PydanticCustomError) as caught:
        offer.check()
    assert caught.value.context is not None and caught.value.context["param"] == param


def test_results_come_behind_their_calls() -> None:
    user, result = Turn("user", "x"), Turn("tool", "1", call_id="a")
    calls = Turn("assistant", "", calls=(Call("a", "f", "{}"), Call("b", "g", "{}")))
    twice = Turn("assistant", "", calls=(Call("a", "f", "{}"), Call("b", "f", "{}"), Call("a", "g", "{}")))
    assert wrong_call([user, calls, result, Turn("tool", "2", call_id="b")]) is None
    assert wrong_call([user, calls, calls, result]) is None  # clients number the calls of each turn anew
    assert wrong_call([user, result, calls]) == WrongCall(1, "a", is_result=True)
    assert wrong_call([user, twice]) == WrongCall(1, "a", is_result=False)


def test_the_length_is_that_of_what_was_said() -> None:
    assert Conversation((Turn("user", "abc"), Turn("assistant", "de", reasoning="hm"))).num_chars == 5


def test_a_requests_own_variables_win() -> None:
    own = {"enable_thinking": True, "x": 1}
    assert template_kwargs(None, None, None) == {}
    assert template_kwargs("none", "low", own) == {"reasoning_effort": "none", "verbosity": "low"} | own
