"""The tokenizer in a GGUF file. transformers reads its vocabulary; how a text is split into words before that
is a name in the file, of which transformers knows some."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: Words are split as GPT-2 splits them, which transformers does where it does not know a name.
_AS_GPT2 = {"gpt-2", "phi-2", "olmo", "mpt", "jais"}
#: Splits of one text after the other, by name: those of the model's own tokenizer.json.
_SPLITS = {
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ),
}  # fmt: skip


def read_gguf(file: Path) -> Any:
    """transformers' tokenizer from the vocabulary in a GGUF file."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.integrations.gguf.reader import read_gguf_metadata

    # The folder is a new one, since transformers would take files beside the GGUF file for its tokenizer's.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).symlink_to(file.resolve())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, gguf_file=file.name, local_files_only=True
        )
    metadata, _ = read_gguf_metadata(str(file))
    kind, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2" and name in _SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = _splits(_SPLITS[name])
    elif kind == "gpt2" and name is not None and name not in _AS_GPT2 | GGUF_PRE_TOKENIZER_SPLITS.keys():
        logger.warning(
            "%s has a tokenizer that splits words by the rules %r, which are not known here: words are split "
            "as GPT-2 splits them, and some texts get other tokens than those that the model knows",
            file, name,
        )  # fmt: skip
    return tokenizer


def _splits(expressions: tuple[str, ...]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    parts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*parts, last])
