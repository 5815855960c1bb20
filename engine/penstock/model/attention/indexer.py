"""Indexer: DeepSeek's lightning indexer (DSA, arXiv 2512.02556), which chooses the keys that each token
attends to. It has a narrow key of each token in the cache, beside the token's latent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels import BatchLayout, Kernels, LayerKV
from penstock.model.architecture import layer_norm_tensors, linear_tensors
from penstock.model.attention.chosen_keys import MOST_NUMBERS, PIECE, Chosen, best, read_rows, write_part
from penstock.model.family import Family
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: Of the norm of keys.
KEY_EPS = 1e-6
#: Under which a layer's choice is among BatchLayout.notes, for layers that have none of their own.
_CHOICE = "chosen keys"


@dataclass(frozen=True)
class Indexer:
    """A key's score for a query is the sum over heads of weight * relu(q . k): the weights follow from the
    query's hidden state, and all heads share the keys. A token attends to the `num_chosen` keys of the
    highest scores. The reference turns q and k by a Hadamard matrix, which changes no product, and rounds
    both to FP8; neither is done here."""

    num_heads: int
    head_dim: int
    num_chosen: int
    #: Rope turns pairs of neighbours among the first dimensions, otherwise the two halves of these.
    is_interleaved: bool = False
    #: Layers that take the choice of the last layer before that has one.
    shared: frozenset[int] = frozenset()

    def tensors(self, spec: ModelSpec, query_rank: int, prefix: str) -> tuple[TensorSpec, ...]:
        """The tensors of a layer that is not `shared`, whose names begin with `prefix`."""
        part, hidden = f"{prefix}indexer.", spec.hidden_size
        rows = self.num_heads * self.head_dim
        return (
            *linear_tensors("index_q", (rows, query_rank), (f"{part}wq_b",), has_bias=False),
            *linear_tensors("index_k", (self.head_dim, hidden), (f"{part}wk",), has_bias=False),
            *layer_norm_tensors("index_norm", self.head_dim, f"{part}k_norm"),
            # A small error of a weight may choose another key.
            TensorSpec("index_weights", (self.num_heads, hidden), (f"{part}weights_proj.weight",)),
        )

    def choose(
        self,
        family: Family,
        index: int,
        weights: LayerWeights,
        x: Tensor,
        latent: Tensor,
        kv: LayerKV,
        batch: BatchLayout,
    ) -> list[Chosen]:
        """The keys of those tokens that see more than num_chosen, by normed x [num_tokens, hidden_size] and
        the latent of their queries [num_tokens, query_rank]. Writes the keys of the step's tokens."""
        if index in self.shared:
            return list(batch.notes[_CHOICE])
        kernels, rope = family.kernels, family.ropes[index]
        q = family.project(weights, "index_q", latent).view(len(x), self.num_heads, self.head_dim)
        k = family.project(weights, "index_k", x)
        k = kernels.layer_norm(k, weights.vector("index_norm"), weights.vector("index_norm.bias"), KEY_EPS)
        k = k[:, None]
        if rope is not None:
            cos, sin = rope.at(batch)
            kernels.rope(q, cos, sin, self.is_interleaved)
            kernels.rope(k, cos, sin, self.is_interleaved)
        write_part(batch, kv, -1, k[:, 0])
        # The factors of both are in the weights: relu(s x) = s relu(x).
        factor = (self.num_heads * self.head_dim) ** -0.5
        of_heads = kernels.router_scores(x, weights.vector("index_weights"), None, "none") * factor
        starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
        found = []
        for seq, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
            past = lengths[seq] - (end - start)
            first = start + min(max(0, self.num_chosen - past), end - start)
            if first < end:
                rows, table = slice(first, end), batch.block_tables[seq]
                chosen = self._best(
                    kernels, q[rows], of_heads[rows], kv.parts[-1], table, past + first - start
                )
                found.append(Chosen(seq, first, end, chosen))
        batch.notes[_CHOICE] = found
        return found

    def _best(
        self, kernels: Kernels, q: Tensor, of_heads: Tensor, part: Tensor, table: Tensor, first: int
    ) -> Tensor:
        """The positions of the keys of tokens that follow each other from the position `first` on."""
        step, chosen = max(1, MOST_NUMBERS // (PIECE * self.num_heads)), []
        for start in range(0, len(q), step):
            own, weight = q[start : start + step], of_heads[start : start + step]
            seen = torch.arange(first + start + 1, first + start + len(own) + 1, device=q.device)
            keys = torch.arange(first + start + len(own), device=q.device)
            scores = index_scores(kernels, own, weight, part, table, keys)
            chosen.append(best(scores, seen, self.num_chosen))
        return torch.cat(chosen)


def index_scores(
    kernels: Kernels, q: Tensor, of_heads: Tensor, part: Tensor, table: Tensor, positions: Tensor
) -> Tensor:
    """The scores of a sequence's keys at positions [num_keys] for queries [num_tokens, num_heads, dim] with
    weights of their heads [num_tokens, num_heads]: float32 [num_tokens, num_keys]. Kernels of routers
    multiply: a product of theirs has the same bits in any company."""
    num_tokens, num_heads, dim = q.shape
    scores = q.new_empty(num_tokens, len(positions))
    for first in range(0, len(positions), PIECE):
        places = positions[first : first + PIECE]
        keys = read_rows(part, table, places).float().contiguous()
        products = kernels.router_scores(q.reshape(-1, dim), keys, None, "none").relu_()
        products = products.view(num_tokens, num_heads, -1)
        for token in range(num_tokens):
            turned = products[token].t().contiguous()
            own = kernels.router_scores(of_heads[token : token + 1].contiguous(), turned, None, "none")
            scores[token, first : first + len(places)] = own[0]
    return scores
