"""GGUF files of known shapes with random weights, for llama.cpp: Llama, and Qwen3 with experts. As much disk
as the shape has parameters. Needs `pip install gguf`.

Scales have both signs, so that the weights have no mean, and the outputs of attention are small: a token's
hidden state, which its routers see, is then mostly its own, and hardly that of the tokens before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy

from penstock.model.known_shapes import find_shape

SHAPES = Path.home() / ".cache" / "penstock" / "shapes"
#: Bytes of a block of 32 weights: a float16 scale, and integers of 8 or 4 bits. The spread of the integers.
BLOCK_BYTES, SPREAD = {"Q8_0": 34, "Q4_0": 18}, {"Q8_0": 73, "Q4_0": 4.6}
ATTENTION_GAIN = 0.1
#: Norms of a router's rows, by the rank r of their experts: (r + 2) ** -exponent. A token's scores are then
#: normal numbers that are so large. With 128 experts of which a token chooses 8, a cache of the last used
#: experts hits 75, 78 and 81% with room for 28, 30 and 32% of them; by the usual popularity of
#: penstock/memory/planning/popularity.py it hits 77, 78 and 80%.
NORM_EXPONENTS = {"usual": 0.72, "uniform": 0.0}


class RandomFile:
    """A file that is being written. Its matrices are pieces of a stock of random blocks, each from another
    place on: drawing each anew would take longer than writing them. Each width has a stock of its own."""

    #: Blocks of a stock beyond those of its largest matrix.
    MORE_BLOCKS = 1 << 16

    def __init__(self, path: Path, architecture: str, shape: dict[str, Any], kind: str) -> None:
        self.writer = gguf.GGUFWriter(str(path), architecture)
        self.shape, self.kind = shape, kind
        self._stocks: dict[tuple[int, str], Any] = {}
        self._generator = numpy.random.default_rng(0)

    def matrix(self, name: str, *size: int, kind: str | None = None, gain: float = 1.0) -> None:
        """`size`: (rows, columns), perhaps with a number of matrices before them."""
        kind, columns = kind or self.kind, size[-1]
        count = int(numpy.prod(size)) // 32
        stock = self._stocks.get((columns, kind))
        if stock is None or len(stock) <= count:
            stock = self._stocks[columns, kind] = self._blocks(count + self.MORE_BLOCKS, columns, kind)
        first = int(self._generator.integers(0, len(stock) - count))
        blocks = stock[first : first + count]
        if gain != 1.0:
            blocks = blocks.copy()
            scales = numpy.ascontiguousarray(blocks[:, :2]).view(numpy.float16) * numpy.float16(gain)
            blocks[:, :2] = scales.view(numpy.uint8)
        data = blocks.reshape(*size[:-1], -1)
        self.writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])

    def _blocks(self, count: int, columns: int, kind: str) -> Any:
        blocks = numpy.frombuffer(self._generator.bytes(count * BLOCK_BYTES[kind]), numpy.uint8)
        blocks = blocks.reshape(count, -1).copy()
        signs = numpy.where(blocks[:, :1] < 128, 1, -1)
        scales = (signs / (SPREAD[kind] * columns**0.5)).astype(numpy.float16)
        blocks[:, :2] = scales.view(numpy.uint8)
        return blocks

    def ones(self, name: str, length: int) -> None:
        self.writer.add_tensor(name, numpy.ones(length, numpy.float32))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_model(path: Path, shape: dict[str, Any], kind: str) -> None:
    """A GGUF file of this shape, its layers in `kind`, embedding and head in Q8_0, routers in float32."""
    has_experts = "num_experts" in shape
    file = RandomFile(path, "qwen3moe" if has_experts else "llama", shape, kind)
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim = shape.get("head_dim", hidden // heads)
    _write_facts(file.writer, shape, head_dim)
    file.matrix("token_embd.weight", vocab, hidden, kind="Q8_0")
    file.matrix("output.weight", vocab, hidden, kind="Q8_0")
    file.ones("output_norm.weight", hidden)
    for index in range(shape["num_hidden_layers"]):
        prefix = f"blk.{index}."
        file.ones(prefix + "attn_norm.weight", hidden)
        file.ones(prefix + "ffn_norm.weight", hidden)
        file.matrix(prefix + "attn_q.weight", heads * head_dim, hidden)
        file.matrix(prefix + "attn_k.weight", kv_heads * head_dim, hidden)
        file.matrix(prefix + "attn_v.weight", kv_heads * head_dim, hidden)
        file.matrix(prefix + "attn_output.weight", hidden, heads * head_dim, gain=ATTENTION_GAIN)
        if has_experts:
            file.ones(prefix + "attn_q_norm.weight", head_dim)
            file.ones(prefix + "attn_k_norm.weight", head_dim)
            _write_experts(file, prefix)
        else:
            ffn = shape["intermediate_size"]
            file.matrix(prefix + "ffn_gate.weight", ffn, hidden)
            file.matrix(prefix + "ffn_up.weight", ffn, hidden)
            file.matrix(prefix + "ffn_down.weight", hidden, ffn)
    file.close()


def _write_facts(writer: gguf.GGUFWriter, shape: dict[str, Any], head_dim: int) -> None:
    """What the file says of the model, and a tokenizer."""
    vocab = shape["vocab_size"]
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if "num_experts" in shape:
        writer.add_expert_count(shape["num_experts"])
        writer.add_expert_used_count(shape["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(shape["moe_intermediate_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *(f"t{index}".encode() for index in range(3, vocab))])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([2, 3, 3] + [1] * (vocab - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _write_experts(file: RandomFile, prefix: str) -> None:
    """A layer's experts, and a place for its router, which set_popularity() fills."""
    shape = file.shape
    hidden, number, inner = (shape[n] for n in ("hidden_size", "num_experts", "moe_intermediate_size"))
    file.writer.add_tensor(prefix + "ffn_gate_inp.weight", numpy.zeros((number, hidden), numpy.float32))
    file.matrix(prefix + "ffn_gate_exps.weight", number, inner, hidden)
    file.matrix(prefix + "ffn_up_exps.weight", number, inner, hidden)
    file.matrix(prefix + "ffn_down_exps.weight", number, hidden, inner)


def set_popularity(path: Path, popularity: str) -> None:
    """Write the routers of a file: random rows whose norms make some experts more popular than others, in an
    order of its own in each layer."""
    generator = numpy.random.default_rng(1)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.endswith("ffn_gate_inp.weight"):
            number, hidden = tensor.data.shape
            norms = (numpy.arange(number) + 2.0) ** -NORM_EXPONENTS[popularity]
            rows = generator.standard_normal((number, hidden)) * hidden**-0.5
            tensor.data[:] = rows * generator.permutation(norms)[:, None]


def model_file(shape: str, kind: str = "Q8_0", folder: Path = SHAPES) -> Path:
    """Written, unless it is there."""
    path = folder / f"{shape}{'' if kind == 'Q8_0' else f'-{kind}'}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        write_model(partial, find_shape(shape), kind)
        partial.rename(path)
    return path
