"""A tiny random Llama with a byte-level tokenizer, made once: what engine tests run on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
# Nor leave anything behind in the user's cache.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="penstock-tests-")

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def own_cache() -> Iterator[None]:
    yield
    shutil.rmtree(os.environ["XDG_CACHE_HOME"])


def save_byte_tokenizer(folder: Path, num_merges: int = 20) -> None:
    """A byte-level BPE tokenizer of 258 + num_merges tokens, ids 0 and 1 its <bos> and <eos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + num_merges,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the water runs down the pipe and the wheel turns"] * 5, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(
        folder
    )


def save_tiny_llama(folder: Path, **overrides: object) -> None:
    """Random weights, large enough that logits have clear winners; seeded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, object] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 278,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(sizes | overrides))).save_pretrained(folder)
    save_byte_tokenizer(folder)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model. Read-only: copy it before changing anything."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder)
    return folder
