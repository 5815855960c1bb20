"""Flags over variables over defaults; nothing unknown, nothing twice, nothing left out."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock_server.settings import (
    Settings,
    add_flags,
    make_settings,
    parse_bytes,
    read_environment,
)


def settings_of(*flags: str, **environ: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser, "serve")
    return make_settings(vars(parser.parse_args(flags)), environ)


def test_flag_wins_over_variable_wins_over_default() -> None:
    assert settings_of("m").port == 8000
    assert settings_of("m", PENSTOCK_PORT="9000").port == 9000
    assert settings_of("m", "--port", "9001", PENSTOCK_PORT="9000").port == 9001


def test_a_flag_can_take_back_a_variable() -> None:
    assert settings_of("m", PENSTOCK_OFFLINE="yes").offline
    assert not settings_of("m", "--no-offline", PENSTOCK_OFFLINE="yes").offline


def test_model_may_come_from_the_environment_but_must_come() -> None:
    assert settings_of(PENSTOCK_MODEL="m").model == "m"
    with pytest.raises(ConfigError, match="no model"):
        settings_of()


def test_unknown_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_PROT"):
        settings_of("m", PENSTOCK_PROT="9000")


def test_variables_of_others_are_left_alone() -> None:
    others = {
        "PENSTOCK_BASE_URL": "http://elsewhere:8000",
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_SERVICE_PORT_HTTP": "8000",
        "PENSTOCK_PORT": "tcp://10.0.0.1:8000",
        "PENSTOCK_PORT_8000_TCP_ADDR": "10.0.0.1",
        "HOME": "/root",
    }
    assert read_environment(others) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PENSTOCK_PORT", "http"),
        ("PENSTOCK_OFFLINE", "maybe"),
        ("PENSTOCK_KV_DTYPE", "float8"),
        ("PENSTOCK_SSE_KEEP_ALIVE", "-1"),
        ("PENSTOCK_SSE_KEEP_ALIVE", "soon"),
        ("PENSTOCK_KV_CACHE_MEMORY", "2 apples"),
    ],
)
def test_wrong_value_of_a_variable_is_an_error_that_names_it(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_environment({name: value})


def test_wrong_value_of_a_flag_is_told_in_our_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of("m", "--kv-cache-memory", "2 apples")
    assert "'2 apples' is no size" in capsys.readouterr().err


def test_port_out_of_range() -> None:
    with pytest.raises(ConfigError, match="65536"):
        settings_of("m", "--port", "65536")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("7B", 7),
        ("2GiB", 2 * 2**30),
        ("512m", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("3 kb", 3000),
        ("1T", 2**40),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1PiB", "1 2", "0x10"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_bytes(text)


def test_lists_come_from_repeated_flags_or_between_commas() -> None:
    assert settings_of("m", "--api-key", "a", "--api-key", "b").api_key == ("a", "b")
    assert settings_of("m", PENSTOCK_API_KEY="a, b,").api_key == ("a", "b")


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(settings_of("m", "--api-key", "secret"))


def test_model_names() -> None:
    assert settings_of("org/model").model_names == ("org/model",)
    assert settings_of("/models/llama/").model_names == ("llama",)
    named = settings_of("m", "--model-name", "a", "--served-model-name", "b")
    assert named.model_names == ("a", "b")


def test_engine_config_has_each_setting_of_the_engine() -> None:
    """Each knob of EngineConfig can be set, and the defaults are the engine's own."""
    assert settings_of("m").engine_config() == EngineConfig()
    changed = Settings(
        model="m",
        activations="int8",
        kv_dtype="float32",
        host_memory=1,
        device_memory=1,
        kv_cache_memory=1,
        block_size=32,
        max_model_len=2,
        max_num_seqs=3,
        max_queued_seqs=8,
        max_num_batched_tokens=4,
        step_time_target=0.5,
        enable_prefix_caching=False,
        resident_layers=5,
        threads=6,
        kernels="torch",
        group_size=64,
        device="cpu",
        strict_plan=True,
        ignore_unexpected_tensors=True,
    ).engine_config()
    assert settings_of("m", "--kv-tokens", "7").engine_config().num_kv_tokens == 7
    assert settings_of("m", "--kv-cache-memory", "20%").engine_config().kv_cache_share == 0.2
    for field in dataclasses.fields(EngineConfig):
        if field.name in ("num_kv_tokens", "kv_cache_share"):  # other ways to say kv_cache_bytes
            continue
        assert getattr(changed, field.name) != getattr(EngineConfig(), field.name), field.name


def test_engine_refuses_what_it_can_not_do() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        settings_of("m", "--block-size", "17").engine_config()


def test_help_has_every_setting_with_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "serve")
    text = " ".join(parser.format_help().split())
    for field in dataclasses.fields(Settings):
        assert field.name == "model" or "--" + field.name.replace("_", "-") in text
        assert " ".join(field.metadata["help"].split()) in text
    assert "(default: 16MiB)" in text and "(default: 10)" in text
