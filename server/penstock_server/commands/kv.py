"""`penstock kv`: what lies in a folder of --kv-disk, whether it is whole, and less of it. No model is
loaded."""

from __future__ import annotations

import json
import math
import mmap
import sys
import time
from pathlib import Path
from typing import Literal

from penstock.cache.disk.kv_folder import ShelfSummary, shrink, summaries
from penstock.cache.disk.shelf import Shelf
from penstock.errors import ConfigError
from penstock.memory.planning.plan import gib

Action = Literal["list", "verify", "prune"]


def run_kv(action: Action, folder: Path, keep_bytes: int | None, as_json: bool) -> int:
    """Prints what lies in the folder, or what was done to it. Returns 1 if blocks were damaged, or if more
    than `keep_bytes` is left because servers use it. Raises ConfigError."""
    if (keep_bytes is not None) != (action == "prune"):
        raise ConfigError("`penstock kv prune` needs --keep SIZE, and no other action has it")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder")
    if action == "verify":
        return _verify(folder, as_json)
    is_done = keep_bytes is None or _prune(folder, keep_bytes)
    _show(summaries(folder), as_json)
    return int(not is_done)


def _show(found: list[ShelfSummary], as_json: bool) -> None:
    if as_json:
        print(json.dumps([_told(each) for each in found]))
        return
    for each in found:
        used = f", last used {_when(each.newest_s)}" if each.num_blocks else ""
        print(f"{gib(each.num_bytes):>12}  {each.num_blocks:7} blocks  {each.folder.name}{used}")
        if each.num_pieces:
            print(f"{'':14}{each.num_pieces:7} of them are {each.num_states} recurrent states")
        print(f"{'':14}of {each.about.get('model', 'an unknown model')}")
    models = "1 model" if len(found) == 1 else f"{len(found)} models"
    print(f"{gib(sum(each.num_bytes for each in found)):>12} of {models}")


def _told(summary: ShelfSummary) -> dict[str, object]:
    return {
        "name": summary.folder.name,
        "model": summary.about.get("model"),
        "fingerprint": summary.about.get("fingerprint"),
        "num_blocks": summary.num_blocks,
        "num_states": summary.num_states,
        "num_bytes": summary.num_bytes,
        "oldest_s": summary.oldest_s,
        "newest_s": summary.newest_s,
    }


def _when(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))


def _prune(folder: Path, keep_bytes: int) -> bool:
    """Let blocks give way until so many bytes are left, the least recently used first. False if more is left,
    since servers use the rest."""
    in_use = set[Path]()
    while True:
        found = summaries(folder)
        excess = sum(each.num_bytes for each in found) - keep_bytes
        can_go = [each for each in found if each.num_blocks and each.folder not in in_use]
        if excess <= 0 or not can_go:
            return excess <= 0
        can_go.sort(key=lambda each: each.oldest_s)
        until_s = can_go[1].oldest_s if len(can_go) > 1 else math.inf
        # Blocks that are as old as those of the next model give way, too: one round has an end.
        if not shrink(can_go[0].folder, excess, math.nextafter(until_s, math.inf)):
            in_use.add(can_go[0].folder)


def _verify(folder: Path, as_json: bool) -> int:
    """Read all blocks. Those that are damaged are removed, unless a server uses them now."""
    results = []
    for summary in summaries(folder):
        shelf = Shelf.reopen(summary.folder)
        if shelf is None:
            continue
        with shelf:
            buffer = memoryview(mmap.mmap(-1, shelf.extent_bytes))
            states = [shelf.read(key, buffer) for key in shelf.all_keys()]
            if not shelf.is_writer:
                print(f"{summary.folder.name} is in use: nothing is removed there", file=sys.stderr)
        results.append((summary.folder.name, states.count(True), states.count(False)))
    if as_json:
        print(json.dumps([{"name": name, "whole": whole, "damaged": bad} for name, whole, bad in results]))
    else:
        for name, whole, damaged in results:
            print(f"{name}: {whole} blocks are whole, {damaged} are damaged")
    return int(any(damaged for _, _, damaged in results))
