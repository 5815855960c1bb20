"""`penstock doctor --card`: the first minute on a card. Every kernel against the reference, rates of memory
and link, a small model; and a file with all of it, to send in."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.config import EngineConfig, card_number
from penstock.errors import ConfigError, PenstockError
from penstock.kernels.cuda import nvrtc
from penstock.kernels.cuda.kept_check import driver_version
from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.cuda.launcher import CudaLauncher
from penstock.kernels.cuda.self_check import cases, mismatches
from penstock.measure import card_crossing_s, card_launch_s, device_rates
from penstock.memory.cuda_lane import CudaLane
from penstock.memory.hardware import num_physical_cores, pinnable_bytes, total_memory_bytes
from penstock.memory.lane import gpu_trouble

#: Seconds after which a trial counts as one that hangs.
TRIAL_S = 600


def run_card_doctor(
    cache_dir: Path,
    file: Path,
    run_trial: Callable[[str, Path], dict[str, str]] | None = None,
    device: str = "auto",
) -> int:
    """Prints the findings and writes them to `file` as JSON. `device` is EngineConfig.device; "auto" is the
    first card. Returns 1 if something is wrong. `run_trial` takes a card's name such as cuda:1 and the
    folder of the cache, and stands in for the process of its own. Raises ConfigError for a device that is no
    card."""
    if device == "cpu":
        raise ConfigError("doctor --card tries a card, and --device is cpu: leave it out, or write cuda:0")
    number = card_number(device) or 0
    trouble = gpu_trouble(number)
    if trouble is not None:
        print(f"!  card       cuda:{number}: {trouble}")
        return 1
    return _report_on(torch.device("cuda", number), cache_dir, file, run_trial or _trial_in_a_process)


def _report_on(
    device: torch.device, cache_dir: Path, file: Path, run_trial: Callable[[str, Path], dict[str, str]]
) -> int:
    report: dict[str, Any] = {"machine": _machine(device)}
    for name, value in report["machine"].items():
        print(f"   {name:22} {value}")
    report["kernels"] = _tried(lambda: _kernels(device, cache_dir))
    report["rates"] = _tried(lambda: _rates(device, cache_dir))
    report["model"] = _tried(lambda: run_trial(str(device), cache_dir))
    file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    wrong = _wrong(report)
    for name, value in report["rates"].items():
        print(f"   {name:22} {value:.4g}" if isinstance(value, float) else f"   {name:22} {value}")
    for name, value in report["model"].items():
        print(f"{'ok' if value == 'ok' else '! '} model      {name}: {value}")
    print(
        "\n".join(wrong) or f"ok kernels    {report['kernels']['num_cases']} calls compute what they should"
    )
    print(f"the report is in {file}: " + ("please send it in" if wrong else "nothing is wrong"))
    return int(bool(wrong))


def _wrong(report: dict[str, Any]) -> list[str]:
    """A line for each thing that is wrong."""
    found = [f"!  kernels    {text}" for text in report["kernels"].get("mismatches", ())]
    parts = ("kernels", "rates", "model")
    found += [f"!  {part:10} {report[part]['error']}" for part in parts if "error" in report[part]]
    return found + [
        f"!  model      {name}: {text}"
        for name, text in report["model"].items()
        if text != "ok" and name != "error"
    ]


def _tried(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A part of the report. What fails is told there, and the other parts go on."""
    try:
        return part()
    except (PenstockError, RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _machine(device: torch.device) -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability(device)
    library = nvrtc.find_nvrtc(10 * major + minor)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "card": torch.cuda.get_device_name(device),
        "compute capability": f"{major}.{minor}",
        "card's memory": f"{total >> 20} MiB, {free >> 20} MiB free",
        "driver": driver_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "NVRTC": "none" if library is None else ".".join(map(str, getattr(library, "version", ()))),
        "system": platform.platform(),
        "cores": num_physical_cores(),
        "RAM": f"{total_memory_bytes() >> 20} MiB, {pinnable_bytes() >> 20} MiB can be pinned",
    }


def _kernels(device: torch.device, cache_dir: Path) -> dict[str, Any]:
    """Each kernel against the reference, whatever was kept of an earlier check."""
    major, minor = torch.cuda.get_device_capability(device)
    launcher = CudaLauncher(device, nvrtc.compile_kernels(10 * major + minor, cache_dir))
    found, number = list[str](), launcher.num_multiprocessors
    for activations in ("int16", "int8"):
        kernels = CudaKernels(launcher, activations)
        texts = mismatches(kernels, device, activations, number)
        found += [f"{activations}: {text}" for text in texts]
    return {"num_cases": 2 * len(list(cases(number))), "mismatches": found}


def _rates(device: torch.device, cache_dir: Path) -> dict[str, float]:
    config = EngineConfig(device=str(device))
    rates = device_rates(config, device, cache_dir)
    with contextlib.closing(CudaLane(device.index)) as lane:
        return rates | {
            "to the processor and back, us": 1e6 * card_crossing_s(lane, config, cache_dir),
            "a launch, us": 1e6 * card_launch_s(lane, config, cache_dir),
        }


def _trial_in_a_process(device: str, cache_dir: Path) -> dict[str, str]:
    """card_trial.py, in a process of its own, with the kernels that were compiled before."""
    command = [sys.executable, "-m", "penstock_server.commands.card_trial", device, str(cache_dir)]
    done = subprocess.run(
        command,
        env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1"},
        capture_output=True,
        text=True,
        timeout=TRIAL_S,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"the trial ended with code {done.returncode}: {last}"}
    answer: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer
