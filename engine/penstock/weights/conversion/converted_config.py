"""config.json of a converted model, which says in compressed-tensors' words how its weights are kept."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.weights.checkpoints.own_head import HEAD
from penstock.weights.checkpoints.quantized.quantization_config import PLANES
from penstock.weights.planes_format import UpperPlane
from penstock.weights.store import WeightStore
from penstock.weights.tensors import ModelTensors, TensorSpec
from penstock.weights.weight_format import Int8, WeightFormat

#: In the config.json of a converted model: the head is there for others, and is the embedding's matrix.
TIED_HEAD = "penstock_tied_head"


def converted_config(store: WeightStore) -> dict[str, Any]:
    """Raises ConfigError for a model that no config.json can describe."""
    config = store.checkpoint.config | {"quantization_config": quantization_config(store.tensors)}
    if store.tensors.is_tied:
        config |= {"tie_word_embeddings": False, TIED_HEAD: True}
    return config


def quantization_config(tensors: ModelTensors) -> dict[str, Any]:
    """What compressed-tensors calls our formats; planes have a name of our own. Raises ConfigError for a
    format without a name."""
    if tensors.has_planes:
        return planes_config(tensors)
    tables = _kept(tensors.embedding)
    linear = [kept for unit in tensors.units for kept in _kept(unit.tensors)]
    # transformers calls every head by one name, and knows the names of heads in checkpoints beside it.
    linear += [kept.also(_module(HEAD)) for kept in _kept(tensors.head)]
    if tensors.is_tied:
        linear.append(
            _Kept(tensors.output_matrix.format, [_module(HEAD)])
        )  # the file holds a head for others
    groups = _groups(tables, linear)
    forms = {_packing(kind) for kind in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": targets,
                "weights": _scheme(kind),
                "format": _packing(kind),  # without it compressed-tensors takes weight-only INT8 for packed
            }
            for index, (kind, targets) in enumerate(groups.items())
        },
        "ignore": [name for kept in tables + linear if not _scheme(kept.format) for name in kept.modules],
    }


def planes_config(tensors: ModelTensors) -> dict[str, Any]:
    """What says that the layers' matrices are in planes. There is no `quant_method`, so that transformers and
    vLLM refuse the folder; with a name that they don't know, transformers would leave the matrices random."""
    inner = (*(tensor for unit in tensors.units for tensor in unit.tensors), *tensors.head)
    kinds = {tensor.format for tensor in inner if tensor.is_matrix}
    is_int8 = all(isinstance(kind, UpperPlane | Int8) for kind in kinds)
    if not is_int8 or len({kind.group_size for kind in kinds}) > 1:
        names = ", ".join(sorted(kind.name for kind in kinds))
        raise ConfigError(
            "planes are for models that are INT8 throughout, with groups of one size; this one is kept as "
            f"{names}. Convert it without --weights planes"
        )
    return {
        "penstock": PLANES,
        "version": 1,
        "group_size": tensors.group_size,
        "integers": "NAME = 16 * (NAME_upper - 8) + NAME_lower; byte i has input 2 i in its low half",
    }


class _Kept(NamedTuple):
    """Modules of one format."""

    format: WeightFormat
    modules: list[str]

    def also(self, module: str) -> _Kept:
        """The same modules, and `module` if that is not one of them."""
        return self._replace(modules=list(dict.fromkeys([*self.modules, module])))


def _kept(tensors: tuple[TensorSpec, ...]) -> list[_Kept]:
    """The tensors with two dimensions: layers of neurons, and tables whose rows are looked up."""
    flat = [tensor for tensor in tensors if len(tensor.shape) == 2]
    return [_Kept(tensor.format, [_module(part) for part in tensor.parts]) for tensor in flat]


def _groups(tables: list[_Kept], linear: list[_Kept]) -> dict[WeightFormat, list[str]]:
    """The targets of each format, except plain floating point. The first linear module's format is that of
    the class Linear; linear modules of other formats are named."""
    quantized = [kept for kept in linear if _scheme(kept.format)]
    groups = {kept.format: ["Linear"] for kept in quantized[:1]}
    for kept in quantized:
        if groups.setdefault(kept.format, [])[:1] != ["Linear"]:
            groups[kept.format] += kept.modules
    for kept in tables:
        if _scheme(kept.format):
            groups.setdefault(kept.format, []).append("Embedding")
    return groups


def _scheme(kind: WeightFormat) -> dict[str, Any]:
    """WeightFormat.scheme(), {} for plain floating point. Raises ConfigError."""
    scheme = kind.scheme()
    if scheme is None:
        raise ConfigError(
            f"weights that are kept as {kind.name} can't be converted: compressed-tensors, in whose form "
            "converted models are written, has no name for this format. Serve the checkpoint unconverted"
        )
    return scheme


def _packing(kind: WeightFormat) -> str:
    """What compressed-tensors calls the form of a format's integers in files."""
    return "pack-quantized" if _scheme(kind).get("num_bits") == 4 else "int-quantized"


def _module(part: str) -> str:
    return part.removesuffix(".weight")
