"""Chats with tools: the tools that a request offers, calls in Hermes' format, results, and answers from them.

Names, parameters and wordings vary, and some tools are invented on the spot, so that the model reads what is
offered. Some requests need no tool, or one that is not offered: the answer is then an ordinary one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import world as w
from stories import capital, invented_word

#: What stands in front of the tools in the system's message; the chat template writes the same.
HEAD = "You can call these tools:"
CITIES = w.phrases("""
    London | Berlin | Tokyo | Paris | Rome | Oslo | Madrid | New York | San Francisco | Boston | Beijing |
    Shanghai | Sydney | Cairo | Lima | Vienna | Prague | Athens | Dublin | Seoul | Mumbai | Toronto
""")
NAMES = w.words("Anna Ben Carla David Emma Felix Grace Hugo Ida Jack Kim Leo Mia Nina Oscar Paul Rosa Tom")
SKIES = w.words("sunny cloudy rainy clear windy snowy foggy")
GOODS = w.words("book lamp chair apple phone bicycle kettle scarf table ticket laptop camera pencil")
ROOMS = w.phrases("kitchen | bedroom | living room | garden | cellar | office")
LANGUAGES = w.words("French German Spanish Italian Chinese Japanese Greek")
SAYINGS = w.phrases("""
    I am late | dinner is ready | the train is full | see you tomorrow | the bridge is closed |
    happy birthday | call me back | the mill is running | I am on my way
