"""EarlierTexts: what sequences leave for later ones to guess from."""

from __future__ import annotations

from collections import OrderedDict, deque

from penstock.generation.drafting.recycled_tokens import RecycledTokens
from penstock.generation.drafting.repeated_text import RepeatedText

#: Salts of which something is kept, and texts of each.
_MAX_SALTS, _MAX_TEXTS = 8, 4


class Shared:
    """What sequences with the same salt leave for each other."""

    def __init__(self) -> None:
        self.recycled = RecycledTokens()
        #: Prompts with their answers, the latest first. They grow while their sequences run.
        self.texts: deque[RepeatedText] = deque(maxlen=_MAX_TEXTS)


class EarlierTexts:
    """A salt (GenerationRequest.cache_salt) says that nothing of a text may show in what others get, not even
    in their speed. So texts are kept for requests with the same salt, and not for requests without one: of
    these, only what the model found likely after one or two tokens is kept."""

    def __init__(self) -> None:
        self._of_all = Shared()
        self._by_salt: OrderedDict[str, Shared] = OrderedDict()

    def begin(self, salt: str | None, text: RepeatedText) -> Shared:
        """A sequence begins, with a text that will grow. Returns what is there for it."""
        if not salt:
            return self._of_all
        shared = self._by_salt.setdefault(salt, Shared())
        self._by_salt.move_to_end(salt)
        if len(self._by_salt) > _MAX_SALTS:
            self._by_salt.popitem(last=False)
        shared.texts.appendleft(text)
        return shared
