"""FileTokenizer: a tokenizer.json as it is, by the package `tokenizers` alone. transformers computes the same
for these folders, and takes seconds to import."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Classes in tokenizer_config.json that add nothing to tokenizer.json.
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
#: Models for which transformers takes these classes as it finds them, by model_type in config.json.
PLAIN_MODELS = frozenset(
    (
        *("apertus", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "falcon"),
        *("falcon_h1", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_neox"),
        *("gpt_oss", "granite", "granitemoe", "granitemoehybrid", "lfm2", "llama", "llama4_text"),
        *("nemotron_h", "olmo", "olmo2", "olmo3", "opt", "phi", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
        *("stablelm", "starcoder2"),
    )
)
#: Special tokens that have a name of their own.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Keys of tokenizer_config.json that are read here, and those that change neither ids nor texts.
_READ = {
    *("tokenizer_class", "added_tokens_decoder", "chat_template", "extra_special_tokens"),
    *("additional_special_tokens", "split_special_tokens", *_NAMED),
}
_IDLE = {
    *("add_bos_token", "add_eos_token", "add_prefix_space", "backend"),
    *("clean_up_tokenization_spaces", "errors", "is_local", "legacy", "local_files_only", "max_length"),
    *("model_input_names", "model_max_length", "name_or_path", "pad_to_multiple_of", "pad_token_type_id"),
    *("padding_side", "stride", "truncation_side", "truncation_strategy", "use_default_system_prompt"),
}
#: Files by which a folder changes what tokenizer_config.json says.
_OTHER_FILES = ("special_tokens_map.json", "added_tokens.json")
_OTHER_TEMPLATES = "additional_chat_templates"


class FileTokenizer:
    """What Tokenizer calls of transformers' TokenizersBackend, under the same names."""

    def __init__(
        self, tokenizer: Any, named: Mapping[str, str], extra: Iterable[str], chat_template: Any
    ) -> None:
        """`tokenizer` is a tokenizers.Tokenizer that has all special tokens: `named` by their names, such as
        "bos_token", and `extra` ones."""
        self.backend_tokenizer = tokenizer
        self.chat_template = chat_template
        self.special_tokens_map = dict(named)
        self.all_special_ids = [self._id(token) for token in dict.fromkeys([*named.values(), *extra])]
        self.bos_token_id, self.eos_token_id, self.unk_token_id = (
            self._id(named[name]) if name in named else None for name in _NAMED[:3]
        )

    def _id(self, token: str) -> int:
        token_id: int = self.backend_tokenizer.token_to_id(token)
        return token_id

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def vocab_size(self) -> int:
        """Without the added tokens."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=False))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        tokens: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return tokens

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        piece: str | None = self.backend_tokenizer.id_to_token(token_id)
        return piece

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        ids: list[int] = self._encoded(text, add_special_tokens).ids
        return ids

    def __call__(self, first: str, second: str, **_: Any) -> dict[str, list[int]]:
        """Token ids of a pair of texts, and for each the text that it is of, 0 or 1."""
        encoded = self._encoded((first, second) if second else first, add_special_tokens=True)
        return {"input_ids": encoded.ids, "token_type_ids": encoded.type_ids}

    def _encoded(self, text: str | tuple[str, str], add_special_tokens: bool) -> Any:
        return self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        text: str = self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def read_file_tokenizer(folder: Path) -> FileTokenizer | None:
    """The tokenizer of a folder; None where transformers would compute something else than tokenizer.json
    says, and where the files can't be read: transformers says what is wrong."""
    try:
        model, config = (_object(folder / name) for name in ("config.json", "tokenizer_config.json"))
        if not _is_plain(folder, model, config):
            return None
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        named = {name: _content(config[name]) for name in _NAMED if config.get(name)}
        extra = list(map(_content, _extra_tokens(config)))
        if not _has_tokens(tokenizer, config, [*named.values(), *extra]):
            return None
        return FileTokenizer(tokenizer, named, extra, _chat_template(folder, config))
    except Exception:  # of many types; the caller goes another way, which raises what is wrong
        return None


def _is_plain(folder: Path, model: dict[str, Any], config: dict[str, Any]) -> bool:
    if model.get("model_type") not in PLAIN_MODELS or config.get("tokenizer_class") not in _PLAIN_CLASSES:
        return False
    if (
        config.keys() - _READ - _IDLE
        or config.get("split_special_tokens")
        or (folder / _OTHER_TEMPLATES).exists()
    ):
        return False
    return "added_tokens_decoder" in config or not any((folder / name).exists() for name in _OTHER_FILES)


def _has_tokens(tokenizer: Any, config: dict[str, Any], special: list[str]) -> bool:
    """Whether tokenizer.json has all added tokens of the config, with the same flags, and rules for the
    tokens around a text."""
    from tokenizers import AddedToken

    own = tokenizer.get_added_tokens_decoder().values()
    added = config.get("added_tokens_decoder") or {}
    flags = {repr(AddedToken(**token)) for token in added.values()}
    return (
        tokenizer.post_processor is not None
        and flags <= set(map(repr, own))
        and set(special) <= {token.content for token in own}
    )


def _extra_tokens(config: dict[str, Any]) -> list[Any]:
    tokens = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(tokens, list):
        raise ValueError("tokens with names of their own")
    return tokens


def _content(token: Any) -> str:
    content = token["content"] if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError("a token that is no text")
    return content


def _chat_template(folder: Path, config: dict[str, Any]) -> Any:
    """A text, or several by their names; None."""
    file, template = folder / "chat_template.jinja", config.get("chat_template")
    if file.exists():
        return file.read_text(encoding="utf-8")
    return {each["name"]: each["template"] for each in template} if isinstance(template, list) else template


def _object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("no object")
    return content
