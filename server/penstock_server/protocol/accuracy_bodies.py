"""The JSON of `penstock report` and `penstock eval`: errors of quantized tensors, of an engine's results."""

from __future__ import annotations

from penstock_server.protocol.engine_bodies import Told


class TensorError(Told):
    """The error of a tensor's quantized form against the checkpoint's tensor."""

    name: str
    #: Frobenius norm of the difference, divided by that of the tensor; for the whole tensor, and for the
    #: output channel where this quotient is largest.
    relative: float
    worst_channel: float
    #: Largest magnitude divided by the root mean square, for the channel where this quotient is largest.
    outlier_ratio: float


class DivergenceBody(Told):
    """The distance of an engine from the unquantized model, over the scored tokens."""

    #: The unquantized model's perplexity.
    perplexity: float
    #: KL divergence of the next token's distribution, in nats.
    mean_kl: float
    max_kl: float
    #: The share of tokens for which both models find the same next token likeliest, 0 to 1.
    top1_agreement: float
    #: Relative errors of hidden states after each layer.
    layer_errors: tuple[float, ...]


class FidelityBody(Told):
    num_tokens: int
    perplexity: float
    divergence: DivergenceBody | None


class EvaluationBody(Told):
    """The result of `penstock eval`; the command adds the names of the model and of the reference."""

    fidelity: FidelityBody
    weights: tuple[TensorError, ...]
    num_windows: int
    context: int
    #: The kind of the reference: "unquantized" or "dequantized"; null without one.
    reference: str | None
    #: The formats of the matrices by which tokens are multiplied, each once.
    formats: tuple[str, ...]
    activations: str
    kv_dtype: str
    kernels: str
