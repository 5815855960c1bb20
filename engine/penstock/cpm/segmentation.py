"""Segmentation: a Chinese text -> its words, by the package jieba.

rjieba, which transformers uses, finds other words in some sentences. The models were trained with jieba's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from penstock.errors import ConfigError

Segmenter = Callable[[str], Iterator[str]]
#: jieba's time grows with the square of a run of Chinese characters: 0.2 s for 4096 rare characters, 3 s for
#: 16,000. A run without any punctuation is cut after so many characters.
MAX_RUN_CHARS = 4096
_LONG_RUN = re.compile(f"[\u4e00-\u9fd5]{{{MAX_RUN_CHARS}}}")


@lru_cache(maxsize=1)
def load_segmenter() -> Segmenter:
    """A function that cuts a text into words; spaces and line ends are words of their own. The dictionary
    takes 65 MB and some seconds, once. Raises ConfigError where jieba is not installed."""
    try:
        import jieba
    except ImportError as error:
        raise ConfigError(
            "the tokenizers of CPM-1, CPM-2, EVA and CPM-Ant cut a text into Chinese words with the package "
            "jieba, which is not installed: pip install 'penstock-llm[cpm]'"
        ) from error
    tokenizer = jieba.Tokenizer()
    # jieba's own initialize() keeps the dictionary under a fixed name in the system's folder for temporary
    # files, where every user of the machine can put another file, and reads that file with marshal.
    tokenizer.FREQ, tokenizer.total = tokenizer.gen_pfdict(tokenizer.get_dict_file())
    tokenizer.initialized = True

    def cut(text: str) -> Iterator[str]:
        begin = 0
        for run in _LONG_RUN.finditer(text):
            yield from tokenizer.cut(text[begin : run.end()])
            begin = run.end()
        yield from tokenizer.cut(text[begin:])

    return cut
