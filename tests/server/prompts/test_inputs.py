"""Prompts become token ids, fields become SamplingParams, and what can't is a 400."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from conftest import save_byte_tokenizer
from fakes import FakeModel, model_of
from penstock.errors import ContextOverflow, InvalidParameter, RequestError
from penstock.generation.beam_search import BeamParams
from penstock.generation.requests.generation_request import SamplingParams
from penstock.text.chat import render_chat
from penstock.text.tokenizer import Tokenizer
from penstock_server.facade.model import ServedModel
from penstock_server.prompts.inputs import (
    choices,
    read_bad_words,
    read_prompts,
    refuse_long_text,
    sampling_params,
    template_message,
)
from penstock_server.prompts.questions import read_chat, read_completion, read_input
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.messages import Message
from penstock_server.protocol.requests import ChatCompletionRequest, CompletionRequest
from penstock_server.protocol.responses_request import ResponsesRequest
from penstock_server.settings.chat_rules import ChatRules


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "Hi"} | fields)


def chat(*messages: dict[str, Any], **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": list(messages)} | fields)


def params(defaults: dict[str, object] | None = None, **fields: Any) -> Any:
    return sampling_params(completion(**fields), defaults or {}, 16, None)


def test_prompts_of_text_and_of_token_ids() -> None:
    model = model_of(FakeModel())
    texts = read_prompts(model, completion(prompt=["Hi", "yo"], echo=True))
    ids = read_prompts(model, completion(prompt=[[72, 105], [121, 111]], echo=True))
    assert texts == ids
    assert [prompt.token_ids for prompt in texts] == [[72, 105], [121, 111]]
    assert [prompt.text for prompt in texts] == ["Hi", "yo"]


@pytest.mark.parametrize("num_chars", [1000, 1001])
def test_texts_that_can_not_fit_are_not_even_read(num_chars: int) -> None:
    """Its tokenizer has tokens of one character, and its context is 1000 of them."""
    model = model_of(FakeModel())
    text = "x" * num_chars
    turns = [{"role": "user", "content": part} for part in (text[:600], text[600:])]
    for body in (completion(prompt=["x", text]), chat(*turns)):
        if num_chars == 1000:
            refuse_long_text(model, num_chars_of(body))
        else:
            with pytest.raises(ContextOverflow, match="1001 characters.*at least 1001 tokens.*1000"):
                refuse_long_text(model, num_chars_of(body))


@pytest.mark.parametrize("place", ["content", "reasoning", "arguments", "description"])
def test_a_prompt_whose_beginning_does_not_fit_is_not_tokenized_whole(
    place: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "ab " * 100_000
    user = {"role": "user", "content": text if place == "content" else "Hi"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
    answer: dict[str, Any] = {"role": "assistant", "content": "x"}
    answer |= {"reasoning_content": text} if place == "reasoning" else {}
    answer |= {"tool_calls": [call]} if place == "arguments" else {}
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    tools = {"tools": [tool]} if place == "description" else {}
    encode, longest = tokenizer.encode, [0]

    def watched(text: str, add_special_tokens: bool = True) -> list[int]:
        longest.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", watched)
    monkeypatch.setattr(tokenizer, "max_token_chars", 1000)
    with pytest.raises(ContextOverflow, match="and the first 65536 of them are"):
        read_chat(chatting(tokenizer), chat(user, answer, user, **tools), ChatRules())
    assert max(longest) == 65536


def test_what_the_template_leaves_out_may_be_long(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, thoughts = {"role": "user", "content": "Hi"}, "x" * 100_000 + "</think>ok"
    monkeypatch.setattr(tokenizer, "max_token_chars", 1000)
    body = chat(user, {"role": "assistant", "content": thoughts}, user)
    question = read_chat(chatting(tokenizer), body, ChatRules())
    assert len(question.prompts[0].token_ids) < 100


def test_a_conversation_beyond_the_context_can_be_counted(tokenizer: Tokenizer) -> None:
    body = ResponsesRequest.model_validate({"input": "ab " * 40_000})
    prompt, _ = read_input(chatting(tokenizer), body, ChatRules(), lambda num_chars: None)
    assert prompt.num_tokens > 40_000


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """With a template that shows tools, calls and thoughts, and drops what stands before </think>."""
    save_byte_tokenizer(tmp_path)
    found = Tokenizer.load(tmp_path)
    found.backend.chat_template = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{{ m.reasoning_content }}"
        "{{ m.tool_calls }}<tool_call>{% endfor %}{{ tools }}"
    )
    monkeypatch.setattr("penstock_server.prompts.inputs.render_chat", render_chat)
    return found


def chatting(tokenizer: Any) -> ServedModel:
    """A context of 1000 tokens."""
    return replace(model_of(FakeModel()), tokenizer=tokenizer)


def num_chars_of(body: CompletionRequest | ChatCompletionRequest) -> int:
    return body.num_prompt_chars if isinstance(body, CompletionRequest) else body.as_conversation.num_chars


def test_special_tokens_can_be_left_out() -> None:
    asked: list[bool] = []

    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            asked.append(add_special_tokens)
            return [1]

    fake: Any = FakeModel()
    fake.tokenizer = Tokenizer()
    model = model_of(fake)
    for value in (None, True, False):
        read_prompts(model, completion(add_special_tokens=value))
    assert asked == [True, True, False]


def rendered(*messages: dict[str, Any], **fields: Any) -> str:
    question = read_chat(model_of(FakeModel()), chat(*messages, **fields), ChatRules())
    return bytes(question.prompts[0].token_ids).decode()


def test_messages_go_through_the_chat_template() -> None:
    user = {"role": "user", "content": "Hi"}
    assert rendered(user) == "user: Hi\nassistant:"
    assert rendered(user, add_generation_prompt=False) == "user: Hi"
    assert rendered(user, continue_final_message=True) == "user: Hi..."
    assert "('reasoning_effort', 'low')" in rendered(user, reasoning_effort="low")
    assert "('thinking', False)" in rendered(user, chat_template_kwargs={"thinking": False})


def test_no_chat_template_is_the_requests_fault() -> None:
    with pytest.raises(RequestError):
        read_chat(
            model_of(FakeModel(has_chat_template=False)), chat({"role": "user", "content": "Hi"}), ChatRules()
        )


def test_without_a_chat_template_there_is_no_place_for_tools() -> None:
    """Also where a model has a form of its own for messages, as EVA has."""
    body = chat({"role": "user", "content": "Hi"}, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(InvalidParameter, match="no chat template to show tools") as caught:
        read_chat(model_of(FakeModel(has_chat_template=False)), body, ChatRules())
    assert caught.value.param == "tools"


@pytest.mark.parametrize("function", [render_chat, PreTrainedTokenizerBase.apply_chat_template])
def test_chat_template_kwargs_can_not_set_what_is_no_variable_of_a_template(function: Any) -> None:
    user = {"role": "user", "content": "Hi"}
    for name in inspect.signature(function).parameters:
        if name != "template_kwargs":
            with pytest.raises(ApiError) as caught:
                rendered(user, chat_template_kwargs={name: "x"})
            assert (caught.value.status_code, caught.value.param) == (400, "chat_template_kwargs")


def test_messages_as_templates_expect_them() -> None:
    message = Message.model_validate({"role": "developer", "content": "Be kind", "name": "Ann"})
    assert template_message(message.turn) == {"role": "system", "content": "Be kind", "name": "Ann"}
    message = Message.model_validate({"role": "assistant", "reasoning_content": "Hm"})
    assert template_message(message.turn) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm",
    }


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.6,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "seed": 5,
    }
    lists: dict[str, Any] = {
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "logit_bias": {"7": -100, "8": 2.5},
    }
    found = params(**fields, **lists)
    for name, value in fields.items():
        assert getattr(found, name) == value
    assert (found.stop, found.stop_token_ids) == (("a", "b"), (3,))
    assert found.logit_bias == {7: -100, 8: 2.5}
    assert (found.max_tokens, found.logprobs) == (16, None)


def test_request_wins_over_the_models_defaults_over_ours() -> None:
    found = params({"temperature": 0.6, "top_k": 20}, temperature=0)
    assert (found.temperature, found.top_k, found.top_p) == (0, 20, 1.0)


def test_a_beam_search_draws_nothing() -> None:
    advice = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    found = params(advice, use_beam_search=True, n=3)
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (1.0, 0, 1.0, 1.1)
    assert found.beams == BeamParams(3, 3)
    assert choices(found, 3) == [found] * 3
    for name, value in {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1}.items():
        with pytest.raises(InvalidParameter) as refused:
            params(use_beam_search=True, **{name: value})
        assert refused.value.param == name
    with pytest.raises(InvalidParameter) as refused:
        params(use_beam_search=True, length_penalty=99.0)
    assert refused.value.param == "length_penalty"
    assert params(use_beam_search=True, temperature=0, top_k=-1, seed=4).beams == BeamParams(1)


def test_choices_have_seeds_of_their_own_and_the_first_scores_the_prompt() -> None:
    def seeds(number: int, seed: int | None) -> list[int | None]:
        return [each.seed for each in choices(SamplingParams(seed=seed), number)]

    assert seeds(3, 5) == [5, 6, 7]
    assert seeds(2, 2**63 - 1) == [2**63 - 1, -(2**63)]
    assert seeds(2, None) == [None, None]
    for seed in (None, 5):
        found = choices(SamplingParams(seed=seed, prompt_logprobs=2), 3)
        assert [each.prompt_logprobs for each in found] == [2, None, None]


@pytest.mark.parametrize("key", ["x", "-1", "1.0", "", "9" * 5000, "²"])
def test_biases_have_token_ids_as_keys(key: str) -> None:
    with pytest.raises(ApiError) as caught:
        params(logit_bias={key: 1})
    assert (caught.value.status_code, caught.value.param) == (400, "logit_bias")


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("top_p", -0.1), ("seed", 2**63), ("stop", "")]
)
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        params(**{name: value})
    assert caught.value.param == name


def test_prompts_are_cut_at_their_beginning() -> None:
    model = model_of(FakeModel(max_model_len=20))

    def kept(prompt: Any, **fields: Any) -> Any:
        (found,) = read_prompts(model, completion(prompt=prompt, echo=True, **fields))
        assert bytes(found.token_ids).decode() == found.text
        return found.text

    assert kept("abcdef", truncate_prompt_tokens=2) == kept([*b"abcdef"], truncate_prompt_tokens=2) == "ef"
    assert kept("abc", truncate_prompt_tokens=9) == "abc"
    assert kept("abcdef", truncate_prompt_tokens=2, truncation_side="right") == "ab"
    assert kept("abcdef", truncate_prompt_tokens=2, truncation_side="left") == "ef"
    assert kept("abcdef", truncation_side="right") == "abcdef"
    assert kept("x" * 10 + "y" * 30, truncate_prompt_tokens=-1, max_tokens=5) == "y" * 15
    assert kept("x" * 10 + "y" * 30, truncate_prompt_tokens=-1) == "y" * 19
    assert len(kept("y" * 30, truncate_prompt_tokens=-1, max_tokens=0)) == 20
    user = {"role": "user", "content": "Hi"}
    assert rendered(user, truncate_prompt_tokens=10) == "assistant:"


def test_bad_words_are_forbidden_after_a_space_as_well() -> None:
    words = read_bad_words(model_of(FakeModel()), ["ab", " c"])
    assert words == (tuple(b"ab"), tuple(b" ab"), tuple(b" c"))
    with pytest.raises(ApiError) as caught:

        class Silent:
            def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
                return []

        silent: Any = Silent()
        read_bad_words(replace(model_of(FakeModel()), tokenizer=silent), ["x"])
    assert caught.value.param == "bad_words"


def test_allowed_tokens_and_what_is_told_of_the_prompt_arrive() -> None:
    body = completion(allowed_token_ids=[3, 4])
    found = sampling_params(body, {}, 0, 1, 2, ((5,),))
    assert (found.allowed_token_ids, found.bad_words) == ((3, 4), ((5,),))
    assert (found.max_tokens, found.logprobs, found.prompt_logprobs) == (0, 1, 2)


class Counting(FakeModel):
    """A model whose tokenizer notes what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_chars = 0
        encode = self.tokenizer.encode

        def counted(text: str, add_special_tokens: bool = True) -> list[int]:
            self.num_chars += len(text)
            return encode(text, add_special_tokens)

        self.tokenizer.encode = counted  # type: ignore[method-assign]
        self.tokenizer.max_token_chars = 1000  # the number of characters alone refuses nothing


