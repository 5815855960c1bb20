"""Our CUDA kernels on the first GPU, each beside the ceiling that it could reach: products with few tokens
beside the rate at which the card reads its memory, products with many beside torch._int_mm, attention beside
reading K and V once. Once as machine code for this card, once from PTX for compute capability 6.1, which is
the code of a GTX 10xx (8-bit dot products, no tensor cores). Results are compared with the reference first.
Prints a card, and one JSON line last.

    python tests/bench/gpu.py [--activations int8] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cuda.kernels import CudaKernels
from penstock.kernels.cuda.launcher import CudaLauncher
from penstock.kernels.cuda.nvrtc import find_nvrtc, source
from penstock.kernels.operands import AttentionSpec, BatchLayout, LayerKV, QuantizedTensor
from penstock.kernels.reference import ReferenceKernels
from penstock.spec import FLOAT16

#: (out_features, in_features) of an 8-billion-parameter Llama.
SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))
FEW, MANY = (1, 4, 8, 16), (32, 128, 512)
CONTEXT, HEADS, KV_HEADS, HEAD_DIM = 4096, 32, 8, 128
SEQUENCES, CHUNK = (1, 8, 32), 512
#: Much more than any cache: matrices take turns until this much was read.
ROUND_BYTES = 1 << 30


def median_s(functions: list[Callable[[], object]], repeats: int) -> float:
    """Seconds on the device of one call, the functions taking turns, after one round that is not counted."""
    for function in functions:
        function()
    times = []
    for _, function in zip(range(max(repeats, len(functions))), cycle(functions), strict=False):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        function()
        ended.record()
        times.append((started, ended))
    torch.cuda.synchronize()
    return statistics.median(started.elapsed_time(ended) / 1e3 for started, ended in times)


def memory_rates(repeats: int) -> dict[str, float]:
    """GB/s of reading (a sum) and of copying (bytes read and written)."""
    source_, target = (torch.ones(ROUND_BYTES // 4, device="cuda") for _ in range(2))
    read = median_s([source_.sum], repeats)
    copy = median_s([lambda: target.copy_(source_)], repeats)
    return {"read_gbps": ROUND_BYTES / read / 1e9, "copy_gbps": 2 * ROUND_BYTES / copy / 1e9}


def matrices(shape: tuple[int, int]) -> list[QuantizedTensor]:
    """Matrices of one shape that together take ROUND_BYTES."""
    count = ROUND_BYTES // (shape[0] * shape[1]) + 1
    return [
        QuantizedTensor(
            torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda"),
            torch.rand(shape[0], device="cuda"),
        )
        for _ in range(count)
    ]


def check_products(mine: CudaKernels) -> None:
    """Bit for bit, with every number of tokens that is measured."""
    weight = matrices((4096, 4096))[0]
    for num_tokens in (*FEW, *MANY):
        x = torch.randn(num_tokens, 4096)
        expected = ReferenceKernels(mine.activations).linear(
            x, QuantizedTensor(weight.qweight.cpu(), weight.scale.cpu())
        )
        assert torch.equal(mine.linear(x.cuda(), weight).cpu(), expected), num_tokens


def measure_products(mine: CudaKernels, repeats: int) -> Iterator[dict[str, Any]]:
    rows = 2 if mine.activations == "int16" else 1
    for shape in SHAPES:
        weights = matrices(shape)
        for num_tokens in (*FEW, *MANY):
            x = torch.randn(num_tokens, shape[1], device="cuda")
            seconds = median_s([partial(mine.linear, x, weight) for weight in weights], repeats)
            operations = 2 * rows * num_tokens * shape[0] * shape[1]
            yield {
                "shape": shape,
                "num_tokens": num_tokens,
                "seconds": seconds,
                "gbps": shape[0] * shape[1] / seconds / 1e9,
                "tops": operations / seconds / 1e12,
            }


def int_mm_tops(num_rows: int, shape: tuple[int, int], repeats: int) -> float:
    """torch's own INT8 product with as many rows, 0 where the card has none."""
    x = torch.randint(-127, 128, (num_rows, shape[1]), dtype=torch.int8, device="cuda")
    calls = [partial(torch._int_mm, x, weight.qweight.t()) for weight in matrices(shape)]
    try:
        return 2 * num_rows * shape[0] * shape[1] / median_s(calls, repeats) / 1e12
    except RuntimeError:
        return 0.0


def paged_batch(num_seqs: int, num_new: int) -> tuple[Tensor, LayerKV, BatchLayout]:
    """Sequences of CONTEXT tokens, the last `num_new` of each new, in shuffled blocks of 16."""
    blocks = CONTEXT // 16
    k, v = (
        torch.randn(num_seqs * blocks, KV_HEADS, *size, device="cuda").half()
        for size in ((HEAD_DIM, 16), (16, HEAD_DIM))
    )
    layout = BatchLayout(
        torch.arange(CONTEXT - num_new, CONTEXT, device="cuda").repeat(num_seqs),
        torch.zeros(0, device="cuda"),
        torch.randperm(num_seqs * blocks, device="cuda").view(num_seqs, blocks).int(),
        torch.arange(0, (num_seqs + 1) * num_new, num_new, device="cuda").int(),
        torch.full((num_seqs,), CONTEXT, device="cuda").int(),
    )
    return torch.randn(num_seqs * num_new, HEADS, HEAD_DIM, device="cuda"), LayerKV(FLOAT16, (k, v)), layout


