"""llama.cpp with random Q8_0 weights of a known shape: decode steps with several sequences, to stand
beside `penstock bench --shape`. Needs `pip install llama-cpp-python gguf` (built natively:
CMAKE_ARGS=-DGGML_NATIVE=ON) and as much disk as the shape has parameters.

    python tests/bench/peer_llama_cpp.py --shape solar-10.7b [--folder DIR] [--sequences 1 8 32]

For a memory limit run this, and penstock bench, in a cgroup:

    systemd-run --scope -p MemoryMax=6656M python tests/bench/peer_llama_cpp.py --shape solar-10.7b
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import llama_cpp  # type: ignore[import-not-found]
import numpy

from penstock.model.known_shapes import find_shape

NUM_STEPS, CONTEXT = 3, 64
SHAPES = Path.home() / ".cache" / "penstock" / "shapes"


#: Bytes of a block of 32 weights: a float16 scale, and integers of 8 or 4 bits.
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18}


def write_model(path: Path, shape: dict[str, Any], kind: str) -> None:
    """A GGUF file of this shape, its layers in `kind`, embedding and head in Q8_0; matrices of one size share
    their random blocks."""
    hidden, heads, kv_heads = (
        shape[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    ffn, vocab, head_dim = shape["intermediate_size"], shape["vocab_size"], hidden // heads
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *(f"t{index}".encode() for index in range(3, vocab))])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([2, 3, 3] + [1] * (vocab - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    blocks: dict[tuple[int, int, str], Any] = {}
    generator = numpy.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, kind: str = kind) -> None:
        if (rows, columns, kind) not in blocks:
            width, spread = BLOCK_BYTES[kind], 73 if kind == "Q8_0" else 4.6
            data = numpy.empty((rows, columns // 32, width), numpy.uint8)
            data[:, :, 2:] = generator.integers(0, 256, (rows, columns // 32, width - 2), dtype=numpy.uint8)
            data[:, :, :2] = numpy.float16([1 / (spread * columns**0.5)]).view(numpy.uint8)
            blocks[rows, columns, kind] = data.reshape(rows, -1)
        kind_number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, blocks[rows, columns, kind], raw_dtype=kind_number)

    matrix("token_embd.weight", vocab, hidden, "Q8_0")
    matrix("output.weight", vocab, hidden, "Q8_0")
    ones = numpy.ones(hidden, numpy.float32)
    writer.add_tensor("output_norm.weight", ones)
    for index in range(shape["num_hidden_layers"]):
        prefix = f"blk.{index}."
        writer.add_tensor(prefix + "attn_norm.weight", ones)
        writer.add_tensor(prefix + "ffn_norm.weight", ones)
        matrix(prefix + "attn_q.weight", hidden, hidden)
        matrix(prefix + "attn_k.weight", kv_heads * head_dim, hidden)
        matrix(prefix + "attn_v.weight", kv_heads * head_dim, hidden)
        matrix(prefix + "attn_output.weight", hidden, hidden)
        matrix(prefix + "ffn_gate.weight", ffn, hidden)
        matrix(prefix + "ffn_up.weight", ffn, hidden)
        matrix(prefix + "ffn_down.weight", hidden, ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_file(shape: str, kind: str = "Q8_0", folder: Path = SHAPES) -> Path:
    """Written, unless it is there."""
    path = folder / f"{shape}{'' if kind == 'Q8_0' else f'-{kind}'}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        write_model(partial, find_shape(shape), kind)
        partial.rename(path)
    return path


_SILENCE = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Llama:
    """A loaded model, through the library's own interface: its Python class knows one sequence only."""

    def __init__(self, path: Path, max_seqs: int, num_threads: int, context: int = CONTEXT) -> None:
        """`context`: tokens of each sequence."""
        llama_cpp.llama_log_set(_SILENCE, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self.max_seqs = max_seqs
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context * max_seqs, max_seqs
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True  # a long prompt takes the room of several sequences
        self._context = llama_cpp.llama_init_from_model(self._model, params)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def step(self, num_seqs: int, position: int) -> float:
        """Seconds of a step in which each sequence gets a token."""
        return self._decode([(300 + index, position, index, True) for index in range(num_seqs)])

    def prompt(self, token_ids: list[int]) -> float:
        """Seconds of a prompt in the first sequence."""
        last = len(token_ids) - 1
        return self._decode([(token, index, 0, index == last) for index, token in enumerate(token_ids)])

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> float:
        """(token, position, sequence, are its logits wanted) -> seconds."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, self.max_seqs)
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence, is_wanted) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.logits[index] = 1, is_wanted
            batch.seq_id[index][0] = sequence
        started = time.perf_counter()
        code = llama_cpp.llama_decode(self._context, batch)
        assert code == 0, code
        _ = llama_cpp.llama_get_logits(self._context)[0]  # waits for them
        seconds = time.perf_counter() - started
        llama_cpp.llama_batch_free(batch)
        return seconds


def answer(llama: Llama) -> None:
    """Reads lines of steps, [number of sequences, position or token ids of a prompt], and writes a line of
    their seconds for each. Each line begins with empty sequences."""
    for line in sys.stdin:
        llama.clear()
        seconds = [
            llama.prompt(where) if isinstance(where, list) else llama.step(number, where)
            for number, where in json.loads(line)
        ]
        print(json.dumps(seconds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="decode steps of llama.cpp with random weights")
    parser.add_argument("--shape", default="solar-10.7b")
    parser.add_argument("--folder", type=Path, default=SHAPES)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kind", choices=BLOCK_BYTES, default="Q8_0")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a sequence")
    parser.add_argument("--answer", action="store_true", help="take steps from standard input")
    options = parser.parse_args()
    path = model_file(options.shape, options.kind, options.folder)
    if options.answer:
        answer(Llama(path, max(options.sequences), options.threads, options.context))
        return
    started = time.perf_counter()
    llama = Llama(path, max(options.sequences), options.threads)
    result: dict[str, Any] = {"bench": "llama.cpp", "shape": options.shape}
    for number in options.sequences:
        llama.clear()
        llama.step(number, 0)
        result.setdefault("first_token_s", time.perf_counter() - started)
        seconds = statistics.median(llama.step(number, 1 + index) for index in range(NUM_STEPS))
        result[f"decode_{number}_s"] = seconds
        print(
            f"decode, {number:2} sequences: {seconds * 1e3:8.0f} ms a step, {number / seconds:6.2f} tokens/s"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
