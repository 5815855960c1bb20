"""config.json of a converted model, which says in compressed-tensors' words how its weights are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from penstock.errors import ConfigError
from penstock.weights.checkpoints.own_head import HEAD, TIED_HEAD
from penstock.weights.checkpoints.quantized.module_kinds import any_expert
from penstock.weights.checkpoints.quantized.quantization_config import CODES, PLANES, STEPS_KEY
from penstock.weights.formats.int4_format import WORD_ROWS, Int4
from penstock.weights.formats.model_formats import has_planes
from penstock.weights.formats.planes_format import UpperPlane
from penstock.weights.formats.stacked_format import in_one_format
from penstock.weights.formats.weight_format import Floats, Int8, WeightFormat, rows_of_parts
from penstock.weights.store import WeightStore
from penstock.weights.tensor_source import TensorSource
from penstock.weights.tensors import ModelTensors, TensorSpec, beside_shared


def converted_config(store: WeightStore) -> dict[str, Any]:
    """Raises ConfigError for a model that no config.json can describe."""
    tensors = converted_tensors(store)
    config = store.checkpoint.config | {"quantization_config": quantization_config(tensors)}
    _check_words(store)
    packed = [matrix.format for matrix in _matrices(tensors) if isinstance(matrix.format, Int4)]
    if packed and all(kind.form.has_steps for kind in packed):
        config |= {STEPS_KEY: True}
    if has_copied_head(tensors):
        config |= {"tie_word_embeddings": False, TIED_HEAD: True}
    return config


def converted_tensors(store: WeightStore) -> ModelTensors:
    """A model's tensors as a converted folder holds them. If the layers come from a checkpoint in 4 bits,
    embedding and head stay floats where the checkpoint has floats: other tools quantize layers alone, and
    the same INT8 is made of the same floats whenever the folder is loaded."""
    tensors, source = store.tensors, store.source
    inner = [tensor for unit in tensors.units for tensor in unit.tensors if isinstance(tensor.format, Int4)]
    if not any(tensor.format.holds(source.entry(tensor.parts[0])) for tensor in inner):
        return tensors

    def outer(group: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(_unquantized(tensor, source) for tensor in group)

    return replace(tensors, embedding=outer(tensors.embedding), head=outer(tensors.head))


def _unquantized(tensor: TensorSpec, source: TensorSource) -> TensorSpec:
    """The matrix as the checkpoint has it, if that is floats and the matrix has one part."""
    entry = source.entry(tensor.parts[0])
    kind = Floats(entry.dtype)
    is_plain = entry.dtype in ("F32", "F16", "BF16") and kind.holds(entry) and entry.shape == tensor.shape
    return replace(tensor, format=kind) if tensor.is_matrix and is_plain else tensor


def has_copied_head(tensors: ModelTensors) -> bool:
    """Whether a converted folder holds the embedding's matrix a second time: transformers can't share a
    quantized matrix between embedding and head."""
    return tensors.is_tied and not has_own_codes(tensors) and bool(_scheme(tensors.output_matrix.format))


def _check_words(store: WeightStore) -> None:
    """Raises ConfigError for zero points that don't fill words."""
    stored = [own for tensor in store.tensors.multiplied for own in in_one_format(tensor)]
    for tensor in stored:
        if isinstance(tensor.format, Int4) and tensor.format.form.minima == "zero_points":
            for part, _, start, end in rows_of_parts(store.source, tensor):
                if (end - start) % WORD_ROWS:
                    raise ConfigError(
                        f"{part} has {end - start} rows, and compressed-tensors packs the zero points of "
                        f"{WORD_ROWS} rows: the model can't be converted. Serve the checkpoint unconverted"
                    )


