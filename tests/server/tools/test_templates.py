"""Templates in each style get what they expect; for the others the tools are told in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import save_byte_tokenizer
from penstock.errors import InvalidParameter, TemplateLost
from penstock.text import text_process
from penstock.text.chat import render_chat
from penstock.text.tokenizer import Tokenizer
from penstock_server.protocol.requests import ChatCompletionRequest
from penstock_server.protocol.tools import Function
from penstock_server.settings.chat_rules import ParserChoice
from penstock_server.tools import templates
from penstock_server.tools.minicpm5_parser import MiniCPM5Parser
from penstock_server.tools.parsing.deepseek import DeepSeekParser
from penstock_server.tools.prompting import ToolPrompt
from penstock_server.tools.templates import ToolStyle, detect_style

from .chat_templates import DEAF, HERMES, LLAMA3, MINICPM5, MISTRAL, NO_SYSTEM, PLAIN
from .folding import parse

TOOL = Function.model_validate({"name": "add", "strict": True})
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "2", "tool_call_id": "call_1"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tools")
    save_byte_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("template", "choice", "style"),
    [
        (HERMES, "auto", ToolStyle("hermes", True)),
        (LLAMA3, "auto", ToolStyle("llama3", True)),
        (MISTRAL, "auto", ToolStyle("mistral", True)),
        (MINICPM5, "auto", ToolStyle("minicpm5", True)),
        (PLAIN, "auto", ToolStyle("hermes", False)),
        ("", "auto", ToolStyle("hermes", False)),
        # Tools, but in a format that nothing here reads.
        ('{{ tools }}<|start_header_id|>"parameters": <tool_call>', "auto", ToolStyle("hermes", True)),
        ("{{ tools }}<|python_tag|>", "auto", ToolStyle("llama3", True)),
        ("{{ tools }}<tool_call><function=x><parameter=y>", "auto", ToolStyle("qwen3_coder", True)),
        ("{{ tools }}<tool_call>x<arg_key>", "auto", ToolStyle("glm45", True)),
        ("{{ tools }}<minimax:tool_call><invoke name=", "auto", ToolStyle("minimax_m2", True)),
        ("{{ tools }}<|start|>x<|channel|>commentary", "auto", ToolStyle("harmony", True)),
        # DeepSeek's templates write arguments as they are, or as JSON.
        ("{{ tools }}<｜tool▁calls▁begin｜>", "auto", ToolStyle("deepseek_v3", True, takes_text=True)),
        (
            "{{ tools }}<｜tool▁calls▁begin｜>{{ tool['function']['arguments']|tojson }}",
            "auto",
            ToolStyle("deepseek_v3", True),
        ),
        ("{{ tools }}<seed:tool_call><function=x><parameter=y>", "auto", ToolStyle("seed_oss", True)),
        # XML of MiniMax-M3 and Functionary 3.1, and a list between tags as Apriel has it.
        ("{{ tools }}<tool_call><function=x>", "auto", ToolStyle("hermes", False)),
        ("{{ tools }}<tool_call><invoke name=", "auto", ToolStyle("hermes", False)),
        ("{{ tools }}<function={{ name }}> or <|python_tag|>", "auto", ToolStyle("hermes", False)),
        ("{{ tools }}in <tool_call> tags: <tool_calls>[", "auto", ToolStyle("hermes", False)),
        ("{{ tools }}", "auto", ToolStyle("hermes", False)),
        ("{{ tools }}", "llama3", ToolStyle("llama3", True)),
        (PLAIN, "mistral", ToolStyle("hermes", False)),
        (HERMES, "none", ToolStyle(None, True)),
        (PLAIN, "none", ToolStyle(None, False)),
    ],
)
def test_the_style_is_what_the_template_says(template: str, choice: ParserChoice, style: ToolStyle) -> None:
    assert detect_style(template, choice) == style


def rendered(tokenizer: Tokenizer, template: str, messages: Any, **kwargs: Any) -> str:
    token_ids = render_chat(tokenizer, messages, chat_template=template, **kwargs)
    return tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("template", [HERMES, LLAMA3, MISTRAL])
def test_a_round_trip_through_each_template(tokenizer: Tokenizer, template: str) -> None:
    style = detect_style(template, "auto")
    first, second = CALLS[0], CALLS[0] | {"id": "call_2"}
    twice = {"role": "assistant", "content": "", "tool_calls": [first, second]}
    messages = templates.native_messages([MESSAGES[0], twice, MESSAGES[2]], style.parser)
    tools = templates.template_tools([TOOL])
    text = rendered(tokenizer, template, [*messages, {"role": "user", "content": "So?"}], tools=tools)
    assert '"name": "add"' in text and text.count('{"a": 1}') == 2 and "2" in text
    assert MESSAGES[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_minicpm5_shows_calls_in_the_form_that_its_parser_reads(tokenizer: Tokenizer) -> None:
    """What the template writes of a call is what the parser finds in the text, value by value."""
    arguments = {"city": "Paris & <Rome>\nor", "days": 3, "when": {"from": [1, None]}, "is_dry": True}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}
    said = {"role": "assistant", "content": "Hm.", "tool_calls": [call, call]}
    messages = templates.native_messages([MESSAGES[0], said], "minicpm5")
    tools = templates.template_tools([TOOL])
    text = rendered(tokenizer, MINICPM5, messages, tools=tools, add_generation_prompt=False)
    answer = text.rpartition("assistant\n")[2].removesuffix("<|im_end|>")
    found = parse(MiniCPM5Parser([TOOL]), [answer])
    assert found.text == "Hm." and [json.loads(each) for _, each in found.named] == [arguments, arguments]


def test_templates_see_a_tools_name_description_and_parameters() -> None:
    described = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    (shown,) = templates.template_tools([Function.model_validate(described | {"strict": True})])
    assert shown == {"type": "function", "function": described}
    (bare,) = templates.template_tools([TOOL])
    assert bare["function"] == described | {"name": "add", "description": ""}


DEEP = '{"a": ' * 900 + "1" + "}" * 900


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"a": 1}', {"a": 1}), ("", {}), (" ", {}), ('{"a": ', '{"a": '), (DEEP, DEEP)],
)
def test_arguments_are_objects_if_they_can(arguments: str, parsed: Any) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
    (message,) = templates.native_messages([{"role": "assistant", "tool_calls": [call]}], "hermes")
    assert message["tool_calls"][0]["function"]["arguments"] == parsed


def test_results_have_the_name_of_their_call() -> None:
    result = templates.native_messages(MESSAGES, "hermes")[2]
    assert result == {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "add"}


def test_ids_for_mistral_are_nine_letters_and_always_the_same() -> None:
    _, assistant, result = templates.native_messages(MESSAGES, "mistral")
    stand_in = assistant["tool_calls"][0]["id"]
    assert stand_in == result["tool_call_id"] and len(stand_in) == 9 and stand_in.isalnum()
    own = {"id": "a1B2c3D4e", "type": "function", "function": {"name": "add", "arguments": ""}}
    (kept,) = templates.native_messages([{"role": "assistant", "tool_calls": [own]}], "mistral")
    assert kept["tool_calls"][0]["id"] == "a1B2c3D4e"


def test_calls_and_results_in_plain_words() -> None:
    messages = [*MESSAGES, MESSAGES[2] | {"content": "3"}, {"role": "user", "content": "So?"}]
    user, assistant, results = templates.plain_messages(messages)
    assert user == MESSAGES[0]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": call}
    told = "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>\nSo?"
    assert results == {"role": "user", "content": told}


def test_two_messages_of_a_user_stay_two() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert templates.plain_messages(twice) == twice


@pytest.mark.parametrize("template", [PLAIN, NO_SYSTEM, DEAF])
@pytest.mark.parametrize("system", [False, True])
def test_the_description_is_in_the_prompt(tokenizer: Tokenizer, template: str, system: bool) -> None:
    if system and template == NO_SYSTEM:
        pytest.skip("refuses the client's own")
    begin = [{"role": "system", "content": "Be kind."}] if system else []
    text = templates.describe([TOOL], "no")

    def render(messages: Any) -> list[int]:
        return render_chat(tokenizer, messages, chat_template=template)

    ids = templates.render_described(render, templates.plain_messages([*begin, *MESSAGES]), text)
    prompt = tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt.count(text) == 1 and prompt.count("1 + 1?") == 1
    assert prompt.startswith("[system]") == (template == PLAIN)
    assert json.dumps(templates.template_tools([TOOL])[0]["function"]) in prompt


def test_a_template_that_shows_it_nowhere_is_a_refusal() -> None:
    with pytest.raises(InvalidParameter) as caught:
        templates.render_described(lambda messages: [1], MESSAGES[:1], "text")
    assert caught.value.param == "tools"


def test_a_template_that_takes_too_much_for_it_is_tried_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "MAX_SECONDS", 0.3)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if 'text' in messages[0].content %}" + loop + "{% endif %}x"
    tried: list[Any] = []

    def render(messages: Any) -> list[int]:
        tried.append(messages)
        return render_chat(tokenizer, messages, chat_template=template)

    with pytest.raises(TemplateLost):
        templates.render_described(render, MESSAGES[:1], "text")
    assert len(tried) == 2


def test_the_description_says_how_to_answer() -> None:
    assert "<tool_call>" in templates.describe([TOOL], "no")
    assert "\n[{" in templates.describe([TOOL], "calls")
    assert "one call" in templates.describe([TOOL], "call")
    assert "arguments for add" in templates.describe([TOOL], TOOL)


def test_the_example_that_we_show_is_one_that_we_read() -> None:
    from penstock_server.tools.parsers import HermesParser

    from .folding import parse

    result = parse(HermesParser(), [templates.describe([], "no")])
    assert result.named == [("get_weather", '{"city": "Paris"}')]


@pytest.mark.parametrize("fence", ["", "```json"])
def test_deepseeks_calls_are_asked_for_where_its_template_shows_calls_and_no_tools(fence: str) -> None:
    style = detect_style("{{ messages }}<｜tool▁calls▁begin｜>" + fence, "auto")
    assert (style.parser, style.is_native) == ("deepseek_v3", True)
    prompt = ToolPrompt("auto", (TOOL,), True, style)
    assert prompt.shown_tools is None and ("```json" in prompt.description) == bool(fence)
    found = parse(DeepSeekParser(), [prompt.description])
    assert found.named == [("get_weather", '{"city": "Paris"}')]


def test_messages_as_the_protocol_has_them() -> None:
    body = {"messages": [*MESSAGES, {"role": "user", "content": "So?"}]}
    request = ChatCompletionRequest.model_validate(body)
    assert [message.role for message in request.messages] == ["user", "assistant", "tool", "user"]


def test_arguments_that_would_fill_the_memory_as_json() -> None:
    """A list is two characters, and seventy bytes and more once it is read. Code in a text is text."""

    def calls(arguments: str, number: int) -> Any:
        return [
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}] * number,
            }
        ]

    code = json.dumps({"code": "a[1] = {b: [c]};" * 50_000})
    templates.check_calls(calls(code, 3))
    templates.check_calls(calls("[[[[", 4_000))
    numbers = '{"a": [' + "1," * 10_000 + "1]}"
    for wrong in (
        calls("[" + "[]," * 100_000 + "1]", 1),
        calls("[" + "[]," * 100 + "1]", 1_000),
        calls(numbers.replace("1,", "1," * 150), 1),
        calls(numbers, 150),
    ):
        with pytest.raises(InvalidParameter, match="arguments of calls") as refused:
            templates.check_calls(wrong)
        assert refused.value.param == "messages"
