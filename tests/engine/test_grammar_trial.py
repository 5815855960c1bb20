"""Grammars that would end or hold up a process end the trial's, and the next one is read all the same."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import save_byte_level

from penstock.errors import InvalidParameter
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.grammars.grammar_matcher import GrammarCompiler
from penstock.generation.grammars.grammar_trial import GrammarTrial
from penstock.text.tokenizer import Tokenizer

NUM_RULES = 15_000
#: Each rule is the next one: reading it takes as many calls within each other.
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(NUM_RULES)) + f'\nr{NUM_RULES}: "a"'
#: Few expressions at first, and too many with each digit.
LARGE = {"type": "integer", "multipleOf": 99999, "minimum": 0, "maximum": 10**12}


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


HOSTILE = {
    "deep": Grammar.lark(CHAIN),
    "endless": Grammar.json_schema({"type": "integer", "multipleOf": 99_999_989}),
    "endless behind a choice": Grammar.json_schema(object_of(unit={"enum": ["g", "kg"]}, amount=LARGE)),
    "endless in one of two": Grammar.json_schema(
        {"anyOf": [object_of(kind={"const": "a"}), object_of(kind={"const": "b"}, n=LARGE)]}
    ),
    "endless within": Grammar.lark('start: %json {"type": "integer", "multipleOf": 99999989}'),
}


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial([bytes([byte]) for byte in range(256)] + [b""], [256], 256, [256])
    yield trial
    trial.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_would_end_the_process_does_not_pass(trial: GrammarTrial, name: str) -> None:
    grammar = HOSTILE[name]
    assert trial.passes("regex", "a+")
    assert not trial.passes(grammar.kind, grammar.text)
    assert trial.passes("regex", "a+")


def test_what_is_only_wrong_passes(trial: GrammarTrial) -> None:
    """Whoever reads it then can say what is wrong."""
    for kind, text in (("regex", "("), ("lark", "start: nothing"), ("json_schema", '{"type": 1}')):
        assert trial.passes(kind, text)


def test_a_large_schema_of_an_honest_client_passes(trial: GrammarTrial) -> None:
    properties = {f"property_{index}": {"type": "string"} for index in range(500)}
    grammar = Grammar.json_schema({"type": "object", "properties": properties})
    assert trial.passes(grammar.kind, grammar.text)


def test_the_compiler_refuses_it_with_advice(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    with pytest.raises(InvalidParameter, match="make it smaller"):
        grammars.check(HOSTILE["deep"])
    grammars.check(Grammar.regex("a+"))
    grammars.close()


def test_a_refusal_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_byte_level(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    tried: list[str] = []

    def refuse(trial: GrammarTrial, kind: str, text: str) -> bool:
        tried.append(text)
        return False

    monkeypatch.setattr(GrammarTrial, "passes", refuse)
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="make it smaller"):
            grammars.check(Grammar.regex("a+"))
    assert tried == ["a+"]


def test_a_refused_grammar_leaves_the_process_as_it_is(trial: GrammarTrial) -> None:
    """A new process would read the whole vocabulary again while others wait."""
    assert trial.passes("regex", "a+")
    process = trial._process
    assert not trial.passes(HOSTILE["deep"].kind, HOSTILE["deep"].text)
    assert trial.passes("regex", "a+") and trial._process is process is not None


def test_grammars_are_tried_beside_one_that_takes_its_time(trial: GrammarTrial) -> None:
    """The hostile grammar's process is stopped, as if it took for ever."""
    slow = HOSTILE["endless"]
    assert trial.passes("regex", "a+") and trial._process is not None
    children = Path(f"/proc/{trial._process.pid}/task/{trial._process.pid}/children")
    while children.read_text():
        pass  # the process of the first grammar is about to end
    with ThreadPoolExecutor(1) as threads:
        hostile = threads.submit(trial.passes, slow.kind, slow.text)
        while not (found := children.read_text().split()):
            pass
        os.kill(int(found[0]), signal.SIGSTOP)
        try:
            assert trial.passes("regex", "b+") and not hostile.done()
        finally:
            os.kill(int(found[0]), signal.SIGCONT)
        assert not hostile.result()


def test_a_lost_process_refuses_nothing(trial: GrammarTrial) -> None:
    """What nobody could try is no refusal, and the next grammar starts a new process."""
    assert trial.passes("regex", "a+") and trial._process is not None
    trial._process.kill()
    trial._process.wait()
    with pytest.raises(OSError):
        trial.passes("regex", "a+")
    assert trial.passes("regex", "a+")


def test_a_closed_trial_begins_again(trial: GrammarTrial) -> None:
    trial.close()
    trial.close()
    assert trial.passes("regex", "a+")


def test_a_server_of_many_connections_reads_grammars(trial: GrammarTrial) -> None:
    """The pipes to the process get descriptors from 1024 on, which select() refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"a process may have {hard} descriptors here")
    trial.close()
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert trial.passes("regex", "a+")
        trial.close()
