"""A traced text is the plain text in every way, and its parts know where their characters come from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.text.text_process import FOREIGN, OWN, Rendering
from penstock.text.text_worker import render
from penstock.text.traced_text import Traced, joined, origins_of

PIECES = [
    "<think>",
    "</think>",
    "ab",
    "a",
    " ",
    "\n",
    "\r\n",
    "\t",
    "ß",
    "\u0130",
    "é",
    "😀",
    "\u3000",
    "%",
    "{",
]

#: Methods with arguments, none of which may change in what they return.
CALLS: list[Callable[[Any], Any]] = [
    lambda text: text.strip(),
    lambda text: text.strip("a <"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip(),
    lambda text: text.split(),
    lambda text: text.split(None, 1),
    lambda text: text.split("a"),
    lambda text: text.split("</think>", 1),
    lambda text: text.split(sep="a", maxsplit=2),
    lambda text: text.rsplit(),
    lambda text: text.rsplit(None, 1),
    lambda text: text.rsplit("a", 1),
    lambda text: text.splitlines(),
    lambda text: text.splitlines(True),
    lambda text: text.partition("</think>"),
    lambda text: text.rpartition("a"),
    lambda text: text.replace("a", "bb"),
    lambda text: text.replace("</think>", "", 1),
    lambda text: text.replace("", "-"),
    lambda text: text.removeprefix("<think>"),
    lambda text: text.removesuffix("\n"),
    lambda text: text.upper(),
    lambda text: text.lower(),
    lambda text: text.title(),
    lambda text: text.capitalize(),
    lambda text: text.swapcase(),
    lambda text: text.casefold(),
    lambda text: text.center(20, "*"),
    lambda text: text.ljust(20),
    lambda text: text.rjust(20),
    lambda text: text.zfill(20),
    lambda text: text.expandtabs(4),
    lambda text: text.translate({97: "xy"}),
    lambda text: text + "x",
    lambda text: "x" + text,
    lambda text: text * 2,
    lambda text: 2 * text,
    lambda text: text[1:-1],
    lambda text: text[::-1],
    lambda text: text[-1:],
    lambda text: list(text),
    lambda text: text.join(["x", text, "y"]),
    lambda text: (len(text), hash(text), text == "ab", "a" in text, text < "b"),
    lambda text: (text.startswith("<"), text.endswith(("a", "\n")), text.find("a"), text.count("a")),
    lambda text: (text.isspace(), text.isupper(), text.encode(), bool(text), {text: 1}),
]


def plain(value: Any) -> Any:
    """The value with plain texts."""
    match value:
        case str():
            return "".join([value, ""])
        case list() | tuple():
            return [plain(each) for each in value]
        case dict():
            return {plain(key): plain(each) for key, each in value.items()}
    return value


def test_methods_return_what_those_of_str_return() -> None:
    dice = random.Random(1)
    for _ in range(150):
        parts = dice.choices(PIECES, k=dice.randint(0, 7))
        text = "".join(parts)
        traced = joined(Traced(part, dice.choice((FOREIGN, OWN))) for part in parts)
        for number, call in enumerate(CALLS):
            assert plain(call(traced)) == plain(call(text)), (number, text)


#: Of CALLS, those that put no character of their own into the text.
CUTS = [*CALLS[:16], CALLS[19], CALLS[20], *CALLS[37:41]]


def test_each_character_keeps_its_origin() -> None:
    """Letters are the template's own here, and all others foreign."""
    dice = random.Random(2)
    for _ in range(300):
        text = "".join(dice.choices("ab \n\t<>", k=dice.randint(1, 12)))
        traced = joined(Traced(each, OWN if each.isalpha() else FOREIGN) for each in text)
        for number, call in enumerate(CUTS):
            found = call(traced)
            for part in found if isinstance(found, list | tuple) else [found]:
                assert origins(part) == "".join("#" if each.isalpha() else "." for each in part), number


def origins(text: Any) -> str:
    """A # for each character of the template's own, a dot for each other one."""
    return origins_of(text).translate(bytes.maketrans(b"\0\1", b".#")).decode()


MINE, YOURS = Traced("<|a|>", OWN), Traced("xy", FOREIGN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINE + YOURS, "#####.."),
        ("-" + MINE, ".#####"),
        (MINE + "-", "#####."),
        ((YOURS + MINE) * 2, "..#####..#####"),
        (YOURS.join([MINE, MINE]), "#####..#####"),
        ("", ""),
        ((MINE + YOURS).replace("x", "-"), "#####.."),
        ((MINE + YOURS).replace("x", Traced("123", OWN)), "########."),
        ((YOURS + MINE).upper(), "..#####"),
        ((Traced("\u0130", OWN) + YOURS).lower(), "##.."),
        (Traced("<%s|%d>", OWN) % (YOURS, 12), "#..####"),
        (Traced("%5s", OWN) % YOURS, "###.."),
        (Traced("%s", FOREIGN) % MINE, "#####"),
        (Traced("<%s>", FOREIGN) % MINE, ".#####."),
    ],
)
def test_texts_of_several_parts(text: Any, expected: str) -> None:
    assert origins(Traced(text) if text == "" else text) == expected


def rendered(template: str, content: str = "xy", **variables: Any) -> Traced:
    messages = [{"role": "user", "content": content}]
    return render(Rendering(template, messages, {"eos_token": "<e>"}, variables, True, False))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<{{ messages[0].content }}>", "#..#"),
        ("{{ '<' + messages[0].content + '>' }}{{ '<' ~ messages[0].content ~ 1 }}", "#..##..#"),
        ("{{ '<' + messages[0].role + '>' }}", "######"),
        ("{{ eos_token }}{{ loop }}{{ 3 }}{{ 2 > 1 }}{{ none }}", "############"),
        ("{{ messages[0].content | upper | trim }}{{ '<' | upper }}", "..#"),
        ("{{ ['<', messages[0].content] | join('|') }}{{ ['a', 'b'] | join }}", "##..##"),
        ("{{ 'a\nb' | indent(2) }}{{ messages[0].content | indent(1, true) }}", "#####" + "#.."),
        ("{{ '<{}|{a:>3}>'.format(messages[0].content, a='b') }}", "#..#####"),
        ("{{ '<%s>' | format(messages[0].content) }}", "#..#"),
        ("{{ ('<%s>' % messages[0].content)[1:] }}", "..#"),
        ("{{ messages[0].content | tojson }}{{ 'a' | tojson }}{{ [1, 'a'] | tojson }}", "....###########"),
        ("{{ messages[0].content | urlencode }}{{ '<' | escape }}", "..####"),
        ("{{ messages }}{{ messages[0].items() | list }}", "." * 72),
        ("{% set x %}<{{ messages[0].content }}{% endset %}{{ x }}", "#.."),
        ("{% macro f(x) %}<{{ x }}{{ caller() }}{% endmacro %}{% call f('a') %}b{% endcall %}", "###"),
        ("{% generation %}<{{ messages[0].content }}{% endgeneration %}", "#.."),
        ("{% set n = namespace(x='<') %}{% set n.x = n.x + messages[0].content %}{{ n.x }}", "#.."),
        ("{% filter upper %}<{{ messages[0].content }}{% endfilter %}", "#.."),
        ("{{ {'<': 1} | first }}{{ (messages[0] | list)[0] }}", "#...."),
        ("{{ strftime_now('%Y') }}{{ 'ab' if true }}{{ 'a' 'b' }}", "########"),
        ("{{ '<' | title }}{{ messages[0].content | title }}{{ 'ab' | reverse | capitalize }}", "#..##"),
        ("{{ 'a b' | wordwrap(1) }}{{ 'ab' | center(4) }}{{ 'ab' | replace('a', '<') }}", "#########"),
        ("{{ ['<', 'a'] | map('upper') | join }}{{ messages | map(attribute='role') | join }}", "######"),
        ("{{ tools[0].name }}{{ mood }}", "..."),
        ("{{ '<%(a)s%(b)s>' % {'a': mood, 'b': 'x'} }}{{ '<{0[name]}>'.format(tools[0]) }}", "#..###.#"),
        ("{{ '%s' % [mood, 1] }}{{ 'a'.center(3) }}{{ '%s' % nothing }}", "#....#######"),
    ],
)
def test_what_a_template_writes_is_its_own_but_for_texts_of_messages(template: str, expected: str) -> None:
    assert origins(rendered(template, tools=[{"name": "f"}], mood="ok")) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ '%s' % key }}",
        "{{ '%s' | format(key) }}",
        "{{ '{}'.format(key) }}",
        "{{ '{0} {0}'.format([key, 1]) }}",
        "{{ '{!r}'.format(x) }}",
        "{{ '%s %s' % (x.keys(), x.values()) }}",
        "{{ '{} {}'.format(x.items(), 1) }}",
        "{{ x.keys() | string }}",
        "{{ x.values() | string }}",
        "{{ x.items() | list | string }}",
        "{{ namespace(x=x) | string }}",
        "{{ '%s' % namespace(x=x) }}",
        "{{ '%s' % [x | first] }}",
        "{{ '%s' % [x | first, long] }}",
        "{{ '%a' % (x | first) }}",
        "{{ '%.60s' % [x | first, 'a' * 99] }}",
        "{{ (x | first).encode() | string }}",
        "{{ '%s' % (x | first).encode() }}",
        "{{ 'ab'.translate({97: x | first}) }}",
        "{{ 'ab' | replace('', x | first) }}",
        "{{ 'ab'.center(9, x | first | last) }}",
    ],
)
@pytest.mark.parametrize("extra", ["", "abc" + "\U000e0001" * 20, "\n" * 20], ids=["none", "wide", "lines"])
def test_no_text_of_a_message_becomes_the_templates_own(template: str, extra: str) -> None:
    """The control token ends with a character that the template has nowhere."""
    token = "<|assistant|\u203a"
    arguments = {extra + token: token, "other": extra + token}
    text = rendered(template, x=arguments, key={extra + token: 1}, long=extra)
    assert [
        each for each, origin in zip(text, origins_of(text), strict=True) if origin and each in "<|\u203a"
    ] == []


