"""`penstock eval`: how far an engine's results are from those of the unquantized checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from penstock import Engine
from penstock.evaluate import Divergence, Fidelity, Window, evaluate, memory_bytes, windows
from penstock.memory.hardware import HardwareProfile, capacities
from penstock.model.registry import OpenModel, open_model
from penstock.unquantized import UnquantizedModel
from penstock.weights.checkpoints.hub import find_model
from penstock.weights.formats.stacked_format import in_one_format
from penstock.weights.quantization_error import QuantizationError
from penstock.weights.tensors import ModelTensors, TensorSpec
from penstock_server.commands.converting import ProgressBar, read_text
from penstock_server.facade.inside import quantization_errors, tensors_of
from penstock_server.facade.loading import load_engine, load_tokenizer, open_source
from penstock_server.protocol.accuracy_bodies import EvaluationBody
from penstock_server.settings.settings import Settings

#: Tokens of a window by default; fewer if the model's context is shorter.
CONTEXT = 512

NO_REFERENCE = (
    "The model is quantized already, at least in part, so there is nothing to compare it with. Name the "
    "checkpoint from which the model was made (--against ORIGINAL). Or name the model itself (--against "
    "MODEL): the figures are then the cost of activations, keys and values, without that of the quantized "
    "weights."
)
DEQUANTIZED = (
    "The reference has quantized tensors itself, dequantized. Of tensors that the model has from it, the "
    "weights have no error in these figures, which then have that of activations, keys and values"
)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Everything that the command reports."""

    fidelity: Fidelity
    #: The errors of the quantized tensors, in order; () without a reference.
    weights: tuple[QuantizationError, ...]
    num_windows: int
    context: int
    #: The kind of the reference: "unquantized" or "dequantized"; None without one.
    reference: str | None
    #: The formats of the engine's matrices, each once, and its settings.
    formats: tuple[str, ...]
    activations: str
    kv_dtype: str
    kernels: str


def run_eval(
    settings: Settings,
    text: Path,
    against: str | None,
    context: int | None,
    stride: int | None,
    is_json: bool,
) -> int:
    """Prints perplexity, divergence, and errors layer by layer. Raises PenstockError."""
    content = read_text(text)
    opened = open_source(settings)
    longest = settings.max_model_len or opened.spec.max_position_embeddings
    context = context if context is not None else min(CONTEXT, longest)
    pieces = windows(load_tokenizer(settings, opened), content, context, stride)
    with contextlib.ExitStack() as closing:
        closing.callback(opened.store.close)
        reference, hardware = _reference(settings, against, opened), capacities()
        if reference is not None:
            closing.callback(reference.store.close)
            hardware = without(hardware, memory_bytes(reference, pieces))
        engine = closing.enter_context(load_engine(settings, hardware=hardware))
        found = measure(engine, reference, pieces, context)
        tensors = tensors_of(engine)
    if is_json:
        body = EvaluationBody.model_validate(found).model_dump()
        print(json.dumps({"model": settings.model, "against": against} | body))
    else:
        print("\n".join(lines(found, tensors)))
    return 0


def _reference(settings: Settings, against: str | None, opened: OpenModel) -> UnquantizedModel | None:
    if against is not None:
        folder = find_model(against, offline=settings.offline, allow_pickle=settings.allow_pickle)
        return UnquantizedModel(
            open_model(folder, settings.ignore_unexpected_tensors, allow_pickle=settings.allow_pickle)
        )
    return None if opened.store.is_quantized else UnquantizedModel(opened)


def without(hardware: HardwareProfile, num_bytes: int) -> HardwareProfile:
    """The hardware with `num_bytes` less free memory, which the engine's automatic budget then leaves
    alone."""
    return dataclasses.replace(hardware, free_ram_bytes=max(0, hardware.free_ram_bytes - num_bytes))