LONG = "a" * 900_000


@pytest.mark.parametrize(
    "read",
    [
        lambda model: read_prompts(model, completion(prompt=LONG)),
        lambda model: read_chat(model, chat({"role": "user", "content": LONG}), ChatRules()),
        lambda model: read_chat(model, chat(*[{"role": "user", "content": LONG[:9000]}] * 100), ChatRules()),
        lambda model: read_chat(
            model,
            chat({"role": "user", "content": "x"}, prediction={"type": "content", "content": LONG}),
            ChatRules(),
        ),
    ],
)
def test_the_beginning_of_a_long_prompt_tells_that_it_does_not_fit(read: Callable[[Any], object]) -> None:
    model = Counting()
    with pytest.raises(ContextOverflow, match="Shorten the prompt") as caught:
        read(model_of(model))
    assert model.num_chars < 70_000 and 800_000 < caught.value.num_prompt_tokens < 1_000_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": ["a" * 128] * 1024}, "bad_words"),
        ({"stop": ["a" * 2048] * 64}, "stop"),
        ({"prompt": ["a" * 2048] * 1024}, "prompt"),
    ],
)
def test_many_texts_are_refused_before_one_is_tokenized(fields: dict[str, Any], param: str) -> None:
    model = Counting()
    with pytest.raises(ApiError, match="characters together") as caught:
        read_completion(model_of(model), completion(**{"prompt": "x"} | fields))
    assert (caught.value.status_code, caught.value.param) == (400, param)
    assert model.num_chars <= 1
