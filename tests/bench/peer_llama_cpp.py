"""llama.cpp with random Q8_0 weights of a known shape: decode steps with several sequences, to stand
beside `penstock bench --shape`. Needs `pip install llama-cpp-python gguf` (built natively:
CMAKE_ARGS=-DGGML_NATIVE=ON) and as much disk as the shape has parameters.

    python tests/bench/peer_llama_cpp.py --shape solar-10.7b [--folder DIR] [--sequences 1 8 32]

For a memory limit run this, and penstock bench, in a cgroup (with Q4_0 and less memory than the weights
take: --mapped). streamed_experts.py does so with a mixture of experts:

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

import llama_cpp  # type: ignore[import-not-found]
from random_gguf import BLOCK_BYTES, SHAPES, model_file

NUM_STEPS, CONTEXT = 3, 64
#: Steps have tokens below this and a bit more, which every vocabulary has.
TOKEN_IDS = 30000


_SILENCE = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Llama:
    """A loaded model, through the library's own interface: its Python class knows one sequence only."""

    def __init__(
        self,
        path: Path,
        max_seqs: int,
        num_threads: int,
        context: int = CONTEXT,
        is_mapped: bool = False,
    ) -> None:
        """`context`: tokens of each sequence. `is_mapped`: all weights stay in the file, which is mapped into
        memory. Otherwise those that it repacks (Q4_0) are a copy in memory."""
        llama_cpp.llama_log_set(_SILENCE, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self.max_seqs = max_seqs
        model_params = llama_cpp.llama_model_default_params()
        if is_mapped:
            model_params.load_mode, model_params.use_extra_bufts = llama_cpp.LLAMA_LOAD_MODE_MMAP, False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        assert self._model, f"llama.cpp does not load {path}"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context * max_seqs, max_seqs
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True  # a long prompt takes the room of several sequences
        self._context = llama_cpp.llama_init_from_model(self._model, params)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def step(self, num_seqs: int, position: int) -> float:
        """Seconds of a step in which each sequence gets a token, another one at each position: tokens choose
        experts."""
        first = 300 + 7919 * position % TOKEN_IDS
        return self._decode([(first + index, position, index, True) for index in range(num_seqs)])

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
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="solar-10.7b")
    parser.add_argument("--folder", type=Path, default=SHAPES)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kind", choices=BLOCK_BYTES, default="Q8_0")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a sequence")
    parser.add_argument("--mapped", action="store_true", help="all weights stay in the mapped file")
    parser.add_argument("--answer", action="store_true", help="take steps from standard input")
    options = parser.parse_args()
    path = model_file(options.shape, options.kind, options.folder)
    if options.answer:
        answer(Llama(path, max(options.sequences), options.threads, options.context, options.mapped))
        return
    started = time.perf_counter()
    llama = Llama(path, max(options.sequences), options.threads, is_mapped=options.mapped)
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