def measure(
    engine: Engine, reference: UnquantizedModel | None, pieces: list[Window], context: int
) -> Evaluation:
    """Evaluates the engine on windows of a text, beside the reference if there is one. Raises
    PenstockError."""
    bar = ProgressBar("evaluating", "window")
    try:
        fidelity = evaluate(engine, reference, pieces, bar)
    finally:
        bar.close()
    weights, kind = [], None
    if reference is not None:
        kind = "dequantized" if reference.store.is_quantized else "unquantized"
        errors = quantization_errors(engine, reference)
        weights = list(tqdm(errors, "weights", unit="tensor", disable=not sys.stderr.isatty()))
    config = engine.config
    alone = (own for tensor in tensors_of(engine).multiplied for own in in_one_format(tensor))
    formats = tuple(dict.fromkeys(tensor.format.name for tensor in alone))
    ways = formats, config.activations, config.kv_dtype, config.kernels
    return Evaluation(fidelity, tuple(weights), len(pieces), context, kind, *ways)


def lines(found: Evaluation, tensors: ModelTensors) -> list[str]:
    """The report as lines of text."""
    fidelity, divergence = found.fidelity, found.fidelity.divergence
    report = [
        f"text              {fidelity.num_tokens} tokens scored; windows: {found.num_windows} of at most "
        f"{found.context}",
        f"weights           {'; '.join(found.formats)}",
        f"engine            activations {found.activations}, keys and values {found.kv_dtype}, kernels "
        f"{found.kernels}",
        f"perplexity        {fidelity.perplexity:.4f}",
    ]
    if divergence is not None:
        change = fidelity.perplexity / divergence.perplexity - 1
        report[-1] += f", {found.reference} {divergence.perplexity:.4f} ({change:+.3%})"
        report += [
            f"KL divergence     {divergence.mean_kl:.2e} nats a token, at most {divergence.max_kl:.2e}",
            f"likeliest token   the same for {divergence.top1_agreement:.2%}",
            "",
            *layer_table(divergence, found.weights, tensors),
        ]
    return [*report, *note(found)]


def note(found: Evaluation) -> list[str]:
    """What the figures don't have, below the report."""
    if found.reference == "unquantized":
        return []
    if found.reference is None:
        return ["", NO_REFERENCE]
    number = len(found.weights)
    rounded = f", and of the weights that are rounded anew ({number} matrices)" if number else ""
    return ["", f"{DEQUANTIZED}{rounded}."]


def layer_table(
    divergence: Divergence, weights: tuple[QuantizationError, ...], tensors: ModelTensors
) -> list[str]:
    """A line for the embedding, for each layer and for the head: the relative error of the hidden states
    after it, and the relative error of its worst matrix. A layer's experts are tensors of the layer."""
    errors = {error.name: error for error in weights}
    layers = [*_layers(tensors)]
    names = ["embedding", *(f"layer {index}" for index in range(len(layers))), "head"]
    hidden = [None, *divergence.layer_errors, None]
    rows = [f"{'relative error of':12} {'hidden':>9} {'weights':>9}  worst tensor"]
    for name, error, own in zip(names, hidden, (tensors.embedding, *layers, tensors.head), strict=True):
        alone = (each for tensor in own for each in in_one_format(tensor))
        of_own = [errors[key] for tensor in alone if (key := ", ".join(tensor.parts)) in errors]
        row = f"{name:17} {'' if error is None else f'{error:.4%}':>9}"
        if of_own:
            worst = max(of_own, key=lambda item: item.relative)
            row += f" {worst.relative:9.4%}  {worst.name}"
        if of_own or error is not None:
            rows.append(row.rstrip())
    return rows


def _layers(tensors: ModelTensors) -> Iterator[list[TensorSpec]]:
    """The tensors of each layer, those of its experts included."""
    for _, units in itertools.groupby(tensors.units, lambda unit: unit.key[:2]):
        yield [tensor for unit in units for tensor in unit.tensors]
