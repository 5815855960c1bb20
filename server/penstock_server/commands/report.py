"""`penstock report`: the error of each quantized tensor against the checkpoint's tensor."""

from __future__ import annotations

import json
import sys

from tqdm import tqdm

from penstock.weights.quantization_error import QuantizationError, matrices, quantization_errors
from penstock_server.facade.loading import open_source
from penstock_server.protocol.accuracy_bodies import TensorError
from penstock_server.settings.settings import Settings

_COLUMNS = f"{'relative error':>14} {'worst channel':>14} {'max / rms':>10}  tensor"


def report(settings: Settings, is_json: bool) -> int:
    """Prints a line for each tensor, and names the worst in the last line. Raises CheckpointError."""
    store = open_source(settings).store
    errors = list(tqdm(quantization_errors(store), unit="tensor", disable=not sys.stderr.isatty()))
    num_matrices = sum(1 for _ in matrices(store))
    store.close()
    if is_json:
        print(json.dumps([TensorError.model_validate(error).model_dump() for error in errors]))
    else:
        print("\n".join(table(errors, num_matrices - len(errors))))
    return 0


def table(errors: list[QuantizationError], num_kept: int) -> list[str]:
    """The errors as lines of text. `num_kept`: the matrices that the checkpoint has in INT8 or 4 bits."""
    if not errors:
        return ["The checkpoint is quantized already: nothing is quantized, and nothing is lost."]
    worst = max(errors, key=lambda error: error.relative)
    lines = [_COLUMNS, *(_line(error) for error in errors), ""]
    lines.append(
        f"{len(errors)} of {len(errors) + num_kept} matrices are quantized; the worst is {worst.name}: "
        f"{worst.relative:.2%} of its norm"
    )
    kept = f"{num_kept} matrices are INT8 or 4 bits in the checkpoint already, and lose nothing"
    return [*lines, kept] if num_kept else lines


def _line(error: QuantizationError) -> str:
    return f"{error.relative:14.4%} {error.worst_channel:14.4%} {error.outlier_ratio:10.1f}  {error.name}"
