"""The vocabularies of a model and of the small model that guesses for it: the same tokens under the same
ids."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.text.tokenizer import Tokenizer

#: Rows of an embedding after the last token, with which a model is filled up to a round number. Models of
#: one vocabulary differ by no more.
MOST_PADDING = 512
_ADVICE = "Take a model of the same family"


def check_tokens(small: Tokenizer, large: Tokenizer, num_tokens: int) -> None:
    """Raises ConfigError unless both tokenizers have the same tokens under the ids below `num_tokens`, as far
    as both have tokens: models pad their vocabularies. small: the draft model's."""
    for token_id in range(min(num_tokens, small.vocab_size, large.vocab_size)):
        mine, theirs = small.pieces([token_id]), large.pieces([token_id])
        if mine != theirs:
            raise ConfigError(
                f"the draft model has another vocabulary: token {token_id} is {mine[0]!r}, and "
                f"{theirs[0]!r} in the model that it should draft for. {_ADVICE}"
            )


def check_sizes(small: int, large: int) -> None:
    """The same where only the numbers of tokens are known, so that two vocabularies of about one size are
    taken for the same."""
    if abs(small - large) > MOST_PADDING:
        raise ConfigError(
            f"the draft model has another vocabulary: {small} tokens, and {large} in the model that it "
            f"should draft for. {_ADVICE}; if one model only adds tokens to the other's, name folders of "
            "both with their tokenizers"
        )
