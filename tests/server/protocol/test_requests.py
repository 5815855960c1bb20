"""A field is honoured or refused by name; the accepted-without-effect list is what it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_completion_create_params
from pydantic import ValidationError

from penstock.generation.beam_search import BeamParams
from penstock_server.protocol import generation_fields
from penstock_server.protocol import requests as protocol
from penstock_server.protocol.requests import ChatCompletionRequest, CompletionRequest

USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [USER]} | fields)


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "Hi"} | fields)


def refused(make: Any, **fields: Any) -> dict[str, Any]:
    """The first error about a request with these fields."""
    with pytest.raises(ValidationError) as caught:
        make(**fields)
    error = caught.value.errors()[0]
    return {"loc": error["loc"], "msg": error["msg"], "param": error.get("ctx", {}).get("param")}


@pytest.mark.parametrize("make", [chat, completion])
def test_unknown_field_is_refused_by_name(make: Any) -> None:
    assert refused(make, temprature=1)["loc"] == ("temprature",)
    assert refused(make, stream=True, stream_options={"x": 1})["loc"] == ("stream_options", "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "yaml"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {"search_context_size": "low"}),
        ("moderation", {"x": 1}),
        ("verbosity", "huge"),
    ],
)
def test_what_chat_does_not_support_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(chat, **{name: value})["loc"][0] == name


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}, {"truncate_prompt_tokens": 5}])
def test_what_does_not_go_with_a_suffix_is_refused_by_name(fields: dict[str, Any]) -> None:
    assert refused(completion, suffix="end", **fields)["param"] == "suffix"


def test_empty_values_of_unsupported_fields_are_accepted() -> None:
    chat(tools=[], tool_choice="none", functions=None, response_format={"type": "text"})
    chat(modalities=["text"], function_call="auto", audio=None)
    completion(suffix="", best_of=2, n=2)


def test_accepted_without_effect_as_the_module_says() -> None:
    request = chat(
        user="u",
        session_id="s",
        chat_id="c",
        cache_prompt=True,
        id_slot=-1,
        safety_identifier="s",
        metadata={"a": "b"},
        store=True,
        service_tier="flex",
        prompt_cache_key="k",
        prompt_cache_options={"mode": "auto"},
        prompt_cache_retention="24h",
        stream=True,
        stream_options={"include_obfuscation": False},
    )
    assert protocol.__doc__ is not None
    for name in request.model_fields_set - {"messages", "stream", "stream_options"}:
        assert name in protocol.__doc__


def test_null_counts_as_absent() -> None:
    for make, model in ((chat, ChatCompletionRequest), (completion, CompletionRequest)):
        optional = [name for name, field in model.model_fields.items() if not field.is_required()]
        assert make(**dict.fromkeys(optional)).model_dump() == make().model_dump()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", generation_fields.MAX_N + 1),
        ("n", "1"),
        ("n", True),
        ("max_tokens", -2),
        ("max_tokens", 10**30),
        ("allowed_token_ids", []),
        ("bad_words", "x"),
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", 2.5),
        ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", -2),
        ("request_id", "a b"),
        ("priority", 2**63),
        ("cache_salt", ""),
        ("spaces_between_special_tokens", False),
        ("use_beam_search", 1),
        ("best_of", 0),
        ("best_of", generation_fields.MAX_N + 1),
        ("length_penalty", "1"),
        ("early_stopping", "ever"),
        ("temperature", "hot"),
        ("temperature", math.nan),
        ("top_p", math.inf),
        ("stop", 1),
        ("stop", ["a"] * 65),
        ("stop", [1]),
        ("logit_bias", {"1": math.inf}),
        ("logit_bias", [1]),
        ("logit_bias", {str(token_id): 1 for token_id in range(generation_fields.MAX_BIASES + 1)}),
        ("stop_token_ids", [-1]),
        ("seed", 1.5),
        ("stream", 1),
        ("ignore_eos", "yes"),
    ],
)
def test_wrong_types_and_ranges_are_refused_by_name(name: str, value: Any) -> None:
    assert refused(chat, **{name: value})["loc"][0] == name


def test_stream_options_need_a_stream() -> None:
    assert refused(chat, stream_options={"include_usage": True})["param"] == "stream_options"
    assert chat(stream=True, stream_options={"include_usage": True}).wants_usage_chunk
    assert not chat(stream=True).wants_usage_chunk


def test_stop_may_be_one_string_or_several() -> None:
    assert chat().stop_strings == ()
    assert chat(stop="a").stop_strings == ("a",)
    assert chat(stop=["a", "b"]).stop_strings == ("a", "b")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_the_four_kinds_of_prompts(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], [1, "a"], [[1], "a"], None, 7, [-(2**31)]])
def test_no_prompts(prompt: Any) -> None:
    assert refused(completion, prompt=prompt)["loc"][0] == "prompt"


def test_prompt_is_required() -> None:
    with pytest.raises(ValidationError, match="prompt"):
        CompletionRequest.model_validate({})


def test_content_may_be_text_or_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[USER, {"role": "user", "content": parts}])
    assert [message.text for message in request.messages] == ["Hi", "a\nb"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": "user", "content": "x", "tool_call_id": "1"},
        {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {}}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 1},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": "half \ud800"},
        {"content": "x"},
        "Hi",
    ],
)
def test_no_messages(message: Any) -> None:
    assert refused(chat, messages=[USER, message])["loc"][:2] == ("messages", 1)


def test_an_unknown_part_is_named() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    error = refused(chat, messages=[{"role": "user", "content": parts}])
    assert error["loc"][-1] == "type" and "'image_url' parts are not supported" in error["msg"]
    for wrong in ({"type": "text"}, {"type": "text", "refusal": "x"}, {"type": "refusal", "text": "x"}):
        assert refused(chat, messages=[{"role": "assistant", "content": [wrong]}])["loc"][:2] == (
            "messages",
            0,
        )


def test_a_refusal_is_what_the_assistant_said() -> None:
    part = {"type": "refusal", "refusal": "No."}
    request = chat(
        messages=[{"role": "assistant", "content": [part]}, {"role": "assistant", "refusal": "Never."}]
    )
    assert [message.text for message in request.messages] == ["No.", "Never."]
    for wrong in ({"content": [part]}, {"content": "x", "refusal": "x"}):
        assert refused(chat, messages=[{"role": "user"} | wrong])["loc"] == ("messages", 0)


@pytest.mark.parametrize("make", [chat, completion])
def test_no_answer_needs_something_else_to_tell(make: Any) -> None:
    assert refused(make, max_tokens=0)["param"] == "max_tokens"
    assert make(max_tokens=0, prompt_logprobs=0).answer_tokens == 0


def test_scoring_by_echo() -> None:
    assert completion(max_tokens=0, echo=True, logprobs=1).max_tokens == 0


@pytest.mark.parametrize("make", [chat, completion])
def test_what_does_not_go_with_a_stream(make: Any) -> None:
    assert refused(make, stream=True, prompt_logprobs=1)["param"] == "prompt_logprobs"
    options = {"continuous_usage_stats": True}
    error = refused(make, stream=True, stream_options=options)
    assert error["param"] == "stream_options.continuous_usage_stats"
    assert make(stream=True, stream_options=options | {"include_usage": True}).wants_continuous_usage


@pytest.mark.parametrize("make", [chat, completion])
def test_values_that_change_nothing_are_accepted(make: Any) -> None:
    make(spaces_between_special_tokens=True, use_beam_search=False, length_penalty=1.0, early_stopping=False)
    assert refused(make, use_beam_search=0)["loc"][0] == "use_beam_search"


@pytest.mark.parametrize("make", [chat, completion])
def test_fields_of_a_beam_search_need_one(make: Any) -> None:
    for fields in (
        {"best_of": 3},
        {"length_penalty": 0.5},
        {"early_stopping": True},
        {"early_stopping": "never"},
    ):
        error = refused(make, **fields)
        assert error["param"] == next(iter(fields)) and "use_beam_search: true" in error["msg"]
        assert make(use_beam_search=True, **fields).beams is not None
    assert make(best_of=2, n=2).beams is None
    assert "best_of may only be 3, which" in refused(make, best_of=2, n=3)["msg"]
    assert refused(make, use_beam_search=True, n=4, best_of=3)["param"] == "best_of"
    assert make(use_beam_search=True, n=4).beams == BeamParams(4, 4)
    wanted = BeamParams(6, 2, -0.5, "never")
    fields = {"n": 2, "best_of": 6, "length_penalty": -0.5, "early_stopping": "never"}
    assert make(use_beam_search=True, **fields).beams == wanted


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ChatCompletionRequest, chat_completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_openai_package_has_its_place(model: Any, params: Any) -> None:
    """None falls to extra="forbid": each is honoured, refused as unsupported, or accepted as documented."""
    assert set(params.__annotations__) <= set(model.model_fields)


def test_there_must_be_a_message() -> None:
    assert refused(chat, messages=[])["loc"] == ("messages",)


def test_an_answer_of_ours_is_accepted_as_a_message() -> None:
    """Clients append the message they got, with all its nulls, to the conversation."""
    dumped = {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert chat(messages=[USER, dumped, USER]).messages[1].text == "Hello"


def test_logprobs_of_chat() -> None:
    assert chat().num_logprobs is None
    assert chat(logprobs=False, top_logprobs=0).num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).num_logprobs == 3
    assert refused(chat, top_logprobs=3)["param"] == "top_logprobs"
    assert refused(chat, logprobs=True, top_logprobs=21)["loc"] == ("top_logprobs",)


def test_what_the_chat_template_gets() -> None:
    assert chat().as_conversation.template_kwargs == {}
    request = chat(reasoning_effort="low", verbosity="high", chat_template_kwargs={"enable_thinking": False})
    said = {"reasoning_effort": "low", "verbosity": "high", "enable_thinking": False}
    assert request.as_conversation.template_kwargs == said
    for effort, is_thinking in (("none", False), ("minimal", True), ("high", True)):
        kwargs = chat(reasoning_effort=effort).as_conversation.template_kwargs
        assert kwargs == {"reasoning_effort": effort, "enable_thinking": is_thinking}


def test_continuing_a_message_excludes_beginning_one() -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(chat, **both)["param"] == "continue_final_message"


def test_fields_by_the_names_of_other_servers() -> None:
    """llama-server's, and vLLM's former ones. A field that has both names keeps Penstock's."""
    body = completion(repeat_penalty=1.1, n_predict=7)
    assert (body.repetition_penalty, body.max_tokens) == (1.1, 7)
    assert completion(repeat_penalty=1.1, repetition_penalty=1.2).repetition_penalty == 1.2
    for name, value in {
        "json": {"type": "object"},
        "regex": "a+",
        "choice": ["a"],
        "grammar": "start: A",
    }.items():
        form = chat(**{f"guided_{name}": value, "guided_decoding_backend": "x"}).structured_outputs
        assert form is not None and form.model_dump(by_alias=True, exclude_none=True) == {name: value}
    assert chat(guided_json=None, guided_regex=None).structured_outputs is None
    # guidance sends both.
    both = {"guided_grammar": "start: A", "structured_outputs": {"grammar": "start: A"}}
    found = chat(**both, guided_decoding_backend="guidance").structured_outputs
    assert found and found.grammar == "start: A"
    assert chat(enable_thinking=False).as_conversation.template_kwargs == {"enable_thinking": False}
    own = chat(enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
    assert own.as_conversation.template_kwargs == {"enable_thinking": True}
    with pytest.raises(ValidationError, match="repetition_penalty"):
        completion(repeat_penalty="high")


def test_no_limit_of_tokens() -> None:
    for make in (chat, completion):
        assert make(max_tokens=-1).answer_tokens is make(n_predict=-1).answer_tokens is None
    assert chat(max_tokens=-1, max_completion_tokens=5).answer_tokens == 5


@pytest.mark.parametrize("name", ["typical_p", "tfs_z", "mirostat", "dynatemp_range", "xtc_probability"])
def test_samplers_of_other_servers_may_be_off(name: str) -> None:
    off = 1 if name in ("typical_p", "tfs_z") else 0
    assert getattr(completion(**{name: off}), name) == off
    assert refused(completion, **{name: 0.5 if name != "mirostat" else 2})["loc"] == (name,)


def test_hints_of_other_apis_in_messages() -> None:
    hint = {"type": "ephemeral"}
    said = {
        "role": "assistant",
        "content": "x",
        "reasoning": "Hm.",
        "reasoning_details": [{}],
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}],
        "images": [{"type": "image_url", "index": 0, "image_url": {"url": "data:image/png;base64,AA=="}}],
        "cache_control": hint,
    }
    asked = {"role": "user", "content": [{"type": "text", "text": "y", "cache_control": hint}]}
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": hint}
    turns = chat(messages=[said, asked], tools=[tool]).as_conversation.turns
    assert (turns[0].reasoning, turns[1].text) == ("Hm.", "y")
    assert refused(chat, messages=[asked | {"images": ["AA=="]}])["loc"] == ("messages", 0, "images")
