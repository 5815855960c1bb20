"""A soft prompt in a file of its own, or in a checkpoint of CPM-2-Finetune, where it lies beside the model. A
pickle is interpreted, and never executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.cpm.known_names import SOFT_PROMPT
from penstock.cpm.shards import rank_files
from penstock.errors import CheckpointNotFound, CorruptFile, UnsupportedModel
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.safetensors_header import read_header
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry
from penstock.weights.checkpoints.torch_files.torch_file import is_torch_file, read_torch_file

#: Switches of a --prompt-config of CPM-2-Finetune: vectors don't see the text, text doesn't see the vectors.
#: No script of CPM-2-Finetune sets them; they stand in six configs of an experiment (configs/prompt/masks).
_MASKS = ("mask_prompt2token", "mask_token2prompt")
#: A config has some hundred bytes.
_LARGEST_CONFIG = 1 << 16


def read_soft_prompt(path: Path) -> Tensor:
    """[num_tokens, hidden_size] from a file of safetensors or of torch.save with one tensor, or from a rank's
    file of CPM-2-Finetune, or from the folder with these files. Raises CheckpointNotFound, CorruptFile,
    UnsafeCheckpoint, WrongTensor, and UnsupportedModel if a --prompt-config of CPM-2-Finetune lies beside and
    masks attention between vectors and text. The checkpoint itself does not say how it was trained."""
    file = _file(path)
    _refuse_masks(file.parent)
    entries = read_torch_file(file).tensors if is_torch_file(file) else _in_safetensors(file)
    entry = entries.get(SOFT_PROMPT)
    if entry is None:
        if len(entries) != 1:
            raise CheckpointNotFound(
                f"{file} holds {len(entries)} tensors and no {SOFT_PROMPT}: a soft prompt is a file with one "
                "tensor [tokens, hidden size], or a checkpoint that CPM-2-Finetune trained with --prompt-tune"
            )
        (entry,) = entries.values()
    if entry.dtype not in DTYPES or len(entry.shape) != 2 or not all(entry.shape):
        raise CorruptFile(
            f"{entry.name} in {file} is of dtype {entry.dtype} and shape {list(entry.shape)}; a soft prompt "
            "is a floating point tensor of shape [tokens, hidden size]"
        )
    with Checkpoint(file.parent, {}, {entry.name: entry}) as checkpoint:
        return entry.read_rows(checkpoint, 0, entry.shape[0])


def _refuse_masks(folder: Path) -> None:
    for file in sorted(folder.glob("*.json")):
        config = _prompt_config(file)
        if masks := [name for name in _MASKS if config.get(name)]:
            raise UnsupportedModel(
                f"{file} sets {masks[0]}: the soft prompt was trained with a mask between vectors and text. "
                "Penstock's encoder lets all tokens see each other, so answers would be wrong. Train the "
                "soft prompt without the mask, as the scripts of CPM-2-Finetune do"
            )


def _prompt_config(file: Path) -> dict[str, Any]:
    """A --prompt-config of CPM-2-Finetune; {} for any other file."""
    try:
        config: Any = json.loads(file.read_bytes()) if file.stat().st_size <= _LARGEST_CONFIG else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    encoder = config.get("enc")
    return config if isinstance(encoder, dict) and "prompt_len" in encoder else {}


def _in_safetensors(file: Path) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in read_header(file)}


def _file(path: Path) -> Path:
    """The file to read: the first rank's in a folder."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} does not exist; it should be the file of a soft prompt")
    ranks = rank_files(path)
    if not ranks:
        raise CheckpointNotFound(f"{path} has no file of CPM-2-Finetune (mp_rank_00_model_states.pt)")
    return ranks[0]
