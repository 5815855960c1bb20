"""Where a conversation's system turns stand in the prompt: where the client has them if the chat template
shows them there, and otherwise at a place that the template has.

Agents send system turns after others. Some templates refuse them (Qwen3.5), some leave them out without a
word (gpt-oss, SmolLM3), and some know no system at all (Gemma 2)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from penstock.errors import InvalidParameter, TemplateLost
from penstock_server.protocol.conversation import Turn

if TYPE_CHECKING:
    from penstock import Tokenizer

#: Writes turns as a template does. Raises InvalidParameter for "messages" if the template refuses the turns.
Write = Callable[[Sequence[Turn]], list[int]]

#: The most system turns in front that are tried.
_MOST_IN_FRONT = 8
_SYSTEM, _SECOND = Turn("system", "Be brief."), Turn("system", "Be kind.")
_ASKED, _ANSWERED = Turn("user", "Hi"), Turn("assistant", "Hello")


#: What each tokenizer's template was found to show. A client's own variables give new entries, so that there
#: is a limit for them.
_known: WeakKeyDictionary[Tokenizer, dict[tuple[object, ...], bool]] = WeakKeyDictionary()
_MOST_KNOWN = 256


class Probe:
    """Finds out by short conversations whether a template shows a system turn. It asks once: the answers are
    kept for the tokenizer, by the template's variables."""

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any], write: Write) -> None:
        """write: writes a conversation with the variables."""
        self._tokenizer, self._variables, self._write = tokenizer, variables, write

    @cached_property
    def _key(self) -> bytes:
        told = json.dumps([self._tokenizer.tool_template, self._variables], sort_keys=True, default=repr)
        return hashlib.sha256(told.encode()).digest()

    def shows(self, before: Sequence[Turn], system: Turn, behind: Turn | None) -> bool:
        """Whether the template shows `system` between the others. Without one after it, it is compared with
        another text in its place, since few templates take no turn at all. Raises TemplateLost."""
        known, asked = _known.setdefault(self._tokenizer, {}), (self._key, *before, system, behind)
        if (found := known.get(asked)) is None:
            found = self._differs(before, system, behind)
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[asked] = found
        return found

    def _differs(self, before: Sequence[Turn], system: Turn, behind: Turn | None) -> bool:
        shown = [system, behind] if behind else [system]
        other = behind or replace(system, text=f"{system.text} Please.")
        try:
            return self._write([*before, *shown]) != self._write([*before, other])
        except TemplateLost:
            raise
        except InvalidParameter:
            return False


def write_placed(write: Write, turns: Sequence[Turn], probe: Probe) -> list[int]:
    """What `write` makes of the turns, with system turns where the template takes them. Raises what `write`
    raises for the first arrangement if the template refuses all. A template that takes too much time or
    memory would take it again, so that TemplateLost ends the work.
    """
    refused: InvalidParameter | None = None
    for arrangement in _arrangements(turns, probe):
        try:
            return write(arrangement)
        except InvalidParameter as error:
            if error.param != "messages" or isinstance(error, TemplateLost):
                raise
            refused = refused or error
    assert refused is not None
    raise refused


def _arrangements(turns: Sequence[Turn], probe: Probe) -> Iterator[Sequence[Turn]]:
    """The turns in all arrangements that are worth a try, the best first. A later system turn that becomes a
    part of the user's leaves the prompt's beginning as it was, so that its keys and values still serve."""
    number = _num_in_front(turns)
    has_later = any(turn.role == "system" for turn in turns[number:])
    first = turns
    if number == len(turns) and not probe.shows([], _SYSTEM, None):  # Gemma 3 shows it in front of a user's
        yield _without_system(turns)
        return
    in_front = min(number, _MOST_IN_FRONT) - 1
    if number > 1 and not probe.shows([_SYSTEM] * in_front, _SECOND, _ASKED):
        first = _with_one_system(first)
    if has_later and not probe.shows([_SYSTEM, _ASKED, _ANSWERED], _SECOND, _ASKED):
        first = _with_later_in_users(first)
    yield first
    if has_later or number > 1:
        yield _with_all_in_front(turns)
    if has_later or number:
        yield _without_system(turns)


def _num_in_front(turns: Sequence[Turn]) -> int:
    return next((at for at, turn in enumerate(turns) if turn.role != "system"), len(turns))


def _with_one_system(turns: Sequence[Turn]) -> list[Turn]:
    number = _num_in_front(turns)
    return [_joined(turns[:number]), *turns[number:]]


def _with_all_in_front(turns: Sequence[Turn]) -> list[Turn]:
    others = [turn for turn in turns if turn.role != "system"]
    return [_joined([turn for turn in turns if turn.role == "system"]), *others]


def _without_system(turns: Sequence[Turn]) -> list[Turn]:
    """All system turns are parts of the user's turns."""
    return _with_later_in_users(turns, 0)


def _joined(systems: Sequence[Turn]) -> Turn:
    return Turn("system", "\n\n".join(turn.text for turn in systems))


def _with_later_in_users(turns: Sequence[Turn], number: int | None = None) -> list[Turn]:
    """System turns after the first `number` turns are parts of the user's turn beside them; None: after the
    system turns in front. Many templates want the results of calls right after the calls, so that no turn of
    the user's comes between them."""
    number = _num_in_front(turns) if number is None else number
    placed = list(turns[:number])
    texts: list[str] = []
    takes_more = False  # the last turn is the user's, and a system's text is its end
    for turn in turns[number:]:
        last = placed[-1].role if placed else ""
        if turn.role == "system" and last == "user":
            placed[-1] = _longer(placed[-1], turn.text)
            takes_more = True
        elif turn.role == "system":
            texts.append(turn.text)
        elif turn.role == "user" and takes_more:
            placed[-1] = _longer(placed[-1], turn.text)
            takes_more = False
        elif turn.role == "user":
            placed.append(replace(turn, text="\n".join([*texts, turn.text])))
            takes_more, texts = False, []
        else:
            if texts and turn.role != "tool":
                placed.append(Turn("user", "\n".join(texts)))
                texts = []
            placed.append(turn)
            takes_more = False
    return [*placed, Turn("user", "\n".join(texts))] if texts else placed


def _longer(turn: Turn, text: str) -> Turn:
    return replace(turn, text=f"{turn.text}\n{text}")
