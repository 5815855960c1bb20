"""`penstock convert`: progress while it runs, rates and errors at the end."""

from __future__ import annotations

import sys
from pathlib import Path

from tqdm import tqdm

from penstock.errors import ConfigError
from penstock.model.registry import open_model
from penstock.weights.convert import ConversionReport, convert
from penstock.weights.hub import find_model
from penstock.weights.manifest import verify
from penstock_server.settings import Settings


class ProgressBar:
    """Progress as (done, total), on stderr; a bar in a terminal, a line for each part elsewhere."""

    def __init__(self, description: str, unit: str) -> None:
        is_bytes = unit == "B"
        interval = 0.1 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(desc=description, unit=unit, unit_scale=is_bytes, mininterval=interval)

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def run_convert(settings: Settings, target: Path) -> int:
    """Raises PenstockError."""
    store = open_model(
        find_model(settings.model, settings.revision, settings.offline), settings.ignore_unexpected_tensors
    ).store
    bar = ProgressBar(f"converting to {target}", "B")
    try:
        with store.checkpoint:
            report = convert(store, target, bar)
    finally:
        bar.close()
    print("\n".join(summary(report, target)))
    return 0


def run_verify(folder: Path) -> int:
    """Raises CheckpointError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    bar = ProgressBar(f"verifying {folder}", "file")
    try:
        num_files = verify(folder, bar)
    finally:
        bar.close()
    print(f"{num_files} files are what was written")
    return 0


def summary(report: ConversionReport, target: Path) -> list[str]:
    """Lines for people."""
    lines = [f"{target}: {report.num_files} files in {report.total_s:.1f} s"]
    if report.num_resumed:
        lines.append(f"{report.num_resumed} of them were there already, from a run that was stopped")
    if report.quantize_s and report.write_s:
        reading, writing = report.bytes_read / report.quantize_s, report.bytes_written / report.write_s
        limit = "quantizing" if report.quantize_s > report.write_s else "writing"
        lines += [
            f"read and quantized {report.bytes_read / 1e9:.2f} GB at {reading / 1e9:.2f} GB/s",
            f"wrote {report.bytes_written / 1e9:.2f} GB at {writing / 1e9:.2f} GB/s; {limit} was the limit",
        ]
    if report.errors:
        worst = max(report.errors, key=lambda name: report.errors[name])
        lines.append(f"relative error of INT8: at most {report.errors[worst]:.2%} ({worst})")
    return lines
