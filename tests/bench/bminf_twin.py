"""BMInf's way of decoding with a card that holds a part of the layers, done again in plain torch, to stand
beside `penstock bench --device-memory`.

The layers that a card keeps are spread evenly over the model; the others lie in pinned memory, and a stream
of its own copies each of them into one of two buffers while the layers before it are computed. Weights are
INT8 with a scale for each output channel, activations are rounded to INT8 with a scale for each token, and
all else is float16. Weights are random. That a copy never overtakes a use, nor a use a copy, is checked: the
same tokens come out if every copy is waited for. The link's own rate, by copies of a layer, stands beside.

    .venv/bin/python tests/bench/bminf_twin.py --shape solar-10.7b --device-memory 6GiB --sequences 1 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.model.known_shapes import find_shape
from penstock_server.settings.values import parse_bytes

CONTEXT, MAX_TOKENS, NUM_STEPS = 16, 64, 5
#: torch's INT8 product takes no fewer rows.
LEAST_ROWS = 32
#: Of the card, for what is neither weights nor keys and values.
WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Sizes:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int

    @classmethod
    def of(cls, shape: dict[str, Any]) -> Sizes:
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        return cls(*(shape[name] for name in names), shape["num_hidden_layers"], shape["vocab_size"])

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(out_features, in_features) of a layer."""
        kv = self.kv_heads * self.head_dim
        return (
            (self.hidden + 2 * kv, self.hidden), (self.hidden, self.hidden),
            (2 * self.inner, self.hidden), (self.hidden, self.inner),
        )  # fmt: skip

    @property
    def layer_bytes(self) -> int:
        return sum(rows * columns + 4 * rows for rows, columns in self.matrices)


