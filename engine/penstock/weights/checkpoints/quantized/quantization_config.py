"""Which quantized checkpoints are read, by what their configs say. All others are refused by name."""

from __future__ import annotations

from typing import Any

from penstock.config import COMPUTED_GROUP_SIZES, GROUP_SIZES
from penstock.errors import UnsupportedModel
from penstock.weights.checkpoints.quantized import compressed_schemes
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Names that method() gives.
COMPRESSED, GPTQ, GPTQ_INT4 = "compressed-tensors", "gptq with 8 bits", "gptq with 4 bits"
AWQ = "awq with 4 bits"
#: gpt-oss: its experts are MXFP4, and all else is unquantized. What holds a layer's experts, the family puts
#: apart.
MXFP4 = "mxfp4"
#: FP8 by DeepSeek's and transformers' own code, and by FBGEMM.
FP8 = ("fp8", "fbgemm_fp8")
#: NVIDIA's ModelOpt, and which of its algorithms are read. Their activations are not rounded here.
MODELOPT = "modelopt"
MODELOPT_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PER_BLOCK", "MXFP8")
MODELOPT_NVFP4 = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
MODELOPT_MXFP4 = ("MXFP4", "W4A8_MXFP4_FP8")
#: Of several algorithms, which each module's name tells.
MODELOPT_MIXED = "MIXED_PRECISION"
MXFP4_GROUP = 32
#: The dtype of elements in FP8, as safetensors has it.
FP8_DTYPE = "F8_E4M3"
#: INT8 in two planes of four bits, as Penstock's converted folders have it (planes.py). The name stands under
#: a key of its own in config.json, "penstock".
PLANES = "planes"
#: 4-bit codes of forms that compressed-tensors has no name for (codes.py), under the same key.
CODES = "codes"
#: Under this key, config.json says that all 4-bit matrices have their scales as units and steps.
STEPS_KEY = "penstock_int4_steps"
#: What the log says of weights in FP8, and of those whose inputs AWQ scales.
REQUANTIZED = "FP8 weights, which become INT8"
REQUANTIZED_SCALED = "weights of modules whose inputs are multiplied by their pre_quant_scale"
#: The ending of numbers by which a module's inputs are multiplied before its matrix (ModelOpt's NVFP4_AWQ).
PRE_SCALE = ".pre_quant_scale"
#: Endings of other tools' scales for activations, keys and values. The scales say how to round these.
#: Penstock does not use these scales, and nothing is lost.
ACTIVATION_SCALES = tuple(
    f".{of}_{kind}"
    for of in ("input", "output", "activation", "q", "k", "v", "kv")
    for kind in ("scale", "zero_point", "global_scale")
)
#: How AWQ's tools call the layout that Penstock reads.
AWQ_LAYOUT = "gemm"


def check_quantization(config: dict[str, Any]) -> int | None:
    """Inputs that share a scale in the linear layers of an INT8 checkpoint; 0 if all inputs of an output
    channel do, or if the checkpoint has 4 bits. None if the checkpoint is unquantized, or if its numbers
    can't be kept and are quantized again. Raises UnsupportedModel for all other checkpoints."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    kind = method(quantization)
    if kind == COMPRESSED:
        return _compressed_group_size(quantization)
    if kind == GPTQ:
        return _gptq_group_size(quantization)
    if kind == PLANES:
        return _planes_group_size(quantization)
    if kind == CODES:
        _check_codes(quantization)
        return 0
    if kind in (*FP8, MODELOPT):
        return None
    if kind == GPTQ_INT4:
        _check_gptq_int4(quantization)
    elif kind == AWQ:
        _check_awq(quantization)
    elif kind != MXFP4:
        raise unsupported(kind)
    return 0


def has_mxfp4_experts(config: dict[str, Any]) -> bool:
    """Whether a checkpoint keeps its experts, and nothing else, in MXFP4."""
    quantization = config.get("quantization_config")
    return quantization is not None and method(quantization) == MXFP4


def has_planes(config: dict[str, Any]) -> bool:
    """Whether a checkpoint keeps its layers' matrices in planes."""
    quantization = config.get("quantization_config")
    return quantization is not None and method(quantization) == PLANES


