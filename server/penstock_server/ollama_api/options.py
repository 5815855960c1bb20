"""`options` of requests to Ollama's API: how to choose tokens, and how Ollama would load a model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from penstock_server.protocol.generation_fields import StopStrings
from penstock_server.protocol.wire import MAX_INT, OnlyOne, OnlyZero

#: Options that say how Ollama shall load a model or divide its work. The server's own settings say so here.
_LOADING = frozenset(
    {
        *("num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "draft_num_predict", "numa"),
        *("low_vram", "f16_kv", "use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only"),
    }
)

#: Options with the name and meaning of a field of a chat request.
_OF_CHAT = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop"),
    "speculation",
)


def whole(value: object) -> object:
    """Go and JavaScript send whole numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]


class Options(BaseModel):
    """Unknown options are left out, as by Ollama, and named in the header X-Penstock-Ignored."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = Field(
        None, description="0: no repeat_penalty; others have no effect."
    )
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = Field(None, description="-1: any")
    stop: StopStrings | None = None
    num_predict: Annotated[Whole, Field(ge=-2, le=MAX_INT)] | None = Field(
        None, description="The most tokens of the answer; 0 and less: as many as the context has room for."
    )
    num_ctx: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = Field(
        None, description="Without effect: the server's context has its own size."
    )
    speculation: bool | None = Field(
        None, description="Penstock's own. false: no guesses of the answer's tokens are computed ahead."
    )

    # samplers that Penstock does not have, with the values that turn them off
    typical_p: OnlyOne = None
    tfs_z: OnlyOne = None
    mirostat: OnlyZero = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a chat request."""
        fields = {name: getattr(self, name) for name in _OF_CHAT}
        if self.top_p is not None and self.top_p > 1:  # off, as in Ollama
            fields["top_p"] = 1.0
        fields["repetition_penalty"] = None if self.repeat_last_n == 0 else self.repeat_penalty
        fields["seed"] = None if self.seed == -1 else self.seed
        fields["max_tokens"] = self.num_predict if self.num_predict and self.num_predict > 0 else -1
        return fields

    def ignored(self, max_model_len: int) -> list[str]:
        """What is asked for and has no effect, by its place."""
        found = [
            f"options.{name}"
            for name, value in (self.model_extra or {}).items()
            if value is not None and name not in _LOADING
        ]
        if self.num_ctx is not None and self.num_ctx > max_model_len:
            found.append(f"options.num_ctx (the context has {max_model_len} tokens)")
        return found
