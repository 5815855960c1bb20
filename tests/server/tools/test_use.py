"""What a request's tools mean for the prompt, for the sampling and for the reading of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from conftest import save_byte_tokenizer, save_tiny_llama, wait_until_ready
from fakes import FakeModel, model_of
from penstock.async_engine import AsyncEngine
from penstock.engine import Engine
from penstock.errors import InvalidParameter
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.requests.generation_request import SamplingParams
from penstock.text.chat import render_chat
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.prompts.questions import read_chat
from penstock_server.protocol.requests import ChatCompletionRequest
from penstock_server.settings.chat_rules import ChatRules
from penstock_server.settings.settings import Settings
from penstock_server.tools.call_filters import FirstCall
from penstock_server.tools.minicpm5_parser import MiniCPM5Parser
from penstock_server.tools.parsers import HermesParser, Llama3Parser, MistralParser
from penstock_server.tools.parsing.deepseek import DeepSeekParser
from penstock_server.tools.parsing.harmony import HarmonyParser
from penstock_server.tools.parsing.xml_calls import XmlParser
from penstock_server.tools.use import ToolUse

from ..conftest import sse_events
from .chat_templates import HERMES, LLAMA3, MINICPM5, MISTRAL, PLAIN
from .folding import parse

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "array", "items": {"enum": ["Mon", "Tue"]}, "minItems": 1, "maxItems": 2},
        "nodes": {"$ref": "#/$defs/Leaf"},
    },
    "required": ["city", "days", "nodes"],
    "$defs": {"Leaf": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {
    "weather": PARAMETERS,
    "now": {"type": "object", "maxProperties": 0},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
USER = {"role": "user", "content": "Hi"}


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [USER], "tools": TOOLS} | fields)


def use_of(template: str = HERMES, parser: Any = "auto", model: Any = None, **fields: Any) -> ToolUse:
    model = model or FakeModel()
    model.tokenizer.tool_template = template
    return ToolUse.of(request(**fields).as_conversation.tools, model.tokenizer, parser)


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (HERMES, HermesParser),
        (LLAMA3, Llama3Parser),
        (MISTRAL, MistralParser),
        (MINICPM5, MiniCPM5Parser),
        ("{{ tools }}<tool_call>x<arg_key>", XmlParser),
        ("{{ tools }}<tool_call><function=x><parameter=y>", XmlParser),
        ("{{ tools }}<minimax:tool_call><invoke", XmlParser),
        ("{{ tools }}<｜tool▁calls▁begin｜>", DeepSeekParser),
        ("{{ tools }}<|start|>x<|channel|>commentary", HarmonyParser),
    ],
)
def test_the_parser_is_the_templates(template: str, parser: type) -> None:
    assert isinstance(use_of(template).parser(), parser)
    assert isinstance(use_of(template, parallel_tool_calls=False).parser(), FirstCall)
    assert use_of(template, "none").parser() is None
    assert use_of(template, tool_choice="none").parser() is None
    assert use_of(template, tools=None).parser() is None
    assert use_of(template, "none", tool_choice="required").parser() is not None


def test_tools_are_shown_once() -> None:
    for template, is_native in ((HERMES, True), (PLAIN, False)):
        use = use_of(template)
        assert (use.prompt.shown_tools is not None) == is_native
        assert bool(use.prompt.description) != is_native
        for off in ({"tool_choice": "none"}, {"tools": None}):
            silent = use_of(template, **off)
            assert not silent.prompt.shown_tools and not silent.prompt.description


def test_the_prompt_has_the_description_where_the_template_knows_no_tools() -> None:
    question = read_chat(model_of(FakeModel()), request(), ChatRules())
    prompt = bytes(question.prompts[0].token_ids).decode()
    assert prompt.startswith("system: You can call tools.") and '"name": "weather"' in prompt


def test_marks_that_are_special_tokens_must_be_in_the_text(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    tokenizer.backend.add_special_tokens({"extra_special_tokens": ["[TOOL_CALLS]"]})
    special = Tokenizer(tokenizer.backend, frozenset({1}))
    calls = '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    for skips in (True, False):
        detokenizer = Detokenizer(special, [5], skip_special_tokens=skips)
        pieces = [detokenizer.add(token_id) for token_id in special.encode(calls)]
        found = parse(MistralParser(), [*pieces, detokenizer.finish()])
        assert found.named == ([] if skips else [("now", "{}")])
    params = SamplingParams(skip_special_tokens=True)
    for template, choice, is_skipped in (
        (MISTRAL, "auto", False),
        (MISTRAL, "required", True),
        (MISTRAL, "none", True),
        (HERMES, "auto", True),
    ):
        special.tool_template = template
        use = ToolUse.of(request(tool_choice=choice).as_conversation.tools, special, "auto")
        assert use.binding.bind(params).skip_special_tokens == is_skipped


def test_what_answers_are_bound_to() -> None:
    params = SamplingParams()
    assert use_of().binding.bind(params).grammar is None
    assert use_of(tool_choice="none").binding.bind(params).grammar is None
    for choice in ("required", NAMED):
        bound = use_of(tool_choice=choice).binding.bind(SamplingParams(grammar=Grammar.json_object()))
        assert bound.grammar is not None and "weather" in bound.grammar.text or choice == NAMED
        assert bound.grammar != Grammar.json_object()
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    grammar = use_of(tools=strict).binding.bind(params).grammar
    assert grammar is not None and grammar.kind == "lark"
    assert use_of(LLAMA3, tools=strict).binding.bind(params).grammar is None


def test_calls_or_an_answer_of_a_given_form() -> None:
    params = SamplingParams(grammar=Grammar.json_schema({"enum": ["here"]}))
    grammar = use_of().binding.bind(params).grammar
    assert grammar is not None and '"here"' in grammar.text and "<tool_call>" in grammar.text
    regex = SamplingParams(grammar=Grammar.regex("a+"))
    for template, impossible in ((HERMES, regex), (LLAMA3, params), (MISTRAL, params)):
        with pytest.raises(InvalidParameter) as caught:
            use_of(template).binding.bind(impossible)
        assert caught.value.param == "tool_choice"
    assert use_of(tool_choice="none").binding.bind(params).grammar == params.grammar


def test_a_single_call_ends_the_answer_where_a_grammar_can_say_so() -> None:
    for template, is_bound in ((HERMES, True), (PLAIN, True), (LLAMA3, False), (MISTRAL, False)):
        use = use_of(template, parallel_tool_calls=False)
        assert (use.binding.bind(SamplingParams()).grammar is not None) == is_bound


def test_minicpm5s_tags_are_special_tokens(tmp_path: Path) -> None:
    """The tokenizer has parts of tags as special tokens, which an answer leaves out by default."""
    save_byte_tokenizer(tmp_path)
    backend = Tokenizer.load(tmp_path).backend
    tags = ["<function", "<param", "</param>", "</function>"]
    backend.add_special_tokens({"extra_special_tokens": tags})
    special = Tokenizer(backend, frozenset({1}))
    special.tool_template = MINICPM5
    book = {"type": "function", "function": {"name": "book", "parameters": {"properties": {"city": {}}}}}
    use = ToolUse.of(request(tools=[book]).as_conversation.tools, special, "auto")
    params = use.binding.bind(SamplingParams(skip_special_tokens=True))
    call = '<function name="book"><param name="city">Paris</param></function>'
    detokenizer = Detokenizer(special, [5], skip_special_tokens=params.skip_special_tokens)
    pieces = [detokenizer.add(token_id) for token_id in special.encode(call)]
    found = parse(use.parser(), [*pieces, detokenizer.finish()])
    assert (found.text, found.named) == ("", [("book", '{"city": "Paris"}')])


def test_schemas_are_checked_where_they_bind() -> None:
    model: Any = FakeModel()
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"not": {}}}}}}
    params = SamplingParams()
    fine = use_of(tools=[*TOOLS, bad], model=model)
    fine.binding.check(model_of(model), fine.binding.bind(params).grammar)
    strict = bad | {"function": bad["function"] | {"strict": True}}  # type: ignore[operator]
    for fields in ({"tools": [*TOOLS, bad], "tool_choice": "required"}, {"tools": [*TOOLS, strict]}):
        use = use_of(model=model, **fields)
        with pytest.raises(InvalidParameter) as caught:
            use.binding.check(model_of(model), use.binding.bind(params).grammar)
        assert caught.value.param == "tools.2.function.parameters"


# -- on a model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools-model")
    save_tiny_llama(folder, max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(PLAIN)
    return folder


@pytest.fixture
def client(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """Random weights: what comes out is as unlikely to be a call as can be."""
    monkeypatch.setattr("penstock_server.prompts.inputs.render_chat", render_chat)
    app = create_app(
        ServedEngine(AsyncEngine(lambda report: Engine.load(model_folder))), Settings(model="tiny")
    )
    with TestClient(app, base_url="http://localhost") as client:
        wait_until_ready(client)
        yield client


@pytest.mark.parametrize("temperature", [0, 2])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("choice", "is_parallel"), [(NAMED, True), ("required", True), ("required", False)])
def test_forced_calls_of_random_weights_are_valid(
    client: TestClient, temperature: float, streams: bool, choice: Any, is_parallel: bool
) -> None:
    body = {
        "messages": [USER],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        "temperature": temperature,
        "seed": 7,
        "n": 2,
        "max_tokens": 1500,
    }
    for finish_reason, calls in answered(client, body, streams):
        assert finish_reason == ("stop" if choice == NAMED else "tool_calls")
        assert calls and (is_parallel and choice != NAMED or len(calls) == 1)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_strict_calls_leave_room_for_text(client: TestClient) -> None:
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    body = {"messages": [USER], "tools": strict, "min_tokens": 40, "max_tokens": 40, "temperature": 0}
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "length" and len(choice["message"]["content"]) > 10


def answered(client: TestClient, body: dict[str, Any], streams: bool) -> list[Any]:
    """Per choice, why it ended, and name and arguments of each call."""
    answer = client.post("/v1/chat/completions", json=body | {"stream": streams})
    assert answer.status_code == 200, answer.text
    if not streams:
        return [
            (
                choice["finish_reason"],
                [(call["function"]["name"], call["function"]["arguments"])
                 for call in choice["message"]["tool_calls"]],
            )
            for choice in answer.json()["choices"]
        ]  # fmt: skip
    found: list[Any] = [[None, []] for _ in range(body["n"])]
    for event in sse_events(answer.text)[:-1]:
        (choice,) = event["choices"]
        assert not choice["delta"].get("content")
        calls = found[choice["index"]][1]
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        found[choice["index"]][0] = choice["finish_reason"]
    return found
