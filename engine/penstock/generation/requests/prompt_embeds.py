"""PromptEmbeds: vectors that stand in place of a prompt's tokens, as a caller gave them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import Tensor

from penstock.errors import InvalidParameter
from penstock.weights.checkpoints.torch_files.faults import Hostile, Malformed
from penstock.weights.checkpoints.torch_files.single_tensor import single_tensor

#: What reads a soft prompt from a file.
_SOFT_PROMPT_FILES = "penstock.cpm.soft_prompt:read_soft_prompt"
#: The field of a request that has them.
FIELD = "prompt_embeds"


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """What a model's first layer gets of as many tokens, before the model adds positions. Gemma and MiniCPM
    scale the embedding's rows: the vectors are scaled already."""

    vectors: Tensor  # float32 [num_tokens, hidden_size], on the host
    #: Stands for shape and values: prompts with equal vectors may share keys and values.
    digest: bytes

    @classmethod
    def of(cls, vectors: Tensor) -> PromptEmbeds:
        """From any floating dtype. Raises InvalidParameter for what is no [num_tokens, hidden_size], and for
        values that are not finite."""
        shape = list(vectors.shape)
        if vectors.dim() != 2 or not vectors.numel() or not vectors.is_floating_point():
            raise InvalidParameter(
                FIELD,
                f"{FIELD} has shape {shape} and dtype {str(vectors.dtype).removeprefix('torch.')}; it must "
                "be a floating point tensor of shape [tokens, hidden size]",
            )
        exact = vectors.detach().to(torch.device("cpu"), torch.float32).contiguous()
        if not bool(exact.isfinite().all()):
            raise InvalidParameter(FIELD, f"{FIELD} holds values that are infinite or no numbers in float32")
        digest = hashlib.sha256(str(shape).encode())
        digest.update(exact.numpy().data)
        return cls(exact, digest.digest())

    @classmethod
    def read(cls, raw: bytes) -> PromptEmbeds:
        """From a file of safetensors or of torch.save that holds one tensor. A pickle is interpreted, and
        never executed. Raises InvalidParameter."""
        try:
            tensor = single_tensor(raw)
        except Malformed as error:
            raise InvalidParameter(
                FIELD, f"{FIELD} can't be read: {error}. Send a file of safetensors or of torch.save"
            ) from error
        except Hostile as error:
            raise InvalidParameter(
                FIELD, f"{FIELD} {error}. No tensor needs that, and nothing of the file was run"
            ) from error
        return cls.of(tensor)

    @classmethod
    def load(cls, path: Path) -> PromptEmbeds:
        """From a file on this machine: one of read()'s, or a checkpoint of CPM-2-Finetune (a folder, or the
        file of one rank), which has a soft prompt beside the model. Raises kinds of CheckpointError."""
        return cls.of(resolve_name(_SOFT_PROMPT_FILES)(path))

    @property
    def num_tokens(self) -> int:
        return self.vectors.shape[0]

    def num_in_front(self, token_ids: Sequence[int]) -> int:
        """How many of the vectors stand in front of a prompt: all, or none if the prompt has ids below 0,
        which say where vectors stand."""
        return 0 if min(token_ids, default=0) < 0 else self.num_tokens

    @property
    def hidden_size(self) -> int:
        return self.vectors.shape[1]
