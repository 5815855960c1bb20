"""CudaAttention: attention on a GPU, by whichever kernel suits the heads' dimensions."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels import reference
from penstock.kernels.cuda.launcher import HEIGHTS, Launcher, ceil_div
from penstock.kernels.operands import AttentionSpec, BatchLayout, DistanceBias, LayerKV
from penstock.kernels.shared.attended import AttentionBeside
from penstock.spec import INT8

#: Threads of a block of attention, by the same numbers of dimensions as HEIGHTS.
ATTENTION_THREADS = {64: 256, 128: 256, 256: 128}
#: Keys of one partial result, as in attention.cu.
SPLIT_KEYS = 256
#: The most memory for partial results: with more of them there are rows enough to keep a GPU busy.
MAX_PARTIAL_BYTES = 16 << 20
#: Of attention_latent.cu: rows and threads of a block, dimensions of a row of the cache, and of its value.
LATENT_HEIGHT, LATENT_THREADS, MAX_ROW, MAX_LATENT = 8, 256, 640, 512


class CudaAttention:
    """A row is one head's query of one token. A block of threads computes some rows of one sequence."""

    def __init__(self, launcher: Launcher, beside: AttentionBeside | None = None) -> None:
        """`beside` attends to the splits of BatchLayout.in_ram."""
        self._launcher = launcher
        self._beside = beside

    def mix(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        """Kernels.paged_attention()."""
        head_dim = q.shape[2]
        assert q.stride()[1:] == (head_dim, 1)
        if kv.plain[2] is None:
            is_wide = head_dim > MAX_ROW or spec.latent_dim > MAX_LATENT
            mix = reference.paged_attention if is_wide or spec.has_biases else self._mix_latents
            return mix(q, kv, batch, spec)
        if head_dim > max(HEIGHTS):  # a rare shape, not worth a kernel
            return reference.paged_attention(q, kv, batch, spec)
        return self._mix_heads(q, kv, batch, spec)

    def _mix_heads(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        (num_tokens, num_heads, head_dim), num_seqs = q.shape, batch.num_seqs
        code, keys, values = kv.plain
        num_kv_heads, _, block_size = kv.sizes
        width = next(width for width in HEIGHTS if head_dim <= width)
        few, many = HEIGHTS[width]
        group_tokens = num_tokens * num_heads // num_kv_heads
        height = few if group_tokens <= few * num_seqs else many
        num_tiles = group_tokens // height + num_seqs
        y = q.new_empty(num_tokens, num_heads * head_dim)
        in_ram, beside = batch.in_ram, self._beside
        num_blocks = num_tiles * num_kv_heads if in_ram is None else 0
        partials, num_splits = self._partials(q, batch, block_size, head_dim, num_blocks)
        if in_ram is not None and beside is not None:
            assert partials is not None, "a step with more of them has none in RAM"
            theirs = beside.begin(q, in_ram, spec)
        self._launcher.launch(
            f"attention_{width}_{height}" + ("_int8" if kv.layout is INT8 else ""),
            (num_tiles, num_kv_heads, 1 if partials is None else num_splits), ATTENTION_THREADS[width],
            q, q.stride(0), keys, values, code,
            num_heads, num_kv_heads, head_dim, block_size, batch.block_tables, batch.block_tables.shape[1],
            batch.query_start, batch.context_lens, batch.prefix_lens, num_seqs,
            spec.scale, spec.softcap, spec.window, spec.chunk, spec.alibi_slopes,
            *_bias_arguments(spec.distance_bias), spec.sinks, y, partials, num_splits,
        )  # fmt: skip
        if in_ram is not None and beside is not None and partials is not None:
            beside.join()
            all_parts = partials.view(num_tokens, num_heads, num_splits, head_dim + 2)
            all_parts[in_ram.tokens, :, in_ram.numbers] = theirs
        self._merge(partials, num_splits, batch, spec, y, head_dim)
        return y

    def _mix_latents(self, q: Tensor, kv: LayerKV, batch: BatchLayout, spec: AttentionSpec) -> Tensor:
        (num_tokens, num_heads, head_dim), num_seqs = q.shape, batch.num_seqs
        code, rows, _ = kv.plain
        block_size, value_dim = rows.shape[3], spec.latent_dim
        num_tiles = num_tokens * num_heads // LATENT_HEIGHT + num_seqs
        y = q.new_empty(num_tokens, num_heads * value_dim)
        partials, num_splits = self._partials(q, batch, block_size, value_dim, num_tiles)
        self._launcher.launch(
            "attention_latent", (num_tiles, 1, 1 if partials is None else num_splits), LATENT_THREADS,
            q, q.stride(0), rows, code,
            num_heads, head_dim, block_size, batch.block_tables, batch.block_tables.shape[1],
            batch.query_start, batch.context_lens, batch.prefix_lens, num_seqs,
            spec.scale, spec.softcap, spec.window, spec.chunk, spec.sinks, y, partials, num_splits, value_dim,
        )  # fmt: skip
        self._merge(partials, num_splits, batch, spec, y, value_dim)
        return y

    def _partials(
        self, q: Tensor, batch: BatchLayout, block_size: int, value_dim: int, num_blocks: int
    ) -> tuple[Tensor | None, int]:
        """Room for partial results, if `num_blocks` blocks of threads leave the GPU idle; and the number of
        splits. Only the device knows where a sequence begins and how long it is. So the numbers of tiles and
        splits are upper limits, and blocks that find nothing to do end at once."""
        num_splits = ceil_div(batch.block_tables.shape[1] * block_size, SPLIT_KEYS)
        num_partials = q.shape[0] * q.shape[1] * num_splits * (value_dim + 2)
        is_idle = num_blocks < 2 * self._launcher.num_multiprocessors
        if is_idle and num_splits > 1 and num_partials * 4 <= MAX_PARTIAL_BYTES:
            return q.new_empty(num_partials), num_splits
        return None, num_splits

    def _merge(
        self, partials: Tensor | None, num_splits: int, batch: BatchLayout, spec: AttentionSpec, y: Tensor,
        value_dim: int,
    ) -> None:  # fmt: skip
        if partials is None:
            return
        width = next((width for width in HEIGHTS if value_dim <= width), max(HEIGHTS))
        self._launcher.launch(
            "merge_splits", (y.shape[0], y.shape[1] // value_dim), min(width, 128),
            partials, num_splits, y.shape[1] // value_dim, value_dim, batch.query_start, batch.context_lens,
            batch.prefix_lens, batch.num_seqs, spec.window, spec.chunk, spec.sinks, y,
        )  # fmt: skip


def _bias_arguments(bias: DistanceBias | None) -> tuple[Tensor | None, int, int, Tensor | None]:
    """What the attention kernels take of a bias."""
    return (None, 0, 0, None) if bias is None else (bias.table, bias.max_distance, bias.boundary, bias.across)
