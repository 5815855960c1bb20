"""Where a conversation's system turns stand in the prompt: where the client has them if the chat template
shows them there, and otherwise at a place that the template has.

Agents send system turns behind others. Some templates refuse them (Qwen3.5), some leave them out without a
word (gpt-oss, SmolLM3), and some know no system at all (Gemma 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from penstock.errors import InvalidParameter
from penstock_server.protocol.conversation import Turn

#: Writes turns as a template does. Raises InvalidParameter for "messages" if the template refuses the turns.
Write = Callable[[Sequence[Turn]], list[int]]

#: The most system turns in front that are tried.
_MOST_IN_FRONT = 8
_SYSTEM, _SECOND = Turn("system", "Be brief."), Turn("system", "Be kind.")
_ASKED, _ANSWERED = Turn("user", "Hi"), Turn("assistant", "Hello")


def write_placed(write: Write, turns: Sequence[Turn], probe: Write) -> list[int]:
    """What `write` makes of the turns, with system turns where the template takes them. Raises what `write`
    raises for the first arrangement if the template refuses all.

    probe: writes a short conversation with the same variables, to find out what the template shows.
    """
    refused: InvalidParameter | None = None
    for arrangement in _arrangements(turns, probe):
        try:
            return write(arrangement)
        except InvalidParameter as error:
            if error.param != "messages":
                raise
            refused = refused or error
    assert refused is not None
    raise refused


def _arrangements(turns: Sequence[Turn], probe: Write) -> Iterator[Sequence[Turn]]:
    """The turns in all arrangements that are worth a try, the best first. A later system turn that becomes a
    part of the user's leaves the prompt's beginning as it was, so that its keys and values still serve."""
    number = _num_in_front(turns)
    has_later = any(turn.role == "system" for turn in turns[number:])
    first = turns
    in_front = min(number, _MOST_IN_FRONT) - 1
    if number > 1 and not _shows(probe, [_SYSTEM] * in_front, [_SECOND], [_ASKED]):
        first = _with_one_system(first)
    if has_later and not _shows(probe, [_SYSTEM, _ASKED, _ANSWERED], [_SECOND], [_ASKED]):
        first = _with_later_in_users(first)
    yield first
    if has_later or number > 1:
        yield _with_all_in_front(turns)
    if has_later or number:
        yield _without_system(turns)


def _shows(probe: Write, before: list[Turn], system: list[Turn], behind: list[Turn]) -> bool:
    """Whether the template shows `system` between the others."""
    try:
        return probe([*before, *system, *behind]) != probe([*before, *behind])
    except InvalidParameter:
        return False


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
    """System turns behind the first `number` turns are parts of the user's turn beside them; None: behind the
    system turns in front. Many templates want the results of calls right behind the calls, so that no turn of
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
