"""Files as CPM-1, CPM-2 and BMInf published them, made of small models: Megatron's shards and BMInf's tree.
The splits are written here anew, from what Megatron's layers do."""

from __future__ import annotations

import argparse
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def save_ranks(ranks: list[Tensors], folder: Path, is_zip: bool = True) -> None:
    """DeepSpeed's files: the tensors in "module", beside the states of a training."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, tensors in enumerate(ranks):
        content = {
            "module": tensors,
            "optimizer": {"state": {0: torch.zeros(3)}},
            "args": argparse.Namespace(model_parallel_size=len(ranks)),
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "mp_world_size": len(ranks),
        }
        file = folder / f"mp_rank_{rank:02d}_model_states.pt"
        torch.save(content, file, _use_new_zipfile_serialization=is_zip)


def part(whole: Tensor, rank: int, num_ranks: int, num_blocks: int = 1) -> Tensor:
    """Rows of a rank: its part of each block, one after the other."""
    blocks = whole.chunk(num_blocks)
    return torch.cat([block.chunk(num_ranks)[rank] for block in blocks]).clone()


def cpm1_ranks(gpt2: Tensors, num_ranks: int) -> list[Tensors]:
    """The tensors of transformers' GPT2LMHeadModel as CPM-1's ranks had them."""
    return [dict(_cpm1(gpt2, rank, num_ranks)) for rank in range(num_ranks)]


def _cpm1(gpt2: Tensors, rank: int, num_ranks: int) -> Iterator[tuple[str, Tensor]]:
    yield "word_embeddings.weight", part(gpt2["transformer.wte.weight"], rank, num_ranks)
    yield "position_embeddings.weight", gpt2["transformer.wpe.weight"]
    for kind in ("weight", "bias"):
        yield f"transformer.final_layernorm.{kind}", gpt2[f"transformer.ln_f.{kind}"]
    index = 0
    while f"transformer.h.{index}.ln_1.weight" in gpt2:
        ours, theirs = f"transformer.h.{index}.", f"transformer.layers.{index}."
        for kind in ("weight", "bias"):
            yield f"{theirs}input_layernorm.{kind}", gpt2[f"{ours}ln_1.{kind}"]
            yield f"{theirs}post_attention_layernorm.{kind}", gpt2[f"{ours}ln_2.{kind}"]
            qkv, up = gpt2[f"{ours}attn.c_attn.{kind}"].t(), gpt2[f"{ours}mlp.c_fc.{kind}"].t()
            yield f"{theirs}attention.query_key_value.{kind}", part(qkv, rank, num_ranks, 3)
            yield f"{theirs}mlp.dense_h_to_4h.{kind}", part(up, rank, num_ranks)
        for name, megatron in (("attn.c_proj", "attention.dense"), ("mlp.c_proj", "mlp.dense_4h_to_h")):
            columns = gpt2[f"{ours}{name}.weight"].chunk(num_ranks)[rank]  # rows are inputs in GPT-2's files
            yield f"{theirs}{megatron}.weight", columns.t().clone()
            yield f"{theirs}{megatron}.bias", gpt2[f"{ours}{name}.bias"]
        index += 1


def cpm_live_ant(transformers_own: Tensors, num_soft: int) -> tuple[Tensors, Tensors]:
    """CPM-Ant's tensors as CPM-Live saved them, in float16, and what they are under transformers' names. In
    CPM-Live, a Linear divides its results and an Embedding its rows by the root of a row's length."""
    saved, same = {}, {}
    for name, value in transformers_own.items():
        if not name.startswith("cpmant."):
            continue  # the head is the embedding
        is_divided = value.dim() == 2 and not name.endswith("relative_attention_bias")
        root = value.shape[1] ** 0.5 if is_divided else 1.0
        half = (value * root).half()
        saved[name.removeprefix("cpmant.")], same[name] = half, half.float() / root
    embedding = saved.pop("input_embedding.weight")
    saved["input_embedding.weight"], saved["prompt_embedding.weight"] = (
        part.clone() for part in embedding.split([len(embedding) - num_soft, num_soft])
    )
    return saved, same


def cpm2_ranks(t5: Tensors, num_ranks: int) -> list[Tensors]:
    """The tensors of transformers' MT5ForConditionalGeneration as CPM-2's ranks had them."""
    return [dict(_cpm2(t5, rank, num_ranks)) for rank in range(num_ranks)]


