"""Which quantized checkpoints are read, and what they are read as. All others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.config import GROUP_SIZES
from penstock.errors import CorruptFile, UnsupportedModel
from penstock.weights.checkpoints import checkpoint, gguf_models
from penstock.weights.checkpoints import folder as folders
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf import is_gguf
from penstock.weights.checkpoints.gguf_models import open_gguf
from penstock.weights.checkpoints.packed import gptq_entries, unpacked_entries
from penstock.weights.checkpoints.packed_int4 import compressed_int4_entries
from penstock.weights.checkpoints.published import bminf
from penstock.weights.checkpoints.published.bminf_file import is_bminf
from penstock.weights.checkpoints.published.pickled_folder import open_pickled

#: The name that _method() gives to GPTQ with 8 bits.
GPTQ = "gptq with 8 bits"
#: Formats of compressed-tensors: INT8 in bytes (older editions say naive), and INT8 in int32 words.
FORMATS = ("int-quantized", "naive-quantized", "pack-quantized")
#: Endings of compressed-tensors' scales for activations, keys and values. The scales say how to round these.
#: Penstock does not use these scales, and nothing is lost.
ACTIVATION_SCALES = tuple(
    f".{of}_{kind}" for of in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point")
)
#: Endings of tensors that show what quantized a checkpoint where config.json does not name it.
FOREIGN_TENSORS = {
    ".SCB": "bitsandbytes LLM.int8",
    ".weight.absmax": "bitsandbytes with 4 bits",
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "FP8",
    "_proj_blocks": "MXFP4",
}


#: Errors that a malformed file causes: a word in place of a number, a missing number, a division by zero.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def open_checkpoint(folder: Path, allow_pickle: bool = False) -> Checkpoint:
    """A model's folder or GGUF file, whichever tool wrote it, with each tensor under its usual name and in
    its usual shape. `allow_pickle` is the one of EngineConfig.

    Raises Checkpoint.open()'s errors, UnsupportedModel and WrongTensor.
    """
    try:
        return _open(folder, allow_pickle)
    except MALFORMED as error:
        raise CorruptFile(
            f"the headers or configs of {folder} make no sense ({error!r}); download the model again"
        ) from error


def _open(folder: Path, allow_pickle: bool) -> Checkpoint:
    if is_gguf(folder):
        return open_gguf(folder)
    if is_bminf(folder):
        return bminf.open_bminf(folder)
    with _open_stored(folder, allow_pickle) as stored:
        quantization = stored.config.get("quantization_config")
        if quantization is None:
            _check_names(stored)
            return stored
        group_size = check_quantization(stored.config)
        if _method(quantization) == GPTQ:
            return _open_gptq(stored, group_size is not None)
        unpacked = compressed_int4_entries if _packs_4_bits(quantization) else unpacked_entries
        entries = {
            entry.name: entry for entry in unpacked(stored) if not entry.name.endswith(ACTIVATION_SCALES)
        }
        idle = _zeros(stored, ".weight_zero_point")
        return Checkpoint(folder, stored.config, entries, idle, pickles=stored.pickles)


def _open_stored(folder: Path, allow_pickle: bool) -> Checkpoint:
    """A folder's tensors as its files have them."""
    if folder.is_dir() and folders.pickles(folder):
        folders.check_adapter(folder)
        if not allow_pickle:
            folders.check_no_pickles(folder)
        return open_pickled(folder, read_config(folder) if (folder / "config.json").is_file() else {})
    stored = Checkpoint.open(folder)
    stored.config = read_config(folder)
    return stored


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder or a GGUF file, in the form of config.json. `quantization_config` has what
    AutoGPTQ and ModelOpt write into files of their own, and MLX under a key of its own. Raises
    CheckpointNotFound, CorruptFile and UnsupportedModel (GGUF files, adapters)."""
    if is_gguf(folder):
        return gguf_models.read_config(folder)
    if is_bminf(folder):
        return bminf.read_config(folder)
    config = checkpoint.read_config(folder)
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "bits" in mlx:  # newer editions repeat the key, without a method's name
        return config | {"quantization_config": mlx | {"quant_method": "MLX"}}
    if config.get("quantization_config") is not None:
        return config
    beside, modelopt = folder / "quantize_config.json", folder / "hf_quant_config.json"
    if beside.is_file():
        return config | {"quantization_config": {"quant_method": "gptq"} | checkpoint.read_json(beside)}
    found = checkpoint.read_json(modelopt).get("quantization") if modelopt.is_file() else None
    if isinstance(found, dict) and found.get("quant_algo"):  # without it only keys and values were quantized
        return config | {"quantization_config": found | {"quant_method": "modelopt"}}
    return config


def _open_gptq(stored: Checkpoint, keeps_integers: bool) -> Checkpoint:
    # The first version of the format stores each zero point minus one.
    is_second = stored.config["quantization_config"].get("checkpoint_format") == "gptq_v2"
    entries = {entry.name: entry for entry in gptq_entries(stored, keeps_integers, 128 if is_second else 127)}
    # AutoGPTQ gives each module a bias, which is zero where the model has none.
    idle = frozenset(
        name for name in _zeros(stored, ".bias") if f"{name.removesuffix('bias')}qweight" in stored.entries
    )
    requantized = "" if keeps_integers else "GPTQ's groups, which are out of order (desc_act)"
    return Checkpoint(stored.folder, stored.config, entries, idle, requantized, stored.pickles)


def check_quantization(config: dict[str, Any]) -> int | None:
    """Inputs that share a scale in the linear layers of an INT8 checkpoint; 0 if all inputs of an output
    channel do. None if the checkpoint is unquantized, or if its integers can't be kept and are quantized
    again. Raises UnsupportedModel for all other checkpoints."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = _method(quantization)
    if method == "compressed-tensors":
        return _compressed_group_size(quantization)
    if method == GPTQ:
        return _gptq_group_size(quantization)
    raise _unsupported(method)


