"""A model in a GGUF file as if it were a Hugging Face folder: llama.cpp's numbers become a config.json, and
the tensors get the names and the order of the model's own code.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import MALFORMED, CorruptFile, UnsupportedModel
from penstock.text.gguf_vocabulary import end_tokens
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files.block_types import BY_NAME, GROUP
from penstock.weights.checkpoints.gguf_files.gguf_architecture import Architecture, Stored, exchanged
from penstock.weights.checkpoints.gguf_files.gguf_dense import DENSE
from penstock.weights.checkpoints.gguf_files.gguf_encoders import ENCODERS
from penstock.weights.checkpoints.gguf_files.gguf_gemmas import GEMMA4_EXPERTS, GEMMAS
from penstock.weights.checkpoints.gguf_files.gguf_gpts import GPTS
from penstock.weights.checkpoints.gguf_files.gguf_header import read_header
from penstock.weights.checkpoints.gguf_files.gguf_hybrids import HYBRID_MIXTURES, HYBRIDS
from penstock.weights.checkpoints.gguf_files.gguf_kda import KDA_MIXTURES
from penstock.weights.checkpoints.gguf_files.gguf_keys import check_keys
from penstock.weights.checkpoints.gguf_files.gguf_latents import DENSE_LATENTS, LATENTS
from penstock.weights.checkpoints.gguf_files.gguf_mixtures import MIXTURES
from penstock.weights.checkpoints.gguf_files.gguf_numbers import Numbers
from penstock.weights.checkpoints.gguf_files.gguf_rope import ROPE_TENSORS, read_rope
from penstock.weights.checkpoints.gguf_files.gguf_rows import Matrix, made_of
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Llama's modules by llama.cpp's words.
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
#: By llama.cpp's names: models whose mlps are dense, and mixtures of experts. Files of some names are either.
ARCHITECTURES = DENSE | GEMMAS | GPTS | HYBRIDS | DENSE_LATENTS | ENCODERS
OF_EXPERTS = MIXTURES | LATENTS | HYBRID_MIXTURES | KDA_MIXTURES | {"gemma4": GEMMA4_EXPERTS}
#: How a model makes a vector of a text, by llama.cpp's number (`pooling_type`).
POOLING = {1: "mean", 2: "cls", 3: "last"}
#: config.json's key for it, which no folder has.
GGUF_POOLING = "gguf_pooling"
TOKENS = "tokenizer.ggml.tokens"
#: Names of mixtures of types that Penstock reads, by `general.file_type` (llama.h: llama_ftype).
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0",
    37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
_STORED_NAME = re.compile(r"(?:blk\.(\d+)\.)?(.+?)(?:\.(weight|bias))?")


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file as an unquantized checkpoint, with 4-bit codes where the file has them. Raises
    CheckpointNotFound, CorruptFile, UnsupportedModel."""
    numbers = Numbers(path, *read_header(path))
    config = _checked_config(numbers)
    try:
        entries = {entry.name: entry for entry in _entries(numbers)}
    except MALFORMED as error:
        raise _senseless(path, error) from error
    return Checkpoint(path, config, entries, requantized=_requantized(numbers), file_type=_file_type(numbers))


def _file_type(numbers: Numbers) -> str:
    """The name of the file's mixture of types. A file that does not tell it is named after the type that most
    elements have."""
    named = FILE_TYPES.get(numbers.metadata.get("general.file_type", -1))
    if named is not None:
        return named
    kinds: Counter[str] = Counter()
    for entry in numbers.tensors.values():
        kinds[entry.dtype] += math.prod(entry.shape)
    return kinds.most_common(1)[0][0]


def _requantized(numbers: Numbers) -> str:
    """Which types become INT8, and how."""
    stored = {entry.dtype for entry in numbers.tensors.values()}
    kinds = [kind for name, kind in BY_NAME.items() if name in stored]
    found = sorted(kind.name for kind in kinds if kind.form is None and kind.integers is None)
    return f"{', '.join(found)}, which become INT8 in groups of {GROUP} inputs" if found else ""


def read_config(path: Path) -> dict[str, Any]:
    """The config in the form of config.json. Raises as open_checkpoint() does."""
    return _checked_config(Numbers(path, *read_header(path)))


def _checked_config(numbers: Numbers) -> dict[str, Any]:
    """_config() of numbers and shapes that nobody has checked. Raises as open_checkpoint() does."""
    try:
        return _config(numbers)
    except MALFORMED as error:
        raise _senseless(numbers.path, error) from error


def _senseless(path: Path, error: Exception) -> CorruptFile:
    return CorruptFile(f"{path} has numbers or shapes that make no model ({error!r:.200}); download it again")


def _entries(numbers: Numbers) -> Iterator[TensorEntry]:
    architecture = _architecture(numbers)
    mixture = architecture.mixture
    rules = NAMES | (dict(mixture.names) if mixture else {}) | dict(architecture.names)
    for entry in (*numbers.tensors.values(), *architecture.made(numbers)):
        if entry.name in ROPE_TENSORS:
            continue
        match = _STORED_NAME.fullmatch(entry.name)
        stored = None if match is None else _stored(numbers, architecture, entry, match)
        if stored is not None and mixture is not None and mixture.knows(stored.word):
            yield from mixture.entries(stored)
            continue
        rule = rules.get(stored.word) if stored is not None else None
        if stored is not None and callable(rule):
            yield from rule(stored)
            continue
        if entry.name.endswith(".scale"):  # without it answers would be wrong
            raise UnsupportedModel(
                f"{numbers.path} has {entry.name}, a scale of a whole NVFP4 tensor, which Penstock does not "
                "apply. Use a file with other types, or the original repository"
            )
        if stored is None or rule is None:
            yield entry  # the store does not know the name either, and says so
            continue
        yield _named(architecture, stored, str(rule))


