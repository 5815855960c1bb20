"""Flags over variables over a file over defaults; nothing unknown, nothing twice, nothing left out."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock_server.settings.settings import Settings
from penstock_server.settings.sources import add_flags, make_settings, read_environment, read_file


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


def test_lists_come_from_repeated_flags_or_between_commas() -> None:
    assert settings_of("m", "--api-key", "a", "--api-key", "b").api_key == ("a", "b")
    assert settings_of("m", PENSTOCK_API_KEY="a, b,").api_key == ("a", "b")


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    return path


def test_a_file_gives_way_to_variables_and_flags(tmp_path: Path) -> None:
    path = str(file_of(tmp_path, 'model = "m"\nport = 1\nmax-num-seqs = 2\nblock_size = 32\n'))
    settings = settings_of("--config", path, "--port", "3", PENSTOCK_MAX_NUM_SEQS="4")
    assert (settings.model, settings.block_size) == ("m", 32)
    assert (settings.port, settings.max_num_seqs) == (3, 4)
    assert settings_of(PENSTOCK_CONFIG=path).port == 1


def test_values_of_a_file(tmp_path: Path) -> None:
    text = """
    offline = true
    host-memory = "6GiB"
    device-memory = 4096
    sse-keep-alive = 2
    shutdown-timeout = 2.5
    api-key = ["a", "b,c"]
    served-model-name = "x,y"
    cache-dir = "/cache"
    kv-dtype = "float32"
    """
    assert read_file(file_of(tmp_path, text)) == {
        "offline": True,
        "host_memory": 6 * 2**30,
        "device_memory": 4096,
        "sse_keep_alive": 2.0,
        "shutdown_timeout": 2.5,
        "api_key": ("a", "b,c"),
        "served_model_name": ("x", "y"),
        "cache_dir": Path("/cache"),
        "kv_dtype": "float32",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "prot is no setting"),
        ('config = "other.toml"', "config is no setting"),
        ("[server]\nport = 1", "server is no setting"),
        ('port = "8000"', "port is '8000'; it must be a whole number"),
        ("port = true", "port is True"),
        ("port = 1.0", "port is 1.0"),
        ("offline = 1", "offline is 1; it must be true or false"),
        ("host = 1", "host is 1; it must be a string"),
        ('kv-dtype = "float8"', "kv-dtype is 'float8'; choose one of"),
        ('host-memory = "2 apples"', "host-memory: '2 apples' is no size"),
        ("api-key = [1]", "it must be a list of strings or a string"),
        ("sse-keep-alive = -1", "sse-keep-alive: '-1' is no number of seconds"),
        ("block-size = 16\nblock_size = 16", "block_size is there twice"),
        ("port = ", "is not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(file_of(tmp_path, text))
    assert message in str(caught.value) and "penstock.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone.toml: No such file"):
        settings_of("m", "--config", str(tmp_path / "gone.toml"))


def test_every_setting_can_be_in_a_file(tmp_path: Path) -> None:
    """With its own default, where that can be written."""
    defaults: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(Settings) if field.default
    }
    lines = []
    for name, value in defaults.items():
        shown = str(value).lower() if isinstance(value, bool | int | float) else f"'{value}'"
        lines.append(f"{name} = {shown}")
    assert read_file(file_of(tmp_path, "\n".join(lines))) == defaults


def test_an_empty_key_is_an_error_and_not_an_open_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of("m", "--api-key", "")
    assert "--api-key: the value is empty" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="PENSTOCK_API_KEY: the value is empty"):
        settings_of("m", PENSTOCK_API_KEY="")


def test_help_has_headings() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "serve")
    text = parser.format_help()
    headings = [
        "model:",
        "engine: memory and arithmetic:",
        "server:",
        "several machines, one model:",
        "security:",
        "limits:",
        "logs and traces:",
    ]
    found = [text.index(f"\n{heading}") for heading in headings]
    assert found == sorted(found)


def test_help_has_every_setting_with_its_default() -> None:
    text = ""
    for command in ("serve", "worker"):
        parser = argparse.ArgumentParser()
        add_flags(parser, command)
        text += " ".join(parser.format_help().split())
    for field in dataclasses.fields(Settings):
        assert field.name == "model" or "--" + field.name.replace("_", "-") in text
        assert " ".join(field.metadata["help"].split()) in text
    assert "(default: 16MiB)" in text and "(default: 10)" in text
