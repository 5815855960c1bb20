"""Values of config.json that no model has end in an error that names them, never in a traceback."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_families import dequantized
from test_formats_in import Ids
from test_own_head import difference, from_transformers
from tiny_models import DISTINCT, MODELS, RECURRENT, build, in_circles

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import InvalidConfig, PenstockError
from penstock.generation.requests.generation_request import SamplingParams
from penstock.model.registry import open_model, read_spec

BAD: tuple[Any, ...] = ("many", "", "7", None, -3, 0, 0.5, 1e400, float("nan"), 10**30, [3], {}, True)
KINDS = ("Llama, rope llama3", "Qwen2, window", "Phi-3, rope longrope", "Gemma 2", "GPT-2", "OPT", "BLOOM")
KINDS += ("GPT-NeoX", "Falcon")
#: What the engine reads beside the family.
TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}
#: What the names and numbers of one layer and one head are called.
ONE = {"num_hidden_layers": 1, "num_attention_heads": 1}
ONE_LAYER: dict[str, dict[str, Any]] = dict.fromkeys(
    ("GPT2", "Bloom", "CTRL", "GPTBigCode", "GPTJ", "OpenAIGPT"), {"n_layer": 1, "n_head": 1}
)
ONE_LAYER |= {
    "CodeGen": {"n_layer": 1, "n_head": 4, "rotary_dim": 16},
    "Falcon": ONE | {"num_kv_heads": 1},
    "GPTNeo": {"num_layers": 1, "num_heads": 1, "attention_types": [[["local"], 1]]},
    "Mpt": {"n_layers": 1, "n_heads": 1},
    "XGLM": {"num_layers": 1, "attention_heads": 1},
}
ONE_KV = ONE | {"num_key_value_heads": 1}


def edited(folder: Path, target: Path, **changes: object) -> Path:
    """The folder with another config.json."""
    target.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if not (target / path.name).exists():
            (target / path.name).hardlink_to(path)
    config = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_wrong_value_is_an_error_of_ours(kind: str, tmp_path: Path) -> None:
    """Each value of config.json, each value of its rope, in turn; what is taken has to load and answer, the
    first two specs of each name."""
    source = tmp_path / "source"
    build(kind, source, **({"n_layer": 1} if kind in ("GPT-2", "BLOOM") else {"num_hidden_layers": 1}))
    config = json.loads((source / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    changes: list[dict[str, Any]] = [{name: bad} for name in config for bad in BAD]
    changes += [{"rope_parameters": rope | {name: bad}} for name in rope for bad in BAD]
    seen, loaded = [read_spec(config)], Counter[str]()
    for change in changes:
        try:
            found = read_spec(config | change)
            (name,) = change
            is_new = name in TOKENS or found not in seen
            if is_new and loaded[name] < 2:
                seen.append(found)
                loaded[name] += 1
                load(edited(source, tmp_path / "edited", **change))
        except PenstockError:
            pass
        except Exception as error:
            raise AssertionError(f"{change} ends in {error!r}") from error


def load(folder: Path) -> None:
    tokenizer: Any = Ids()
    with Engine.load(
        folder, EngineConfig(num_kv_tokens=64, max_num_batched_tokens=16, max_num_seqs=2), tokenizer=tokenizer
    ) as engine:
        engine.generate([[5, 9, 20]], SamplingParams(temperature=0, max_tokens=2))


@pytest.mark.parametrize("bad", ["many", -3, 0, 0.5, float("nan"), [3], True])
@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads"])
def test_the_error_names_the_value_and_what_it_must_be(name: str, bad: object, tmp_path: Path) -> None:
    build("Llama", tmp_path / "source")
    folder = edited(tmp_path / "source", tmp_path / "edited", **{name: bad})
    with pytest.raises(InvalidConfig, match=rf"{name} = .*must be a whole number from 1 to.*download"):
        open_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'.*true or false"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05.*from 0 on"),
        ({"num_key_value_heads": 3}, "keys and values = 3.*divisor of the number of heads, 4"),
        ({"num_hidden_layers": 9999}, "number of layers = 9999.*at most that of tensors, 30"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000.*to 10000"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM'.*list of names"),
        ({"head_dim": 15}, "rope rotates = 15.*even"),
        ({"sliding_window": "wide", "architectures": ["MistralForCausalLM"]}, "sliding_window = 'wide'"),
        (
            {"sliding_window": 8, "layer_types": ["x"], "architectures": ["MistralForCausalLM"]},
            "layer_types.*3 layers",
        ),
    ],
)
def test_what_contradicts_itself_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    build("Llama", tmp_path / "source")
    with pytest.raises(InvalidConfig, match=message):
        open_model(edited(tmp_path / "source", tmp_path / "edited", **change))


#: Models of several kinds of layers.
SEVERAL_KINDS = (*RECURRENT, "Gemma 3n", "Gemma 4, experts")


@pytest.mark.parametrize("name", in_circles([name for name in DISTINCT if name not in SEVERAL_KINDS]))
def test_one_layer_and_one_head(name: str, tmp_path: Path) -> None:
    kind = MODELS[name][0]
    one = ONE_LAYER.get(kind, ONE if "num_key_value_heads" not in MODELS[name][1] else ONE_KV)
    rope = MODELS[name][1].get("rope_parameters", {})
    if "short_factor" in rope and kind != "MiniCPM3":  # of the dimensions of a head; latents have their own
        longer = {list_name: rope[list_name] * 4 for list_name in ("short_factor", "long_factor")}
        one = one | {"rope_parameters": rope | longer}
    if "head_dim" in MODELS[name][1]:
        one = one | {"head_dim": 64}
    build(name, tmp_path, **one)
    tokenizer: Any = Ids()
    with Engine.load(tmp_path, EngineConfig(), tokenizer=tokenizer) as engine:
        (completion,) = engine.generate([[5, 9, 20]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(completion.token_ids) == 4 and engine.spec.num_layers == 1
    assert difference(tmp_path, dequantized(from_transformers(tmp_path), tmp_path)) < 5e-4
