"""Chat templates: what they write, what they refuse, and what they can't reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import save_byte_level

from penstock.errors import InvalidParameter
from penstock.text.chat import render_chat
from penstock.text.tokenizer import Tokenizer

TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
    {{- '[' + message.role + ']' + message.content }}
    {%- if not (continue_final_message and loop.last) %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}
{%- if mood %}{{ mood }}{% endif %}"""
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "中文 😀?"},
]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer without a template."""
    folder = tmp_path_factory.mktemp("bare")
    save_byte_level(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("chat")
    save_byte_level(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(folder)


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def test_roles_and_the_generation_prompt(tokenizer: Tokenizer) -> None:
    expected = "<bos>[system]Be brief.<eos>[user]中文 😀?<eos>"
    prompt = render_chat(tokenizer, MESSAGES)
    assert text_of(tokenizer, prompt) == expected + "[assistant]"
    assert text_of(tokenizer, render_chat(tokenizer, MESSAGES, add_generation_prompt=False)) == expected
    # Special tokens are tokens, not spelled out, and <bos> is there once.
    assert prompt == tokenizer.encode(expected + "[assistant]", add_special_tokens=False)
    assert prompt.count(0) == 1 and prompt.count(1) == 2


def test_it_is_what_transformers_renders(tokenizer: Tokenizer) -> None:
    theirs = tokenizer.backend.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert render_chat(tokenizer, MESSAGES) == theirs


def test_the_final_message_can_be_continued(tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    token_ids = render_chat(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert text_of(tokenizer, token_ids).endswith("[assistant]It is")
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        render_chat(tokenizer, messages, continue_final_message=True)


def test_further_arguments_and_another_template(tokenizer: Tokenizer, bare: Tokenizer) -> None:
    assert text_of(tokenizer, render_chat(tokenizer, MESSAGES, mood="!")).endswith("[assistant]!")
    token_ids = render_chat(bare, MESSAGES, chat_template="{{ messages[1].content }}{{ mood }}", mood="!")
    assert text_of(bare, token_ids) == "中文 😀?!"


def test_tools_reach_the_template(bare: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    assert text_of(bare, render_chat(bare, MESSAGES, chat_template=template, tools=[tool])) == "weather"


def test_the_whole_text_is_measured_before_it_is_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(num_chars: int) -> None:
        raise OverflowError(num_chars)

    text = "<bos>[system]Be brief.<eos>[user]中文 😀?<eos>[assistant]!"
    monkeypatch.setattr(tokenizer, "encode", None)
    with pytest.raises(OverflowError, match=f"^{len(text)}$"):
        render_chat(tokenizer, MESSAGES, mood="!", check_length=refuse)


def test_a_model_without_template_says_what_to_do(bare: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="chat_template.jinja") as caught:
        render_chat(bare, MESSAGES)
    assert caught.value.param == "messages"


def test_the_templates_own_refusal_is_passed_on(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match="no role wizard") as caught:
        render_chat(tokenizer, [{"role": "wizard", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "parts"}]}],
        [{"content": "no role"}],
        [{}],
    ],
)
def test_messages_that_the_template_can_not_write(
    tokenizer: Tokenizer, messages: list[dict[str, object]]
) -> None:
    with pytest.raises(InvalidParameter):
        render_chat(tokenizer, messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% for x in %}",
        "{{ messages | no_such_filter }}",
        "{{ undefined_name.attribute }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) | length }}",
        "{{ [][0] + 1 }}",
        "{{ 'x'.index('y') }}",
    ],
)
def test_a_broken_template_is_a_refusal(bare: Tokenizer, template: str) -> None:
    with pytest.raises(InvalidParameter, match="template"):
        render_chat(bare, MESSAGES, chat_template=template)


def test_a_refusal_does_not_repeat_the_whole_conversation(bare: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x" * 100_000}]
    template = "{{ raise_exception('I do not like ' ~ messages[0].content) }}"
    with pytest.raises(InvalidParameter, match="I do not like xxx") as refused:
        render_chat(bare, messages, chat_template=template)
    assert len(str(refused.value)) < 1200


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() | length }}",
        "{{ (messages | attr('__class__')).__subclasses__() }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
        "{{ '{0.__class__.__subclasses__}'.format(messages) + undefined_name.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_the_sandbox_refuses_ways_out(bare: Tokenizer, template: str) -> None:
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(InvalidParameter):
        render_chat(bare, messages, chat_template=template)
    assert messages == MESSAGES
