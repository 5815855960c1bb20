"""Pure memory decisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.memory.plan import default_kv_cache_bytes, num_kv_blocks, resident_layers


@given(num_layers=st.integers(1, 100), num_resident=st.integers(0, 120))
def test_streamed_layers_are_spread_evenly(num_layers: int, num_resident: int) -> None:
    resident = resident_layers(num_layers, num_resident)
    assert len(resident) == min(num_layers, num_resident)
    streamed = sorted(set(range(num_layers)) - resident)
    gaps = [
        b - a for a, b in zip(streamed, streamed[1:] + [s + num_layers for s in streamed[:1]], strict=True)
    ]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_none_means_all_layers() -> None:
    assert resident_layers(5, None) == {0, 1, 2, 3, 4}


@given(
    per_token=st.integers(1, 10**6),
    max_num_seqs=st.integers(1, 256),
    context=st.integers(2, 10**6),
    free=st.integers(0, 10**12),
)
def test_the_default_cache_never_exceeds_a_quarter_of_what_is_free(
    per_token: int, max_num_seqs: int, context: int, free: int
) -> None:
    num_bytes = default_kv_cache_bytes(per_token, 16, max_num_seqs, context, free)
    assert num_bytes <= free // 4
    if num_bytes < free // 4:  # not cut: it holds what it promises
        held = num_kv_blocks(num_bytes, per_token, 16) * 16
        assert held >= max(max_num_seqs * min(context, 2048), context)