def _cpm2(t5: Tensors, rank: int, num_ranks: int) -> Iterator[tuple[str, Tensor]]:
    def rows(*names: str) -> Tensor:
        return torch.cat([t5[f"{name}.weight"].chunk(num_ranks)[rank] for name in names])

    def columns(name: str) -> Tensor:
        return t5[f"{name}.weight"].chunk(num_ranks, 1)[rank].clone()

    yield "word_embeds.weight", rows("shared")
    yield "lm_head.weight", rows("lm_head")
    for stack, feed in (("encoder", 1), ("decoder", 2)):
        yield f"{stack}.word_embeds.weight", rows("shared")
        yield f"{stack}.final_layernorm.weight", t5[f"{stack}.final_layer_norm.weight"]
        index = 0
        while f"{stack}.block.{index}.layer.0.layer_norm.weight" in t5:
            ours, theirs = f"{stack}.block.{index}.layer.", f"{stack}.blocks.{index}."
            own, cross, ff = (
                f"{ours}0.SelfAttention.",
                f"{ours}1.EncDecAttention.",
                f"{ours}{feed}.DenseReluDense.",
            )
            yield f"{theirs}self_attn.self_attn.project.weight", rows(*(own + name for name in "qkv"))
            yield f"{theirs}self_attn.self_attn.dense.weight", columns(f"{own}o")
            if index == 0:
                bias = "relative_attention_bias"
                yield f"{theirs}self_attn.self_attn.{bias}.weight", columns(f"{own}{bias}")
            yield f"{theirs}self_attn.layer_norm.weight", t5[f"{ours}0.layer_norm.weight"]
            if stack == "decoder":
                yield f"{theirs}cross_attn.cross_attn.project_q.weight", rows(f"{cross}q")
                yield f"{theirs}cross_attn.cross_attn.project_kv.weight", rows(f"{cross}k", f"{cross}v")
                yield f"{theirs}cross_attn.cross_attn.dense.weight", columns(f"{cross}o")
                yield f"{theirs}cross_attn.layer_norm.weight", t5[f"{ours}1.layer_norm.weight"]
            yield f"{theirs}ff.layer_norm.weight", t5[f"{ours}{feed}.layer_norm.weight"]
            yield f"{theirs}ff.dense_relu_dense.wi_0.weight", rows(f"{ff}wi_0")
            yield f"{theirs}ff.dense_relu_dense.wi_1.weight", rows(f"{ff}wi_1")
            yield f"{theirs}ff.dense_relu_dense.wo.weight", columns(f"{ff}wo")
            index += 1


def model_center(t5: Tensors) -> Tensors:
    """The tensors of transformers' MT5ForConditionalGeneration under ModelCenter's names of "cpm2-large"."""
    return dict(_model_center(t5))


def _model_center(t5: Tensors) -> Iterator[tuple[str, Tensor]]:
    yield "input_embedding.weight", t5["shared.weight"]
    yield "output_projection.weight", t5["lm_head.weight"]
    for stack, feed in (("encoder", 1), ("decoder", 2)):
        table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield f"position_bias_{stack[:3]}.relative_attention_bias", t5[table]
        yield f"{stack}.output_layernorm.weight", t5[f"{stack}.final_layer_norm.weight"]
        index = 0
        while f"{stack}.block.{index}.layer.0.layer_norm.weight" in t5:
            ours, theirs = f"{stack}.block.{index}.layer.", f"{stack}.layers.{index}."
            blocks = [("self_att", f"{ours}0", "SelfAttention")]
            blocks += [("cross_att", f"{ours}1", "EncDecAttention")] if stack == "decoder" else []
            for block, layer, module in blocks:
                yield f"{theirs}{block}.layernorm_before_attention.weight", t5[f"{layer}.layer_norm.weight"]
                for name in "qkv":
                    projection = t5[f"{layer}.{module}.{name}.weight"]
                    yield f"{theirs}{block}.self_attention.project_{name}.weight", projection
                yield f"{theirs}{block}.self_attention.attention_out.weight", t5[f"{layer}.{module}.o.weight"]
            yield f"{theirs}ffn.layernorm_before_ffn.weight", t5[f"{ours}{feed}.layer_norm.weight"]
            for name, own in (("w_in.w_0", "wi_0"), ("w_in.w_1", "wi_1"), ("w_out", "wo")):
                yield f"{theirs}ffn.ffn.{name}.weight", t5[f"{ours}{feed}.DenseReluDense.{own}.weight"]
            index += 1


# ---- BMInf

Tree = dict[str, object]  # of tensors and trees
GPT2_LINEARS = {
    "self_attn.linear_out": "attn.c_proj", "ff.linear_in": "mlp.c_fc", "ff.linear_out": "mlp.c_proj",
}  # fmt: skip
T5_PROJECTIONS = {"project_q": "q", "project_k": "k", "project_v": "v", "linear_out": "o"}


def insert(tree: Tree, name: str, tensor: Tensor) -> None:
    *layers, last = name.split(".")
    for layer in layers:
        inside = tree.setdefault(layer, {})
        assert isinstance(inside, dict)
        tree = inside
    tree[last] = tensor