def quantization_config(tensors: ModelTensors) -> dict[str, Any]:
    """What compressed-tensors calls our formats; planes have a name of our own. Raises ConfigError for a
    format without a name."""
    if has_planes(tensors):
        return planes_config(tensors)
    if has_own_codes(tensors):
        return codes_config(tensors)
    tables = _kept(tensors.embedding)
    linear = [kept for unit in tensors.units for kept in _kept(unit.tensors)]
    # transformers calls every head by one name, and knows the names of heads in checkpoints beside it.
    linear += [kept.also(_module(HEAD)) for kept in _kept(tensors.head)]
    if tensors.mtp is not None:  # whose groups have no table
        linear += [kept for group in tensors.mtp.groups for kept in _kept(beside_shared(group))]
    if has_copied_head(tensors):
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


def _matrices(tensors: ModelTensors) -> list[TensorSpec]:
    """All matrices, each in one format."""
    return [
        own
        for group in tensors.groups
        for tensor in group
        if tensor.is_matrix
        for own in in_one_format(tensor)
    ]


def has_own_codes(tensors: ModelTensors) -> bool:
    """Whether a matrix has 4-bit codes in a form for which compressed-tensors has no name. A folder with such
    matrices is described in our own words."""
    kinds = {tensor.format for tensor in _matrices(tensors)}
    return any(isinstance(kind, Int4) and kind.scheme() is None for kind in kinds)


def codes_config(tensors: ModelTensors) -> dict[str, Any]:
    """What says that matrices are in codes of our own description (codes.py). As planes_config(), without a
    `quant_method`. Raises ConfigError for a format that is neither 4-bit codes nor INT8."""
    kinds = {tensor.format for tensor in _matrices(tensors)}
    for kind in kinds:
        if not isinstance(kind, Int4 | Int8 | Floats):
            _scheme(kind)
    return low_formats(tensors) | {
        "penstock": CODES,
        "version": 1,
        "group_size": max(kind.group_size for kind in kinds if isinstance(kind, Int4)),
        "int8_group_sizes": sorted({kind.group_size for kind in kinds if isinstance(kind, Int8)}),
        "arrays": "the fields of a matrix of 4-bit codes, each as NAME_field; NAME_packed has the codes, "
        "NAME_mxfp4, NAME_iq4_nl and others codes that stand for numbers of a table; eight codes in a word. "
        "NAME_int3_64 has codes of 3 bits in groups of 64, in blocks of 256 inputs",
    }


def low_formats(tensors: ModelTensors) -> dict[str, Any]:
    """Which modules are in our own codes, where some have fewer bits than 4: low_codes() reads it. Other
    matrices are INT8. {}: none has fewer bits."""
    found = dict[str, list[str]]()
    for tensor in _matrices(tensors):
        kind = tensor.format
        if isinstance(kind, Int4) and kind.form.has_steps:
            name = "int4" if kind.form.bits == 4 else kind.form.codebook
            modules = [any_expert(_module(part)) for part in tensor.parts]
            found.setdefault(f"{name}/{kind.group_size}", []).extend(modules)
    if all(name.startswith("int4/") for name in found):
        return {}
    return {"formats": {name: list(dict.fromkeys(modules)) for name, modules in sorted(found.items())}}


class _Kept(NamedTuple):
    """Modules of one format."""

    format: WeightFormat
    modules: list[str]

    def also(self, module: str) -> _Kept:
        """The same modules, and `module` if that is not one of them."""
        return self._replace(modules=list(dict.fromkeys([*self.modules, module])))


def _kept(tensors: tuple[TensorSpec, ...]) -> list[_Kept]:
    """The tensors with two dimensions: layers of neurons, and tables whose rows are looked up."""
    alone = [own for tensor in tensors for own in in_one_format(tensor)]
    flat = [tensor for tensor in alone if len(tensor.shape) == 2]
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
            f"weights that are kept as {kind.name} can't be converted without loss: compressed-tensors, in "
            "whose form converted models are written, has no name for this format. Serve the checkpoint "
            "itself, unconverted"
        )
    return scheme


def _packing(kind: WeightFormat) -> str:
    """What compressed-tensors calls the form of a format's integers in files."""
    return "pack-quantized" if _scheme(kind).get("num_bits") == 4 else "int-quantized"


def _module(part: str) -> str:
    return part.removesuffix(".weight")
