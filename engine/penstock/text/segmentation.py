"""Segmentation: a Chinese text -> its words, by the package jieba.

rjieba, which transformers uses, finds other words in some sentences. The models were trained with jieba's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import cast

from penstock.errors import ConfigError

Segmenter = Callable[[str], Iterator[str]]


@lru_cache(maxsize=1)
def load_segmenter() -> Segmenter:
    """jieba's function that cuts a text. Spaces and line ends are words of their own. The dictionary takes
    some 100 MB and a second, once. Raises ConfigError where jieba is not installed."""
    try:
        import jieba
    except ImportError as error:
        raise ConfigError(
            "the tokenizers of CPM-1, CPM-2, EVA and CPM-Ant cut a text into Chinese words with the package "
            "jieba, which is not installed: pip install 'penstock[cpm]'"
        ) from error
    jieba_tokenizer = jieba.Tokenizer()
    # jieba's own initialize() keeps the dictionary under a fixed name in the system's folder for temporary
    # files, where every user of the machine can put another file, and reads that file with marshal.
    jieba_tokenizer.FREQ, jieba_tokenizer.total = jieba_tokenizer.gen_pfdict(jieba_tokenizer.get_dict_file())
    jieba_tokenizer.initialized = True
    return cast(Segmenter, jieba_tokenizer.cut)
