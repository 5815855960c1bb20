"""Reasoning: how the answers to one request think, by the markers of the model's chat template."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from penstock import SamplingParams, Thinking, Tokenizer
from penstock_server.settings.chat_rules import ReasoningChoice, ReasoningFormat
from penstock_server.tools.parsers import AnswerParser
from penstock_server.tools.parsing.harmony import CHANNEL, MESSAGE, START, HarmonyParser
from penstock_server.tools.parsing.thinking import PlainParser, ThinkingParser

#: The opener and the closer of each format.
MARKERS: dict[ReasoningFormat, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "harmony": (f"{CHANNEL}analysis", f"{CHANNEL}final"),
}
#: Harmony's own way from the analysis to the answer.
_TO_FINAL = f"<|end|>{START}assistant{CHANNEL}final"
#: The tokens of an analysis' head: a channel, its name, and the mark of its text.
_HARMONY_HEAD = 3
#: Granite's opener is one that the model always writes; a prompt never has it.
_NEVER_OPEN = frozenset({"granite"})
#: The end of a prompt in which a marker is looked for.
_NUM_LAST_TOKENS = 48


@dataclass(frozen=True)
class Reasoning:
    format: ReasoningFormat
    #: The prompt has the opener, so that the answer begins in its thinking.
    is_open: bool
    tokenizer: Tokenizer

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, choice: ReasoningChoice, prompt: list[int], last_turn: str | None
    ) -> Reasoning | None:
        """None: the answer does not think. prompt: the token ids. last_turn: the text that the answer goes on
        with, if it does."""
        format = detect_format(tokenizer) if choice == "auto" else choice
        if format is None or format == "none":
            return None
        if format == "harmony":
            return cls(format, True, tokenizer)
        opener, closer = MARKERS[format]
        if last_turn is not None:
            opened, closed = last_turn.rfind(opener), last_turn.rfind(closer)
            return None if closed >= 0 and closed > opened else cls(format, opened >= 0, tokenizer)
        end = tokenizer.decode(prompt[-_NUM_LAST_TOKENS:], skip_special_tokens=False).rstrip()
        if end.endswith(closer):
            return None  # the prompt has an empty thinking, as Qwen3's for enable_thinking: false
        is_open = end.endswith(opener) or (choice != "auto" and format not in _NEVER_OPEN)
        return cls(format, is_open, tokenizer)

    def parser(
        self, inner: AnswerParser, call_marker: str | None = None, functions: Collection[str] = ()
    ) -> ThinkingParser | HarmonyParser:
        """A parser for one answer. inner: reads what is after the thinking. call_marker: the text with which
        a call begins; None: there are no calls, or they stay in the text. functions: their names."""
        if self.format == "harmony":
            return HarmonyParser(inner, None if call_marker is None else functions)
        # Models that think between these tags forget the closer at times, before a call.
        ends = (call_marker,) if call_marker and self.format == "think" else ()
        return ThinkingParser(inner, *MARKERS[self.format], self.is_open, ends)

    def _is_special(self, marker: str) -> bool:
        """Whether a marker is a special token, which is no part of the text by default."""
        found = self.tokenizer.encode(marker, add_special_tokens=False)
        return len(found) == 1 and found[0] in self.tokenizer.special_token_ids

    def counter(self) -> ThinkingCounter:
        return ThinkingCounter(self)

    def bind(self, params: SamplingParams, budget: int | None, must_call: bool = False) -> SamplingParams:
        """`params` with the thinking in front of what the grammar demands, and with the markers in the text.
        budget: the most tokens of the thinking. must_call: the grammar is that of calls."""
        opener, closer = MARKERS[self.format]
        if self.format == "harmony" or self._is_special(opener) or self._is_special(closer):
            params = replace(params, skip_special_tokens=False)
        if params.grammar is None and budget is None:
            return params
        encode = self.tokenizer.encode
        opener_ids = encode(opener, add_special_tokens=False)
        is_harmony = self.format == "harmony"
        end = closer
        if is_harmony and budget:
            end, budget = _TO_FINAL, budget + _HARMONY_HEAD
        thinking = Thinking(
            opener,
            closer,
            self.is_open,
            opener_id=opener_ids[0] if len(opener_ids) == 1 else None,
            max_tokens=budget,
            forced=tuple(encode(end, add_special_tokens=False)),
            lead=tuple(encode(MESSAGE, add_special_tokens=False)) if is_harmony else (),
            may_end=is_harmony and must_call,
        )
        return replace(params, thinking=thinking)


class ThinkingCounter:
    """Counts the tokens of one answer's thinking."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._parser = reasoning.parser(PlainParser())
        self._token_bytes = reasoning.tokenizer.token_bytes
        # Harmony's analysis ends with one token.
        is_harmony = reasoning.format == "harmony"
        self._closer_bytes = 0 if is_harmony else len(MARKERS[reasoning.format][1].encode())
        #: Tokens of the thinking, without its markers.
        self.num_tokens = 0
        #: Tokens up to the end of the thinking, with its markers.
        self.num_before_answer = 0
        self._num_all = 0
        #: The bytes of each of the last tokens of the thinking. Some of them may be the closer's.
        self._last: deque[int] = deque(maxlen=self._closer_bytes)

    def add(self, token_ids: Sequence[int]) -> None:
        """Goes on with the answer's next tokens."""
        for token_id in token_ids:
            was_thinking = self._parser.is_thinking
            token = self._token_bytes(token_id)
            # Markers are ASCII, so that each byte may stand for a character.
            self._parser.feed(token.decode("latin-1"))
            self._num_all += 1
            if was_thinking or self._parser.is_thinking:
                self.num_before_answer = self._num_all
            if was_thinking and self._parser.is_thinking:
                self.num_tokens += 1
                self._last.append(len(token))
            elif was_thinking:
                self._end(self._closer_bytes - len(token))

    def _end(self, num_bytes: int) -> None:
        """Takes back the tokens of the closer in front of its last token; they have `num_bytes`."""
        while self._last and self._last[-1] <= num_bytes:
            num_bytes -= self._last.pop()
            self.num_tokens -= 1


def detect_format(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The format whose markers stand in the chat template. None: the template knows no thinking."""
    template = tokenizer.tool_template
    if f"{CHANNEL}" in template and START in template:
        return "harmony"
    for format in ("mistral", "seed", "granite", "think"):
        opener, closer = MARKERS[format]
        if opener.rstrip(":") in template or closer.rstrip(":") in template:
            return format
    return None
