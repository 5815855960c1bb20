"""PromptForms: how one model wants to be asked to complete a text and to fill in its blanks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidParameter
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.text.middle_tokens import MiddleTokens

#: A blank of a text. Where a text has this one, underscores are text.
SPAN = "<span>"
#: Four or more underscores are a blank too. Names in code have two at most, side by side.
_UNDERSCORES = re.compile("_{4,}")


@dataclass(frozen=True)
class BlankText:
    """A text with blanks: pieces[0], blank 0, pieces[1], blank 1, and so on."""

    pieces: tuple[str, ...]
    #: Where each blank begins in the text, in characters.
    positions: tuple[int, ...]

    @classmethod
    def read(cls, text: str, marker: str | None = None) -> BlankText:
        """marker: what a blank looks like. None: SPAN, or four or more underscores in a text without SPAN.
        Raises InvalidParameter for a text without a blank."""
        pattern = re.compile(re.escape(marker or SPAN))
        if marker is None and SPAN not in text:
            pattern = _UNDERSCORES
        found = list(pattern.finditer(text))
        if not found:
            wanted = repr(marker) if marker else f"{SPAN} or ____ (four or more underscores)"
            raise InvalidParameter("prompt", f"the prompt has no blank: mark each blank by {wanted}")
        return cls(tuple(pattern.split(text)), tuple(match.start() for match in found))

    @property
    def num_blanks(self) -> int:
        return len(self.positions)

    def filled(self, texts: Sequence[str]) -> str:
        """The whole text, with `texts` in its blanks."""
        return "".join(part for pair in zip_longest(self.pieces, texts, fillvalue="") for part in pair)


@dataclass(frozen=True)
class FormedPrompt:
    """A prompt in a model's own form, and what the form demands of the answer."""

    token_ids: list[int]
    #: The first tokens that a decoder writes to an encoded prompt, whatever its logits are.
    answer_start: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: The token that ends each blank. () where the whole answer is the text of the only blank.
    closers: tuple[int, ...] = ()
    #: Tokens that no blank may have.
    forbidden: tuple[int, ...] = ()


class PromptForms:
    """The forms of one model. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer, has_encoder: bool) -> None:
        self._tokenizer = tokenizer
        self.has_encoder = has_encoder
        #: NoText has no tokenizer of transformers.
        self._backend: Any = getattr(tokenizer, "backend", None)
        form = getattr(self._backend, "form", None)
        #: Form.asked_by of the CPM models.
        self._asked_by = form.asked_by if form else "text"

    @property
    def max_blanks(self) -> int:
        """The most blanks that a text may have. 0: the model can't fill in blanks."""
        return max(0, len(self._sentinels) - 1) or (1 if self._middle else 0)

    @property
    def forbidden_ids(self) -> tuple[int, ...]:
        """Tokens that no answer of the model may have: CPM-2 and EVA never write the unknown token."""
        has_form = self.has_encoder and self._asked_by != "text" and self._backend is not None
        return (self._backend.unk_token_id,) if has_form else ()

    def complete(self, text: str) -> FormedPrompt | None:
        """A text that CPM-2 continues: the last sentinel stands for the continuation. None for the models
        that need no form."""
        if self._asked_by != "sentinels" or not self._sentinels:
            return None
        last = self._sentinels[-1]
        return FormedPrompt([*self._encode(text), last], (last,), self._sentinels)

    def after_soft_prompt(self, token_ids: Sequence[int]) -> FormedPrompt | None:
        """A prompt with vectors of prompt tuning, as CPM-2-Finetune has it: the text has no mark, and the
        answer begins with the first sentinel. None for other models."""
        if self._asked_by != "sentinels" or not self._sentinels:
            return None
        return FormedPrompt(list(token_ids), self._sentinels[:1], self._sentinels)

    def fill(self, pieces: Sequence[str], instead: str = "let it continue the text") -> FormedPrompt:
        """A text with a blank between any two of `pieces`. instead: the advice for a model that can't fill in
        blanks. Raises InvalidParameter if the model can't fill in blanks, or not as many."""
        num_blanks = len(pieces) - 1
        if not self.max_blanks:
            raise InvalidParameter("prompt", self._why_not(instead))
        if num_blanks > self.max_blanks:
            most = "one blank" if self.max_blanks == 1 else f"{self.max_blanks} blanks"
            raise InvalidParameter(
                "prompt",
                f"the prompt has {num_blanks} blanks; this model fills in {most} at a time. Send a shorter "
                "part of the text, or fill in the other blanks yourself",
            )
        if self._middle is not None:
            token_ids = self._middle.prompt(self._tokenizer, self._vocab, *pieces)
            return FormedPrompt(token_ids, stop_token_ids=self._middle.stop_token_ids(self._vocab))
        markers = self._sentinels[:num_blanks]
        unknown = getattr(self._backend, "unk_token_id", None)
        return FormedPrompt(
            self._with_markers(pieces, markers),
            markers[:1],
            closers=self._sentinels[1 : num_blanks + 1],
            forbidden=(*self._sentinels, *(() if unknown is None else (unknown,))),
        )

    def _with_markers(self, pieces: Sequence[str], markers: Sequence[int]) -> list[int]:
        """The tokens of a text whose blanks are `markers`. T5's tokenizer itself knows the markers by name,
        and spells the text around them as in the model's training; the names are no text there."""
        names = [piece.replace("\u2581", " ") for piece in self._tokenizer.pieces(markers)]
        if self._tokenizer.encode(names[0], add_special_tokens=False) != [markers[0]]:
            rest = [token_id for piece, marker in zip(pieces[1:], markers, strict=True)
                    for token_id in (marker, *self._encode(piece))]  # fmt: skip
            return [*self._encode(pieces[0]), *rest]
        text = "".join(part for pair in zip_longest(pieces, names, fillvalue="") for part in pair)
        token_ids = self._tokenizer.encode(text)
        if [token_id for token_id in token_ids if token_id in self._sentinels] != list(markers):
            raise InvalidParameter(
                "prompt",
                f"the prompt has a name like {names[0]}, which is the model's own mark of a blank: mark "
                f"blanks by {SPAN}, and leave such names out",
            )
        return token_ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def _why_not(self, instead: str) -> str:
        advice = f"{instead}, or take a model that can, such as CPM-2, T5"
        if self._asked_by == "dialogue":
            return f"EVA talks, and can't fill in blanks: {advice}"
        what = "sentinel tokens" if self.has_encoder else "fill-in-the-middle tokens"
        return f"this model can't fill in blanks, since its vocabulary has no {what}: {advice}, Qwen2.5-Coder"

    @cached_property
    def _vocab(self) -> Mapping[str, int]:
        vocab: Mapping[str, int] = self._backend.get_vocab() if self._backend is not None else {}
        return vocab

    @cached_property
    def _sentinels(self) -> tuple[int, ...]:
        """EVA's vocabulary has sentinels, and EVA was not trained to fill in blanks."""
        is_able = self.has_encoder and self._backend is not None and self._asked_by != "dialogue"
        return self._tokenizer.sentinels if is_able else ()

    @cached_property
    def _middle(self) -> MiddleTokens | None:
        from penstock.text.middle_tokens import find_middle_tokens

        return None if self.has_encoder else find_middle_tokens(self._vocab)