def write_bminf(file: Path, tensors: Tensors) -> None:
    """BMInf's form of a tree, whose names are joined by dots in `tensors`."""
    tree: Tree = {}
    for name, tensor in tensors.items():
        insert(tree, name, tensor)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(_layer(tree))


def _layer(tree: Tree) -> bytes:
    parameters = {name: value for name, value in tree.items() if isinstance(value, Tensor)}
    layers = {name: value for name, value in tree.items() if isinstance(value, dict)}
    raw = struct.pack("<II", len(parameters), len(layers))
    for name, tensor in parameters.items():
        content = tensor.numpy().tobytes()
        raw += _string(name) + struct.pack("<B", tensor.dim())
        raw += b"".join(struct.pack("<I", size) for size in tensor.shape)
        raw += struct.pack("<IB", len(content), {torch.int8: 0, torch.float16: 1}[tensor.dtype]) + content
    return raw + b"".join(_string(name) + _layer(value) for name, value in layers.items())


def _string(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 and float16 scales per row; then moved, as training after rounding moved them."""
    scale = (weight.abs().amax(1) / 127).half()
    integers = (weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    integers[0, 0] = -128  # a value that rounding to the nearest never gives
    return integers, scale


def bminf_cpm1(gpt2: Tensors) -> Tensors:
    """The tensors of transformers' GPT2LMHeadModel as BMInf has them."""
    tree = {
        "token_embedding.weight": gpt2["transformer.wte.weight"].half(),
        "position_embedding.weight": gpt2["transformer.wpe.weight"].half(),
        "layernorm.weight": gpt2["transformer.ln_f.weight"].half(),
        "layernorm.bias": gpt2["transformer.ln_f.bias"].half(),
    }
    index = 0
    while f"transformer.h.{index}.ln_1.weight" in gpt2:
        ours, theirs = f"transformer.h.{index}.", f"layers.{index}."
        for name, norm in (("ln_attn", "ln_1"), ("ln_ff", "ln_2")):
            for kind in ("weight", "bias"):
                tree[f"{theirs}{name}.{kind}"] = gpt2[f"{ours}{norm}.{kind}"].half()
        qkv = list(
            zip(*(gpt2[f"{ours}attn.c_attn.{kind}"].t().chunk(3) for kind in ("weight", "bias")), strict=True)
        )
        matrices = {f"self_attn.project_{name}": pair for name, pair in zip("qkv", qkv, strict=True)}
        for name, linear in GPT2_LINEARS.items():
            matrices[name] = (gpt2[f"{ours}{linear}.weight"].t(), gpt2[f"{ours}{linear}.bias"])
        for name, (weight, bias) in matrices.items():
            tree[f"{theirs}{name}.weight"], tree[f"{theirs}{name}.scale"] = rounded(weight)
            tree[f"{theirs}{name}.bias"] = bias.half()
        index += 1
    return tree


def bminf_t5(t5: Tensors) -> Tensors:
    """The tensors of transformers' MT5ForConditionalGeneration as BMInf has those of CPM-2 and EVA."""
    tree = {
        "input_embedding.weight": t5["shared.weight"].half(),
        "output_embedding.weight": t5["lm_head.weight"].half(),
    }
    for stack, feed in (("encoder", 1), ("decoder", 2)):
        short = stack[:3]
        tree[f"ln_{short}.weight"] = t5[f"{stack}.final_layer_norm.weight"].half()
        table = t5[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        tree[f"position_bias_{short}.weight"] = table.half().t().contiguous()
        index = 0
        while f"{stack}.block.{index}.layer.0.layer_norm.weight" in t5:
            ours, theirs = f"{stack}.block.{index}.layer.", f"{short}_layers.{index}."
            modules = {"self_attn": f"{ours}0.SelfAttention", "cross_attn": f"{ours}1.EncDecAttention"}
            norms = {"ln_attn": 0, "ln_ff": feed} | ({"ln_cross_attn": 1} if stack == "decoder" else {})
            for name, layer in norms.items():
                tree[f"{theirs}{name}.weight"] = t5[f"{ours}{layer}.layer_norm.weight"].half()
            matrices = {
                f"{module}.{name}": f"{layer}.{own}"
                for module, layer in modules.items() if module == "self_attn" or stack == "decoder"
                for name, own in T5_PROJECTIONS.items()
            }  # fmt: skip
            for name, own in (("linear_in", "wi_0"), ("linear_gated", "wi_1"), ("linear_out", "wo")):
                matrices[f"ff.{name}"] = f"{ours}{feed}.DenseReluDense.{own}"
            for name, own in matrices.items():
                tree[f"{theirs}{name}.weight"], tree[f"{theirs}{name}.scale"] = rounded(t5[f"{own}.weight"])
            index += 1
    return tree
