"""`penstock plan --architectures`: every causal architecture that the installed transformers knows, and who
computes it, as a table in Markdown. Each architecture that is not ours is tried, which takes minutes."""

from __future__ import annotations

import sys
from collections import Counter

from penstock.kernels import choose_kernels
from penstock.model.through_transformers.architectures import Served, architectures
from penstock_server.settings.settings import Settings

#: A line of progress after so many architectures, which take some seconds.
TOLD_EVERY = 10
_WORDS = {"own": "own", "transformers": "transformers", "refused": "refused"}
_HEADS = ("| model_type | served | why not |", "|---|---|---|")


def run_architectures(settings: Settings) -> int:
    """Prints the table, a line as soon as it is known, and the sums."""
    print("\n".join(_HEADS))
    kernels = choose_kernels(settings.engine_config())
    counts: Counter[str] = Counter()
    for served in architectures(kernels, report_progress=_tell):
        print(line(served), flush=True)
        counts[_words(served)] += 1
    print(f"\n{'; '.join(f'{number} {words}' for words, number in counts.most_common())}")
    return 0


def _tell(num_done: int, num_all: int, model_type: str) -> None:
    """Progress goes to stderr, since the table goes into a file as a rule."""
    if num_done % TOLD_EVERY == 0:
        print(f"{num_done} of {num_all} architectures, now {model_type}", file=sys.stderr, flush=True)


def line(served: Served) -> str:
    """A line of the table."""
    reason = served.reason.removeprefix(f"{served.architecture} ").removeprefix(f"{served.architecture}: ")
    reason = reason.replace("|", "/").replace("\n", " ")
    return f"| {served.model_type} | {_words(served)} | {reason} |"


def _words(served: Served) -> str:
    is_varying = served.path == "transformers" and not served.is_invariant
    return _WORDS[served.path] + (", not batch invariant" if is_varying else "")