def views(layer: Tensor, sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """Weights and scales of the matrices that lie in a layer's memory, uint8 [layer_bytes]."""
    found, first = [], 0
    for rows, columns in sizes.matrices:
        end = first + rows * columns
        weight, scale = layer[first:end].view(torch.int8), layer[end : end + 4 * rows].view(torch.float32)
        found.append((weight.view(rows, columns), scale))
        first = end + 4 * rows
    return found


def product(x: Tensor, matrix: tuple[Tensor, Tensor]) -> Tensor:
    """float16 [num_tokens, in_features] to [num_tokens, out_features]."""
    weight, scale = matrix
    steps = x.abs().amax(1, keepdim=True).float().clamp_min(1e-6) / 127
    codes = torch.zeros(max(LEAST_ROWS, x.shape[0]), x.shape[1], dtype=torch.int8, device=x.device)
    codes[: x.shape[0]] = (x / steps).round()
    sums = torch._int_mm(codes, weight.t())[: x.shape[0]]
    return (sums.float() * steps * scale).half()


class Model:
    """Keys and values: float16 [layers, 2, num_seqs, MAX_TOKENS, kv_heads, head_dim]."""

    def __init__(self, sizes: Sizes, device_bytes: int, num_seqs: int) -> None:
        self.sizes, self.num_seqs, self.position = sizes, num_seqs, 0
        torch.manual_seed(0)
        make = lambda *size: torch.randn(*size, device="cuda", dtype=torch.float16)  # noqa: E731
        self.embedding = make(sizes.vocab, sizes.hidden)
        self.head = self.embedding * 0.02
        self.cache = make(sizes.layers, 2, num_seqs, MAX_TOKENS, sizes.kv_heads, sizes.head_dim)
        others = (self.embedding, self.head, self.cache)
        used = WORKSPACE_BYTES + sum(each.numel() * 2 for each in others) + 2 * sizes.layer_bytes
        num_kept = min(sizes.layers, max(0, (device_bytes - used) // sizes.layer_bytes))
        places = {index * sizes.layers // num_kept for index in range(num_kept)}
        self.kept = {index: self._layer(index) for index in sorted(places)}
        self.pinned = [
            None if index in places else self._layer(index).cpu().pin_memory()
            for index in range(sizes.layers)
        ]
        self.buffers = [torch.zeros(sizes.layer_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self.stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.arrived, self.used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))  # type: ignore
        self.streamed = [index for index in range(sizes.layers) if index not in self.kept]
        self.num_copied = self.num_used = 0
        self.is_patient = False
        for _ in range(2):
            self.copy_next()

    def _layer(self, index: int) -> Tensor:
        layer = torch.empty(self.sizes.layer_bytes, dtype=torch.uint8, device="cuda")
        generator = torch.Generator("cuda").manual_seed(index)
        for weight, scale in views(layer, self.sizes):
            weight.random_(-127, 128, generator=generator)
            scale.fill_(weight.shape[1] ** -0.5 / 73)
        return layer

    def copy_next(self) -> None:
        """Of the layers that are streamed, in a circle."""
        if not self.streamed:
            return
        slot = self.num_copied % 2
        source = self.pinned[self.streamed[self.num_copied % len(self.streamed)]]
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.used[slot])
            self.buffers[slot].copy_(source, non_blocking=True)
            self.arrived[slot].record(self.stream)
        self.num_copied += 1
        if self.is_patient:
            torch.cuda.synchronize()

    def step(self, tokens: Tensor) -> Tensor:
        """int64 [num_seqs] to the likeliest next ones."""
        x = self.embedding[tokens]
        for index in range(self.sizes.layers):
            if index in self.kept:
                x = self.layer(x, views(self.kept[index], self.sizes), index)
                continue
            slot = self.num_used % 2
            torch.cuda.current_stream().wait_event(self.arrived[slot])
            x = self.layer(x, views(self.buffers[slot], self.sizes), index)
            self.used[slot].record()
            self.num_used += 1
            self.copy_next()
        self.position += 1
        return (norm(x) @ self.head.t()).argmax(1)

    def layer(self, x: Tensor, matrices: list[tuple[Tensor, Tensor]], index: int) -> Tensor:
        sizes, (keys, values) = self.sizes, self.cache[index]
        split = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        heads = product(norm(x), matrices[0]).view(self.num_seqs, -1, sizes.head_dim)
        q, k, v = heads.split(split, dim=1)
        q, keys[:, self.position], values[:, self.position] = self.turn(q), self.turn(k), v
        end = self.position + 1
        mixed = functional.scaled_dot_product_attention(
            q.unsqueeze(2), *(each[:, :end].transpose(1, 2) for each in (keys, values)), enable_gqa=True
        )
        x = x + product(mixed.reshape(self.num_seqs, -1), matrices[1])
        gate, up = product(norm(x), matrices[2]).chunk(2, dim=1)
        return x + product(functional.silu(gate) * up, matrices[3])

    def turn(self, heads: Tensor) -> Tensor:
        """Rotary positions."""
        half = self.sizes.head_dim // 2
        angles = self.position * 1e4 ** (-torch.arange(half, device="cuda") / half)
        cos, sin = angles.cos().half(), angles.sin().half()
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[1:], eps=1e-5)


def link_gbps(model: Model) -> float:
    """Of copies of one layer, of which nothing else is done meanwhile."""
    source = model.pinned[model.streamed[0]]
    target = torch.empty_like(source, device="cuda")
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return float(target.numel()) / statistics.median(times[1:]) / 1e9


def decode(model: Model, num_steps: int) -> tuple[list[list[int]], list[float]]:
    """Each step's tokens and seconds."""
    model.position, times = 0, list[float]()
    found = list[list[int]]()
    tokens = torch.arange(model.num_seqs, device="cuda") + 2
    for _ in range(num_steps):
        started = time.perf_counter()
        tokens = model.step(tokens)
        found.append(tokens.tolist())
        times.append(time.perf_counter() - started)
    return found, times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="solar-10.7b")
    parser.add_argument("--device-memory", type=parse_bytes, default=6 << 30)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    sizes = Sizes.of(find_shape(options.shape))
    results = []
    for num_seqs in options.sequences:
        torch.cuda.reset_peak_memory_stats()
        model = Model(sizes, options.device_memory, num_seqs)
        tokens, times = decode(model, CONTEXT + NUM_STEPS)
        model.is_patient = True
        assert decode(model, CONTEXT)[0] == tokens[:CONTEXT], "a copy overtook a use"
        seconds = statistics.median(times[CONTEXT:])
        num_bytes = len(model.streamed) * sizes.layer_bytes
        link = link_gbps(model) if model.streamed else 0.0
        results.append(
            {"num_seqs": num_seqs, "seconds": seconds, "streamed_bytes": num_bytes, "link_gbps": link}
        )
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"{num_seqs} sequences: {seconds * 1e3:.1f} ms a step, {num_seqs / seconds:.2f} tokens/s; "
            f"{len(model.kept)} layers kept, {num_bytes / 1e9:.2f} GB copied at "
            f"{num_bytes / seconds / 1e9:.1f} GB/s (the link alone: {link:.1f}); peak {peak:.2f} GiB"
        )
        del model
        torch.cuda.empty_cache()
    print(json.dumps({"bench": "bminf_twin", "shape": options.shape, "steps": results}))


if __name__ == "__main__":
    main()
