"""response_format and structured_outputs: what they become, what is refused by name; and with the real
`openai` package and the demo model, answers that are what was asked for."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
import uvicorn
from pydantic import BaseModel, Field
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock import AsyncEngine, Engine
from penstock.generation.grammars.grammar import Grammar
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["alpha", "beta"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 500},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}
#: As a plain pydantic model writes it: nothing is said of other properties.
PLAIN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me of the water."}]


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


FIELDS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
    ({"response_format": named(SCHEMA)}, Grammar.json_schema(SCHEMA)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, Grammar.json_object()),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        Grammar.json_schema(SCHEMA),
    ),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    ({"grammar": 'root ::= "a"'}, Grammar.lark('root ::= "a"')),
    ({"json_schema": SCHEMA}, Grammar.json_schema(SCHEMA)),
    ({"json_schema": {}}, Grammar.json_schema({})),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
    ({"structured_outputs": {"regex": "a+"}}, Grammar.regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar.lark('start: "a"')),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": False, "whitespace_pattern": " "}},
        Grammar.json_schema({"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": " "}}),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "grammar"), FIELDS)
def test_both_routes_hand_the_grammar_to_the_engine(
    client: TestClient, engine: FakeAsyncEngine, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    for route, prompt in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):
        assert client.post(f"/v1/{route}", json=prompt | fields).status_code == 200
        assert engine.streams[-1].params.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "is_closed"),
    [
        ({"response_format": named(PLAIN)}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": PLAIN}}}, True),
        ({"json_schema": PLAIN}, True),
        ({"structured_outputs": {"json": PLAIN}}, True),
        ({"structured_outputs": {"json": PLAIN, "disable_additional_properties": True}}, True),
        ({"structured_outputs": {"json": PLAIN, "disable_additional_properties": False}}, False),
        ({"response_format": named(PLAIN | {"additionalProperties": True})}, False),
    ],
)
def test_objects_are_closed_unless_the_client_opens_them(
    client: TestClient, engine: FakeAsyncEngine, fields: dict[str, Any], is_closed: bool
) -> None:
    assert client.post("/v1/completions", json={"prompt": "x"} | fields).is_success
    schema = json.loads(engine.streams[-1].params.grammar.text)
    assert schema.get("additionalProperties", True) is not is_closed
    assert schema["properties"] == PLAIN["properties"]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
        ({"response_format": {}}, "response_format", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": named({"type": "strang"})}, "response_format", "Invalid type: strang"),
        ({"response_format": named({"uniqueItems": True})}, "response_format", "uniqueItems"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not JSON"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs", "empty"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs", "'x' not found"),
        ({"grammar": "root ::= x"}, "grammar", "'x' not found"),
        ({"json_schema": {"type": "strang"}}, "json_schema", "Invalid type: strang"),
        ({"json_schema": {}, "grammar": "root ::= x"}, "json_schema", "together with grammar"),
        ({"response_format": {"type": "json_object"}, "grammar": "root ::= x"}, "grammar", "together with"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs",
            "json only",
        ),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs", "supported"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "send one",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "ignore_eos",
            "false where there is a grammar",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "structured_outputs", "exactly one"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", "something else"),
        ({"guided_grammar": "a", "structured_outputs": {"regex": "a"}}, "guided_grammar", "something else"),
        ({"guided_regex": "a", "structured_outputs": 7}, "structured_outputs", "valid dictionary"),
    ],
)
def test_what_can_not_be_followed_is_refused_by_name(
    client: TestClient, fields: dict[str, Any], param: str, said: str
) -> None:
    for route, prompt in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):
        answer = client.post(f"/v1/{route}", json=prompt | fields)
        error = answer.json()["error"]
        assert answer.status_code == 400 and said in error["message"], error
        assert error["param"].startswith(param) and param in error["message"]


@pytest.fixture(scope="module")
def demo() -> Iterator[openai.OpenAI]:
    """A client of a server with the demo model, in a thread of this process."""
    engine = AsyncEngine(lambda report: Engine.load("demo", report_progress=report))
    app = create_app(ServedEngine(engine), Settings(model="demo"))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=40) as client:
        yield client
    server.should_exit = True
    thread.join()


class Wheel(BaseModel):
    name: str = Field(max_length=10)
    kind: Literal["water", "wind"]
    turns: bool


def test_parse_with_a_pydantic_model(demo: openai.OpenAI) -> None:
    answer = demo.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Wheel, n=3, seed=1, max_tokens=200
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Wheel) and choice.finish_reason == "stop"
    assert len({choice.message.content for choice in answer.choices}) > 1


class Inner(BaseModel):
    wheel: Wheel | None
    many: list[Wheel] = Field(max_length=1)


def test_a_plain_pydantic_schema_gets_no_other_properties(demo: openai.OpenAI) -> None:
    """It says nothing of others, and this model would go on with them."""
    schema = Inner.model_json_schema()
    assert "additionalProperties" not in json.dumps(schema)
    answer = demo.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=named(schema), n=4, seed=1, max_tokens=400
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        said = json.loads(choice.message.content or "")
        assert said == Inner.model_validate(said).model_dump(mode="json")


def test_a_schema_in_a_stream(demo: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": MESSAGES, "response_format": named(SCHEMA), "seed": 3}
    whole = demo.chat.completions.create(**asked, n=2).choices
    texts, reasons = ["", ""], ["", ""]
    for chunk in demo.chat.completions.create(**asked, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert reasons == ["stop", "stop"] and texts == [choice.message.content for choice in whole]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_log_probabilities_change_no_token(demo: openai.OpenAI) -> None:
    """They take a step for each token; without them forced tokens come several at a time."""
    asked: Any = {"model": "demo", "messages": MESSAGES, "response_format": named(SCHEMA), "seed": 4}
    plain = demo.chat.completions.create(**asked)
    told = demo.chat.completions.create(**asked, logprobs=True)
    assert told.choices[0].message.content == plain.choices[0].message.content
    assert told.usage is not None and plain.usage is not None
    assert told.usage.completion_tokens == plain.usage.completion_tokens
    assert told.choices[0].logprobs is not None
    spelled = told.choices[0].logprobs.content or []
    assert len(spelled) == told.usage.completion_tokens
    assert "".join(token.token for token in spelled) == plain.choices[0].message.content


def test_structured_outputs_of_both_routes(demo: openai.OpenAI) -> None:
    for outputs, pattern in (
        ({"regex": "[A-Z][a-z]{2,5}\\."}, r"[A-Z][a-z]{2,5}\."),
        ({"choice": ["the water", "the wheel"]}, "the (water|wheel)"),
        ({"grammar": 'start: "a" B\nB: /[0-9]{1,3}/'}, "a[0-9]{1,3}"),
        ({"grammar": 'root ::= "b" [0-9]'}, "b[0-9]"),
    ):
        extra = {"structured_outputs": outputs}
        text = demo.completions.create(model="demo", prompt="The", extra_body=extra).choices[0].text
        said = demo.chat.completions.create(model="demo", messages=MESSAGES, extra_body=extra)
        for each in (text, said.choices[0].message.content or ""):
            assert re.fullmatch(pattern, each), each


@pytest.mark.inner
def test_what_leaves_no_token_to_choose_is_a_400_that_names_it(demo: openai.OpenAI) -> None:
    """Known on the way only: the second token of a text may be forbidden, or what a grammar leaves."""
    dice = random.Random(3)
    words = ["the", "water", "and", "a", "e", "."]
    counts: Counter[int] = Counter()
    for index in range(40):
        constraints: dict[str, Any] = {
            "allowed_token_ids": [dice.choice([267, 281, 302, 17, 88]) for _ in range(dice.randint(1, 3))],
            "bad_words": dice.sample(words, 4),
            "structured_outputs": {"choice": ["the", "and", "water"]},
            "min_tokens": 4,
        }
        kept = {name: constraints[name] for name in dice.sample(sorted(constraints), 2)}
        asked: Any = {"model": "demo", "prompt": "The", "n": 2, "logprobs": 3, "max_tokens": 6, "seed": index}
        try:
            if index % 2:
                demo.completions.create(**asked, extra_body=kept)
            else:
                list(demo.completions.create(**asked, extra_body=kept, stream=True))
            counts[200] += 1
        except openai.APIError as error:
            assert "contradicts itself" in error.message and str(error.param) in (*kept, "None"), (
                error.message
            )
            assert isinstance(error, openai.BadRequestError) or not index % 2
            counts[400] += 1
    assert counts[200] > 5 and counts[400] > 5


def test_a_stop_string_ends_it_before_the_grammar_does(demo: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": MESSAGES, "response_format": named(SCHEMA), "seed": 4}
    whole = demo.chat.completions.create(**asked).choices[0].message.content or ""
    for stop in ('e":', "}", "kind"):
        cut = demo.chat.completions.create(**asked, stop=stop).choices[0]
        assert cut.message.content == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    for length in (1, 3, 5, 9):
        short = demo.chat.completions.create(**asked, max_tokens=length)
        assert short.usage is not None and short.usage.completion_tokens == length
        assert short.choices[0].finish_reason == "length"
        assert whole.startswith(short.choices[0].message.content or "")
