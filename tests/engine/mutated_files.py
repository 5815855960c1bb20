"""Mutated files of torch.save and of BMInf. Each file is read, or refused with a CheckpointError, and nothing
in a file is run. The tests try the first files; the script tries as many as are asked for, and limits memory
and time:

    .venv/bin/python tests/engine/mutated_files.py torch --first 0 --count 100000
"""

from __future__ import annotations

import argparse
import collections
import io
import os
import random
import resource
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hostile_pickles import ATTACKS, CANARY, write_zip
from published_files import bminf_cpm1, bminf_t5, write_bminf
from torch import nn

from penstock.cpm.bminf_file import NAME, read_tree
from penstock.errors import CheckpointError
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.formats import open_checkpoint
from penstock.weights.checkpoints.torch_files.torch_file import read_torch_file

#: Opcodes that do something in a good file.
OPCODES = b"().0(NKMJtRbQcqrhjaeuslXBU\x80\x81\x85\x86\x87\x8c\x93\x94\x95"
#: Memory beyond that of the good files, and seconds of the processor for one file.
MAX_MORE_BYTES, MAX_FILE_S = 64 << 20, 10

Results = collections.Counter[str]


def mutations(whole: bytes, seed: int) -> bytes:
    """A copy with some bytes changed, cut out, doubled or filled with extreme values."""
    rng, raw = random.Random(seed), bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        _mutate(raw, rng.randrange(len(raw)), rng)
        if not raw:
            break
    return bytes(raw)


