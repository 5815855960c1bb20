"""How long products take, by measured rates of products or by what memory and arithmetic allow. Pure."""

from __future__ import annotations

from penstock.memory.hardware import RECURRENCE, FormatRates, LaneProfile, ProductRates

#: Seconds of all that is not a product (norms, attention over a short context, activations, the calls
#: themselves) in a layer, measured on two cores.
LAYER_OVERHEAD_S = 150e-6


#: The name of INT8 with a scale for each output channel, in which an element is a byte.
PLAIN = "int8"
#: Elements by the names of their formats.
Formats = tuple[tuple[str, int], ...]


def multiply_s(
    lane: LaneProfile, num_bytes: float, num_elements: float, rows: int, formats: Formats = ()
) -> float:
    """Seconds of products of `rows` rows by matrices with so many bytes and elements, and in these formats.
    Without measured rates of products, what memory and arithmetic allow; a rate of 0 is not known."""
    if lane.products:
        own = own_rates(lane.products, lane.formats, formats)
        return product_s(lane.products, round(num_bytes), round(num_elements), rows, own)
    amounts = (num_bytes, lane.memory_gbps), (2 * rows * num_elements, lane.int8_gops)
    return max(amount / rate / 1e9 if rate else 0.0 for amount, rate in amounts)


def recurrence_s(lane: LaneProfile, state_bytes: int, num_sequences: int, num_tokens: int) -> float:
    """Seconds in which so many tokens of all sequences together pass through states of so many bytes a
    sequence. 0 where recurrences were not measured."""
    rates = dict(lane.formats).get(RECURRENCE)
    if not rates or not num_sequences:
        return 0.0
    return num_sequences * state_bytes / 4 * _seconds_per_byte(rates, -(-num_tokens // num_sequences))


def product_s(
    products: ProductRates, num_bytes: int, num_elements: int, rows: int, own: ProductRates = ()
) -> float:
    """Seconds of products by matrices with so many bytes and elements. Rates are those of INT8, a byte for
    each element. With the fewest rows a product waits for its bytes; what more rows add is arithmetic, which
    goes by elements. `own`: rates that were measured with the matrices' own formats (own_rates()), in
    elements."""
    if rows == 0:
        return 0.0
    if own:
        return num_elements * _seconds_per_byte(own, rows)
    reading = 1 / products[0][1] / 1e9
    return num_bytes * reading + num_elements * (_seconds_per_byte(products, rows) - reading)


def own_rates(products: ProductRates, known: FormatRates, formats: Formats) -> ProductRates:
    """Rates of products with matrices in these formats together, in 1e9 elements a second; () if one of the
    formats was not measured, or if all are INT8 with a scale for each output channel."""
    rates = dict(known) | {PLAIN: products}
    if (
        not products
        or {name for name, _ in formats} <= {PLAIN}
        or any(name not in rates for name, _ in formats)
    ):
        return ()
    whole = sum(count for _, count in formats)
    return tuple(
        (
            rows,
            1e-9 / sum(count / whole * _seconds_per_byte(rates[name], rows) for name, count in formats),
        )
        for rows, _ in products
    )


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
