"""An entry for a setting of the engine's has what EngineConfig says of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.config import EngineConfig
from penstock_server.settings.entries import engine_setting
from penstock_server.settings.settings import Settings
from penstock_server.settings.speculative_config import SpeculativeConfig
from penstock_server.settings.values import parse_bool, parse_int


def fields() -> dict[str, dataclasses.Field[Any]]:
    """By the field of EngineConfig that they are for."""
    found = {}
    for field in dataclasses.fields(Settings):
        name = field.metadata["engine_field"]
        for each in [name] if isinstance(name, str) else [name(1), name(0.5)] if name else []:
            assert each not in found, f"{each} has two entries"
            found[each] = field
    return found


def test_each_field_of_the_engines_config_has_one_entry() -> None:
    made = SpeculativeConfig("m", 1, 2, 2, is_mtp=True, is_planes=True, is_eagle3=True)
    of_json = made.engine_values().keys() - {"draft_model", "mtp"}
    of_json.add("adapters")  # --lora, whose texts become pairs
    assert fields().keys() | of_json == {field.name for field in dataclasses.fields(EngineConfig)}
    assert not fields().keys() & of_json


def test_defaults_are_the_engines() -> None:
    for name, field in fields().items():
        assert field.default == getattr(EngineConfig, name), name


def test_how_a_text_is_read_follows_from_the_fields_type() -> None:
    for name, parse, choices in (
        ("max_num_seqs", parse_int, None),
        ("num_threads", parse_int, None),
        ("strict_plan", parse_bool, None),
        ("kv_dtype", str, ("float16", "float32", "int8")),
    ):
        metadata = fields()[name].metadata
        assert (metadata["parse"], metadata["choices"]) == (parse, choices)
    entry = engine_setting("host_memory_bytes", "", parse=float)
    assert entry.metadata["parse"] is float
