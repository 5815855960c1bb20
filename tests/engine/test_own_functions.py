"""torch's functions in transformers' modules: each token's numbers are the same bits in any company."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.config import EngineConfig
from penstock.kernels import choose_kernels
from penstock.kernels.reference import ReferenceKernels
from penstock.model.through_transformers import guard
from penstock.model.through_transformers.architectures import configs
from penstock.model.through_transformers.family import ThroughTransformers
from penstock.model.through_transformers.own_functions import ELEMENTWISE, OwnFunctions, ours
from penstock.spec import FLOAT16

#: Ways in which modules call functions, each of one tensor [num_tokens, width].
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.sigmoid": torch.sigmoid,
    "Tensor.sigmoid": Tensor.sigmoid,
    "Tensor.sigmoid_": lambda x: x.clone().sigmoid_(),
    "expit": torch.special.expit,
    "nn.Sigmoid": torch.nn.Sigmoid(),
    "silu": functional.silu,
    "nn.SiLU": torch.nn.SiLU(),
    "silu in place": lambda x: functional.silu(x.clone(), inplace=True),
    "softplus": functional.softplus,
    "nn.Softplus": torch.nn.Softplus(beta=2.0, threshold=5.0),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "mish": functional.mish,
    "elu": functional.elu,
    "selu": functional.selu,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "sinh": torch.sinh,
    "pow of numbers": lambda x: x.abs() ** 1.5,
    "pow of a number": lambda x: 2.3**x,
    "pow of both": lambda x: torch.pow(x.abs(), x),
    "broadcast": lambda x: torch.logaddexp(x, x[:, :1]),
    "turned": lambda x: torch.sigmoid(x.t()).t(),
    "sum": lambda x: x / (x.sum(-1, keepdim=True) + 1e-20),
    "mean of squares": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "sum of turned": lambda x: x.t().contiguous().t().sum(dim=1),
    "router": lambda x: functional.linear(x, _matrix(x), torch.ones(3)),
    "router by @": lambda x: x @ _matrix(x).t(),
    "router of floats": lambda x: torch.matmul(x.float(), _matrix(x).float().transpose(0, 1)),
    "number and tensor": lambda x: torch.pow(torch.tensor(2.3, dtype=torch.float64), x),
    "softmax": lambda x: x.softmax(dim=-1),
    "largest": lambda x: x - x.max(dim=-1, keepdim=True)[0] - x.amax(-1, keepdim=True),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.topk(1, dim=-1)[1], 1.0),
    "choice": lambda x: x.sigmoid().topk(min(2, x.shape[1]), dim=-1)[0],
}
WIDTHS, ROWS = (1, 4, 20, 33, 64), (2, 7, 30)


def _matrix(x: Tensor) -> Tensor:
    return torch.randn(3, x.shape[1], generator=torch.Generator().manual_seed(x.shape[1]))


@pytest.mark.parametrize("name", CALLS)
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    call, functions = CALLS[name], OwnFunctions(ReferenceKernels())
    numbers = torch.Generator().manual_seed(1)
    for width in WIDTHS:
        for count in ROWS:
            x = 3 * torch.randn(count, width, generator=numbers)
            chosen = (0, count // 2, count - 1)
            with torch.inference_mode(), functions, functions.watching() as found:
                together = call(x)
                alone = [call(x[row : row + 1].clone())[0] for row in chosen]
            assert not found
            for row, own in zip(chosen, alone, strict=True):
                assert torch.equal(own.nan_to_num(), together[row].nan_to_num()), (width, count, row)
            torch.testing.assert_close(together, call(x), equal_nan=True, rtol=1e-5, atol=1e-5)


def test_large_tensors_are_cut_where_no_thread_begins() -> None:
    functions = OwnFunctions(ReferenceKernels())
    x = torch.randn(70, 1003, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode(), functions:
        together = torch.sigmoid(x)
        alone = torch.cat([torch.sigmoid(row.view(1, -1)) for row in x])
    assert torch.equal(together, alone)


#: Of a tensor [3, 4] or of none of its rows.
EDGES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum over no dimensions": lambda x: x.sum(dim=()),
    "mean over no dimensions": lambda x: x.mean(dim=[], keepdim=True),
    "sum of a number": lambda x: x.sum().sum(0),
    "mean of a number": lambda x: x.sum().mean(-1, keepdim=True),
    "sum over one dimension twice": lambda x: x.sum(dim=(0, -2)),
    "sum over a dimension that is not there": lambda x: x.sum(dim=2),
    "linear of no rows": lambda x: functional.linear(x[:0].view(0, 5, 4), _matrix(x)),
    "@ of no rows": lambda x: x[:0] @ _matrix(x).t(),
    "linear of no width": lambda x: functional.linear(x[:, :0], torch.ones(3, 0), torch.ones(3)),
    "linear of another width": lambda x: functional.linear(x[:, :1], _matrix(x)),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_are_those_of_torch(name: str) -> None:
    """Shapes, numbers and errors."""
    call, x = EDGES[name], torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    try:
        expected = call(x)
    except (IndexError, RuntimeError) as error:
        with OwnFunctions(ReferenceKernels()), pytest.raises(type(error)) as raised:
            call(x)
        assert str(raised.value) == str(error)
        return
    with OwnFunctions(ReferenceKernels()):
        found = call(x)
    assert found.shape == expected.shape and torch.allclose(found, expected)


UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "bmm": lambda x: torch.bmm(x.view(1, *x.shape), x.t().reshape(1, *x.shape[::-1])),
    "glu": lambda x: functional.glu(x),
    "cumsum": lambda x: x.cumsum(0),
    "softmax over tokens": lambda x: x.softmax(0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "sum of all": lambda x: x.sum(),
    "largest of all": lambda x: x * x.abs().max(),
    "largest of a column": lambda x: x.max(dim=0),
    "choice of tokens": lambda x: x.topk(2, dim=0),
    "added by index": lambda x: x.index_add(0, torch.tensor([0, 0]), x[:2]),
    "added by scatter": lambda x: x.scatter(0, torch.zeros(2, 6, dtype=torch.int64), x[:2], reduce="add"),
    "multiplied by scatter in place": lambda x: x.scatter_(
        0, torch.zeros(2, 6, dtype=torch.int64), 3.0, reduce="multiply"
    ),
    "sum over no dimensions": lambda x: x.sum(dim=()),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "add with a factor": lambda x: torch.add(x, x, alpha=0.3),
    "einsum": lambda x: torch.einsum("th,oh->to", x, x),
    "out": lambda x: torch.sigmoid(x, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_seen(name: str) -> None:
    """Whatever the numbers are, and whether they differ here or not."""
    functions = OwnFunctions(ReferenceKernels())
    with torch.inference_mode(), functions, functions.watching() as found:
        UNKNOWN[name](torch.randn(8, 6))
    assert found


def test_our_own_kernels_are_left_alone() -> None:
    functions = OwnFunctions(ReferenceKernels())
    with functions, functions.watching() as found:
        ours(torch.cumsum)(torch.randn(3, 3), 0)
    assert not found


def test_the_names_are_those_of_functions() -> None:
    rooms = (torch, functional, torch.special, torch.Tensor)
    assert all(any(hasattr(room, name) for room in rooms) for name in ELEMENTWISE - {"special_expit"})


#: Those that call most kinds of functions: gates per head, routers with sigmoids and softmaxes, softplus.
FAMILIES = [
    "afmoe", "kolibri1", "hy_v3", "glm4_moe_lite", "nanochat", "cohere2_moe", "xlm-roberta-xl",
]  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_alone_and_in_company(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of other lengths than the guard's, in sizes that are no whole vectors, packed and cut at random;
    and what modules call is known to be safe."""
    dice = random.Random(kind)
    lengths = [dice.randint(1, 37) for _ in range(9)]
    monkeypatch.setattr(guard, "LENGTHS", tuple(lengths))
    monkeypatch.setattr(guard, "NUM_BLOCKS", sum(-(-length // guard.BLOCK_SIZE) for length in lengths) + 3)
    alone = tuple(((text, 0, length),) for text, length in enumerate(lengths))
    packed = (tuple((text, 0, length) for text, length in enumerate(lengths)),)
    family = _family(kind)
    tensors = family.model_tensors(family.spec)
    with family.desk.functions.watching() as unknown:
        assert guard.are_equal(family, tensors, FLOAT16, (alone, packed, _chunks(lengths, dice)))
    assert not unknown


def _family(kind: str) -> ThroughTransformers:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config = next(configs(kind, names if isinstance(names, str) else names[0]))
    spec = ThroughTransformers.read_spec(config)
    return ThroughTransformers(spec, choose_kernels(EngineConfig()), spec.max_position_embeddings)


def _chunks(lengths: list[int], dice: random.Random) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Steps in which some of the texts go on by some tokens."""
    steps, done = [], [0] * len(lengths)
    while done != lengths:
        left = [text for text in range(len(lengths)) if done[text] < lengths[text]]
        step = []
        for text in dice.sample(left, dice.randint(1, len(left))):
            end = dice.randint(done[text] + 1, lengths[text])
            step.append((text, done[text], end))
            done[text] = end
        steps.append(tuple(step))
    return tuple(steps)
