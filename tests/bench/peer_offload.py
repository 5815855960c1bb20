"""accelerate's disk offloading, or AirLLM, with random bfloat16 weights of a known shape: decode steps with
several sequences, and for an encoder-decoder a prompt, to stand beside `penstock bench --shape`. Neither
streams INT8 on a processor, so both read twice the bytes. Needs an environment of its own (`pip install
accelerate airllm`, with PYTHONPATH=engine) and two bytes of disk for each parameter; AirLLM writes them once
more.

    python tests/bench/peer_offload.py accelerate --shape solar-10.7b --host-memory 6 [--sequences 1 8 32]
    python tests/bench/peer_offload.py airllm --shape solar-10.7b

For a memory limit run this, and penstock bench, in a cgroup (see peer_llama_cpp.py).
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import DynamicCache, EncoderDecoderCache

from penstock.model.known_shapes import find_shape

#: Decode steps that are timed, tokens of a sequence before them, and tokens of the prompt that is timed.
NUM_STEPS, CONTEXT, PROMPT = 2, 16, 512
DEMO_MODEL = Path(__file__).parents[2] / "engine" / "penstock" / "demo_model"


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """A checkpoint with a file per layer; tensors of one size share their random numbers."""
    config = transformers.AutoConfig.for_model(**shape)
    with torch.device("meta"):
        model = model_class(shape)(config)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    random: dict[tuple[torch.Size, bool], torch.Tensor] = {}
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("embed_tokens.weight") and "shared.weight" in model.state_dict():
            continue  # the embedding once more
        kind = tensor.shape, name == "lm_head.weight"
        if kind not in random:
            scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.0
            random[kind] = (torch.randn(tensor.shape) * scale + (tensor.dim() == 1)).bfloat16()
        layer = re.match(r".*?\.\d+(?=\.)", name)
        files.setdefault(f"{layer[0] if layer else 'model.rest'}.safetensors", {})[name] = random[kind]
    for file, tensors in files.items():
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    model.config.dtype = torch.bfloat16
    model.config.architectures = shape["architectures"]
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    # T5Config forgets the value.
    own = {"tie_word_embeddings": shape["tie_word_embeddings"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    for name in ("tokenizer.json", "tokenizer_config.json"):  # AirLLM insists on one
        shutil.copy(DEMO_MODEL / name, folder)


def model_class(shape: dict[str, Any]) -> Any:
    return getattr(transformers, shape["architectures"][0])


def load(peer: str, folder: Path, host_gib: float) -> Any:
    if peer == "airllm":
        import airllm  # type: ignore[import-not-found]

        return airllm.AutoModel.from_pretrained(str(folder), device="cpu", dtype=torch.bfloat16)
    return model_class(json.loads((folder / "config.json").read_text())).from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": f"{host_gib}GiB"},
        offload_folder=str(folder / "offload"),
    )


def tokens(num_seqs: int, length: int, vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (num_seqs, length))


@torch.inference_mode()
def decode_s(model: Any, num_seqs: int, vocab_size: int) -> float:
    """Median seconds of a step in which each sequence gets a token."""
    cache: Any = DynamicCache()
    given: dict[str, Any] = {}
    name = "input_ids"
    context = tokens(num_seqs, CONTEXT, vocab_size)
    if model.config.is_encoder_decoder:
        cache, name = EncoderDecoderCache(DynamicCache(), DynamicCache()), "decoder_input_ids"
        given = {"encoder_outputs": model.get_encoder()(context)}
        context = context[:, :1]
    model(**{name: context}, **given, past_key_values=cache, use_cache=True)
    times = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        token = tokens(num_seqs, 1, vocab_size)
        model(**{name: token}, **given, past_key_values=cache, use_cache=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@torch.inference_mode()
def encode_s(model: Any, vocab_size: int) -> float:
    """Seconds in which an encoder reads a prompt."""
    started = time.perf_counter()
    model.get_encoder()(tokens(1, PROMPT, vocab_size))
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("peer", choices=("accelerate", "airllm"))
    parser.add_argument("--shape", default="solar-10.7b")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "penstock" / "shapes")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--host-memory", type=float, default=6.0, metavar="GIB", help="for accelerate")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    importlib.import_module(options.peer)  # before 20 GB are written for it
    shape = find_shape(options.shape)
    folder = options.folder / f"{options.shape}-bf16"
    if not folder.exists():
        partial = folder.with_suffix(".part")
        write_model(partial, shape)
        partial.rename(folder)
    model = load(options.peer, folder, options.host_memory)
    result: dict[str, Any] = {"bench": options.peer, "shape": options.shape}
    if model.config.is_encoder_decoder:
        result["encode_s"] = encode_s(model, shape["vocab_size"])
        print(f"encoding a prompt of {PROMPT}: {result['encode_s']:6.1f} s")
    for number in options.sequences:
        seconds = decode_s(model, number, shape["vocab_size"])
        result[f"decode_{number}_s"] = seconds
        print(f"decode, {number:2} sequences: {seconds:6.1f} s a step, {number / seconds:6.3f} tokens/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
