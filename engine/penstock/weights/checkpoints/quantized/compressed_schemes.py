"""What compressed-tensors says in config.json of a checkpoint's matrices: how many bits, which scales, which
format. Schemes that Penstock does not read are described for people."""

from __future__ import annotations

from typing import Any

from penstock.config import COMPUTED_GROUP_SIZES, GROUP_SIZES

#: Formats of INT8: in bytes (older editions say naive), and in int32 words.
INT8_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized")
FP8_FORMATS = ("float-quantized", "naive-quantized")
#: Floats of few bits with a scale for a group: bits, format, inputs of a group.
FLOATS_IN_GROUPS = {
    "nvfp4": (4, "nvfp4-pack-quantized", 16),
    "mxfp4": (4, "mxfp4-pack-quantized", 32),
    "mxfp6": (6, "mxfp6-pack-quantized", 32),
    "mxfp8": (8, "mxfp8-quantized", 32),
}
#: The smallest group in which a kernel sums exactly; larger groups of 4 bits must consist of whole ones.
SMALLEST_GROUP = min(GROUP_SIZES)
#: Matrices that become INT8 in groups of their own. They don't lie beside INT8 with groups by config.json.
FLOATS = {"fp8", "mxfp6", "mxfp8"}

#: What follows a matrix's name in that of the number by which all of its scales are divided.
GLOBAL_SCALE = "_global_scale"

#: Matrices that stay 4-bit codes.
FOUR_BITS = {"int4", "mxfp4", "nvfp4"}

Scheme = dict[str, Any]
Quantization = dict[str, Any]


def schemes(quantization: Quantization) -> list[tuple[Scheme, str]]:
    """The scheme of weights of each group of modules, and the group's format."""
    groups = (quantization.get("config_groups") or {}).values()
    return [(g.get("weights") or {}, str(g.get("format") or quantization.get("format"))) for g in groups]


def kinds(quantization: Quantization) -> set[str]:
    """How matrices are kept: int8, int4, fp8, or a name of FLOATS_IN_GROUPS; "" for matrices that Penstock
    does not read."""
    return {_kind(scheme, form) for scheme, form in schemes(quantization)}


def kinds_and_sizes(quantization: Quantization) -> list[tuple[str, int]]:
    """The kind of each group of modules, and the inputs that share a scale; 0: all of a row."""
    found = []
    for scheme, form in schemes(quantization):
        is_grouped = scheme.get("strategy") in ("group", "tensor_group")
        found.append((_kind(scheme, form), int(scheme.get("group_size") or 0) if is_grouped else 0))
    return found


def int8_group_size(quantization: Quantization) -> int:
    """Inputs that share a scale in the matrices of INT8, of several sizes the largest; 0 if all inputs of an
    output channel do."""
    return max(int8_sizes(quantization), default=0)


def int4_group_size(quantization: Quantization) -> int:
    """Inputs that share a scale in the matrices of 4 bits; the largest group for whole rows; 0 if no matrix
    has 4 bits."""
    of_4_bits = [scheme for scheme, form in schemes(quantization) if _kind(scheme, form) in FOUR_BITS]
    return int(of_4_bits[0].get("group_size") or max(GROUP_SIZES)) if of_4_bits else 0


def block_shape(quantization: Quantization) -> tuple[int, int]:
    """Rows and columns of a matrix of FP8 that share a scale, where blocks do; (0, 0) where none do."""
    found = [scheme.get("block_structure") for scheme, _ in schemes(quantization)]
    rows, columns = next((block for block in found if block), (0, 0))
    return int(rows), int(columns)


def has_zero_points(quantization: Quantization) -> bool:
    """Whether every matrix of 4 bits has zero points."""
    of_4_bits = [scheme for scheme, form in schemes(quantization) if _kind(scheme, form) == "int4"]
    return bool(of_4_bits) and not any(scheme.get("symmetric", True) for scheme in of_4_bits)


def fault(quantization: Quantization) -> str:
    """What Penstock does not read of a checkpoint; "" if Penstock reads all of it."""
    found, sparsity = (
        kinds(quantization),
        (quantization.get("sparsity_config") or {}).get("format") or "dense",
    )
    transforms = (quantization.get("transform_config") or {}).get("config_groups")
    in_words = {_kind(scheme, form) for scheme, form in schemes(quantization) if form == "pack-quantized"}
    is_known = found and "" not in found and not {"int8", "int4"} <= in_words
    is_known = is_known and not ("int8" in found and found & FLOATS)
    if is_known and sparsity == "dense" and not transforms:
        return ""
    what = sorted({_description(scheme) for scheme, _ in schemes(quantization)})
    what += sorted({form for scheme, form in schemes(quantization)})
    what += ([sparsity] if sparsity != "dense" else []) + (["transforms"] if transforms else [])
    return "; ".join(what) or "no format given"


def int8_sizes(quantization: Quantization) -> set[int]:
    """The sizes of groups in matrices of INT8; 0 for those with a scale for each row. A converted model may
    have both. Where FP8 became INT8, each matrix has the largest groups that fit its width."""
    of_int8 = [scheme for scheme, form in schemes(quantization) if _kind(scheme, form) == "int8"]
    return {int(scheme["group_size"]) if scheme.get("strategy") == "group" else 0 for scheme in of_int8}


def _kind(scheme: Scheme, form: str) -> str:
    numbers = (scheme.get("num_bits"), scheme.get("type"), bool(scheme.get("symmetric", True)))
    strategy = scheme.get("strategy")
    size = int(scheme.get("group_size") or -1) if strategy in ("group", "tensor_group") else 0
    is_ordered = scheme.get("actorder") in ("group", "dynamic", True)  # a group's inputs lie apart
    if numbers == (8, "int", True) and form in INT8_FORMATS and strategy in ("channel", "group"):
        return "int8" if size in (0, *COMPUTED_GROUP_SIZES) and not is_ordered else ""
    if numbers[:2] == (4, "int") and form == "pack-quantized" and strategy in ("channel", "group"):
        return "int4" if size >= 0 and size % SMALLEST_GROUP == 0 else ""
    for kind, (bits, own_form, own_size) in FLOATS_IN_GROUPS.items():
        if numbers == (bits, "float", True) and (form, size) == (own_form, own_size):
            return kind
    is_in_groups = strategy == "group" and size in GROUP_SIZES
    known = strategy in ("tensor", "channel", "block") or is_in_groups
    return "fp8" if numbers == (8, "float", True) and form in FP8_FORMATS and known else ""


def _description(scheme: Scheme) -> str:
    """A scheme, in words for people."""
    of = f" of {scheme['group_size']}" if scheme.get("strategy") == "group" else ""
    text = f"{scheme.get('num_bits')} bits {scheme.get('type')} per {scheme.get('strategy')}{of}"
    text += "" if scheme.get("symmetric", True) else ", asymmetric"
    return text + (f", actorder {scheme['actorder']}" if scheme.get("actorder") else "")
