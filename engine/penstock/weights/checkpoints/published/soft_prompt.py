"""A soft prompt in a file of its own, or in a checkpoint of CPM-2-Finetune, where it lies beside the model. A
pickle is interpreted, and never executed."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from penstock.errors import CheckpointNotFound, CorruptFile
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.published.known_names import SOFT_PROMPT
from penstock.weights.checkpoints.published.shards import rank_files
from penstock.weights.checkpoints.safetensors_header import read_header
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry
from penstock.weights.checkpoints.torch_files.torch_file import is_torch_file, read_torch_file


def read_soft_prompt(path: Path) -> Tensor:
    """[num_tokens, hidden_size] from a file of safetensors or of torch.save with one tensor, or from a rank's
    file of CPM-2-Finetune, or from the folder with these files. Raises CheckpointNotFound, CorruptFile,
    UnsafeCheckpoint and WrongTensor."""
    file = _file(path)
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
