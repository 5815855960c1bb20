"""Models of a given shape with random INT8 weights, in memory: speed needs no training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.generation.block_manager import BlockManager
from penstock.generation.executor import Executor
from penstock.kernels import QuantizedTensor, choose_kernels
from penstock.memory.hardware import num_physical_cores
from penstock.memory.kv_cache import KVCache
from penstock.memory.pools import MemoryPool
from penstock.model.registry import find_family
from penstock.spec import LayerLayout, TensorSpec
from penstock.text.tokenizer import NoText
from penstock.weights.readers import StoreReader
from penstock.weights.store import LayerWeights, ModelTensors
from penstock.weights.streamer import LayerStreamer


class RandomStore:
    """A WeightStore that invents what it would read: integers over the whole range, scales that keep
    activations of the size of trained ones."""

    def __init__(self, tensors: ModelTensors) -> None:
        self.tensors = tensors
        self.layouts = tuple(LayerLayout.of(layer) for layer in tensors.layers)
        self.num_layers = len(self.layouts)
        self.bytes_read = 0

    def contiguous_layer(self, index: int) -> None:
        return None

    def read_layer(self, index: int, buffer: Tensor) -> LayerWeights:
        return self._fill(self.layouts[index], buffer)

    def read_resident(self, tensors: tuple[TensorSpec, ...]) -> LayerWeights:
        layout = LayerLayout.of(tensors)
        return self._fill(layout, torch.empty(layout.num_bytes, dtype=torch.uint8))

    def _fill(self, layout: LayerLayout, buffer: Tensor) -> LayerWeights:
        weights = LayerWeights.views(layout, buffer)
        for _, tensor in weights.items():
            if isinstance(tensor, QuantizedTensor):
                tensor.qweight.random_(-127, 128)
                tensor.scale.fill_(1 / (73 * tensor.qweight.shape[1] ** 0.5))
            else:
                tensor.fill_(1.0)
        return weights


def synthetic_engine(shape: dict[str, Any], config: EngineConfig, num_kv_tokens: int) -> Engine:
    """An engine of this shape, all resident."""
    num_threads = config.num_threads or num_physical_cores()
    family_type = find_family(shape)
    spec = family_type.read_spec(shape)
    store: Any = RandomStore(family_type.model_tensors(spec))
    streamer = LayerStreamer(store, StoreReader(store), frozenset(range(store.num_layers)), 0)
    streamer.wait_until_loaded()
    num_blocks = -(-num_kv_tokens // config.block_size)
    pool = MemoryPool("KV cache", num_blocks * config.block_size * spec.kv_bytes_per_token())
    cache = KVCache(spec, num_blocks, config.block_size, torch.float16, pool)
    kernels = choose_kernels(config, num_threads)
    torch.set_num_threads(1 if kernels.name == "native" else num_threads)  # as Engine.load has it
    family = family_type(spec, kernels, spec.max_position_embeddings)
    executor = Executor(
        family,
        store.read_resident(store.tensors.embedding),
        store.read_resident(store.tensors.head),
        streamer,
        cache,
        max_rows=config.max_num_seqs,
    )
    blocks = BlockManager(num_blocks, config.block_size, enable_prefix_caching=False)
    return Engine(spec, NoText(), executor, blocks, streamer, spec.max_position_embeddings, config)


def step_weight_bytes(engine: Engine) -> int:
    """Bytes of weights that a step reads: all layers and the head, but only rows of the embedding."""
    layers = sum(layout.num_bytes for layout in engine.streamer.store.layouts)
    return layers + LayerLayout.of(engine.streamer.store.tensors.head).num_bytes
