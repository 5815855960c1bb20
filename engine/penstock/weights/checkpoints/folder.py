"""What the names of a folder's files say: which files are the weights, or what else the folder is."""

from __future__ import annotations

import json
import re
from pathlib import Path

from penstock.errors import CheckpointNotFound, CorruptFile, UnsafeCheckpoint, UnsupportedModel
from penstock.gguf_file import GGUF_PART
from penstock.memory.ordinary_file import open_bytes

#: Most bytes of a part of a path that file systems take, and of a whole path inside a model's folder.
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 1024
#: Files that torch.save writes. Each holds a pickle, which runs code when Python's pickle reads it.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
#: Such files without a model's weights: what a training goes on with.
TRAINING = (
    "training_args.bin",
    "optimizer*",
    "scheduler*",
    "scaler*",
    "rng_state*",
    "random_states*",
    "zero_*",
)
#: The name of a part of a model in several pickles.
BIN_PART = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
#: Shards of a training, in a folder or in a folder inside.
RANKS = ("mp_rank_*_model_states.pt", "*/mp_rank_*_model_states.pt")
#: A second copy of the weights, under the names of Mistral's own code.
CONSOLIDATED = "consolidated*.safetensors"
#: The weights under the names of Meta's own code.
CONSOLIDATED_PICKLES = "consolidated*.pth"
#: Files of adapters that PEFT and mlx-lm write.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = ("adapter_model*.safetensors", "adapter_model*.bin", "adapters.safetensors")
#: Beginning of the name of a file that lets llama.cpp see images. Such a file is no model.
GGUF_PROJECTOR = "mmproj"


def is_file_name(name: object) -> bool:
    """Whether a name that comes from a file or a network is that of a file inside a model's folder."""
    if not isinstance(name, str) or len(name.encode(errors="replace")) > MAX_PATH_BYTES:
        return False
    return all(map(is_path_part, name.split("/")))


def is_path_part(name: str) -> bool:
    """Whether a text can be the name of one file or folder."""
    num_bytes = len(name.encode(errors="replace"))
    return name not in ("", ".", "..") and name.isprintable() and num_bytes <= MAX_NAME_BYTES


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no safetensors; the first part, if the model is in parts. Raises
    CheckpointNotFound where there are several models."""
    found = gguf_models(folder)
    if not found or any(folder.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = ", ".join(str(path) for path in found[:8])
        raise CheckpointNotFound(
            f"{folder} holds {len(found)} models as GGUF files. Give the path of one file: {names}"
        )
    return found[0]


def gguf_models(folder: Path) -> list[Path]:
    """The GGUF files of a folder that are models; the first part of each that is in parts."""
    return [path for path in sorted(folder.glob("*.gguf")) if not _is_idle(path)]


def _is_idle(path: Path) -> bool:
    part = GGUF_PART.fullmatch(path.name)
    return path.name.startswith(GGUF_PROJECTOR) or (part is not None and int(part[2]) != 1)


def check_adapter(folder: Path) -> None:
    """Raises UnsupportedModel for a folder with an adapter, alone or beside its model."""
    files = [path.name for pattern in ADAPTERS for path in sorted(folder.glob(pattern))]
    if not files or not (folder / ADAPTER_CONFIG).is_file():
        return
    base = _base_model(folder / ADAPTER_CONFIG)
    raise UnsupportedModel(
        f"{folder} holds an adapter ({ADAPTER_CONFIG}, {files[0]}) for {base}, and no model. Serve the model "
        f"with --lora NAME={folder}, or merge the adapter once with peft: AutoPeftModelForCausalLM"
        ".from_pretrained(folder).merge_and_unload().save_pretrained(new_folder). To serve a model that lies "
        "in the same folder without the adapter, move the adapter's files away"
    )


def _base_model(path: Path) -> str:
    try:
        with open_bytes(path) as stream:
            content = json.load(stream)
        return str(content.get("base_model_name_or_path") or content.get("model") or "a model")
    except (OSError, ValueError, AttributeError, RecursionError, CorruptFile):
        return "a model"


def refuse_without_config(folder: Path) -> CheckpointNotFound:
    """The error for a folder that has no config.json."""
    if (folder / "params.json").is_file() or any(folder.glob("consolidated*")):
        what = (
            "params.json or consolidated.*, the layout of Mistral's or Meta's own code, and no config.json: "
            "use the repository in Hugging Face's layout (for Meta's, the one whose name ends in -hf)"
        )
        return CheckpointNotFound(f"{folder} has {what}")
    return CheckpointNotFound(
        f"{folder} has no config.json, so it is not a Hugging Face model folder, and the folder holds no "
        ".gguf file"
    )


def unindexed_weights(folder: Path) -> list[Path]:
    """The safetensors files of a folder without an index. As in transformers, model.safetensors alone is
    taken if it is there, and variants (model.fp16.safetensors) or copies under other names are not. Raises
    CheckpointNotFound and UnsafeCheckpoint."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    copies = set(folder.glob(CONSOLIDATED))
    files = [path for path in sorted(folder.glob("*.safetensors")) if path not in copies]
    if files:
        return files
    if copies := copies or set(folder.glob(CONSOLIDATED_PICKLES)):
        raise CheckpointNotFound(
            f"{folder} has its weights only as {min(copies).name}, under the names of Mistral's or Meta's "
            "own code. Use a repository with model.safetensors"
        )
    check_no_pickles(folder)
    raise CheckpointNotFound(
        f"{folder} holds no *.safetensors file. If its repository has GGUF files, fetch a GGUF file and give "
        "the path of that file"
    )


def pickles(folder: Path) -> list[Path]:
    """The files of torch.save that hold a folder's weights: pytorch_model.bin, or its parts, or all files
    that could be weights. [] if the folder has safetensors."""
    if any(folder.glob("*.safetensors*")):
        return []
    if (folder / "pytorch_model.bin").is_file():
        return [folder / "pytorch_model.bin"]
    others = {path for pattern in (*TRAINING, CONSOLIDATED_PICKLES) for path in folder.glob(pattern)}
    found = {path for pattern in PICKLES for path in folder.glob(pattern) if path.is_file()} - others
    parts = [path for path in found if BIN_PART.fullmatch(path.name)]
    return sorted(parts or found or {path for pattern in RANKS for path in folder.glob(pattern)})


def check_no_pickles(folder: Path) -> None:
    """Raises UnsafeCheckpoint for a folder whose weights are pickles."""
    if files := pickles(folder):
        raise UnsafeCheckpoint(
            f"{folder} has its weights only as pickles ({shortened([path.name for path in files])}). "
            f"{about_pickles(str(folder))}"
        )


def about_pickles(model: str) -> str:
    """What users should know and do about a model whose weights are pickles."""
    return (
        "A pickle can run code when it is read as usual; Penstock can find the tensors in a pickle without "
        "running anything, if you allow it. Convert the model once: penstock convert --allow-pickle "
        f"{model} NEW_FOLDER. Or use a repository with safetensors"
    )


def shortened(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
