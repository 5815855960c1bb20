"""Each setting is checked, and reaches the engine."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from penstock.config import EngineConfig, KVEventsConfig
from penstock.errors import ConfigError
from penstock.kernel_tuning import KernelTuning
from penstock_server import cli
from penstock_server.settings.settings import Settings
from penstock_server.settings.sources import add_flags, make_settings
from penstock_server.settings.speculative_config import SpeculativeConfig

OF_SPECULATIVE_CONFIG = (
    "max_guesses", "prompt_lookup_min", "prompt_lookup_max", "draft_with_planes", "draft_with_eagle3",
)  # fmt: skip


def settings_of(*flags: str, **environ: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser, "serve")
    return make_settings(vars(parser.parse_args(flags)), environ)


def test_port_out_of_range() -> None:
    with pytest.raises(ConfigError, match="65536"):
        settings_of("m", "--port", "65536")


@pytest.mark.parametrize("flag", ["--rate-limit-requests", "--rate-limit-tokens"])
def test_a_limit_below_nothing(flag: str) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        settings_of("m", flag, "-1")


def test_a_key_without_its_certificate() -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        settings_of("m", "--ssl-keyfile", "key.pem")


def test_keys_are_not_shown() -> None:
    for flag in ("--api-key", "--nodes-secret"):
        assert "tell nobody" not in repr(settings_of("m", flag, "tell nobody"))


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
        state_memory=1,
        kv_disk="kv",
        kv_disk_size=1,
        kv_host_memory=1,
        kv_spill="spill",
        kv_events_config=KVEventsConfig(topic="kv"),
        block_size=32,
        max_model_len=2,
        max_num_seqs=3,
        max_queued_seqs=8,
        max_num_batched_tokens=4,
        step_time_target=0.5,
        resident_layers=5,
        threads=6,
        kernels="native",
        kernel_tuning=KernelTuning(few_rows=4),
        weights="int4",
        group_size=64,
        device="cpu",
        strict_plan=True,
        model_impl="penstock",
        ignore_unexpected_tensors=True,
        allow_pickle=True,
        draft_model="draft",
        draft_device="cpu",
        runner="pooling",
        pooling="mean",
        score_tokens=("no", "yes"),
        lora=("poet=/adapters/poet",),
        lora_memory=1,
        guess_tokenizer=True,
        request_memory=1,
        mtp="off",
        share_products="off",
    ).engine_config()
    assert settings_of("m", "--kv-tokens", "7").engine_config().num_kv_tokens == 7
    assert settings_of("demo").engine_config().num_resident_layers == 3
    for flag, value in (("--resident-layers", "6"), ("--host-memory", "1GiB")):
        assert settings_of("demo", flag, value).engine_config().num_resident_layers in (6, None)
    assert settings_of("m", "--kv-cache-memory", "20%").engine_config().kv_cache_share == 0.2
    assert settings_of("m", "--kv-spill-memory", "3KiB").engine_config().kv_spill_bytes == 3072
    for field in dataclasses.fields(EngineConfig):
        if field.name == "kv_spill_bytes":  # in place of kv_spill
            continue
        if field.name == "enable_prefix_caching":  # kv_disk needs it
            assert not Settings(model="m", enable_prefix_caching=False).engine_config().enable_prefix_caching
            continue
        if field.name in ("num_kv_tokens", "kv_cache_share"):  # other ways to say kv_cache_bytes
            continue
        if field.name in OF_SPECULATIVE_CONFIG:
            continue
        if field.name == "speculation":  # "off" has no draft model
            assert Settings(model="m", speculation="off").engine_config().speculation == "off"
            continue
        assert getattr(changed, field.name) != getattr(EngineConfig(), field.name), field.name


def test_engine_refuses_what_it_can_not_do() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        settings_of("m", "--block-size", "17").engine_config()


def test_adapters_of_the_settings() -> None:
    made = settings_of("m", "--lora", "a=/x", "--lora", "b=y/z")
    assert made.adapters == {"a": Path("/x"), "b": Path("y/z")}
    assert made.engine_config().adapters == (("a", "/x"), ("b", "y/z"))
    for flags, words in (
        (("--lora", "a"), "write NAME=FOLDER"),
        (("--lora", "a=x", "--lora", "a=y"), "another name for each folder"),
        (("--lora", "m=x"), "a name of the model"),
        (("--allow-runtime-lora-updating",), "--lora-memory"),
    ):
        with pytest.raises(ConfigError, match=words):
            _ = settings_of("m", *flags).adapters


def test_speculative_config_reaches_the_engine() -> None:
    """The objects are those of vLLM's own documentation."""

    def config(text: str, *flags: str) -> EngineConfig:
        return settings_of("m", "--speculative-config", text, *flags).engine_config()

    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 3}'
    assert config(text) == EngineConfig(max_guesses=5, prompt_lookup_max=4, prompt_lookup_min=3)
    text = '{"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}'
    assert config(text) == EngineConfig(draft_model="Qwen/Qwen3-0.6B", max_guesses=5)
    assert config('{"method": "suffix", "quantization": null}') == EngineConfig()
    assert config('{"method": "mtp", "num_speculative_tokens": 2}') == EngineConfig(mtp="on", max_guesses=2)
    assert config('{"method": "deepseek_mtp"}') == EngineConfig(mtp="on")
    eagle3 = EngineConfig(draft_model="owner/head", draft_with_eagle3=True, max_guesses=8)
    text = '{"method": "eagle3", "model": "owner/head", "num_speculative_tokens": 8}'
    assert config(text) == eagle3
    assert config('{"method": "planes"}') == EngineConfig(draft_with_planes=True)
    assert config('{"method": "planes", "model": "owner/small"}') == EngineConfig(draft_with_planes=True)
    with pytest.raises(ConfigError, match="--mtp off has no head"):
        config('{"method": "mtp"}', "--mtp", "off")
    with pytest.raises(ConfigError, match="leave --speculative-config out"):
        config(text, "--speculation", "off")
    with pytest.raises(ConfigError, match="leave one of them out"):
        config(text, "--draft-model", "other")
    made = make_settings({"model": "m"}, {"PENSTOCK_SPECULATIVE_CONFIG": text})
    assert made.engine_config() == eagle3


