"""`penstock doctor`: what slows this machine down, and what to do about it."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.config import EngineConfig, card_number
from penstock.errors import CheckpointError
from penstock.kernels import fingerprint
from penstock.kernels.cpu_builds import BUILDS, build_fingerprint, compiled_builds, runnable_builds
from penstock.kernels.cuda.nvrtc import INSTALL_NVRTC, find_nvrtc
from penstock.memory.direct_io import DirectReader
from penstock.memory.hardware import free_memory_bytes, num_physical_cores, total_memory_bytes
from penstock.memory.kept_tuning import tunings_of_build
from penstock.memory.lane import gpu_trouble, has_driver
from penstock.memory.machine_rates import kept_shares
from penstock.memory.other_work import is_busy
from penstock.memory.pages import PAGE
from penstock.model.registry import open_mtp_head
from penstock_server.facade.machine import CACHE_FILE, disturbed

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """The result of one check. `advice` says what to do; it is empty if nothing is to be done."""

    subject: str
    text: str
    advice: str = ""

    @property
    def line(self) -> str:
        mark = "!" if self.advice else "ok"
        return f"{mark:2} {self.subject:10} {self.text}" + (f"\n{'':14}{self.advice}" if self.advice else "")


def run_doctor(folder: Path, cache_dir: Path, device: str = "auto") -> int:
    """Prints the findings. `device` is EngineConfig.device: if it names a GPU, this one is looked at. Returns
    1 if a finding has advice, else 0."""
    cache = cache_dir / CACHE_FILE
    findings = [
        kernels(),
        tuning(cache),
        rates(cache, folder),
        drafts(cache, folder),
        memory(),
        disk(folder),
        huge_pages(),
        *gpu(card_number(device)),
    ]
    print(f"penstock on Python {platform.python_version()}, torch {torch.__version__}")
    print("\n".join(finding.line for finding in findings))
    return int(any(finding.advice for finding in findings))


def kernels(compiled: list[str] | None = None, runnable: list[str] | None = None) -> Finding:
    """The best compiled kernels that this processor can run, and how many cores there are. `compiled` and
    `runnable`: builds that exist here and that the processor runs, and those that it would run."""
    builds = compiled_builds() if compiled is None else compiled
    runnable = runnable_builds() if runnable is None else runnable
    if not builds:
        advice = "Install a C compiler and install penstock again: compiled kernels are several times faster"
        return Finding("kernels", "no kernels were compiled: torch's integer product serves", advice)
    names = [name for name, _ in BUILDS]
    text = f"{builds[0]}, {num_physical_cores()} cores"
    better = names[: names.index(builds[0])]
    if lacked := [name for name in better if name not in runnable]:
        text += f" (the processor has no {' or '.join(lacked)})"
    if missing := [name for name in better if name in runnable]:
        advice = "Compile the kernels again with a newer compiler: make install, or pip install -e ."
        return Finding("kernels", f"{text}; not compiled here: {', '.join(missing)}", advice)
    return Finding("kernels", text)


def tuning(cache: Path) -> Finding:
    """Whether the kernels were tuned on this machine, and while nothing else ran."""
    tuned = tunings_of_build(cache, build_fingerprint())
    if not tuned:
        return Finding("tuning", "the kernels are tuned at the first start, which takes some seconds")
    share = max(share for _, share in tuned)
    if not is_busy(share):
        return Finding("tuning", "the kernels were tuned on this machine")
    advice = "`penstock hardware --remeasure` tunes them again: run it while nothing else runs"
    return Finding("tuning", disturbed(share), advice)


def rates(cache: Path, folder: Path) -> Finding:
    """Whether the kept rates of this machine and of the disk under `folder` were measured while nothing else
    ran."""
    shares = kept_shares(cache, folder, fingerprint(EngineConfig()))
    if not shares:
        return Finding("rates", "this machine is measured at the first start, which takes some seconds")
    share = max(share or 0.0 for share in shares)
    if not is_busy(share):
        return Finding("rates", "the rates of this machine were measured")
    text = f"the rates of this machine were measured while other work took {share:.0%} of the cores"
    advice = f"`penstock hardware --remeasure {folder}` measures them again: run it while nothing else runs"
    return Finding("rates", text, advice)


def drafts(cache: Path, folder: Path) -> Finding:
    """Which drafters there are here, and for the model if `folder` is one."""
    if not kept_shares(cache, folder, fingerprint(EngineConfig())):
        return Finding("drafts", "no tokens are guessed until this machine is measured, at the first start")
    text = "next tokens are guessed from texts, and from what was likely before, where that should pay"
    if not os.path.isfile(folder / "config.json"):
        return Finding("drafts", f"{text}; --draft-model names a small model that guesses, too")
    try:
        head = open_mtp_head(folder)
    except CheckpointError as error:
        return Finding("drafts", text, f"The model can't be opened: {error}")
    if head is None:
        return Finding(
            "drafts", f"{text}; the model has no head of its own: --draft-model names a small model"
        )
    head.store.close()
    return Finding("drafts", f"{text}; the model's head of multi-token prediction guesses, too (--mtp)")


def memory(total: int | None = None, free: int | None = None) -> Finding:
    """RAM, and how much of it is free for this process, by the system and by its cgroup."""
    total = total_memory_bytes() if total is None else total
    free = free_memory_bytes() if free is None else free
    text = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB of it free for this process"
    if free < 2 * GIB:
        return Finding(
            "memory", text, "Little memory is free: stop other programs, or raise the container's limit"
        )
    return Finding("memory", text)


def disk(folder: Path) -> Finding:
    """Whether the disk under `folder` has direct reads, which go past the page cache."""
    folder = folder.parent if os.path.isfile(folder) else folder
    path = folder / f".penstock-doctor-{os.getpid()}"
    try:
        path.write_bytes(bytes(PAGE))
        with DirectReader(depth=1) as reader:
            is_direct = reader.is_direct(path)
    except OSError as error:
        advice = (
            "Name the folder of your models: `penstock doctor FOLDER`. The check writes a small file there"
        )
        return Finding("disk", f"{folder} can't be written: {error.strerror}", advice)
    finally:
        with contextlib.suppress(OSError):  # a disk that can't be written
            path.unlink()
    if is_direct:
        return Finding("disk", f"{folder} has direct reads; `penstock hardware {folder}` measures them")
    advice = (
        "Keep models that are streamed on a local file system such as ext4 or xfs, not tmpfs or a network's"
    )
    return Finding("disk", f"{folder} is on a file system without direct reads", advice)


def huge_pages(path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Finding:
    try:
        is_off = "[never]" in path.read_text()
    except OSError:
        is_off = True
    if is_off:
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled makes loading faster"
        return Finding("huge pages", "the system gives no huge pages", advice)
    return Finding("huge pages", "the system gives huge pages on request")


def gpu(number: int | None = None) -> list[Finding]:
    """The card of this number (None: the first one, with a line for each other card), whether torch and NVRTC
    know the card, and how much memory can be pinned."""
    if (trouble := gpu_trouble(number or 0)) is not None:
        if number is not None:
            return [Finding("GPU", f"cuda:{number} can't be used", trouble)]
        if not has_driver():
            return [Finding("GPU", "no GPU: the processor computes")]
        return [Finding("GPU", "there is a driver, but the processor computes", trouble)]
    findings = _card(number or 0)
    for other in range(1, torch.cuda.device_count()) if number is None else ():
        text = f"cuda:{other} is {torch.cuda.get_device_name(other)}, for --device cuda:{other}"
        findings.append(Finding("GPU", text))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        advice = "ulimit -l unlimited (docker: --ulimit memlock=-1) lets more memory feed the GPU"
        findings.append(Finding("pinning", f"at most {soft / GIB:.2f} GiB may be locked in memory", advice))
    return findings


def _card(number: int) -> list[Finding]:
    major, minor = torch.cuda.get_device_capability(number)
    text = f"{torch.cuda.get_device_name(number)}, compute capability {major}.{minor}"
    findings = [Finding("GPU", text)]
    if find_nvrtc(10 * major + minor) is None:
        text = "no NVRTC knows this card: torch's slower kernels serve"
        findings.append(Finding("NVRTC", text, INSTALL_NVRTC))
    return findings