""")
#: What an invented tool tells, and of whom or what.
NOUNS = w.words("height age weight address score status email colour size price rank owner level birthday")


@dataclass(frozen=True)
class Task:
    """A tool with one request for it. properties: parameter -> JSON type; result: a text, or fields."""

    name: str
    description: str
    properties: dict[str, str]
    request: str
    arguments: dict[str, Any]
    result: dict[str, Any] | str
    lead: str

    def tool(self, rng: random.Random) -> str:
        """The tool as a chat template shows it."""
        is_described = rng.random() < 0.25
        fields: dict[str, Any] = {}
        for name, kind in self.properties.items():
            fields[name] = {"type": kind} | ({"description": f"The {name}"} if is_described else {})
        parameters: dict[str, Any] = {"type": "object", "properties": fields}
        if rng.random() < 0.8:
            parameters["required"] = list(fields)
        described = self.description if rng.random() < 0.85 else ""
        return json.dumps({"name": self.name, "description": described, "parameters": parameters})

    @property
    def call(self) -> str:
        body = json.dumps({"name": self.name, "arguments": self.arguments})
        return f"<tool_call>\n{body}\n</tool_call>"

    @property
    def response(self) -> str:
        text = self.result if isinstance(self.result, str) else json.dumps(self.result)
        return f"<tool_response>\n{text}\n</tool_response>"

    @property
    def answer(self) -> str:
        """The lead and the result in words."""
        if isinstance(self.result, str):
            return f"{self.lead}: {self.result.rstrip('.')}."
        told = (f"{name.replace('_', ' ')} {value}" for name, value in self.result.items())
        return f"{self.lead}: {', '.join(told)}."


def place(rng: random.Random) -> str:
    chance = rng.random()
    if chance < 0.5:
        return rng.choice(CITIES)
    return rng.choice(w.COUNTRIES)[1] if chance < 0.75 else capital(invented_word(rng))


def person(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.7 else capital(invented_word(rng))


def weather(rng: random.Random) -> Task:
    city, sky, degrees = place(rng), rng.choice(SKIES), rng.randint(-9, 38)
    parameter = rng.choice(("city", "city", "city", "location", "location", "place", "town"))
    names = "get_weather get_weather weather get_current_weather current_weather weather_now fetch_weather"
    request = rng.choice((
        f"What is the weather in {city}?", f"What's the weather in {city}?", f"How is the weather in {city}?",
        f"What is the weather like in {city}?", f"Weather in {city}?", f"Is it warm in {city}?",
        f"What's the weather like in {city} today?", f"How warm is it in {city}?",
        f"Is it raining in {city}?",
    ))  # fmt: skip
    results: tuple[dict[str, Any] | str, ...] = (
        {"temperature": degrees, "sky": sky}, {"temperature": degrees}, {"temp_c": degrees, "condition": sky},
        f"{degrees} degrees, {sky}", f"{capital(sky)}, {degrees} C", f"{degrees} degrees",
    )  # fmt: skip
    described = rng.choice(("Get the weather of a city", "The weather of a place", "Get current weather"))
    return Task(
        rng.choice(w.words(names)), described, {parameter: "string"}, request, {parameter: city},
        rng.choice(results), f"The weather in {city}",
    )  # fmt: skip


def clock(rng: random.Random) -> Task:
    city, time = place(rng), f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"
    parameter = rng.choice(("city", "location", "timezone", "place"))
    request = rng.choice((f"What time is it in {city}?", f"What's the time in {city}?", f"Time in {city}?"))
    result: dict[str, Any] | str = rng.choice((time, {"time": time}))
    name = rng.choice(("get_time", "current_time", "clock", "get_local_time"))
    return Task(
        name, "Get the time of a place", {parameter: "string"}, request, {parameter: city}, result,
        f"The time in {city}",
    )  # fmt: skip


def arithmetic(rng: random.Random) -> Task:
    top = rng.choice((20, 100, 1000, 10000))
    a, b = rng.randint(1, top), rng.randint(1, top)
    name, word, sign, total = rng.choice((
        ("add", "plus", "+", a + b), ("multiply", "times", "*", a * b), ("subtract", "minus", "-", a - b),
    ))  # fmt: skip
    request = rng.choice((
        f"What is {a} {word} {b}?", f"What is {a} {sign} {b}?", f"{a} {sign} {b}",
        f"How much is {a} {word} {b}?", f"Calculate {a} {word} {b}.", f"What's {a} {sign} {b}?",
    ))  # fmt: skip
    result: dict[str, Any] | str = rng.choice((str(total), {"result": total}))
    lead = f"{a} {word} {b}"
    if rng.random() < 0.4:
        field = rng.choice(("expression", "expression", "formula"))
        name = rng.choice(("calculator", "calculate", "evaluate"))
        asked = {field: f"{a} {sign} {b}"}
        return Task(name, "Compute an expression", {field: "string"}, request, asked, result, lead)
    first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second")))
    kind = rng.choice(("integer", "number"))
    described = f"{capital(name)} two numbers"
    numbers = {first: a, second: b}
    return Task(name, described, {first: kind, second: kind}, request, numbers, result, lead)


def search(rng: random.Random) -> Task:
    goods = f"{rng.choice(GOODS)}s in {place(rng)}"
    thing = rng.choice((rng.choice(w.ANIMALS)[0] + "s", invented_word(rng), goods))
    field = rng.choice(("query", "query", "q", "text"))
    request = rng.choice((
        f"Search for {thing}.", f"Look up {thing}.", f"Find {thing} on the web.",
        f"Search the web for {thing}.",
    ))  # fmt: skip
    found = rng.choice((f"{rng.randint(2, 90)} pages found", f"A page about {thing}", "Nothing was found"))
    name = rng.choice(("search", "web_search", "search_web", "lookup"))
    return Task(name, "Search the web", {field: "string"}, request, {field: thing}, found, "I found")


def message(rng: random.Random) -> Task:
    name, text = person(rng), rng.choice(SAYINGS)
    to, body = rng.choice((("to", "text"), ("recipient", "message"), ("name", "body")))
    request = rng.choice((
        f"Tell {name} that {text}.", f"Send a message to {name}: {text}", f"Write to {name}: {text}.",
        f"Send {name} the message: {text}",
    ))  # fmt: skip
    result: dict[str, Any] | str = rng.choice(("sent", {"status": "sent"}, "Message delivered"))
    called = rng.choice(("send_message", "send_email", "write_message", "notify"))
    fields = {to: "string", body: "string"}
    values = {to: name, body: text}
    lead = f"The message to {name}"
    return Task(called, "Send a message to somebody", fields, request, values, result, lead)


def timer(rng: random.Random) -> Task:
    number, unit = rng.randint(1, 90), rng.choice(("minutes", "seconds", "hours"))
    request = rng.choice((
        f"Set a timer for {number} {unit}.", f"Start a timer of {number} {unit}.", f"Timer, {number} {unit}!",
    ))  # fmt: skip
    name = rng.choice(("set_timer", "start_timer", "timer"))
    result: dict[str, Any] | str = rng.choice(("started", "ok", {"status": "running"}))
    lead = f"The timer of {number} {unit}"
    return Task(name, "Start a timer", {unit: "integer"}, request, {unit: number}, result, lead)


def light(rng: random.Random) -> Task:
    room, state = rng.choice(ROOMS), rng.choice(("on", "off"))
    request = rng.choice((
        f"Turn {state} the light in the {room}.", f"Switch the {room} light {state}.",
        f"Please turn the light in the {room} {state}.",
    ))  # fmt: skip
    name = rng.choice(("set_light", "switch_light", "light"))
    fields, values = {"room": "string", "state": "string"}, {"room": room, "state": state}
    result = rng.choice(("done", "ok"))
    return Task(name, "Turn a light on or off", fields, request, values, result, f"The light in the {room}")


def translation(rng: random.Random) -> Task:
    text, language = rng.choice((rng.choice(SAYINGS), invented_word(rng))), rng.choice(LANGUAGES)
    request = rng.choice((f"Translate into {language}: {text}", f"How do you say {text} in {language}?"))
    fields = {"text": "string", "language": "string"}
    result = " ".join(invented_word(rng) for _ in range(rng.randint(1, 3)))
    name = rng.choice(("translate", "translate_text"))
    values = {"text": text, "language": language}
    return Task(name, "Translate a text", fields, request, values, result, f"In {language}")


def invented(rng: random.Random) -> Task:
    """A tool that tells something of someone, by a name of its own."""
    noun = rng.choice(NOUNS) if rng.random() < 0.7 else invented_word(rng)
    kind, value, field = rng.choice((
        ("person", person(rng), "name"), ("person", person(rng), "person"), ("city", place(rng), "city"),
        ("thing", f"the {rng.choice(GOODS)}", "item"), ("user", person(rng), "user"),
    ))  # fmt: skip
    shown = value.removeprefix("the ")
    name = rng.choice((f"get_{noun}", f"{noun}_of", f"find_{noun}", f"{kind}_{noun}", f"lookup_{noun}"))
    request = rng.choice((
        f"What is the {noun} of {value}?", f"Tell me the {noun} of {value}.", f"Get the {noun} of {value}.",
        f"Find the {noun} of {value}, please.",
    ))  # fmt: skip
    number = rng.randint(1, 2000)
    results: tuple[dict[str, Any] | str, ...] = (str(number), {noun: number}, invented_word(rng))
    return Task(
        name, f"Get the {noun} of a {kind}", {field: "string"}, request, {field: shown}, rng.choice(results),
        f"The {noun} of {value}",
    )  # fmt: skip


MAKERS: tuple[Callable[[random.Random], Task], ...] = (
    weather, weather, weather, clock, arithmetic, arithmetic, search, message, timer, light, translation,
    invented, invented, invented,
)  # fmt: skip


def tasks(rng: random.Random) -> list[Task]:
    """One to four tasks, for tools of different kinds and names."""
    found: dict[str, Task] = {}
    for maker in dict.fromkeys(rng.sample(MAKERS, rng.choice((1, 1, 2, 2, 3, 4)))):
        task = maker(rng)
        found.setdefault(task.name, task)
    return list(found.values())


def system_message(rng: random.Random, offered: list[Task], prompt: str) -> str:
    """The system's message with the tools, as the chat template writes it. prompt: "" or its first part."""
    tools = "\n".join([HEAD, *(task.tool(rng) for task in offered)])
    return f"{prompt}\n\n{tools}" if prompt else tools


def turns(rng: random.Random, task: Task) -> list[tuple[str, str]]:
    """A request, the call, its result and the answer."""
    asked = task.request.lower() if rng.random() < 0.05 and str(task.arguments).islower() else task.request
    return [("user", asked), ("assistant", task.call), ("user", task.response), ("assistant", task.answer)]
