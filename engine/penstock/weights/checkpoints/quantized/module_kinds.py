"""In what form config.json says that each module's matrix is: what a plan knows before the files are there.
When the files are read, their tensors tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.weights.checkpoints.quantized import compressed_schemes
from penstock.weights.checkpoints.quantized import quantization_config as configs

if TYPE_CHECKING:
    from penstock.weights.tensors import ModelTensors


class Kind(NamedTuple):
    """The form of a matrix."""

    #: One of compressed_schemes.kinds().
    name: str
    #: Inputs that share a scale; 0: all of a row.
    group_size: int = 0


#: What a plan takes a module for.
KindOf = Callable[[str], Kind | None]
#: Where tools list the modules that they have left unquantized.
_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
#: Kinds that become INT8 with a loss.
ROUNDED = ("fp8", "mxfp8")
_GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp6": 32, "mxfp8": 32}


def names_kinds(config: dict[str, Any]) -> bool:
    """Whether config.json tells in what form each matrix is, where forms are not all INT8."""
    quantization = config.get("quantization_config") or {}
    method = configs.method(quantization)
    if method == configs.COMPRESSED:
        return compressed_schemes.kinds(quantization) != {"int8"}
    return method in (*configs.FP8, configs.MODELOPT) or bool(configs.low_codes(config))


def module_kinds(config: dict[str, Any]) -> KindOf:
    """The kind of a module by its name in the text model, without ".weight"; None for one that is not
    quantized."""
    from penstock.weights.checkpoints.text_part import whole_names

    quantization = config.get("quantization_config") or {}
    method = configs.method(quantization)
    if quantization and "expert_dtype" in config:
        quantization = {"expert_dtype": config["expert_dtype"]} | quantization
    left_out = [str(each) for name in _LISTS for each in quantization.get(name) or ()]
    choose = _CHOOSERS.get(method, _uniform)(quantization, method)

    def kind_of(module: str) -> Kind | None:
        names = whole_names(module)
        return None if _is_in(names, left_out) else choose(names)

    return kind_of


def lossless_share(config: dict[str, Any], tensors: ModelTensors) -> float:
    """The share of the matrices' elements that stay as the checkpoint has them, by config.json alone."""
    kind_of, elements = module_kinds(config), {True: 0, False: 0}
    inner = [tensor for unit in tensors.units for tensor in unit.tensors]
    for tensor in (*inner, *tensors.head, *tensors.embedding):
        if tensor.is_matrix:
            kind = None if tensor in tensors.embedding else kind_of(tensor.parts[0].removesuffix(".weight"))
            elements[kind is not None and kind.name not in ROUNDED] += tensor.num_elements
    return elements[True] / max(1, sum(elements.values()))


def _uniform(quantization: dict[str, Any], method: str) -> Callable[[list[str]], Kind | None]:
    """GPTQ, AWQ, MXFP4 and our own: all matrices of layers."""
    kind = Kind("fp8") if method in configs.FP8 else Kind("int4") if quantization else None
    has_head = bool(quantization.get("lm_head"))
    # DeepSeek V4 has its experts in FP4.
    of_experts = Kind("mxfp4", 32) if quantization.get("expert_dtype") == "fp4" else kind

    def choose(names: list[str]) -> Kind | None:
        if "lm_head" in names and not has_head:
            return None
        return of_experts if any(".experts." in name for name in names) else kind

    return choose


def _compressed(quantization: dict[str, Any], method: str) -> Callable[[list[str]], Kind | None]:
    """Of several groups, one that names a module goes before one that names all linear modules."""
    groups = (quantization.get("config_groups") or {}).values()
    kinds = [Kind(*each) for each in compressed_schemes.kinds_and_sizes(quantization)]
    targets = [[str(each) for each in group.get("targets") or ()] for group in groups]

    def choose(names: list[str]) -> Kind | None:
        named = [kind for kind, each in zip(kinds, targets, strict=True) if _is_in(names, each)]
        usual = [kind for kind, each in zip(kinds, targets, strict=True) if "Linear" in each]
        return next(iter(named + usual), None)

    return choose


def _own_codes(quantization: dict[str, Any], method: str) -> Callable[[list[str]], Kind | None]:
    kinds = dict[str, Kind]()
    for name, modules in (quantization.get("formats") or {}).items():
        bits, size = name.split("/")
        kinds |= dict.fromkeys(map(str, modules), Kind(bits, int(size)))
    if not kinds:
        return _uniform(quantization, method)
    return lambda names: next((kinds[one] for one in map(any_expert, names) if one in kinds), None)


def any_expert(module: str) -> str:
    """The name of a module without the number of an expert."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", module)


def _modelopt(quantization: dict[str, Any], method: str) -> Callable[[list[str]], Kind | None]:
    layers = quantization.get("quantized_layers") or {}
    by_layer = {str(name): _modelopt_kind(str(one.get("quant_algo"))) for name, one in layers.items()}
    usual = None if layers else _modelopt_kind(str(quantization.get("quant_algo")))

    def choose(names: list[str]) -> Kind | None:
        return next((by_layer[name] for name in names if name in by_layer), usual)

    return choose


def _modelopt_kind(algorithm: str) -> Kind | None:
    algorithm = algorithm.upper()
    tables = {"nvfp4": configs.MODELOPT_NVFP4, "mxfp4": configs.MODELOPT_MXFP4, "mxfp8": ("MXFP8",)}
    for name, table in tables.items():
        if algorithm in table:
            return Kind(name, _GROUPS[name])
    return Kind("fp8") if algorithm in configs.MODELOPT_FP8 else None


_CHOOSERS: dict[str, Callable[[dict[str, Any], str], Callable[[list[str]], Kind | None]]] = {
    configs.COMPRESSED: _compressed,
    configs.CODES: _own_codes,
    configs.MODELOPT: _modelopt,
}


def _is_in(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(_matches(name, pattern) for name in names for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern of a tool means a module: an expression after "re:", a name with * in it, or a name
    or a part of one between dots."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    if "*" in pattern:
        return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    return f".{pattern}." in f".{name}."
