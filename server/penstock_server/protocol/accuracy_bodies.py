"""What `penstock report` and `penstock eval` print as JSON: errors of INT8, and an engine's distance."""

from __future__ import annotations

from penstock_server.protocol.engine_bodies import Told


class TensorError(Told):
    """How far a tensor's INT8 form is from what the checkpoint holds."""

    name: str
    #: Frobenius norm of the difference over that of the tensor; the same for the worst output channel.
    relative: float
    worst_channel: float
    #: Largest magnitude over the root mean square, of the channel where that is largest.
    outlier_ratio: float


class DivergenceBody(Told):
    """How far an engine is from the unquantized model, over the scored tokens."""

    #: The unquantized model's.
    perplexity: float
    #: Of the next token's distribution, in nats.
    mean_kl: float
    max_kl: float
    #: How often both find the same token likeliest, 0 to 1.
    top1_agreement: float
    #: Relative errors of hidden states after each layer.
    layer_errors: tuple[float, ...]


class FidelityBody(Told):
    num_tokens: int
    perplexity: float
    divergence: DivergenceBody | None


class EvaluationBody(Told):
    """Behind the names of the model and of what it is compared with."""

    fidelity: FidelityBody
    weights: tuple[TensorError, ...]
    num_windows: int
    context: int
    #: What was compared with: "unquantized", "dequantized", or null.
    reference: str | None
    activations: str
    kv_dtype: str
    kernels: str
