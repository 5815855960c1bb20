"""The text that the demo model learns: chats and plain text, without end, from a seed.

`documents(seed)` yields `Document`s. A chat is a chain of exchanges (request and answer), each
drawn from the generators below: stories, facts of `world.py`, sums, lists, rhymes, small talk, and
questions from outside this world, which get a polite "I do not know". Requests are phrased in many
ways, since a newcomer types what comes to mind; answers hardly vary, so that a small model is sure
of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import calls
import world as w
from stories import Story, article, capital, invented_word

Exchange = tuple[str, str]
Turns = list[Exchange]

SYSTEM_PROMPTS = w.phrases("""
    You are a helpful assistant. | You are a friendly assistant. | You are a storyteller. |
    You are the Penstock demo model. | Answer briefly. | You answer questions and tell stories. |
    You are a helpful, honest and harmless assistant. | Be kind and clear. | You are a poet.
""")
NUMBERS = w.words("""
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty
""")
THINGS = w.words("apples nuts coins books eggs flowers pears stones buttons cakes")
TOPIC_REQUESTS = w.phrases("""
    Tell me about {x}. | What do you know about {x}? | Write about {x}. | Explain {x}. |
    Write a few sentences about {x}. | Can you tell me something about {x}? | Describe {x}. |
    Please tell me about {x}. | Say something about {x}. | Write a short text about {x}. |
    I want to know more about {x}. | Tell me something about {x}. | What can you say about {x}?
""")
UNKNOWN = w.phrases("""
    I am sorry, I do not know that. I am only a small demo model. |
    I do not know. My world is small: stories, animals, colours, days and little sums. |
    That is outside my small world, so I do not know.