def _stored(numbers: Numbers, architecture: Architecture, entry: TensorEntry, match: re.Match[str]) -> Stored:
    layer = int(match[1]) if match[1] else None
    prefix = "" if layer is None else f"{architecture.layers}{layer}."
    if layer is not None and layer >= numbers.num_layers and architecture.guessing:
        prefix = f"{architecture.guessing}{layer - numbers.num_layers}."
    return Stored(numbers, entry, layer, match[2], match[3] or "", prefix)


def _named(architecture: Architecture, stored: Stored, module: str) -> TensorEntry:
    """A module's tensor, in the order and with the numbers that the model's own code has."""
    matrix, change = Matrix((stored.entry,)), None
    if architecture.exchanges_rows and stored.word in ("attn_q", "attn_k"):
        matrix = _exchanged(stored)
    if architecture.norm_offset and stored.word.endswith("norm") and stored.kind != "bias":
        offset = architecture.norm_offset

        def change(rows: Any) -> Any:
            return rows - offset

    return made_of(stored.name(module), matrix, change)


def _exchanged(stored: Stored) -> Matrix:
    """The rows of q or k in their order. Raises CorruptFile."""
    head_dim, entry = stored.numbers.head_dim, stored.entry
    num_rotated = stored.numbers.integer("rope.dimension_count", head_dim)
    if head_dim % 2 or num_rotated % 2 or not entry.shape or entry.shape[0] % head_dim:
        raise CorruptFile(
            f"{stored.numbers.path}: tensor {entry.name} of shape {list(entry.shape)} has no whole heads of "
            f"{head_dim} rows; download the file again"
        )
    return Matrix((entry,), exchanged(entry.shape[0], head_dim, num_rotated))


def _architecture(numbers: Numbers) -> Architecture:
    if numbers.architecture == "clip":
        raise UnsupportedModel(
            f"{numbers.path} is the part of a model that reads images (mmproj), without the model: give the "
            "GGUF file that it belongs to"
        )
    has_experts = bool(numbers.get("expert_count"))
    known = OF_EXPERTS if has_experts else ARCHITECTURES
    if numbers.architecture not in known:
        what = "a mixture of experts" if has_experts else "a model"
        raise UnsupportedModel(
            f"{numbers.path} holds {what} of architecture {numbers.architecture!r}; of GGUF files Penstock "
            f"reads {', '.join(ARCHITECTURES)}, and mixtures of {', '.join(OF_EXPERTS)}. Use the original "
            "repository if that is supported"
        )
    return known[numbers.architecture]


def _config(numbers: Numbers) -> dict[str, Any]:
    architecture, head_dim = _architecture(numbers), numbers.head_dim
    mixture = architecture.mixture
    if not numbers.is_latent and numbers.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{numbers.path} has keys and values of different lengths")
    if not architecture.has_kv_shapes and not numbers.has_one_kv_shape:
        numbers.integer("attention.head_count_kv")  # raises
    num_rows = _check_tensors(numbers, architecture)
    rope = read_rope(numbers, architecture.rotates_part)
    config: dict[str, Any] = {
        "architectures": [_model_name(architecture.model)],
        "model_type": numbers.architecture.replace("-", "_"),
        "hidden_size": numbers.integer("embedding_length"),
        "num_hidden_layers": numbers.num_layers,
        "num_attention_heads": numbers.num_heads,
        "num_key_value_heads": numbers.num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": mixture.width(numbers) if mixture else numbers.largest("feed_forward_length"),
        "vocab_size": num_rows,
        "max_position_embeddings": numbers.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in numbers.tensors,
        "rope_parameters": rope,
        "bos_token_id": numbers.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(numbers.metadata) or None,
        "pad_token_id": None,  # without this, transformers takes the number of the first model of this kind
    }
    if architecture.norm_eps == "rms_norm_eps":
        config["rms_norm_eps"] = numbers.real("attention.layer_norm_rms_epsilon")
    elif architecture.norm_eps:
        numbers.get("attention.layer_norm_rms_epsilon")  # which some converters write besides
        config[architecture.norm_eps] = numbers.real("attention.layer_norm_epsilon")
    config |= mixture.config(numbers, rope) if mixture else {}
    config |= architecture.config(numbers)
    check_keys(numbers, rope["rope_type"])
    if pooling := POOLING.get(numbers.get("pooling_type", 0)):
        config[GGUF_POOLING] = pooling
    return {key: value for key, value in config.items() if key not in architecture.lacks}


def _model_name(model: str) -> str:
    return model if model.endswith("Model") else f"{model}ForCausalLM"


def _check_tensors(numbers: Numbers, architecture: Architecture) -> int:
    """The number of rows of the embedding. Raises CorruptFile for a file that is no whole model."""
    num_layers = numbers.num_layers
    if num_layers > len(numbers.tensors):
        raise CorruptFile(f"{numbers.path} claims {num_layers} layers and has {len(numbers.tensors)} tensors")
    for name in ("token_embd.weight", f"blk.{num_layers - 1}.{architecture.last}.weight"):
        if not numbers.tensors.get(name) or not numbers.tensors[name].shape:
            raise CorruptFile(f"{numbers.path} has no {name}; download it again")
    num_rows, tokens = numbers.tensors["token_embd.weight"].shape[0], numbers.metadata.get(TOKENS)
    if isinstance(tokens, list) and len(tokens) > num_rows:
        raise CorruptFile(
            f"{numbers.path} has {len(tokens)} tokens and an embedding of {num_rows}; download it again"
        )
    return num_rows
