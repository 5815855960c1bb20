"""Chats whose answers stand in the request for the most part: a text is written again, edited, or quoted.

Half of the texts are notes of words drawn anew, which no one can know without reading them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import calls
import world as w
from corpus import NUMBERS, THINGS, Document, documents
from stories import Story, invented_word

AGAIN = w.phrases("""
    Repeat this text: | Write this text again: | Copy this text: | Say this once more: | Please repeat: |
    Write the same text again:
""")
EDITS = w.phrases("""
    Replace {old} with {new} in this text: | Write this text with {new} in place of {old}: |
    Change {old} to {new} in this text:
""")
QUOTES = w.phrases("""
    What does the text say about {word}? Answer with a quotation. | Quote the sentence about {word}. |
    Which sentence has the word {word}? Quote it.
""")
NOTES = w.phrases("""
    {name} has {number} {things}. | {name} lives in {city}. | {name} likes {word}. |
    The {goods} of {name} is in the {room}. | {name} speaks {language} and {word}. |
    In {city} it is {sky}. | The {goods} costs {number} coins. | {word} means {number} {things}.
""")


def notes(rng: random.Random) -> list[str]:
    """Three to ten sentences with words drawn anew."""

    def note() -> str:
        return rng.choice(NOTES).format(
            name=rng.choice(calls.NAMES),
            number=rng.choice(NUMBERS),
            things=rng.choice(THINGS),
            city=rng.choice(calls.CITIES),
            word=invented_word(rng),
            goods=rng.choice(calls.GOODS),
            room=rng.choice(calls.ROOMS),
            language=rng.choice(calls.LANGUAGES),
            sky=rng.choice(calls.SKIES),
        )

    return [note() for _ in range(rng.randint(3, 10))]


def sentences(rng: random.Random) -> list[str]:
    """A text: notes, or the beginning of a story."""
    if rng.random() < 0.5:
        return notes(rng)
    told = Story(rng).text("").replace("\n", " ").split(". ")
    return [f"{part.rstrip('.')}." for part in told if part][: rng.randint(3, 10)]


def copied(rng: random.Random) -> Document:
    """A request with a text, and an answer made of that text."""
    parts = sentences(rng)
    text, chance = " ".join(parts), rng.random()
    plain_words = [word for word in text.replace(".", "").replace(",", "").split() if word.isalpha()]
    word = rng.choice(plain_words)
    if chance < 0.4:
        request, reply = rng.choice(AGAIN), text
    elif chance < 0.75:
        new = rng.choice((invented_word(rng), rng.choice(calls.NAMES), rng.choice(THINGS)))
        request = rng.choice(EDITS).format(old=word, new=new)
        reply = " ".join(_replaced(each, word, new) for each in text.split())
    else:
        found = next(part for part in parts if word in part.replace(".", "").replace(",", "").split())
        request, reply = rng.choice(QUOTES).format(word=word), f'The text says: "{found}"'
    return Document(turns=(("user", f"{request}\n{text}"), ("assistant", reply)))


def _replaced(piece: str, old: str, new: str) -> str:
    """A word with its punctuation, changed if it is the old word."""
    bare = piece.rstrip(".,")
    return new + piece[len(bare) :] if bare == old else piece


def drill(rng: random.Random) -> Document:
    """Words drawn anew, and the same words again: no one can guess them, so that copying is all there is
    to learn here."""
    text = " ".join(invented_word(rng) for _ in range(rng.randint(4, 24)))
    return Document(turns=(("user", f"{rng.choice(AGAIN)}\n{text}"), ("assistant", text)))


def documents_with_copies(seed: int) -> Iterator[Document]:
    """The demo's documents (a fifth), chats as above, and drills (a seventh)."""
    rng, others = random.Random(seed), documents(seed + 1)
    while True:
        chance = rng.random()
        yield next(others) if chance < 0.2 else drill(rng) if chance < 0.35 else copied(rng)
