"""The names of tensors in files of other programs, and what each becomes under transformers' names: CPM-1 and
CPM-2 as Megatron saved them, in shards, and CPM-2 as ModelCenter saved it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class Split(Enum):
    """How the ranks of a training shared a tensor."""

    WHOLE = "each rank has all of it"
    ROWS = "each rank has some rows"
    COLUMNS = "each rank has some columns"


class Rule(NamedTuple):
    """What a tensor becomes."""

    #: The whole name in the file.
    pattern: str
    #: transformers' names, with the groups of the pattern in braces. Several names divide the rows into equal
    #: blocks, such as q, k and v.
    names: tuple[str, ...]
    split: Split = Split.WHOLE
    #: Blocks of rows of which each rank has its part: [q of the rank; k of the rank; v of the rank].
    num_blocks: int = 1


class Found(NamedTuple):
    """A rule with the names filled in."""

    names: tuple[str, ...]
    split: Split
    num_blocks: int


def _cpm1() -> Iterator[Rule]:
    layer = r"transformer\.layers\.(\d+)\."
    yield Rule(r"word_embeddings\.weight", ("transformer.wte.weight",), Split.ROWS)
    yield Rule(r"position_embeddings\.weight", ("transformer.wpe.weight",))
    yield Rule(layer + r"input_layernorm\.(weight|bias)", ("transformer.h.{0}.ln_1.{1}",))
    qkv = layer + r"attention\.query_key_value\.(weight|bias)"
    yield Rule(qkv, ("transformer.h.{0}.attn.c_attn.{1}",), Split.ROWS, 3)
    yield Rule(layer + r"attention\.dense\.weight", ("transformer.h.{0}.attn.c_proj.weight",), Split.COLUMNS)
    yield Rule(layer + r"attention\.dense\.bias", ("transformer.h.{0}.attn.c_proj.bias",))
    yield Rule(layer + r"post_attention_layernorm\.(weight|bias)", ("transformer.h.{0}.ln_2.{1}",))
    yield Rule(layer + r"mlp\.dense_h_to_4h\.(weight|bias)", ("transformer.h.{0}.mlp.c_fc.{1}",), Split.ROWS)
    yield Rule(layer + r"mlp\.dense_4h_to_h\.weight", ("transformer.h.{0}.mlp.c_proj.weight",), Split.COLUMNS)
    yield Rule(layer + r"mlp\.dense_4h_to_h\.bias", ("transformer.h.{0}.mlp.c_proj.bias",))
    yield Rule(r"transformer\.final_layernorm\.(weight|bias)", ("transformer.ln_f.{0}",))


def _cpm2() -> Iterator[Rule]:
    block, attention = r"(encoder|decoder)\.blocks\.(\d+)\.", "{0}.block.{1}.layer.0.SelfAttention."
    own, cross = block + r"self_attn\.", r"(decoder)\.blocks\.(\d+)\.cross_attn\."
    other = "{0}.block.{1}.layer.1.EncDecAttention."
    yield Rule(r"word_embeds\.weight", ("shared.weight",), Split.ROWS)
    yield Rule(r"(encoder|decoder)\.word_embeds\.weight", ())  # the same matrix once more
    yield Rule(re.escape(SOFT_PROMPT), ())  # vectors for the model's input, and no part of the model
    yield Rule(r"lm_head\.weight", ("lm_head.weight",), Split.ROWS)
    qkv = tuple(f"{attention}{part}.weight" for part in "qkv")
    yield Rule(own + r"self_attn\.project\.weight", qkv, Split.ROWS, 3)
    yield Rule(own + r"self_attn\.dense\.weight", (f"{attention}o.weight",), Split.COLUMNS)
    bias = "relative_attention_bias.weight"
    yield Rule(own + rf"self_attn\.{re.escape(bias)}", (attention + bias,), Split.COLUMNS)
    yield Rule(own + r"layer_norm\.weight", ("{0}.block.{1}.layer.0.layer_norm.weight",))
    yield Rule(cross + r"cross_attn\.project_q\.weight", (f"{other}q.weight",), Split.ROWS)
    keys = tuple(f"{other}{part}.weight" for part in "kv")
    yield Rule(cross + r"cross_attn\.project_kv\.weight", keys, Split.ROWS, 2)
    yield Rule(cross + r"cross_attn\.dense\.weight", (f"{other}o.weight",), Split.COLUMNS)
    yield Rule(cross + r"layer_norm\.weight", ("{0}.block.{1}.layer.1.layer_norm.weight",))
    for stack, index in FFN_LAYER.items():
        ff, layer = rf"({stack})\.blocks\.(\d+)\.ff\.", f"{{0}}.block.{{1}}.layer.{index}."
        yield Rule(ff + r"layer_norm\.weight", (f"{layer}layer_norm.weight",))
        name = f"{layer}DenseReluDense.{{2}}.weight"
        yield Rule(ff + r"dense_relu_dense\.(wi_0|wi_1)\.weight", (name,), Split.ROWS)
        yield Rule(ff + r"dense_relu_dense\.(wo)\.weight", (name,), Split.COLUMNS)
    yield Rule(r"(encoder|decoder)\.final_layernorm\.weight", ("{0}.final_layer_norm.weight",))


def _model_center() -> Iterator[Rule]:
    yield Rule(r"input_embedding\.weight", ("shared.weight",))
    yield Rule(r"output_projection\.weight", ("lm_head.weight",))
    for short, stack in (("enc", "encoder"), ("dec", "decoder")):
        bias = "relative_attention_bias"
        target = f"{stack}.block.0.layer.0.SelfAttention.{bias}.weight"
        yield Rule(rf"position_bias_{short}\.{bias}", (target,))
    for kind, (index, module) in {"self": (0, "SelfAttention"), "cross": (1, "EncDecAttention")}.items():
        part, layer = rf"(encoder|decoder)\.layers\.(\d+)\.{kind}_att\.", f"{{0}}.block.{{1}}.layer.{index}."
        yield Rule(part + r"layernorm_before_attention\.weight", (f"{layer}layer_norm.weight",))
        inner = part + r"(?:self|cross)_attention\."
        yield Rule(inner + r"project_(q|k|v)\.weight", (f"{layer}{module}.{{2}}.weight",))
        yield Rule(inner + r"attention_out\.weight", (f"{layer}{module}.o.weight",))
    for stack, index in FFN_LAYER.items():
        ffn, layer = rf"({stack})\.layers\.(\d+)\.ffn\.", f"{{0}}.block.{{1}}.layer.{index}."
        yield Rule(ffn + r"layernorm_before_ffn\.weight", (f"{layer}layer_norm.weight",))
        yield Rule(ffn + r"ffn\.w_in\.w_(0|1)\.weight", (f"{layer}DenseReluDense.wi_{{2}}.weight",))
        yield Rule(ffn + r"ffn\.w_out\.weight", (f"{layer}DenseReluDense.wo.weight",))
    yield Rule(r"(encoder|decoder)\.output_layernorm\.weight", ("{0}.final_layer_norm.weight",))


#: What prompt tuning adds to a checkpoint of CPM-2 (CPM-2-Finetune). Each rank has all of it.
SOFT_PROMPT = "encoder.prompt_embeds.weight"
#: The place of the feed-forward layer in a block of T5.
FFN_LAYER = {"encoder": 1, "decoder": 2}
CPM1, CPM2, MODEL_CENTER = tuple(_cpm1()), tuple(_cpm2()), tuple(_model_center())
#: A tensor that each of the files has and no other file.
_SIGNS = {
    "transformer.layers.0.attention.query_key_value.weight": CPM1,
    "encoder.blocks.0.self_attn.self_attn.project.weight": CPM2,
    "position_bias_dec.relative_attention_bias": MODEL_CENTER,
}


def rules_of(names: object) -> tuple[Rule, ...]:
    """The rules for files with these names (a container); () for names that are transformers' own."""
    return next((rules for sign, rules in _SIGNS.items() if sign in names), ())  # type: ignore[operator]


def apply(rules: tuple[Rule, ...], name: str) -> Found | None:
    """What a tensor becomes; None if no rule knows the name."""
    for rule in rules:
        if match := re.fullmatch(rule.pattern, name):
            names = tuple(target.format(*match.groups()) for target in rule.names)
            return Found(names, rule.split, rule.num_blocks)
    return None


def module_names(module: str) -> Iterator[list[str]]:
    """transformers' names of the modules that a module of the files is, for each program that has one of this
    name."""
    ending = ".weight"
    for rules in (CPM1, CPM2, MODEL_CENTER):
        if (found := apply(rules, module + ending)) and found.names:
            yield [name.removesuffix(ending) for name in found.names]
