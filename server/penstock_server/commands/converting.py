"""`penstock convert`: progress while it runs, rates and errors at the end."""

from __future__ import annotations

import sys
from pathlib import Path

from tqdm import tqdm

from penstock import Tokenizer
from penstock.calibrate import Calibration
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.evaluate import prefix
from penstock.kernels import choose_kernels, use_processor
from penstock.memory.hardware import num_physical_cores
from penstock.model.registry import OpenModel
from penstock.weights.checkpoints.checksums import Checksums
from penstock.weights.conversion.fitted_formats import BitBudget, fit_store
from penstock.weights.conversion.manifest import verify
from penstock.weights.conversion.report import ConversionReport
from penstock_server.facade.figures import gigabytes
from penstock_server.facade.loading import convert_with_checksums, load_tokenizer, open_source
from penstock_server.settings.settings import Settings


class ProgressBar:
    """Progress on stderr, told as (done, total). tqdm redraws the bar every 0.1 s in a terminal, and every
    10 s elsewhere."""

    def __init__(self, description: str, unit: str) -> None:
        is_bytes = unit == "B"
        interval = 0.1 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(
            desc=description,
            unit=unit if is_bytes else f" {unit}s",
            unit_scale=is_bytes,
            mininterval=interval,
        )

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def run_convert(
    settings: Settings,
    target: Path,
    text: Path | None,
    num_tokens: int,
    begun: Checksums | None = None,
    budget: BitBudget | None = None,
) -> int:
    """Converts a model. With a text, the first `num_tokens` tokens of the text serve to compensate rounding
    errors (GPTQ). `begun` are checksums of the source that are computed already. With a budget, each matrix
    has the format that fits there best. Raises PenstockError."""
    content = read_text(text) if text is not None else None
    opened = open_source(settings)
    with opened.store.checkpoint:
        if budget is not None:
            print("\n".join(fit_store(opened.store, budget)))
        rounding = None
        if content is not None:
            rounding = _calibration(opened, load_tokenizer(settings, opened), content, num_tokens)
        bar = ProgressBar(f"converting to {target}", "B")
        try:
            report, checksums = convert_with_checksums(settings, opened.store, target, bar, rounding, begun)
        finally:
            bar.close()
    print("\n".join([*summary(report, target), *checksums]))
    return 0


def read_text(path: Path) -> str:
    """The text in a file. Raises ConfigError if the file can't be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the text {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text in UTF-8 ({error})") from error


def _calibration(opened: OpenModel, tokenizer: Tokenizer, text: str, num_tokens: int) -> Calibration:
    use_processor(EngineConfig(), num_physical_cores())
    kernels = choose_kernels(EngineConfig())
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    # As prompts and windows of `penstock eval` do: a first token's keys and values are unlike all others.
    return Calibration(opened, kernels, token_ids, num_tokens, prefix(tokenizer))


def run_verify(folder: Path) -> int:
    """Compares the checksums of a converted folder. Raises CheckpointError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    bar = ProgressBar(f"verifying {folder}", "file")
    try:
        num_files = verify(folder, bar)
    finally:
        bar.close()
    print(f"{num_files} files have the checksums with which they were written, weights and all others")
    return 0


def summary(report: ConversionReport, target: Path) -> list[str]:
    """The conversion's report as lines of text."""
    lines = [f"{target}: {report.num_files} files of weights in {report.total_s:.1f} s"]
    if report.num_resumed:
        lines.append(
            f"{report.num_resumed} of the files are from an earlier run (--verify compares their checksums)"
        )
    if report.quantize_s and report.write_s:
        reading, writing = report.bytes_read / report.quantize_s, report.bytes_written / report.write_s
        limit = "quantizing" if report.quantize_s > report.write_s else "writing"
        lines += [
            f"read and quantized {gigabytes(report.bytes_read)} at {gigabytes(reading)}/s",
            f"wrote {gigabytes(report.bytes_written)} at {gigabytes(writing)}/s; {limit} was the limit",
        ]
    if report.errors:
        worst = max(report.errors, key=lambda name: report.errors[name])
        lines.append(f"relative error of rounding: at most {report.errors[worst]:.2%} ({worst})")
    if report.is_compensated:
        lines.append(
            "this error is before compensation, which makes single weights worse and outputs better; "
            "`penstock eval` measures the outputs"
        )
    return lines