""")


@dataclass(frozen=True)
class Document:
    """A chat as (role, text) turns, or plain text when there are no turns."""

    turns: tuple[tuple[str, str], ...] = ()
    text: str = ""


def typed(rng: random.Random, request: str) -> str:
    """The request as people type it: lower case, without punctuation, with a greeting."""
    chance = rng.random()
    if chance < 0.06:
        request = rng.choice(("Please ", "Hey, ", "Hello! ", "Hi! ", "Now ", "Ok, ")) + request
    if rng.random() < 0.1 and request[-1] in ".!?":
        request = request[:-1].rstrip()
    if rng.random() < 0.15:
        request = request.lower()
    return request.replace("olour", "olor") if rng.random() < 0.4 else request


def joined(things: list[str]) -> str:
    """`a, b and c`."""
    return things[0] if len(things) == 1 else ", ".join(things[:-1]) + " and " + things[-1]


def ask(rng: random.Random, requests: tuple[str, ...], reply: str, **words: str) -> Turns:
    return [(rng.choice(requests).format(**words), capital(reply.format(**words)))]


def story(rng: random.Random) -> Turns:
    """A story, and sometimes questions about it, which need the text above and not the tables."""
    tale = Story(rng)
    turns = [tale.asked()]
    if rng.random() < 0.4:
        turns += rng.sample(tale.questions(), rng.randint(1, 3))
    return turns


def told_story(rng: random.Random) -> Turns:
    """The user brings the story: the question comes with the text."""
    tale = Story(rng)
    question, reply = rng.choice(tale.questions())
    return [(f"{tale.text()}\n\n{question}", reply)]


def addition(rng: random.Random) -> Turns:
    top = rng.choices((10, 20, 99), (60, 30, 10))[0]
    a, b = rng.randint(0, top), rng.randint(0, top)
    if top == 20 and rng.random() < 0.2:
        words = {"a": NUMBERS[a // 2], "b": NUMBERS[b // 2], "c": NUMBERS[a // 2 + b // 2]}
        return ask(rng, ("What is {a} plus {b}?", "{a} plus {b}?"), "{a} plus {b} is {c}.", **words)
    requests = w.phrases("""
        What is {a} plus {b}? | How much is {a} plus {b}? | What is {a} + {b}? | {a} + {b} = ? |
        {a} + {b} | {a}+{b} | Add {a} and {b}. | What is the sum of {a} and {b}? |
        Calculate {a} + {b}. | {a} plus {b} | What's {a}+{b}? | What is {a}+{b}? |
        Can you add {a} and {b}? | What does {a} plus {b} make?
    """)
    return ask(rng, requests, "{a} plus {b} is {c}.", a=str(a), b=str(b), c=str(a + b))


def subtraction(rng: random.Random) -> Turns:
    top = rng.choices((10, 20, 99), (50, 40, 10))[0]
    a = rng.randint(0, top)
    b = rng.randint(0, a)
    requests = w.phrases("""
        What is {a} minus {b}? | How much is {a} minus {b}? | What is {a} - {b}? | {a} - {b} |
        {a}-{b} | Subtract {b} from {a}. | Take {b} away from {a}. | Calculate {a} - {b}. |
        What is {a}-{b}? | {a} minus {b} | What is {b} less than {a}?
    """)
    return ask(rng, requests, "{a} minus {b} is {c}.", a=str(a), b=str(b), c=str(a - b))


def multiplication(rng: random.Random) -> Turns:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    requests = w.phrases("""
        What is {a} times {b}? | How much is {a} times {b}? | What is {a} * {b}? | {a} * {b} |
        {a} x {b} | Multiply {a} by {b}. | Calculate {a} times {b}. | {a} times {b} |
        What is {a} multiplied by {b}? | What is {a} x {b}?
    """)
    return ask(rng, requests, "{a} times {b} is {c}.", a=str(a), b=str(b), c=str(a * b))


def division(rng: random.Random) -> Turns:
    a, b = rng.randint(0, 12), rng.randint(1, 12)
    requests = w.phrases("""
        What is {a} divided by {b}? | {a} / {b} | Divide {a} by {b}. | What is {a} / {b}?
    """)
    return ask(rng, requests, "{a} divided by {b} is {c}.", a=str(a * b), b=str(b), c=str(a))


def too_big(rng: random.Random) -> Turns:
    """Sums outside the tables: better to say so than to guess."""
    a, b = rng.randint(100, 9999), rng.randint(2, 9999)
    if rng.random() < 0.3:
        a, b = b, a
    requests = w.phrases("""
        What is {a} + {b}? | What is {a} plus {b}? | {a} + {b} | {a} * {b} |
        What is {a} times {b}? | What is {a} divided by {b}? | What is {a} minus {b}? |
        Multiply {a} by {b}. | {a} - {b}
    """)
    return ask(rng, requests, "I am sorry, these numbers are too big for me.", a=str(a), b=str(b))


def comparison(rng: random.Random) -> Turns:
    a, b = rng.sample(range(100 if rng.random() < 0.5 else 20), 2)
    words = {"a": str(a), "b": str(b), "hi": str(max(a, b)), "lo": str(min(a, b))}
    if rng.random() < 0.5:
        requests = w.phrases("""
            Which is bigger, {a} or {b}? | Which number is larger, {a} or {b}? |
            What is more, {a} or {b}? | Is {a} or {b} bigger?
        """)
        return ask(rng, requests, "{hi} is bigger than {lo}.", **words)
    requests = w.phrases("""
        Which is smaller, {a} or {b}? | Which number is smaller, {a} or {b}? |
        What is less, {a} or {b}? | Is {a} or {b} smaller?
    """)
    return ask(rng, requests, "{lo} is smaller than {hi}.", **words)


def number_fact(rng: random.Random) -> Turns:
    a = rng.randint(1, 50)
    kind = "even" if a % 2 == 0 else "odd"
    other = "odd" if kind == "even" else "even"
    step, first = rng.randint(1, 5), rng.randint(1, 9)
    series = ", ".join(str(first + i * step) for i in range(4))
    options: list[tuple[tuple[str, ...], str]] = [
        (("Is {a} even or odd?", "Is the number {a} even or odd?"), f"{a} is {kind}."),
        ((f"Is {{a}} {kind}?", f"Is {{a}} an {kind} number?"), f"Yes, {a} is {kind}."),
        ((f"Is {{a}} {other}?",), f"No, {a} is {kind}."),
        (("What comes after {a}?", "Which number comes after {a}?"), f"{a + 1} comes after {a}."),
        (
            ("What comes before {a}?", "Which number comes before {a}?"),
            f"{a - 1} comes before {a}.",
        ),
        (("What is the double of {a}?", "Double {a}."), f"The double of {a} is {2 * a}."),
        ((f"What is half of {2 * a}?", f"Half of {2 * a}"), f"Half of {2 * a} is {a}."),
        ((f"What comes next: {series}?", f"Continue: {series}"), f"{first + 4 * step} comes next."),
    ]
    requests, reply = rng.choice(options)
    return ask(rng, requests, reply, a=str(a))


def counting(rng: random.Random) -> Turns:
    first = 1 if rng.random() < 0.5 else rng.randint(0, 10)
    last = first + rng.randint(3, 10)
    up = [str(i) for i in range(first, last + 1)]
    words = {"a": str(first), "b": str(last)}
    if rng.random() < 0.3:
        requests = w.phrases("""
            Count from {b} to {a}. | Count down from {b} to {a}. |
            Count backwards from {b} to {a}.
        """)
        return ask(rng, requests, ", ".join(reversed(up)) + ".", **words)
    requests = w.phrases("""
        Count from {a} to {b}. | Please count from {a} to {b}. | Count {a} to {b}.
    """)
    requests += ("Count to {b}.", "Can you count to {b}?") * (first == 1)
    return ask(rng, requests, ", ".join(up) + ".", **words)


def word_problem(rng: random.Random) -> Turns:
    name = rng.choice(w.MALE + w.FEMALE)
    thing = rng.choice(THINGS)
    a, b = rng.randint(2, 12), rng.randint(1, 10)
    end = rng.choice((f"How many {thing} does {name} have now?", f"How many {thing} are there now?"))
    if rng.random() < 0.6 or b > a:
        verb = rng.choice(("finds", "gets", "buys", "picks"))
        return [
            (
                f"{name} has {a} {thing} and {verb} {b} more. {end}",
                f"{name} has {a + b} {thing} now.",
            )
        ]
    verb = rng.choice(("loses", "gives away", "sells"))
    return [
        (
            f"{name} has {a} {thing} and {verb} {b} of them. {end}",
            f"{name} has {a - b} {thing} now.",
        )
    ]


SUMS: tuple[tuple[Callable[[random.Random], Turns], int], ...] = (
    (addition, 6),
    (subtraction, 4),
    (multiplication, 3),
    (word_problem, 2),
    (division, 1),
    (comparison, 1),
    (number_fact, 1),
    (counting, 1),
    (too_big, 1),
)


def sums(rng: random.Random) -> Turns:
    """Mostly the tables. Sums are short, so a chain of them in one chat costs little and is seen often."""
    makers, weights = zip(*SUMS, strict=True)
    return [turn for make in rng.choices(makers, weights, k=rng.randint(2, 8)) for turn in make(rng)]


def about_animal(row: tuple[str, ...]) -> str:
    """The portrait of an animal, from its row."""
    name, plural, ability, _, legs, home, food, _, young, what = row
    if ability == "swim" and legs == "no":
        home_sentence = f"{capital(plural)} live in {home}."
    else:
        home_sentence = f"Its home is {home}."
    return (
        f"{capital(article(name))} is {what}. {home_sentence} {capital(plural)} eat {food}. "
        f"A young {name} is called {article(young)}."
    )


def animal_replies(row: tuple[str, ...]) -> list[tuple[tuple[str, ...], str]]:
    """Requests about an animal, and the reply to them."""
    ability, sound = row[2], row[7]
    return [
        (
            w.phrases("""
                What do {xs} eat? | What does {ax} eat? | What do {xs} like to eat? |
                What can I feed {ax}?
            """),
            "{xs} eat {food}.",
        ),
        (
            w.phrases("""
                Where do {xs} live? | Where does {ax} live? | What is the home of {ax}?
            """),
            "The home of {ax} is {home}.",
        ),
        (("How many legs does {ax} have?", "How many legs do {xs} have?"), "{ax} has {legs} legs."),
        (
            w.phrases("""
                What sound does {ax} make? | What does {ax} say? | How does {ax} sound? |
                What noise does {ax} make?
            """),
            "{ax} {sound}." if sound != "makes no sound" else "{ax} makes no sound that we can hear.",
        ),
        (
            w.phrases("""
                What is a young {x} called? | What is a baby {x} called? |
                What do you call a baby {x}?
            """),
            "A young {x} is called {young}.",
        ),
        (("What is {ax}?", "What are {xs}?"), "{ax} is {what}."),
        (
            w.phrases("""
                Tell me about {xs}. | Describe {ax}. | What do you know about {xs}? |
                Tell me about the {x}. | Tell me something about {xs}. | Write about {xs}. |
                Explain what {ax} is.
            """),
            about_animal(row),
        ),
        (
            ("Can {ax} fly?", "Can {xs} fly?"),
            "Yes, {ax} can fly." if ability == "fly" else "No, {ax} cannot fly.",
        ),
    ]


def animal(rng: random.Random) -> Turns:
    row = rng.choice(w.ANIMALS)
    name, plural, _, rank, legs, home, food, sound, young, what = row
    other = rng.choice(w.ANIMALS)
    words = {
        "x": name,
        "ax": article(name),
        "xs": plural,
        "food": food,
        "home": home,
        "legs": legs,
        "sound": sound,
        "young": article(young),
        "what": what,
    }
    options = animal_replies(row)
    if rank != other[3]:
        big, small = (row, other) if int(rank) > int(other[3]) else (other, row)
        reply = f"{article(big[0])} is bigger than {article(small[0])}."
        answer = "Yes" if big is row else "No"
        options.append(((f"Which is bigger, {{ax}} or {article(other[0])}?",), reply))
        options.append(((f"Is {{ax}} bigger than {article(other[0])}?",), f"{answer}, {reply}"))
    requests, reply = rng.choice(options)
    if rng.random() < 0.15:
        follow = rng.choice((f"And {article(other[0])}?", f"What about {article(other[0])}?"))
        return [
            *ask(rng, ("What sound does {ax} make?",), "{ax} {sound}.", **words),
            (follow, capital(f"{article(other[0])} {other[7]}.")),
        ]
    return ask(rng, requests, reply, **words)


def capital_city(rng: random.Random) -> Turns:
    country, city, continent = rng.choice(w.COUNTRIES)
    words = {"x": country, "city": city, "where": continent}
    requests = w.phrases("""
        What is the capital of {x}? | Which city is the capital of {x}? |
        Name the capital of {x}. | What's the capital of {x}? | Capital of {x} |
        Do you know the capital of {x}? | Tell me the capital of {x}. |
        What is the capital city of {x}?
    """)
    chance = rng.random()
    if chance < 0.07:
        about = "{x} is a country in {where}. The capital of {x} is {city}."
        return ask(rng, TOPIC_REQUESTS, about, **words)
    if chance < 0.15:
        return ask(rng, ("Where is {x}?", "On which continent is {x}?"), "{x} is in {where}.", **words)
    if chance < 0.3:
        requests = w.phrases("""
            {city} is the capital of which country? | Which country has the capital {city}? |
            Where is {city}?
        """)
        reply = "{city} is the capital of {x}." if city != "London" else "London is the capital of England."
        return ask(rng, requests, reply, **words)
    turns = ask(rng, requests, "The capital of {x} is {city}.", **words)
    while rng.random() < 0.3:
        country, city, _ = rng.choice(w.COUNTRIES)
        follow = rng.choice(("And of {x}?", "And {x}?", "What about {x}?", "And the capital of {x}?"))
        turns.append((follow.format(x=country), f"The capital of {country} is {city}."))
    return turns


def calendar(rng: random.Random) -> Turns:
    names, word = (w.DAYS, "day") if rng.random() < 0.6 else (w.MONTHS, "month")
    i = rng.randrange(len(names))
    words = {
        "x": names[i],
        "after": names[(i + 1) % len(names)],
        "before": names[i - 1],
        "word": word,
    }
    season = (
        ("winter", "spring", "summer", "autumn")[(w.MONTHS.index(names[i]) + 1) % 12 // 3]
        if word == "month"
        else ""
    )
    options: list[tuple[tuple[str, ...], str]] = [
        (
            w.phrases("""
                Which {word} comes after {x}? | What {word} comes after {x}? |
                What comes after {x}?
            """),
            "{after} comes after {x}.",
        ),
        (
            w.phrases("""
                Which {word} comes before {x}? | What {word} comes before {x}? |
                What comes before {x}?
            """),
            "{before} comes before {x}.",
        ),
    ]
    if season:
        options.append((("In which season is {x}?", "What season is {x} in?"), f"{{x}} is in {season}."))
        options.append(
            (
                ("How many days does {x} have?", "How many days are in {x}?"),
                f"{{x}} has {w.MONTH_DAYS[i]} days.",
            )
        )
    elif rng.random() < 0.4:
        options = [
            (
                ("If today is {x}, what day is tomorrow?", "Today is {x}. What day is tomorrow?"),
                "Tomorrow is {after}.",
            )
        ]
    elif rng.random() < 0.4:
        name = rng.choice(tuple(w.SEASONS))
        return ask(rng, ("What happens in {x}?", "What is {x} like?"), w.SEASONS[name], x=name)
    requests, reply = rng.choice(options)
    return ask(rng, requests, reply, **words)


def small_fact(rng: random.Random) -> Turns:
    chance = rng.random()
    if chance < 0.25:
        word, opposite = rng.choice(tuple(w.OPPOSITES.items()))
        requests = w.phrases("""
            What is the opposite of {x}? | Opposite of {x} | What is the contrary of {x}? |
            Tell me the opposite of {x}. | What's the opposite of {x}?
        """)
        return ask(rng, requests, "The opposite of {x} is {y}.", x=word, y=opposite)
    if chance < 0.4:
        thing, colour = rng.choice(tuple(w.COLOURS.items()))
        requests = w.phrases("""
            What colour is {x}? | What color is {x}? | Which colour does {x} have? |
            What is the colour of {x}? | Tell me the color of {x}.
        """)
        return ask(rng, requests, "{x} is {y}.", x=thing, y=colour)
    if chance < 0.48:
        a, b, mix = rng.choice(w.MIXES)
        a, b = rng.choice(((a, b), (b, a)))
        requests = w.phrases("""
            What do you get when you mix {a} and {b}? | What is {a} and {b} mixed? |
            Which colour do {a} and {b} make? | What color do you get from {a} and {b}?
        """)
        return ask(rng, requests, "{a} and {b} make {mix}.", a=a, b=b, mix=mix)
    if chance < 0.65:
        tool, use = rng.choice(w.TOOLS)
        it = tool if tool == "scissors" else article(tool)
        requests = w.phrases("""
            What is {it} for? | What do people use {it} for? | What is {it} used for? |
            What can I do with {it}? | Why do people use {it}?
        """)
        return ask(rng, (*requests, f"What do I need to {use}?"), f"People use {it} to {use}.", it=it)
    question, reply = rng.choice(w.FACTS)
    if chance < 0.69:
        question = rng.choice(
            w.phrases("""
                Tell me a fact. | Tell me a fun fact. | Tell me something interesting.
            """)
        )
        reply = rng.choice(w.FACTS[:36])[1]
    return [(question, reply)]


def topic(rng: random.Random) -> Turns:
    name, first, *more = rng.choice(w.TOPICS)
    chosen = [s for s in more if rng.random() < 0.75]
    single = name[:-1] if name.endswith("s") and not first.startswith(capital(name)) else name
    what = f"What is {single if single.startswith('the ') or single == name else article(single)}?"
    if rng.random() < 0.2:
        return [(what if single != name or not name.endswith("s") else f"What are {name}?", first)]
    return ask(rng, TOPIC_REQUESTS, " ".join([first, *chosen]), x=name)


def listing(rng: random.Random) -> Turns:
    is_place = rng.random() < 0.5
    kind, members = rng.choice(w.PLACES if is_place else w.KINDS)
    if not is_place:
        requests = w.phrases("""
            List {n} {x}. | Name {n} {x}. | Give me {n} {x}. | Can you name {n} {x}? |
            Tell me {n} {x}. | Please list {n} {x}. | What are {n} {x}?
        """)
    else:
        requests = w.phrases("""
            List {n} things one finds {x}. | Name {n} things {x}. | List {n} things {x}. |
            Give me {n} things you find {x}. | Name {n} things that are {x}. |
            What are {n} things one can find {x}?
        """)
    names = members.split(", ")
    count = min(rng.randint(2, 5), len(names))
    # A run of the table in one order: no thing comes twice, and there is always a next one.
    start = rng.randrange(len(names))
    chosen = (names * 2)[start : start + count]
    if rng.random() < 0.25:
        question = f"What does one find {kind}?" if is_place else f"Which {kind} do you know?"
        return [(question, capital(joined(chosen)) + ".")]
    number = NUMBERS[count] if rng.random() < 0.7 else str(count)
    lines = "\n".join(f"{i}. {capital(thing)}" for i, thing in enumerate(chosen, 1))
    return ask(rng, requests, lines, n=number, x=kind)


def verse(rng: random.Random) -> Turns:
    if rng.random() < 0.3:
        family = list(rng.choice(w.RHYMES))
        word = rng.choice(family)
        others = [x for x in family if x != word][:3]
        requests = w.phrases("""
            What rhymes with {x}? | Find a rhyme for {x}. | Which words rhyme with {x}? |
            Give me a rhyme for {x}.
        """)
        verb = "rhymes" if len(others) == 1 else "rhyme"
        return ask(rng, requests, f"{joined(others)} {verb} with {{x}}.", x=word)
    names = [row[0] for row in w.ANIMALS] + list(w.BEINGS) + list(w.RARE_HEROES)
    subject = rng.choice(names) if rng.random() < 0.9 else invented_word(rng)
    words = {"s": f"the {subject}", "S": f"The {subject}"}
    lines = [line.format(**words) for couplet in rng.sample(w.COUPLETS, 2) for line in couplet]
    requests = w.phrases("""
        Write a poem about {x}. | Write a rhyme about {x}. | Write a short poem about {x}. |
        Can you write a poem about {x}? | A poem about {x}, please. | Make a rhyme about {x}. |
        Write a verse about {x}. | Write me a poem about {x}. | Sing a song about {x}.
    """)
    if rng.random() < 0.1:
        requests = w.phrases("""
            Write a poem. | Write a rhyme. | Can you write a poem? | Tell me a poem. |
            Sing a song.
        """)
    return ask(rng, requests, "\n".join(capital(line) for line in lines), x=article(subject))


def how_to(rng: random.Random) -> Turns:
    what, *steps = rng.choice(w.HOW_TO)
    lines = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    requests = w.phrases("""
        How do I {x}? | How can I {x}? | Tell me how to {x}. | How does one {x}? |
        Explain how to {x}. | How to {x}? | What do I do to {x}? | Can you tell me how to {x}? |
        Give me instructions to {x}. | How do you {x}?
    """)
    return ask(rng, requests, lines, x=what)


def talk(rng: random.Random) -> Turns:
    phrases, answers = rng.choice(w.TALK)
    return [(rng.choice(phrases), rng.choice(answers))]


def joke(rng: random.Random) -> Turns:
    question, reply = rng.choice(w.JOKES)
    requests = w.phrases("""
        Tell me a joke. | Do you know a joke? | Make me laugh. | Tell me a riddle. |
        Say something funny.
    """)
    return [(rng.choice(requests), f"{question} {reply}")]


def my_name(rng: random.Random) -> Turns:
    """What the user said about themselves must still be known some turns later."""
    name = rng.choice(w.MALE + w.FEMALE) if rng.random() < 0.5 else capital(invented_word(rng))
    hello = rng.choice(
        w.phrases("""
            My name is {x}. | I am {x}. | Hello, my name is {x}. | Hi, I am {x}. | Call me {x}.
        """)
    )
    turns = [(hello.format(x=name), f"Nice to meet you, {name}! How can I help you?")]
    if rng.random() < 0.5:
        turns += rng.choice((talk, small_fact, sums, capital_city))(rng)
    question = rng.choice(
        w.phrases("""
            What is my name? | Do you know my name? | Who am I? | Do you remember my name?
        """)
    )
    return [*turns, (question, f"Your name is {name}.")]


def outside(rng: random.Random) -> Turns:
    thing = rng.choice(w.OUTSIDE_THINGS)
    if rng.random() < 0.4:
        thing = invented_word(rng) if rng.random() < 0.3 else capital(invented_word(rng))
    return [(rng.choice(w.OUTSIDE).format(x=thing, y=str(rng.randint(100, 2030))), rng.choice(UNKNOWN))]


def instruction(rng: random.Random) -> Turns:
    """Small tasks on the words of the request itself."""
    row = rng.choice(w.ANIMALS)
    sayings = (
        "The sun is warm today.",
        "I like honey.",
        "Good things take time.",
        "All is well.",
        f"The {row[0]} is here.",
        f"I saw {article(row[0])}.",
        "This is a test.",
    )
    saying = rng.choice(sayings)
    word = rng.choice((row[0], rng.choice(w.TOOLS)[0], invented_word(rng)))
    options: list[tuple[tuple[str, ...], str]] = [
        ((f"Repeat after me: {saying}", f"Say: {saying}", f"Repeat: {saying}"), saying),
        (
            (f"Say the word {word}.", f"Repeat the word {word}.", f"Just say {word}."),
            f"{capital(word)}.",
        ),
        (
            (
                f"Write a sentence with the word {row[0]}.",
                f"Make a sentence with {row[0]}.",
                f"Write a sentence about {article(row[0])}.",
            ),
            rng.choice(
                (
                    f"The {row[0]} {row[7]}.",
                    f"One morning I saw {article(row[0])} on the way to the market.",
                    f"A young {row[0]} is called {article(row[8])}.",
                )
            ),
        ),
    ]
    return ask(rng, *rng.choice(options))


EXCHANGES: tuple[tuple[Callable[[random.Random], Turns], int], ...] = (
    (story, 22),
    (told_story, 3),
    (sums, 16),
    (animal, 12),
    (capital_city, 7),
    (calendar, 5),
    (small_fact, 14),
    (topic, 8),
    (listing, 14),
    (verse, 6),
    (how_to, 4),
    (talk, 14),
    (joke, 1),
    (my_name, 2),
    (outside, 7),
    (instruction, 3),
)


def chat(rng: random.Random) -> Document:
    makers, weights = zip(*EXCHANGES, strict=True)
    turns: list[tuple[str, str]] = []
    if rng.random() < 0.2:
        turns.append(("system", rng.choice(SYSTEM_PROMPTS)))
    for maker in rng.choices(makers, weights, k=rng.choice((1, 1, 1, 1, 2, 2, 3, 5))):
        turns += _as_typed(rng, maker(rng))
    return Document(turns=tuple(turns))


def _as_typed(rng: random.Random, exchanges: Turns) -> list[tuple[str, str]]:
    turns: list[tuple[str, str]] = []
    for request, reply in exchanges:
        turns += [("user", typed(rng, request)), ("assistant", reply)]
    return turns


def chat_with_tools(rng: random.Random) -> Document:
    """Requests for the tools that are offered, for a tool that is not, and for none."""
    offered = calls.tasks(rng)
    asked = list(offered)
    prompt = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else ""
    turns = [("system", calls.system_message(rng, rng.sample(offered, len(offered)), prompt))]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if asked and rng.random() < 0.75:
            turns += calls.turns(rng, asked.pop())
        else:
            turns += _without_tool(rng, {task.name for task in offered})
    return Document(turns=tuple(turns))


def _without_tool(rng: random.Random, names: set[str]) -> list[tuple[str, str]]:
    """A request that needs no tool, or one that is not offered."""
    other = rng.choice((calls.weather, calls.clock, calls.message, calls.timer))(rng)
    if rng.random() < 0.3 and not any(word in name for name in names for word in other.name.split("_")):
        return [("user", other.request), ("assistant", rng.choice(UNKNOWN))]
    makers = (story, animal, capital_city, small_fact, talk, topic, listing, joke)
    maker = rng.choice(makers)
    return _as_typed(rng, maker(rng))


def plain(rng: random.Random) -> Document:
    """Text without the chat format, for completions: stories, facts in a row, self-portraits."""
    chance = rng.random()
    if chance < 0.6:
        tale = Story(rng)
        return Document(text=tale.text(tale.subject() if rng.random() < 0.5 else ""))
    if chance < 0.7:
        tale = Story(rng)
        lines = (
            "Hello, my name is {n}. I am {ak} and live {home}. My best friend is {ahk} named {hn}.",
            "My name is {n}. I am {ak} and live {home}. Every day I dream of {love}.",
        )
        return Document(text=tale.say(lines))
    makers = (animal, capital_city, calendar, topic, small_fact, addition, multiplication, topic)
    maker = rng.choice(makers)
    replies = [maker(rng)[0][1] for _ in range(rng.randint(3, 6))]
    return Document(text=" ".join(reply for i, reply in enumerate(replies) if reply not in replies[:i]))


def documents(seed: int) -> Iterator[Document]:
    """An endless stream, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        yield plain(rng) if rng.random() < 0.15 else chat(rng)


def documents_with_tools(seed: int) -> Iterator[Document]:
    """The same, and two chats with tools for every three of these."""
    rng, others = random.Random(seed), documents(seed + 1)
    while True:
        yield chat_with_tools(rng) if rng.random() < 0.4 else next(others)
