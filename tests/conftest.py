"""What tests of several folders share: a tiny random Llama with a byte-level tokenizer, a server on the demo
model, and the order in which two processes take the files."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
# A thread of torch's that waits for another sleeps: the other needs its core, because two processes test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test may leave anything behind in the user's cache.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="penstock-tests-")

import pytest
import torch

from circles import Durations, covering, read_durations, write_durations
from end_to_end.server_process import ServerProcess

#: The folder of compiled.py. The processes of pytest-xdist get the variable from the first process.
COMPILED = "TESTS_COMPILED_FOLDER"
IS_FIRST_PROCESS = COMPILED not in os.environ
if IS_FIRST_PROCESS:
    os.environ[COMPILED] = tempfile.mkdtemp(prefix="penstock-compiled-")
#: Files whose tests ask real servers. One process takes all of them, so that they share a server.
ON_SERVERS = (
    "end_to_end/", "client/test_async_batch.py", "client/test_readme.py", "client/test_real_server.py"
)  # fmt: skip


def pytest_unconfigure() -> None:
    """Also in the first process, where fixtures do not run with pytest-xdist."""
    if IS_FIRST_PROCESS:
        shutil.rmtree(os.environ[COMPILED], ignore_errors=True)
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def no_log_goes_to_a_former_test() -> Iterator[None]:
    """A command that a test runs in this process adds a handler; pytest closes its stream after the test."""
    yield
    for handler in logging.root.handlers[:]:
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)


def _unit(file: str) -> str:
    """What one process takes as a whole: a file (its models are made once), or all files of ON_SERVERS."""
    name = file.removeprefix("tests/")
    return "servers" if name.startswith(ON_SERVERS) else name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the outer circle of tests too: see circles.py")
    parser.addoption("--record-durations", action="store_true", help="write durations.json: see circles.py")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs with --all only")
    config.addinivalue_line("markers", "inner: runs always, though it takes long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    durations = read_durations()
    # Who names files gets all of their tests.
    if not config.getoption("all") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        kept = set(_inner_circle(items, durations))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    seconds = Counter[str]()
    for file, each in durations.files.items():
        seconds[_unit(file)] += each
    # What takes longest comes first, so that both processes end at the same time. The rest comes by name.
    items.sort(key=lambda item: -seconds[_unit(item.nodeid.partition("::")[0])])


def pytest_collection_finish() -> None:
    """What is imported stays. To look for garbage among it would take a sixth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 100)


def _inner_circle(items: list[pytest.Item], durations: Durations) -> Iterator[pytest.Item]:
    functions = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not item.get_closest_marker("slow"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        if isinstance(first := cases[0], pytest.Function) and hasattr(first, "callspec"):
            chosen = [cases[index] for index in covering([case.callspec.params for case in cases])]  # type: ignore[attr-defined]
        else:
            chosen = cases
        quick = [case for case in chosen if not durations.is_long(case.nodeid)]
        if not quick and first.get_closest_marker("inner"):
            quick = [min(chosen, key=lambda case: durations.tests[case.nodeid])]
        yield from quick


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("record_durations"):
        reports = [each for kind in ("passed", "failed", "") for each in terminalreporter.stats.get(kind, ())]
        write_durations((each.nodeid, each.when, each.duration) for each in reports)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In place of --dist loadfile."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class InUnits(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(super()._split_scope(nodeid))

    config.option.loadscopereorder = False  # the order of pytest_collection_modifyitems
    return InUnits(config, log)


def save_byte_tokenizer(folder: Path, num_merges: int = 20) -> None:
    """A byte-level BPE tokenizer of 258 + num_merges tokens, ids 0 and 1 its <bos> and <eos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258 + num_merges,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the water runs down the pipe and the wheel turns"] * 5, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(
        folder
    )


def save_tiny_llama(folder: Path, **overrides: object) -> None:
    """Random weights, large enough that logits have clear winners; seeded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, object] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 278,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(sizes | overrides))).save_pretrained(folder)
    save_byte_tokenizer(folder)


def wait_until_ready(client: Any) -> None:
    """Until the model behind a client of an application is loaded. An assertion fails if it can't be."""
    while (status := client.get("/health").json()["status"]) != "ok":
        assert status == "loading", f"the server is {status}"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model. Read-only: copy it before changing anything."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    """A server on the demo model, for tests that leave it as it was."""
    flags = ("--max-model-len", "512", "--scheduling-policy", "priority")
    with ServerProcess("demo", *flags, is_warm=False) as server:
        yield server.wait_until_ready()
