"""CompressedAttention: DeepSeek V4's attention to a window of the last tokens, and to entries that stand
for several tokens each.

A token has one row, which is key and value of all heads. An entry is the sum of other rows of a group of
tokens, with weights that a softmax over the group makes for each channel. It is kept beside the row of the
group's last token. In some layers groups follow each other, and a token attends to all entries of whole
groups (HCA); in others an entry also has rows of the group before, and an indexer chooses the entries (CSA).
Values are turned by rope as keys are; so the output is turned back.

The rows of a group that is not whole yet are a recurrent state: chunks, guesses, preemptions and the prefix
cache treat it as they do others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels import AttentionSpec, BatchLayout, LayerKV
from penstock.kernels.head_blocks import HeadBlocks
from penstock.kernels.recurrent.plain import state_runs
from penstock.model.architecture import linear_tensors
from penstock.model.attention.chosen_keys import attend_rows, best, in_slices, read_rows, write_part
from penstock.model.attention.indexer import index_scores
from penstock.model.family import Family
from penstock.model.recurrent.form import in_order
from penstock.spec import ModelSpec
from penstock.state_layout import NO_STATE, StateLayout, StatePart
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class Groups:
    """How a layer makes entries."""

    #: Tokens of a group.
    size: int
    #: Entries have rows of the group before, too, and an indexer chooses among them.
    overlaps: bool

    @property
    def num_rows(self) -> int:
        """Tokens that an entry is made of."""
        return self.size * (2 if self.overlaps else 1)


@dataclass(frozen=True)
class CompressedAttention:
    """The sizes of a model."""

    window: int
    #: Per layer; None: the layer attends to the window alone.
    groups: tuple[Groups | None, ...]
    head_dim: int
    #: Rope turns the last dimensions of a row.
    rope_dim: int
    query_rank: int
    #: The heads' outputs are projected in so many groups, each to so many numbers.
    num_outputs: int
    output_rank: int
    num_index_heads: int
    index_dim: int
    #: Entries that an indexer chooses.
    num_chosen: int

    def state_layout(self, index: int) -> StateLayout:
        groups = self.groups[index]
        if groups is None:
            return NO_STATE
        width = self._row_width(groups)
        return StateLayout((StatePart("rows", (groups.num_rows - 1, width), fed=((width,),)),))

    def _row_width(self, groups: Groups) -> int:
        """Numbers of a token's row from which entries are made: rows and logits, of each series, and then
        those of the indexer."""
        return 4 * (self.head_dim + self.index_dim) if groups.overlaps else 2 * self.head_dim

    def tensors(self, spec: ModelSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        hidden, heads, dim = spec.hidden_size, spec.num_heads, self.head_dim

        def matrix(name: str, rows: int, inputs: int, *parts: str) -> tuple[TensorSpec, ...]:
            return linear_tensors(name, (rows, inputs), tuple(map(prefix.__add__, parts)), has_bias=False)

        def exact(name: str, shape: tuple[int, ...], part: str) -> TensorSpec:
            return TensorSpec(name, shape, (prefix + part,))

        (blocks,) = matrix(
            "o_a", self.num_outputs * self.output_rank, heads * dim // self.num_outputs, "wo_a"
        )
        found = (
            *matrix("q_a", self.query_rank, hidden, "wq_a"),
            exact("q_a_norm", (self.query_rank,), "q_norm.weight"),
            *matrix("q", heads * dim, self.query_rank, "wq_b"),
            *matrix("kv_a", dim, hidden, "wkv"),
            exact("kv_a_norm", (dim,), "norm.weight"),
            exact("sinks", (heads,), "attn_sink"),
            replace(blocks, is_whole=True),
            *matrix("o", hidden, self.num_outputs * self.output_rank, "wo_b"),
        )
        groups = self.groups[index]
        if groups is None:
            return found
        own, series = "compressor.", 2 if groups.overlaps else 1
        parts: tuple[str, ...] = (f"{own}wkv", f"{own}wgate")
        found += (
            exact("entry_bias", (groups.size, series * dim), f"{own}ape"),
            exact("entry_norm", (dim,), f"{own}norm.weight"),
        )
        if not groups.overlaps:
            return (*found, *matrix("entries", self._row_width(groups), hidden, *parts))
        parts += (f"indexer.{own}wkv", f"indexer.{own}wgate")
        index_rows = self.num_index_heads * self.index_dim
        return (
            *found,
            *matrix("entries", self._row_width(groups), hidden, *parts),
            exact("index_bias", (groups.size, 2 * self.index_dim), f"indexer.{own}ape"),
            exact("index_norm", (self.index_dim,), f"indexer.{own}norm.weight"),
            *matrix("index_q", index_rows, self.query_rank, "indexer.wq_b"),
            # A small error of a weight may choose another entry.
            exact("index_weights", (self.num_index_heads, hidden), "indexer.weights_proj.weight"),
        )

    def attend(
        self,
        family: Family,
        index: int,
        weights: LayerWeights,
        x: Tensor,
        kv: LayerKV,
        batch: BatchLayout,
    ) -> Tensor:
        """Self-attention of normed x [num_tokens, hidden_size], with the output projection."""
        kernels, eps, rope = family.kernels, family.spec.norm_eps, family.ropes[index]
        assert rope is not None
        cos, sin = rope.at(batch)
        latent = kernels.rms_norm(family.project(weights, "q_a", x), weights.vector("q_a_norm"), eps)
        q = family.project(weights, "q", latent).view(len(x), -1, self.head_dim)
        q = self._turned(family, kernels.rms_norm(q, q.new_ones(self.head_dim), eps), cos, sin)
        row = kernels.rms_norm(family.project(weights, "kv_a", x), weights.vector("kv_a_norm"), eps)
        row = self._turned(family, row[:, None], cos, sin)
        batch.write_kv(kernels, row, row, kv)
        spec = replace(family.attentions[index], sinks=weights.vector("sinks"))
        groups = self.groups[index]
        if groups is None:
            mixed = kernels.paged_attention(q, kv, batch, replace(spec, window=self.window))
        else:
            self._write_entries(family, index, weights, x, kv, batch)
            found = _Entries(self, groups, family, kv, batch)
            if groups.overlaps:
                found.ask(weights, x, self._index_queries(family, weights, latent, cos, sin))
            mixed = found.attend(q, spec)
        mixed = mixed.view(len(x), -1, self.head_dim)
        mixed = self._turned(family, mixed, cos, -sin).flatten(1)
        blocks = HeadBlocks(weights.matrix("o_a"), self.num_outputs, 0, self.output_rank)
        return family.project(weights, "o", kernels.linear(mixed, blocks))

    def _turned(self, family: Family, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [num_tokens, num_heads, dim] with the last dimensions turned."""
        border = x.shape[-1] - self.rope_dim
        tail = x[..., border:].contiguous()
        family.kernels.rope(tail, cos.contiguous(), sin.contiguous(), True)
        return torch.cat((x[..., :border], tail), dim=-1)

    def _index_queries(
        self, family: Family, weights: LayerWeights, latent: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        q = family.project(weights, "index_q", latent)
        return self._turned(family, q.view(len(q), self.num_index_heads, self.index_dim), cos, sin)

    # ---- entries

    def _write_entries(
        self,
        family: Family,
        index: int,
        weights: LayerWeights,
        x: Tensor,
        kv: LayerKV,
        batch: BatchLayout,
    ) -> None:
        """Write the entries of the groups that end in the step beside the rows of their last tokens."""
        groups = self.groups[index]
        assert groups is not None
        fed = family.project(weights, "entries", x)

        def compute(rows: Sequence[Tensor], states: Tensor, layout: BatchLayout) -> Tensor:
            return self._entries(family, index, weights, rows[0], states, layout)

        entries = in_order((fed,), 0, kv, batch, compute)
        is_end = (batch.positions + 1) % groups.size == 0
        write_part(batch, kv, 1, entries[:, : self.head_dim], is_end)
        if groups.overlaps:
            write_part(batch, kv, 2, entries[:, self.head_dim :], is_end)

    def _entries(
        self,
        family: Family,
        index: int,
        weights: LayerWeights,
        rows: Tensor,
        states: Tensor,
        layout: BatchLayout,
    ) -> Tensor:
        """The entry that ends with each row, and the indexer's; zeros where none does: [num_rows, head_dim +
        index_dim]. Brings the states up to date."""
        groups = self.groups[index]
        assert groups is not None
        y, width = rows.new_zeros(len(rows), self.head_dim + self.index_dim), groups.num_rows
        for run in state_runs(layout):
            start, number = run.rows.start, len(run.rows)
            known = torch.cat((run.state(states), rows[start : run.rows.stop]))
            lengths = range(run.past + 1, run.past + number + 1)
            # A step that measures memory replays a token that was never computed.
            ends = [row for row, length in enumerate(lengths) if length > 0 and length % groups.size == 0]
            for row, slot in run.saves.items():
                states[slot] = known[row - start + 1 : row - start + width]
            states[run.slot] = known[number:]
            if ends:
                windows = torch.stack([known[row : row + width] for row in ends])
                first = torch.tensor([run.past + row + 1 - groups.size for row in ends], device=rows.device)
                entries = self._summed(family, index, weights, windows, first)
                y[start + ends[0] : run.rows.stop : groups.size] = entries
        return y

    def _summed(
        self, family: Family, index: int, weights: LayerWeights, windows: Tensor, first: Tensor
    ) -> Tensor:
        """Entries of windows [num_entries, num_rows, row width], whose groups begin at positions `first`."""
        groups, rope = self.groups[index], family.ropes[index]
        assert groups is not None and rope is not None
        cos, sin = rope.of(first)
        names, sizes = [("entry", self.head_dim)], [2 * self.head_dim]
        if groups.overlaps:
            names, sizes = [*names, ("index", self.index_dim)], [4 * self.head_dim, 4 * self.index_dim]
        found = []
        for (name, dim), own in zip(names, windows.split_with_sizes(sizes, dim=2), strict=True):
            values, logits = own.double().chunk(2, dim=2)
            bias = weights.vector(f"{name}_bias").double()
            if groups.overlaps:  # the first series of the group before, and the second of its own
                size = groups.size
                values = torch.cat((values[:, :size, :dim], values[:, size:, dim:]), dim=1)
                before = logits[:, :size, :dim] + bias[:, :dim]
                before = before.masked_fill((first == 0)[:, None, None], -torch.inf)
                logits = torch.cat((before, logits[:, size:, dim:] + bias[:, dim:]), dim=1)
            else:
                logits = logits + bias
            total = (values * logits.softmax(1)).sum(1).float()
            normed = family.kernels.rms_norm(total, weights.vector(f"{name}_norm"), family.spec.norm_eps)
            found.append(self._turned(family, normed[:, None], cos, sin)[:, 0])
        if not groups.overlaps:
            found.append(windows.new_zeros(len(windows), self.index_dim))
        return torch.cat(found, dim=1)


class _Entries:
    """A layer's attention to the window and to entries, for the tokens of a step."""

    def __init__(
        self, form: CompressedAttention, groups: Groups, family: Family, kv: LayerKV, batch: BatchLayout
    ) -> None:
        self._form, self._groups, self._family, self._kv, self._batch = form, groups, family, kv, batch
        self._queries: tuple[Tensor, Tensor] | None = None

    def ask(self, weights: LayerWeights, x: Tensor, q: Tensor) -> None:
        """Let an indexer with queries [num_tokens, num_index_heads, index_dim] choose."""
        factor = (self._form.num_index_heads * self._form.index_dim) ** -0.5
        of_heads = self._family.kernels.router_scores(x, weights.vector("index_weights"), None, "none")
        self._queries = q, of_heads * factor

    def attend(self, q: Tensor, spec: AttentionSpec) -> Tensor:
        """q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""
        y, batch = q.new_empty(len(q), q.shape[1] * q.shape[2]), self._batch
        starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
        for seq, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
            table, shift = batch.block_tables[seq], lengths[seq] - end
            for rows in self._alike(start, end, shift):
                positions = torch.arange(rows.start + shift, rows.stop + shift, device=q.device)
                keys, counts = self._keys(table, positions, rows)
                y[rows.start : rows.stop] = attend_rows(
                    self._family.kernels, q[rows.start : rows.stop], keys, self._kv, spec, counts
                )
        return y

    def _alike(self, start: int, end: int, shift: int) -> list[range]:
        """The rows in slices, each of rows that see equally many tokens of the window, and that choose among
        entries or attend to all of them."""
        form, size, found = self._form, self._groups.size, []
        whole = max(start, min(end, form.window - 1 - shift))
        found += [range(row, row + 1) for row in range(start, whole)]
        most = form.num_chosen * size + size - 1 - shift if self._groups.overlaps else end
        border = max(whole, min(end, most))
        for first, stop in ((whole, border), (border, end)):
            width = form.window + (form.num_chosen if first == border else (stop + shift) // size)
            rows = torch.arange(first, stop)
            found += [
                range(first + i, first + i + len(own)) for i, own in in_slices(rows, width * form.head_dim)
            ]
        return found

    def _keys(self, table: Tensor, positions: Tensor, rows: range) -> tuple[Tensor, Tensor]:
        """The keys of tokens at positions that follow each other [num_tokens, num_keys, head_dim], and how
        many each token has."""
        form, size, kv = self._form, self._groups.size, self._kv
        num_last = min(form.window, int(positions[0]) + 1)
        last = positions[:, None] + torch.arange(1 - num_last, 1, device=positions.device)
        closed = (positions + 1) // size
        if self._groups.overlaps and int(closed[0]) > form.num_chosen:
            chosen = self._chosen(table, closed, rows)
            counts = torch.full_like(closed, form.num_chosen)
        else:
            chosen = torch.arange(int(closed[-1]), device=positions.device).expand(len(positions), -1)
            counts = closed
        keys = [read_rows(kv.parts[0][:, 0], table, last)]
        if chosen.shape[1]:
            keys.append(read_rows(kv.parts[1], table, (chosen + 1) * size - 1))
        return torch.cat(keys, dim=1), counts + num_last

    def _chosen(self, table: Tensor, closed: Tensor, rows: range) -> Tensor:
        assert self._queries is not None
        q, of_heads = (each[rows.start : rows.stop] for each in self._queries)
        places = (torch.arange(int(closed[-1]), device=closed.device) + 1) * self._groups.size - 1
        kernels = self._family.kernels
        scores = index_scores(kernels, q.contiguous(), of_heads, self._kv.parts[2], table, places)
        return best(scores, closed, self._form.num_chosen)