def int8_group_sizes(config: dict[str, Any]) -> set[int]:
    """Inputs that share a scale in the INT8 matrices of compressed-tensors, 0 for whole rows: a folder may
    have both."""
    quantization = config.get("quantization_config") or {}
    if method(quantization) == CODES:
        return {int(size) for size in quantization["int8_group_sizes"]}
    return compressed_schemes.int8_sizes(quantization) if method(quantization) == COMPRESSED else set()


def int4_group_size(config: dict[str, Any]) -> int:
    """Inputs that share a scale in the matrices that a checkpoint keeps in 4 bits (128 if all inputs of an
    output channel do); 0 if there are no such matrices."""
    quantization = config.get("quantization_config") or {}
    kind, largest = method(quantization), max(GROUP_SIZES)
    if kind == MXFP4:
        return MXFP4_GROUP
    if kind == CODES:
        return int(quantization["group_size"])
    if kind == COMPRESSED:
        return min(compressed_schemes.int4_group_size(quantization), largest)
    if kind not in (GPTQ_INT4, AWQ):
        return 0
    size = _group_size(quantization)
    return largest if size == -1 else min(size, largest)


def low_codes(config: dict[str, Any]) -> dict[str, list[str]]:
    """The modules of a folder of ours whose matrices are in our own codes, by "BITS/GROUP_SIZE" ("int3/64"),
    where some have fewer bits than 4. A module of a layer's experts has * in place of the expert's number."""
    quantization = config.get("quantization_config") or {}
    return quantization.get("formats") or {} if method(quantization) == CODES else {}


def has_low_codes(config: dict[str, Any], weights: str) -> bool:
    """Whether a folder of ours has matrices in codes of so many bits ("int3" or "int2")."""
    return any(name.startswith(f"{weights}/") for name in low_codes(config))


