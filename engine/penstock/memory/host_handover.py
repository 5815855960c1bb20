"""HostHandover: work for the processor where there is no card, the plain twin of CudaHandover."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class HostHandover:
    """Computes at once."""

    def begin(
        self,
        x: Tensor,
        out_features: int,
        compute: Callable[[Tensor], Tensor],
        product: object = None,
        fetch: object = None,
        y: Tensor | None = None,
    ) -> Tensor:
        return compute(x) if y is None else y.copy_(compute(x))

    def join(self) -> None: ...

    def then(self, function: Callable[[], None]) -> None:
        function()

    def check(self) -> None: ...

    def close(self) -> None: ...
