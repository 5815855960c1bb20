"""config.json for files that come without one: the numbers of a model by the shapes of its tensors. What
shapes don't tell is that of the published models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import CorruptFile
from penstock.weights.checkpoints.tensor_entry import TensorEntry

_ANT_BIASES, _ANT_LAYERS = "cpmant.position_bias.relative_attention_bias", "cpmant.encoder.layers."
#: CPM-Bee's biases: 256 for distances, 256 for relations of segments. ModelCenter's other models have fewer.
_BEE_BIASES, _BEE_ROWS = "position_bias.relative_attention_bias", 512
_EMBEDDING, _BLOCK = "shared.weight", "block.0.layer"
#: CPM-Ant has as many soft prompts, of as many rows each.
_SOFT_PROMPTS = 32
#: Heads of CPM-1 are 80 wide; the smaller models of its kind have 64.
_CPM1_HIDDEN, _CPM1_HEAD_DIM, _USUAL_HEAD_DIM = 2560, 80, 64
#: Entries of the vocabularies of CPM-2 for Chinese and English, of EVA, and of CPM-Ant+.
_ENGLISH, _EVA, _ANT_PLUS = 51968, 30000, 86579


def derive(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """The config of a model under transformers' names; {} for any other model than those of known_names.py.
    Raises CorruptFile."""
    try:
        if "transformer.wte.weight" in tensors:
            return _cpm1(tensors)
        if _ANT_BIASES in tensors:
            return _cpmant(tensors)
        if _BEE_BIASES in tensors and tensors[_BEE_BIASES].shape[:1] == (_BEE_ROWS,):
            return {"architectures": ["CpmBeeForCausalLM"], "model_type": "cpmbee"}  # refused by this name
        return _t5(tensors) if f"encoder.{_BLOCK}.0.SelfAttention.q.weight" in tensors else {}
    except (LookupError, StopIteration, ValueError, ZeroDivisionError) as error:
        raise CorruptFile(f"the files lack a tensor, or have one of a wrong shape: {error}") from error


def _num_layers(tensors: Mapping[str, TensorEntry], prefix: str) -> int:
    numbers = {name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)}
    return len(numbers)


def _cpm1(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    vocab_size, hidden = tensors["transformer.wte.weight"].shape
    head_dim = _CPM1_HEAD_DIM if hidden == _CPM1_HIDDEN else _USUAL_HEAD_DIM
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "tokenizer_class": "CpmTokenizer",
        "vocab_size": vocab_size,
        "n_embd": hidden,
        "n_layer": _num_layers(tensors, "transformer.h."),
        "n_head": max(1, hidden // head_dim),
        "n_inner": tensors["transformer.h.0.mlp.c_fc.bias"].shape[0],
        "n_positions": tensors["transformer.wpe.weight"].shape[0],
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 7,
        "pad_token_id": 5,
    }


def _cpmant(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    num_rows, hidden = tensors["cpmant.input_embedding.weight"].shape
    num_biases, num_heads = tensors[_ANT_BIASES].shape
    num_segments = tensors["cpmant.segment_embedding.weight"].shape[0]
    vocab_size = num_rows - _SOFT_PROMPTS**2
    return {
        "architectures": ["CpmAntForCausalLM"],
        "model_type": "cpmant",
        "tokenizer_class": "CPMAntPlusTokenizer" if vocab_size == _ANT_PLUS else "CpmAntTokenizer",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_attention_heads": num_heads,
        "dim_head": _rows(tensors, ".self_attention.project_q.weight") // num_heads,
        "dim_ff": _rows(tensors, ".ffn.w_in.w_0.weight"),
        **_ant_layers(tensors),
        "position_bias_num_buckets": num_biases - num_segments**2,
        "position_bias_max_distance": 2048,
        "prompt_types": _SOFT_PROMPTS,
        "prompt_length": _SOFT_PROMPTS,
        "segment_types": num_segments,
        "eps": 1e-6,
    }


def _ant_layers(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """The number of layers, and what CPM-Live's compressed models leave out of them."""
    parts = {tuple(name.removeprefix(_ANT_LAYERS).split(".")[:2]) for name in tensors if _ANT_LAYERS in name}
    num_layers = 1 + max(int(number) for number, _ in parts)
    lacks = [[(str(i), part) not in parts for part in ("self_att", "ffn")] for i in range(num_layers)]
    return {"num_hidden_layers": num_layers} | ({"mask_modules": lacks} if any(map(any, lacks)) else {})


def _rows(tensors: Mapping[str, TensorEntry], ending: str) -> int:
    """Rows of a matrix of the first layer that has one: CPM-Live's compressed models leave some out."""
    return next(entry.shape[0] for name, entry in tensors.items() if name.endswith(ending))


def _t5(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    vocab_size, hidden = tensors[_EMBEDDING].shape
    attention = f"encoder.{_BLOCK}.0.SelfAttention."
    num_buckets, num_heads = tensors[f"{attention}relative_attention_bias.weight"].shape
    return _family(vocab_size) | {
        "is_encoder_decoder": True,
        "vocab_size": vocab_size,
        "d_model": hidden,
        "d_kv": tensors[f"{attention}q.weight"].shape[0] // num_heads,
        "d_ff": tensors[f"encoder.{_BLOCK}.1.DenseReluDense.wi_0.weight"].shape[0],
        "num_layers": _num_layers(tensors, "encoder.block."),
        "num_decoder_layers": _num_layers(tensors, "decoder.block."),
        "num_heads": num_heads,
        "relative_attention_num_buckets": num_buckets,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "pad_token_id": 5,
    }


def _family(vocab_size: int) -> dict[str, Any]:
    """What CPM-2 and EVA differ in. EVA's published numbers have a distance of 128, and BMInf reads its own
    file of EVA with 256, so the file of BMInf says 256 (bminf_file.py)."""
    if vocab_size == _EVA:
        return {
            "architectures": ["EVAModel"], "model_type": "eva", "tokenizer_class": "EVATokenizer",
            "attn_scale": False, "relative_attention_max_distance": 128,
            "eos_token_id": 4, "decoder_start_token_id": 29810,
        }  # fmt: skip
    return {
        "architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5",
        "tokenizer_class": "CPM2Tokenizer", "relative_attention_max_distance": 128,
        "eos_token_id": 8 if vocab_size == _ENGLISH else 7, "decoder_start_token_id": 1,
    }  # fmt: skip