@pytest.mark.parametrize("command", ["serve", "plan", "bench"])
def test_speculation_off_has_nothing_that_guesses(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that a user names is dropped without a word, wherever "off" comes from."""
    ngram = '{"method": "ngram"}'
    for flags, words in (
        (("--draft-model", "demo"), "can't be used with --draft-model: "),
        (("--mtp", "on"), "can't be used with --mtp on: "),
        (("--speculative-config", ngram), "has no guesses: leave --speculative-config out"),
        (
            ("--draft-model", "demo", "--speculative-config", ngram),
            "has no guesses: leave --speculative-config out",
        ),
    ):
        assert cli.main([command, "demo", "--speculation", "off", *flags]) == 2
        assert f"--speculation off {words}" in capsys.readouterr().err
        monkeypatch.setenv("PENSTOCK_SPECULATION", "off")
        assert cli.main([command, "demo", *flags]) == 2
        assert words in capsys.readouterr().err
        monkeypatch.delenv("PENSTOCK_SPECULATION")
    assert settings_of("m", "--speculation", "off", "--mtp", "off").engine_config().mtp == "off"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ngram", "is not JSON"),
        ("[]", "no JSON object"),
        ("{}", "no method"),
        ('{"method": "medusa", "model": "m"}', "medusa.*take ngram, suffix, draft_model, eagle3"),
        ('{"method": "eagle3"}', "eagle3 needs its model"),
        ('{"method": "draft_model"}', "needs its model"),
        ('{"method": "mtp", "model": "m"}', "came with the model"),
        ('{"method": "ngram", "model": "m"}', "leave the model out"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "at least 1"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "whole number"),
        ('{"method": "ngram", "prompt_lookup_min": 0}', "at least 1"),
        ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}', "prompt_lookup_max is less"),
        ('{"model": "m", "draft_tensor_parallel_size": 2}', "it can be 1"),
        ('{"model": "m", "rejection_sample_method": "block"}', "answers never change"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 24}', "max_tree_depth: leave it out"),
        ('{"method": "ngram", "num_tokens": 3}', "num_tokens is no key"),
    ],
)
def test_what_speculative_config_can_not_say(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SpeculativeConfig.parse(text)