def int4_group_size(config: dict[str, Any]) -> int:
    """Inputs that share a scale in the matrices that a checkpoint keeps in 4 bits (128 if all inputs of an
    output channel do); 0 if there are no such matrices."""
    quantization = config.get("quantization_config") or {}
    if _method(quantization) != "compressed-tensors":
        return 0
    of_4_bits = [scheme for scheme, _ in _compressed_groups(quantization) if scheme.get("num_bits") == 4]
    return int(of_4_bits[0].get("group_size") or max(GROUP_SIZES)) if of_4_bits else 0


def _compressed_group_size(quantization: dict[str, Any]) -> int:
    groups = list((quantization.get("config_groups") or {}).values())
    schemes = [group.get("weights") or {} for group in groups]
    formats = {group.get("format") or quantization.get("format") for group in groups}
    int8 = [scheme for scheme in schemes if scheme.get("num_bits") != 4]
    sizes = {s.get("group_size") or -1 for s in int8 if s.get("strategy") == "group"} or {0}
    is_known = schemes and formats <= set(FORMATS) and all(map(_is_int8, int8)) and len(sizes) == 1
    is_known = is_known and _int4_is_known(quantization)
    sparsity = (quantization.get("sparsity_config") or {}).get("format") or "dense"
    transforms = (quantization.get("transform_config") or {}).get("config_groups")
    if is_known and sizes <= {0, *GROUP_SIZES} and sparsity == "dense" and not transforms:
        return int(sizes.pop())
    what = sorted({_scheme(scheme) for scheme in schemes}) + sorted(map(str, formats))
    what += ([sparsity] if sparsity != "dense" else []) + (["transforms"] if transforms else [])
    raise _unsupported(f"compressed-tensors: {'; '.join(what) or 'no format given'}")