def measure_attention(mine: CudaKernels, repeats: int) -> Iterator[dict[str, Any]]:
    spec = AttentionSpec(HEADS, HEAD_DIM**-0.5)
    for num_seqs, num_new in (*((count, 1) for count in SEQUENCES), (1, CHUNK)):
        # Several caches take turns, so that none is still in the L2.
        kv_bytes = 2 * 2 * num_seqs * CONTEXT * KV_HEADS * HEAD_DIM
        cases = [paged_batch(num_seqs, num_new) for _ in range(ROUND_BYTES // 4 // kv_bytes + 1)]
        q, kv, layout = cases[0]
        y, expected = (k.paged_attention(q, kv, layout, spec) for k in (mine, ReferenceKernels()))
        assert float((y - expected).abs().max()) < 1e-5
        seconds = median_s([partial(mine.paged_attention, *case, spec) for case in cases], repeats)
        keys = num_new * CONTEXT - num_new * (num_new - 1) // 2
        yield {
            "num_seqs": num_seqs,
            "num_new": num_new,
            "seconds": seconds,
            "kv_gbps": kv_bytes / seconds / 1e9,
            "tflops": 4 * num_seqs * keys * HEADS * HEAD_DIM / seconds / 1e12,
        }


def launch_us(mine: CudaKernels) -> float:
    """Microseconds of the host for one launch, Python included."""
    x, weight = torch.randn(1, 64, device="cuda"), torch.ones(64, device="cuda")
    mine.rms_norm(x, weight, 1e-5)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(500):
        mine.rms_norm(x, weight, 1e-5)
    return (time.perf_counter() - started) / 500 * 1e6


@contextmanager
def timed(results: dict[str, Any], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    results[name] = time.perf_counter() - started


def measure(target: str, activations: str, repeats: int) -> dict[str, Any] | None:
    """Everything, with kernels for "sm_90", say, or "compute_61" (without tensor cores); None if no NVRTC
    here compiles for it."""
    library = find_nvrtc(int(target.rpartition("_")[2]))
    if library is None:
        return None
    results: dict[str, Any] = {"target": target}
    with timed(results, "compile_s"):
        image = library.compile(source(), target)
    with timed(results, "load_s"):
        launcher = CudaLauncher(torch.device("cuda", 0), image)
    if target == "compute_61":
        launcher.has_tensor_cores = False
    mine = CudaKernels(launcher, activations)
    check_products(mine)
    results["launch_us"] = launch_us(mine)
    results["products"] = list(measure_products(mine, repeats))
    results["attention"] = list(measure_attention(mine, repeats))
    return results


def report(results: dict[str, Any], rates: dict[str, float], int_mm: dict[str, float]) -> None:
    read, rows = rates["read_gbps"], results["rows"]
    print(f"\n{results['target']}: compiled in {results['compile_s']:.1f} s,", end=" ")
    print(f"loaded in {results['load_s']:.2f} s; a launch takes {results['launch_us']:.0f} us of the host")
    for p in results["products"]:
        line = (
            f"  [{p['shape'][0]}, {p['shape'][1]}] {p['num_tokens']:4} tokens: {p['seconds'] * 1e6:8.1f} us, "
        )
        if p["num_tokens"] in FEW:
            print(f"{line}weights at {p['gbps']:.0f} GB/s, {p['gbps'] / read:.0%} of the card's rate")
        else:
            other = int_mm[f"{p['num_tokens'] * rows}x{p['shape']}"]
            share = f", {p['tops'] / other:.0%} of torch._int_mm's {other:.0f}" if other else ""
            print(f"{line}{p['tops']:.1f} TOPS{share}")
    for a in results["attention"]:
        print(
            f"  attention, {a['num_seqs']} x {a['num_new']} tokens over {CONTEXT}: "
            f"{a['seconds'] * 1e6:8.1f} us, K and V at {a['kv_gbps']:.0f} GB/s ({a['kv_gbps'] / read:.0%}), "
            f"{a['tflops']:.1f} TFLOPS"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--activations", choices=("int16", "int8"), default="int16")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    options = parser.parse_args()
    repeats, rows = 5 if options.quick else 40, 2 if options.activations == "int16" else 1
    torch.manual_seed(0)
    major, minor = torch.cuda.get_device_capability()
    rates = memory_rates(repeats)
    print(f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, torch {torch.__version__};")
    print(f"memory: read {rates['read_gbps']:.0f} GB/s, copied {rates['copy_gbps']:.0f} GB/s;")
    print(f"{options.activations} activations, {rows} rows of bytes a token")
    int_mm = {
        f"{count * rows}x{shape}": int_mm_tops(count * rows, shape, repeats)
        for shape in SHAPES
        for count in MANY
    }
    runs = []
    for target in dict.fromkeys((f"sm_{10 * major + minor}", "compute_61")):
        results = measure(target, options.activations, repeats)
        if results is None:
            print(f"\n{target}: no NVRTC here compiles for it (pip install 'nvidia-cuda-nvrtc-cu12==12.6.*')")
            continue
        runs.append({**results, "rows": rows})
        report(runs[-1], rates, int_mm)
    card = {"bench": "gpu", "device": torch.cuda.get_device_name(), "activations": options.activations}
    print(json.dumps({**card, **rates, "int_mm_tops": int_mm, "runs": runs}))


if __name__ == "__main__":
    main()