def fp8_block(config: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of a matrix of FP8 that share a scale, where blocks do; (0, 0) where none do."""
    quantization = config["quantization_config"]
    if method(quantization) == COMPRESSED:
        return compressed_schemes.block_shape(quantization)
    rows, columns = quantization.get("weight_block_size") or (0, 0)  # null for a scale per tensor
    return int(rows), int(columns)


def is_fp8(entry: TensorEntry) -> bool:
    return entry.dtype == FP8_DTYPE and entry.name.endswith(".weight")


def is_second(quantization: dict[str, Any]) -> bool:
    """Whether GPTQ's files are of the second version of their format, which keeps zero points as they are."""
    return _gptq_version(quantization) == "gptq_v2"


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


def form_of(config: dict[str, Any]) -> str:
    """The form of a checkpoint's weights in words for people; "" for an unquantized one."""
    quantization = config.get("quantization_config") or {}
    if not quantization:
        return ""
    if (kind := method(quantization)) == COMPRESSED:
        forms = sorted(each.upper() for each in compressed_schemes.kinds(quantization))
        return f"{', '.join(forms)} (compressed-tensors)"
    if kind != MODELOPT:
        return kind
    algorithms = modelopt_algorithms(quantization) - {"NONE"}
    return f"{', '.join(sorted(algorithms))} (ModelOpt)" if algorithms else ""


def kv_note(config: dict[str, Any]) -> str:
    """The same of a checkpoint whose keys and values are to be rounded by scales in its files; "" for all
    others."""
    quantization = config.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        return ""
    scheme, algorithm = quantization.get("kv_cache_scheme") or {}, quantization.get("kv_cache_quant_algo")
    if not scheme and not algorithm:
        return ""
    kind = algorithm or f"{scheme.get('num_bits')} bits {scheme.get('type')}"
    return f"the files' scales of keys and values ({kind}) are not used: --kv-dtype says how these are kept"


def method(quantization: dict[str, Any]) -> str:
    """What quantized a checkpoint, with the number of bits where that is known."""
    if (own := quantization.get("penstock")) in (PLANES, CODES):
        return str(own)
    if quantization.get("load_in_8bit") or quantization.get("_load_in_8bit"):
        return "bitsandbytes LLM.int8"
    if quantization.get("load_in_4bit") or quantization.get("_load_in_4bit"):
        kind = quantization.get("bnb_4bit_quant_type", "fp4")
        return f"bitsandbytes with 4 bits ({kind}, whose table of 16 is not one of integers)"
    if _is_modelopt(quantization):
        return MODELOPT
    named = (quantization.get("quant_method"), quantization.get("quant_algo"))
    name = ", ".join(str(one) for one in named if one) or "an unnamed method"
    bits = quantization.get("bits") or quantization.get("w_bit")
    return f"{name} with {bits} bits" if bits else name


def modelopt_algorithms(quantization: dict[str, Any]) -> set[str]:
    """The algorithms by which ModelOpt quantized a checkpoint's modules, in capitals."""
    found = str(quantization.get("quant_algo")).upper()
    if found != MODELOPT_MIXED:
        return {found}
    return {
        str(one.get("quant_algo")).upper() for one in (quantization.get("quantized_layers") or {}).values()
    }


def _is_modelopt(quantization: dict[str, Any]) -> bool:
    """Whether ModelOpt quantized a checkpoint by algorithms that are read. (Some of its editions call the
    method modelopt_fp4, and some name none.)"""
    name = quantization.get("quant_method")
    known = {*MODELOPT_FP8, *MODELOPT_NVFP4, *MODELOPT_MXFP4}
    if str(name).startswith("modelopt"):
        known.add("NONE")  # keys and values alone
    elif name is not None:
        return False
    return bool(found := modelopt_algorithms(quantization)) and found <= known


#: By the beginning of a method's name: what to take in its place, beside the original repository.
_NEAREST = {
    "bitsandbytes with 4 bits": "with --weights int4, the original takes as much memory",
    "bitsandbytes": "the original becomes INT8 when it is loaded",
    "MLX": "a GGUF file of the same bits",
    "auto": "AutoRound's export to GPTQ or AWQ",
    "awq": "a repository in GPTQ or AWQ (gemm), or with --weights int4 the original",
    "gptq": "a repository in GPTQ with 4 bits, or a GGUF file of as few bits",
    "modelopt": "ModelOpt's NVFP4 or FP8",
    "torchao": "compressed-tensors of the same bits",
    "quark": "compressed-tensors of the same bits",
    "exl": "a GGUF file of the same bits",
    "hqq": "a GGUF file of the same bits",
    "aqlm": "a GGUF file of the same bits (IQ2_M, Q2_K)",
    "bitnet": "a GGUF file in TQ2_0",
}


def unsupported(kind: str) -> UnsupportedModel:
    near = next((other for name, other in _NEAREST.items() if kind.startswith(name)), "")
    return UnsupportedModel(
        f"the checkpoint is quantized ({kind}); Penstock reads unquantized checkpoints, which it quantizes "
        "itself, compressed-tensors (`int-quantized`, `pack-quantized`) or GPTQ with 8 bits, symmetric, "
        f"per channel or per group of {', '.join(map(str, GROUP_SIZES))} inputs, the same with 4 bits, AWQ "
        "(gemm), NVFP4, MXFP4, MXFP6, MXFP8 and FP8. Use the original, unquantized repository, or one of "
        f"these formats{f'; nearest is: {near}' if near else ''}"
    )


def _compressed_group_size(quantization: dict[str, Any]) -> int | None:
    if found := compressed_schemes.fault(quantization):
        raise unsupported(f"compressed-tensors: {found}")
    if compressed_schemes.kinds(quantization) & compressed_schemes.FLOATS:
        return None
    return compressed_schemes.int8_group_size(quantization)


_COMPUTED = ", ".join(map(str, COMPUTED_GROUP_SIZES))


def _planes_group_size(quantization: dict[str, Any]) -> int:
    size = quantization.get("group_size")
    if quantization.get("version") != 1 or size not in (0, *COMPUTED_GROUP_SIZES):
        raise UnsupportedModel(
            f"the checkpoint is in planes of version {quantization.get('version')}, groups of {size}; this "
            f"Penstock reads version 1 with groups of {_COMPUTED}, or 0. Install a newer Penstock, or "
            "convert the model again"
        )
    return int(size)


def _check_codes(quantization: dict[str, Any]) -> None:
    if quantization.get("version") != 1 or quantization.get("group_size") not in COMPUTED_GROUP_SIZES:
        raise UnsupportedModel(
            f"the checkpoint has 4-bit codes of version {quantization.get('version')}, groups of "
            f"{quantization.get('group_size')}; this Penstock reads version 1 with groups of "
            f"{_COMPUTED}. Install a newer Penstock, or convert the model again"
        )
    known = {f"{bits}/{size}" for bits in ("int2", "int3", "int4") for size in GROUP_SIZES}
    formats = quantization.get("formats") or {}
    if not isinstance(formats, dict) or not formats.keys() <= known:
        raise UnsupportedModel(
            f"the checkpoint has codes of forms that this Penstock does not know ({formats!s:.200}). Install "
            "a newer Penstock, or convert the model again"
        )


def _gptq_group_size(quantization: dict[str, Any]) -> int | None:
    size, form = _group_size(quantization), _gptq_form(quantization)
    is_symmetric = quantization.get("sym", True)
    if not form and is_symmetric and size in (-1, *GROUP_SIZES):
        if size == -1:
            return 0
        return None if quantization.get("desc_act") else size
    raise unsupported(f"{GPTQ}, groups of {size}{'' if is_symmetric else ', asymmetric'}{form}")


def _check_gptq_int4(quantization: dict[str, Any]) -> None:
    size, form = _group_size(quantization), _gptq_form(quantization)
    if form or not _is_whole(size):
        raise unsupported(f"{GPTQ_INT4}, groups of {size}{form}")


def _gptq_form(quantization: dict[str, Any]) -> str:
    """How the words of GPTQ are laid out, where Penstock does not know the layout; "" otherwise."""
    form = _gptq_version(quantization)
    words = quantization.get("pack_dtype") or "int32"
    is_marlin = quantization.get("is_marlin_format")
    if form in ("gptq", "gptq_v2") and words == "int32" and not is_marlin:
        return ""
    return f", {'marlin' if is_marlin else form}" + (f" in {words}" if words != "int32" else "")


def _gptq_version(quantization: dict[str, Any]) -> str:
    return str(quantization.get("checkpoint_format") or quantization.get("format") or "gptq")


def _check_awq(quantization: dict[str, Any]) -> None:
    form = quantization.get("version") or quantization.get("checkpoint_format") or quantization.get("format")
    size, layout = _group_size(quantization), str(form or AWQ_LAYOUT).lower()
    if quantization.get("backend") == "llm-awq":
        layout = "llm-awq"
    has_zeros = quantization.get("zero_point", True)
    if layout != AWQ_LAYOUT or not has_zeros or not _is_whole(size):
        zeros = "" if has_zeros else ", without zero points"
        raise unsupported(f"{AWQ}, version {layout}, groups of {size}{zeros}")


def _is_whole(size: int) -> bool:
    """Whether groups of so many inputs consist of groups that kernels know."""
    return size == -1 or (size > 0 and size % min(GROUP_SIZES) == 0)


def _group_size(quantization: dict[str, Any]) -> int:
    """Inputs that share a scale; -1 for all inputs of an output channel."""
    return int(quantization.get("group_size") or quantization.get("q_group_size") or -1)
