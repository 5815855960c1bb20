"""Pairs: a query and a document as one text, for models that score how well the two fit."""

from __future__ import annotations

import re

from penstock.errors import InvalidParameter
from penstock.text.chat import render_chat
from penstock.text.tokenizer import Tokenizer

#: What Qwen3-Reranker was trained with: its model card has this form, and its folder may lack it.
RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ messages[0].content }}\n<Query>: {{ messages[1].content }}\n"
    "<Document>: {{ messages[2].content }}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
USUAL_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_ROLES = re.compile(r"""["'](query|document)["']""")


def has_pair_template(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes pairs: it knows the roles query and document."""
    return set(_ROLES.findall(tokenizer.tool_template)) == {"query", "document"}


def encode_pair(
    tokenizer: Tokenizer, first: str, second: str, instruction: str | None = None, by_tokens: bool = False
) -> tuple[list[int], int]:
    """Token ids of a pair, and where the second text begins if the model's embedding can tell; else 0.

    A chat template for pairs writes them, or the form of Qwen3-Reranker where tokens say the score
    (by_tokens); otherwise the tokenizer puts its own tokens around and between the two. Raises
    InvalidParameter for an instruction that has no place.
    """
    if has_pair_template(tokenizer):
        system = [{"role": "system", "content": instruction}] if instruction else []
        pair = [{"role": "query", "content": first}, {"role": "document", "content": second}]
        return render_chat(tokenizer, [*system, *pair]), 0
    if by_tokens:
        told = (instruction or USUAL_INSTRUCTION, first, second)
        messages = [{"role": "user", "content": text} for text in told]
        return render_chat(tokenizer, messages, chat_template=RERANKER_TEMPLATE), 0
    if instruction:
        raise InvalidParameter(
            "instruction", "this model takes a query and a document alone; leave instruction out"
        )
    return tokenizer.encode_pair(first, second)