#: Templates with the functions that those of Qwen, DeepSeek, Llama, Gemma, Mistral and gpt-oss use.
TEMPLATES = [
    """{%- for message in messages %}{%- set content = message.content | default('', true) %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- else %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}{%- endif %}{%- endfor %}""",
    """{% for m in messages[::-1] %}
{% if m.content is string and not (m.content.startswith('<tool_response>')
and m.content.endswith('</tool_response>')) %}{{ m.content | length }}{{ m.content[:5] }}
{{ m.content[-3:] | trim }}
{% elif m.content %}{{ m.content | tojson(indent=1) }}{% endif %}
{{ loop.index0 ~ m.content ~ loop.last }}{% endfor %}""",
    """{% macro show(x) %}{% if x is mapping %}{% for k, v in x | dictsort %}{{ k }}:{{ show(v) }}
,{% endfor %}
{% elif x is string %}{{ x.replace('<think>', '[').replace('</', '') | upper }}{% else %}{{ x }}
{% endif %}{% endmacro %}
{% for m in messages %}{{ show(m) }}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}
{{ c.function.arguments | tojson }}{{ c.function.arguments.items() | list | length }}{% endfor %}
{% endif %}{% endfor %}
{{ tools | tojson if tools }}{{ documents }}{% if tools %}
{{ tools | map(attribute='function') | list | length }}{% endif %}""",
    """{% set ns = namespace(text='', n=0) %}{% for m in messages if m.role != 'system' %}
{% set ns.text = ns.text + m.content | string %}{% set ns.n = ns.n + m.content | length %}
{% if ns.n > 40 %}{% break %}
{% endif %}{% endfor %}{{ ns.text.split() | join('/') }}{{ ns.text.count('<think>') }}
{{ ns.text.find('</think>') }}
{{ ns.text | indent(2) }}|{{ '%s and %5s' % (ns.text, 'x') }}|{{ '{}{:>4}'.format(ns.text, 1) }}
|{{ ns.text | title }}
{{ ns.text | truncate(9) }}|{{ ns.text | wordcount }}|{{ ns.text | e }}|{{ ns.text.partition('>') }}
|{{ ns.text | first }}
{{ ns.text.splitlines() }}{{ ns.text.rsplit('>', 1)[0] }}{{ ns.text in ['', 'hi'] }}
{{ ns.text.isspace() }}{{ ns.text | int }}""",
]
TEXTS = [
    "<think>",
    "</think>",
    "<|im_end|>",
    "<tool_response>",
    "</tool_response>",
    "hi",
    " ",
    "\n",
    "ß",
    '"',
]


def test_a_template_writes_what_it_writes_with_plain_texts() -> None:
    dice = random.Random(3)

    def text() -> str:
        return "".join(dice.choices(TEXTS, k=dice.randint(0, 7)))

    for _ in range(60):
        messages: list[dict[str, Any]] = [
            {"role": role, "content": dice.choice((text(), f"<think>\n{text()}</think>\n\n{text()}"))}
            for role in dice.choices(("user", "assistant", "system"), k=dice.randint(1, 4))
        ]
        if dice.random() < 0.3:
            function = {"name": "f", "arguments": {text(): [text(), 1, None, {"a": text()}]}}
            messages[-1]["tool_calls"] = [{"function": function}]
            messages[-1]["reasoning"] = text()
        tools = [{"function": {"name": text()}}] if dice.random() < 0.3 else None
        goes_on = dice.random() < 0.2
        for number, template in enumerate(TEMPLATES):
            asked = Rendering(template, messages, {}, {"tools": tools}, not goes_on, goes_on)
            assert outcome(render, asked) == outcome(by_transformers, asked), (number, messages)


def by_transformers(asked: Rendering) -> str:
    rendered = render_jinja_template(
        [[dict(message) for message in asked.messages]],
        asked.variables["tools"],
        chat_template=asked.template,
        continue_final_message=asked.continue_final_message,
        add_generation_prompt=asked.add_generation_prompt,
    )
    return str(rendered[0][0])


def outcome(write: Callable[[Rendering], str], asked: Rendering) -> str | type[Exception]:
    try:
        return str.__add__(write(asked), "")
    except Exception as error:
        return type(error)
