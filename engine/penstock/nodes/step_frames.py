"""A step as a frame: where the tokens' keys and values lie, and the hidden states that the layers before have
made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.generation.model_inputs import ModelInputs
from penstock.kernels import BatchLayout
from penstock.nodes.wire.frames import Frame, Kind, WireError

#: The parts of a BatchLayout that travel. Arrays with 8 bytes an element come first.
_LAYOUT = (
    *("positions", "slot_mapping", "rope_lengths", "copied_rows", "copied_slots"),
    *("block_tables", "query_start", "context_lens", "prefix_lens"),
)
_DTYPES = {
    **dict.fromkeys((*_LAYOUT[:5], "wanted_rows", "block_copies"), torch.int64),
    **dict.fromkeys(_LAYOUT[5:], torch.int32),
    "hidden": torch.float32,
}
_OPTIONAL = frozenset({"rope_lengths", "copied_rows", "copied_slots", "prefix_lens"})


def step_frame(number: int, inputs: ModelInputs, hidden: Tensor, returns_all: bool) -> Frame:
    """For the machine with the next layers. `returns_all`: it gives the hidden states of all tokens, which
    other layers follow; else those of the wanted rows."""
    arrays = {name: value for name in _LAYOUT[:5] if (value := getattr(inputs.layout, name)) is not None}
    if not returns_all:
        arrays["wanted_rows"] = inputs.wanted_rows
    if inputs.block_copies:
        arrays["block_copies"] = torch.tensor(inputs.block_copies)
    arrays |= {name: value for name in _LAYOUT[5:] if (value := getattr(inputs.layout, name)) is not None}
    return Frame(Kind.STEP, {"number": number}, arrays | {"hidden": hidden})


def read_step(
    frame: Frame, num_blocks: int, block_size: int
) -> tuple[int, ModelInputs, Tensor, Tensor | None]:
    """The step's number, its inputs, the hidden states, and the rows that are wanted (None: all). Raises
    WireError for a step that would touch memory beyond the KV cache."""
    arrays, number = frame.arrays, frame.fields.get("number")
    missing = {*_LAYOUT, "hidden"} - _OPTIONAL - arrays.keys()
    if type(number) is not int or missing:
        raise WireError(f"a step lacks {', '.join(sorted(missing)) or 'its number'}")
    if any(_DTYPES.get(name) != array.dtype for name, array in arrays.items()):
        raise WireError("a step has arrays that no step has")
    parts: dict[str, Any] = {name: arrays[name] for name in _LAYOUT if name in arrays}
    layout = BatchLayout(**parts)
    hidden, wanted, num_tokens = arrays["hidden"], arrays.get("wanted_rows"), layout.num_tokens
    copies = arrays.get("block_copies", torch.empty(0, 2, dtype=torch.int64))
    bounds = (
        (layout.slot_mapping, num_blocks * block_size),
        (layout.copied_slots, num_blocks * block_size),
        (layout.block_tables, num_blocks),
        (copies, num_blocks),
        (wanted, num_tokens),
        (layout.copied_rows, num_tokens),
        (layout.query_start, num_tokens + 1),
        (layout.context_lens, num_blocks * block_size + 1),
    )
    for values, end in bounds:
        if values is not None and values.numel() and not 0 <= int(values.min()) <= int(values.max()) < end:
            raise WireError("a step points beyond what there is")
    if hidden.dim() != 2 or len(hidden) != num_tokens or not _fits(layout, block_size):
        raise WireError("the parts of a step don't fit together")
    pairs = tuple((int(source), int(target)) for source, target in copies.tolist())
    inputs = ModelInputs(torch.empty(0, dtype=torch.int64), torch.empty(0), layout, pairs)
    return number, inputs, hidden, wanted


def _fits(layout: BatchLayout, block_size: int) -> bool:
    """Whether a layout's arrays have each other's sizes, so that kernels read nothing behind their ends."""
    num_tokens, num_seqs = layout.num_tokens, layout.num_seqs
    optional = (layout.rope_lengths, num_tokens), (layout.prefix_lens, num_seqs)
    copies = [0 if each is None else each.numel() for each in (layout.copied_rows, layout.copied_slots)]
    starts, tables = layout.query_start, layout.block_tables
    sizes_fit = (
        tables.dim() == 2 and len(tables) == num_seqs and starts.shape == (num_seqs + 1,)
        and layout.context_lens.dim() == 1 and layout.slot_mapping.shape == (num_tokens,)
        and all(each is None or each.shape == (size,) for each, size in optional) and copies[0] == copies[1]
    )  # fmt: skip
    if not sizes_fit:
        return False
    num_new, known = starts.diff(), layout.context_lens
    prefixes = known if layout.prefix_lens is None else layout.prefix_lens
    return (
        int(starts[0]) == 0
        and int(starts[-1]) == num_tokens
        and bool((num_new >= 0).all() and (num_new <= known).all() and (prefixes <= known).all())
        and bool((known <= tables.shape[1] * block_size).all())
    )


def step_bytes(num_tokens: int, num_seqs: int, num_blocks: int, row_size: int) -> int:
    """The most that the arrays of a step take: each token may be a run of its own (a branch of guesses)."""
    rows = num_tokens + num_seqs
    longest = min(num_blocks, 1 << 20)
    return rows * (4 * row_size + 6 * 8) + rows * (4 * longest + 16) + 16 * num_blocks + (1 << 16)