def _compressed_groups(quantization: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Each group's scheme of weights, and its format."""
    groups = (quantization.get("config_groups") or {}).values()
    return [(g.get("weights") or {}, str(g.get("format") or quantization.get("format"))) for g in groups]


def _packs_4_bits(quantization: dict[str, Any]) -> bool:
    """Whether what lies in int32 words are 4-bit codes."""
    return any(scheme.get("num_bits") == 4 for scheme, _ in _compressed_groups(quantization))


def _int4_is_known(quantization: dict[str, Any]) -> bool:
    """Whether matrices of 4 bits are symmetric integers in words, and no others lie in words beside them."""
    groups = _compressed_groups(quantization)
    of_4_bits = [(scheme, form) for scheme, form in groups if scheme.get("num_bits") == 4]
    is_alone = all(form != "pack-quantized" or scheme.get("num_bits") == 4 for scheme, form in groups)
    return (is_alone or not of_4_bits) and all(
        form == "pack-quantized"
        and scheme.get("type") == "int"
        and scheme.get("symmetric", True)
        and scheme.get("strategy") in ("channel", "group")
        and scheme.get("actorder") not in ("group", "dynamic", True)
        for scheme, form in of_4_bits
    )


def _gptq_group_size(quantization: dict[str, Any]) -> int | None:
    size = int(quantization.get("group_size") or -1)
    is_plain = (
        quantization.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2")
        and not quantization.get("is_marlin_format")
        and quantization.get("pack_dtype", "int32") == "int32"
    )
    is_symmetric = quantization.get("sym", True)
    if is_plain and is_symmetric and size in (-1, *GROUP_SIZES):
        if size == -1:
            return 0
        return None if quantization.get("desc_act") else size
    form = "" if is_plain else f", {quantization.get('checkpoint_format') or 'marlin'}"
    form += f" in {quantization['pack_dtype']}" if "pack_dtype" in quantization else ""
    raise _unsupported(f"{GPTQ}, groups of {size}{'' if is_symmetric else ', asymmetric'}{form}")


def activation_note(config: dict[str, Any]) -> str:
    """What users should know about a checkpoint that was made for rounded activations; "" for all others."""
    quantization = config.get("quantization_config") or {}
    groups = (quantization.get("config_groups") or {}).values()
    schemes = [scheme for group in groups if (scheme := group.get("input_activations"))]
    if not schemes:
        return ""
    scheme = schemes[0]
    scales = "their scales in the files are not used, as " if not scheme.get("dynamic") else ""
    return (
        f"made for activations of {scheme.get('num_bits')} bits; {scales}activations are computed with 16 "
        "bits, which is closer to the original model; --activations int8 gives 8 bits and a scale per token"
    )


def _is_int8(scheme: dict[str, Any]) -> bool:
    # With actorder "group" the inputs of a group do not lie side by side.
    return (
        scheme.get("num_bits") == 8
        and scheme.get("type") == "int"
        and scheme.get("symmetric", True)
        and scheme.get("strategy") in ("channel", "group")
        and scheme.get("actorder") not in ("group", "dynamic", True)
    )


def _scheme(scheme: dict[str, Any]) -> str:
    """A compressed-tensors scheme, in words for people."""
    of = f" of {scheme['group_size']}" if scheme.get("strategy") == "group" else ""
    text = f"{scheme.get('num_bits')} bits {scheme.get('type')} per {scheme.get('strategy')}{of}"
    text += "" if scheme.get("symmetric", True) else ", asymmetric"
    return text + (f", actorder {scheme['actorder']}" if scheme.get("actorder") else "")


def _method(quantization: dict[str, Any]) -> str:
    """What quantized a checkpoint, with the number of bits where that is known."""
    if quantization.get("load_in_8bit") or quantization.get("_load_in_8bit"):
        return "bitsandbytes LLM.int8"
    if quantization.get("load_in_4bit") or quantization.get("_load_in_4bit"):
        return "bitsandbytes with 4 bits"
    named = (quantization.get("quant_method"), quantization.get("quant_algo"))
    method = ", ".join(str(name) for name in named if name) or "an unnamed method"
    bits = quantization.get("bits") or quantization.get("w_bit")
    return f"{method} with {bits} bits" if bits else method


def _zeros(stored: Checkpoint, ending: str) -> frozenset[str]:
    """Tensors with this ending whose elements are all zero."""
    names = (name for name in stored.entries if name.endswith(ending))
    return frozenset(name for name in names if not bool(stored.read(name).any()))


def _check_names(stored: Checkpoint) -> None:
    """Raises UnsupportedModel for tensors that only a quantized checkpoint has."""
    for name in stored.entries:
        for ending, method in FOREIGN_TENSORS.items():
            if name.endswith(ending):
                raise _unsupported(f"{method}: the files hold {name}, and config.json does not mention it")


def _unsupported(method: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the checkpoint is quantized ({method}); Penstock reads unquantized checkpoints, which it quantizes "
        "itself, and compressed-tensors (`int-quantized`, `pack-quantized`) or GPTQ with 8 bits, symmetric, "
        f"per channel or per group of {', '.join(map(str, GROUP_SIZES))} inputs. Use the original, "
        "unquantized repository"
    )
