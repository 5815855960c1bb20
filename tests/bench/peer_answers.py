"""llama.cpp's side of gguf_answers.py: quantizes a GGUF file with llama.cpp's own quantizer, tokenizes a
text, and answers pieces of the text greedily. Needs llama-cpp-python, and a process of its own: its OpenMP
and torch's don't get along in one.

    python tests/bench/peer_answers.py SOURCE.gguf TARGET.gguf KIND TEXT RESULT.npz
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy

#: Tokens of a prompt and of an answer; prompts are pieces of the text, one behind the other.
PROMPT, ANSWER, NUM_PROMPTS = 48, 64, 24

_SILENCE = llama_cpp.llama_log_callback(lambda level, text, data: None)


def quantize(source: Path, target: Path, kind: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.allow_requantize = True  # of a published file, whose numbers are then those of the new one
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    assert code == 0, f"llama.cpp does not quantize {source} to {kind}"


class Llama:
    """A loaded model with one sequence."""

    def __init__(self, path: Path) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert self._model, f"llama.cpp does not load {path}"
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.adds_bos = bool(llama_cpp.llama_vocab_get_add_bos(self._vocab))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads = PROMPT + ANSWER, os.cpu_count() or 1
        params.n_threads_batch = params.n_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        ids = (llama_cpp.llama_token * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), ids, len(ids), True, False)
        return list(ids[:count])

    def answer(self, prompt: list[int]) -> tuple[list[int], Any]:
        """A greedy answer, and the logits by which each token was chosen: [ANSWER, vocab_size]."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        chosen: list[int] = []
        rows = numpy.empty((ANSWER, self._vocab_size), numpy.float32)
        for index in range(ANSWER):
            given = prompt if not chosen else chosen[-1:]
            tokens = (llama_cpp.llama_token * len(given))(*given)  # the batch has its address alone
            code = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(given)))
            assert code == 0, code
            found = llama_cpp.llama_get_logits_ith(self._context, -1)
            rows[index] = numpy.ctypeslib.as_array(found, (self._vocab_size,))
            chosen.append(int(rows[index].argmax()))
        return chosen, rows


def main() -> None:
    source, target, kind, text, result = sys.argv[1:]
    llama_cpp.llama_log_set(_SILENCE, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    quantize(Path(source), Path(target), kind)
    llama = Llama(Path(target))
    all_ids = llama.tokenize(Path(text).read_text(encoding="utf-8"))
    before = all_ids[: llama.adds_bos]
    ids, width = all_ids[len(before) :], PROMPT - len(before)
    prompts = [before + ids[start : start + width] for start in range(0, width * NUM_PROMPTS, width)]
    assert len(prompts[-1]) == PROMPT, f"the text has {len(ids)} tokens; {width * NUM_PROMPTS} are needed"
    answers, logits = zip(*map(llama.answer, prompts), strict=True)
    numpy.savez(result, token_ids=all_ids, prompts=prompts, answers=answers, logits=numpy.stack(logits))


if __name__ == "__main__":
    main()
