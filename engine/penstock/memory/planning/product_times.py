"""How long products take, by measured rates of products. Pure."""

from __future__ import annotations

from penstock.memory.hardware import ProductRates

#: Seconds of all that is not a product (norms, attention over a short context, activations, the calls
#: themselves) in a layer, measured on two cores.
LAYER_OVERHEAD_S = 150e-6


def product_s(products: ProductRates, num_bytes: int, num_elements: int, rows: int) -> float:
    """Seconds of products by matrices with so many bytes and elements. Rates are those of INT8, a byte for
    each element. With the fewest rows a product waits for its bytes; what more rows add is arithmetic, which
    goes by elements."""
    if rows == 0:
        return 0.0
    reading = 1 / products[0][1] / 1e9
    return num_bytes * reading + num_elements * (_seconds_per_byte(products, rows) - reading)


def _seconds_per_byte(products: ProductRates, rows: int) -> float:
    """Seconds per byte of weights that meet so many rows. Between two measured numbers of rows the seconds
    lie on the line through both; beyond the largest they grow in proportion."""
    before_rows, before_gbps = products[0]
    for known_rows, gbps in products:
        if rows <= known_rows:
            share = (rows - before_rows) / max(1, known_rows - before_rows)
            return (1 / before_gbps + max(0.0, share) * (1 / gbps - 1 / before_gbps)) / 1e9
        before_rows, before_gbps = known_rows, gbps
    return rows / before_rows / before_gbps / 1e9