def _mutate(raw: bytearray, at: int, rng: random.Random) -> None:
    kind = rng.randrange(6)
    if kind == 0:
        raw[at] = rng.randrange(256)
    elif kind == 1:
        raw[at : at + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80"))
    elif kind == 2:
        del raw[at : at + rng.randrange(1, 40)]
    elif kind == 3:
        raw[at:at] = raw[at : at + rng.randrange(1, 40)]
    elif kind == 4:
        raw[at:at] = rng.choice(list(ATTACKS.values()))
    else:
        raw[at : at + 1] = bytes([rng.choice(OPCODES)])


class Watch:
    """Fails if anything happens that Python reports to audit hooks, other than that a file of `folder` is
    opened, while it is active. No hook can be removed, so there is one for the process."""

    folder: str | None = None
    is_hooked = False

    @classmethod
    @contextmanager
    def over(cls, folder: Path) -> Iterator[None]:
        if not cls.is_hooked:
            sys.addaudithook(cls._hook)
            cls.is_hooked = True
        cls.folder = str(folder)
        try:
            yield
        finally:
            cls.folder = None

    @classmethod
    def _hook(cls, event: str, arguments: Any) -> None:
        if cls.folder is None or event in HARMLESS:
            return
        if event in LOOKS and str(arguments[0]).startswith(cls.folder):
            return
        folder, cls.folder = cls.folder, None
        raise SystemExit(f"{event} {arguments} while a file of {folder} was read")


#: Audit events of opening and listing.
LOOKS = ("open", "os.listdir", "os.scandir")
HARMLESS = ("builtins.id",)


class TorchFiles:
    """Files of torch.save: mutated as a whole, and zip files around a mutated pickle."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good = [_saved(state, folder, *form) for state in _states() for form in FORMS]
        with zipfile.ZipFile(io.BytesIO(self.good[0])) as archive:
            names = archive.namelist()
            self._body = archive.read(f"{SEED}/data.pkl")
            self._data = {name.rpartition("/")[2]: archive.read(name) for name in names if "/data/" in name}

    def mutated(self, number: int) -> bytes:
        if number % 3:
            return mutations(self.good[number % len(self.good)], number)
        return write_zip(self.folder / "zip", mutations(self._body, number), self._data).read_bytes()

    def read(self, raw: bytes) -> None:
        file = self.folder / "x"
        file.write_bytes(raw)
        with Watch.over(self.folder):
            found = read_torch_file(file).tensors
            with Checkpoint(self.folder, {}, found) as checkpoint:
                for name, entry in found.items():
                    assert entry.num_bytes <= len(raw)
                    if entry.shape and entry.shape[0]:
                        checkpoint.read(name)


class BminfFiles:
    """BMInf's own files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good = []
        for tensors in (bminf_cpm1(_gpt2()), bminf_t5(_t5())):
            write_bminf(folder / NAME, tensors)
            self.good.append((folder / NAME).read_bytes())

    def mutated(self, number: int) -> bytes:
        return mutations(self.good[number % len(self.good)], number)

    def read(self, raw: bytes) -> None:
        file = self.folder / NAME
        file.write_bytes(raw)
        with Watch.over(self.folder):
            for entry in read_tree(file).values():
                assert entry.num_bytes <= len(raw)
            with open_checkpoint(self.folder) as checkpoint:
                for name, entry in checkpoint.entries.items():
                    if entry.shape and entry.shape[0]:
                        checkpoint.read(name)


KINDS: dict[str, Callable[[Path], TorchFiles | BminfFiles]] = {"torch": TorchFiles, "bminf": BminfFiles}
SEED = "seed"
FORMS = [(True, 2), (False, 2), (True, 5), (False, 4)]


def _states() -> list[dict[str, Any]]:
    """Short pickles: tensors beside what a training leaves."""
    return [
        {"a.weight": torch.ones(4, 3), "b": torch.ones(2).half(), "args": argparse.Namespace(x=1)},
        {
            "module": {"x": {"w": nn.Parameter(torch.ones(2, 2))}},
            "rng": np.random.RandomState(0).get_state()[2:],
        },
    ]


def _gpt2(hidden: int = 4) -> dict[str, torch.Tensor]:
    """The tensors of a GPT-2 with one layer."""
    shapes = {"attn.c_attn": 3 * hidden, "attn.c_proj": hidden, "mlp.c_fc": 4 * hidden}
    linears = {f"transformer.h.0.{name}": (hidden, outputs) for name, outputs in shapes.items()}
    linears["transformer.h.0.mlp.c_proj"] = (4 * hidden, hidden)
    norms = {name: (hidden,) for name in ("transformer.h.0.ln_1", "transformer.h.0.ln_2", "transformer.ln_f")}
    tensors = {
        "transformer.wte.weight": torch.ones(6, hidden),
        "transformer.wpe.weight": torch.ones(5, hidden),
    }
    for name, shape in (linears | norms).items():
        tensors |= {f"{name}.weight": torch.ones(shape), f"{name}.bias": torch.ones(shape[-1])}
    return tensors


def _t5(hidden: int = 4) -> dict[str, torch.Tensor]:
    """The tensors of a T5 whose stacks have one layer each."""
    square, up, down = torch.ones(hidden, hidden), torch.ones(6, hidden), torch.ones(hidden, 6)
    tensors = {"shared.weight": torch.ones(9, hidden), "lm_head.weight": torch.ones(9, hidden)}
    for stack, blocks in (("encoder", ["SelfAttention"]), ("decoder", ["SelfAttention", "EncDecAttention"])):
        layer = f"{stack}.block.0.layer"
        tensors[f"{stack}.final_layer_norm.weight"] = torch.ones(hidden)
        tensors[f"{layer}.0.SelfAttention.relative_attention_bias.weight"] = torch.ones(32, 1)
        for number, block in enumerate(blocks):
            tensors |= {f"{layer}.{number}.{block}.{name}.weight": square for name in "qkvo"}
        feed = f"{layer}.{len(blocks)}.DenseReluDense"
        tensors |= {f"{feed}.wi_0.weight": up, f"{feed}.wi_1.weight": up, f"{feed}.wo.weight": down}
        tensors |= {f"{layer}.{n}.layer_norm.weight": torch.ones(hidden) for n in range(len(blocks) + 1)}
    return tensors


def _saved(state: dict[str, Any], folder: Path, is_zip: bool, protocol: int) -> bytes:
    file = folder / SEED
    torch.save(state, file, _use_new_zipfile_serialization=is_zip, pickle_protocol=protocol)
    return file.read_bytes()


def read_mutated(kind: str, folder: Path, numbers: range) -> Results:
    """How many files were read, and how many were refused with which error. Anything but a CheckpointError
    is raised."""
    files, results = KINDS[kind](folder), Results()
    for good in files.good:  # imports what is imported once
        _outcome(files, good)
    for number in numbers:
        results[_outcome(files, files.mutated(number))] += 1
    assert not (folder / CANARY).exists() and not Path(CANARY).exists()
    return results


def _outcome(files: TorchFiles | BminfFiles, raw: bytes) -> str:
    try:
        files.read(raw)
    except CheckpointError as error:
        return type(error).__name__
    return "read"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _limit_memory() -> None:
    """An attempt to take more than MAX_MORE_BYTES fails with a MemoryError."""
    status = Path("/proc/self/status").read_text()
    limit = (int(status.partition("VmSize:")[2].split()[0]) << 10) + MAX_MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _run(kind: str, folder: Path, numbers: range) -> None:
    """Prints a line for every thousand files, and the slowest of all."""
    read_mutated(kind, folder, range(200))
    _limit_memory()
    started_bytes, slowest_s, slowest = _peak_bytes(), 0.0, -1
    files, results = KINDS[kind](folder), Results()
    for number in numbers:
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_FILE_S)  # its signal ends the process
        raw, started = files.mutated(number), time.process_time()
        results[_outcome(files, raw)] += 1
        taken = time.process_time() - started
        if taken > slowest_s:
            slowest_s, slowest = taken, number
        if (number + 1) % 1000 == 0 or number + 1 == numbers.stop:
            more = (_peak_bytes() - started_bytes) / 2**20
            print(
                f"{kind} files {numbers.start} to {number}: {dict(results)}; peak {more:.1f} MiB above the "
                f"start; slowest {1e3 * slowest_s:.1f} ms (file {slowest})",
                flush=True,
            )
    assert not (folder / CANARY).exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--first", type=int, default=0, help="the number of the first file")
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        os.chdir(folder)
        _run(options.kind, Path(folder), range(options.first, options.first + options.count))


if __name__ == "__main__":
    main()
