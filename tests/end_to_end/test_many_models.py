"""A walk: two models are pulled from a hub, one is interrupted and one converted; a server without a network
has both behind one door, and the openai and ollama packages ask both; then they are deleted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest
import transformers

from penstock.weights.checkpoints.hub import SHIPPED
from warm_python import environment

from .local_hub import LocalHub
from .server_process import ServerProcess

OUT = "-m", "penstock_server"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    for name in ("one", "two"):
        folder = tmp_path / "hub" / "org" / name
        _make_model(folder)
        (folder / "consolidated.safetensors").write_bytes(b"a copy")
        (folder / "original").mkdir()
        (folder / "original" / "model.safetensors").write_bytes(b"another copy")
        (folder / "training_args.bin").write_bytes(b"no weights")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with LocalHub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def _make_model(folder: Path) -> None:
    """Random weights in one file of some megabytes, with the demo's tokenizer and template."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=4096, max_position_embeddings=512, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(SHIPPED["demo"] / name, folder)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """A cold process: huggingface_hub reads the environment when it is imported."""
    return subprocess.run([sys.executable, *words], env=environment(), capture_output=True, text=True)


def listed() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(*OUT, "list", "--json").stdout)
    return found


def test_pull_serve_ask_and_delete(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    # The connection breaks; what came of the file stays, and the same command fetches the rest.
    hub.breaks_after = 1 << 20
    broken = run(*OUT, "pull", "org/one")
    assert broken.returncode == 1 and "can't be fetched" in broken.stderr
    assert [model["is_whole"] for model in listed()] == [False]
    pulled = run(*OUT, "pull", "org/one")
    assert pulled.returncode == 0 and "with the checksums of the hub" in pulled.stdout, pulled.stderr
    ranges = [asked for name, asked in hub.sent if name == "model.safetensors"]
    assert ranges == [None, f"bytes={1 << 20}-"]
    names = {name for name, _ in hub.sent}
    assert "config.json" in names and not names & {"consolidated.safetensors", "training_args.bin"}

    # Bytes of another checksum are not kept.
    hub.corrupt = {"model.safetensors"}
    wrong = run(*OUT, "pull", "org/two")
    assert wrong.returncode == 1 and "another checksum" in wrong.stderr
    hub.corrupt = set()
    converted = run(*OUT, "pull", "org/two", "--convert", "--delete-original")
    assert converted.returncode == 0, converted.stderr
    assert [(model["name"], model["kind"], model["is_whole"]) for model in listed()] == [
        ("org/one", "hub", True),
        ("org/two", "converted", True),
    ]
    assert "org/two" in run(*OUT, "list").stdout

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    options = "--host-memory", "100MiB", "--kv-tokens", "1024", "--max-num-seqs", "2", "--keep-alive", "1h"
    with ServerProcess("org/one", "org/two", "--offline", *options, is_warm=False) as server:
        server.wait_until_ready()
        _ask_both(server.url)

    assert run(*OUT, "rm", "org/three").returncode == 1
    gone = run(*OUT, "rm", "org/one", "org/two")
    assert gone.returncode == 0 and "org/one (hub) is deleted" in gone.stdout
    assert listed() == []


def _ask_both(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["org/one", "org/two"]
        answers = []
        for name in ("org/one", "org/two", "org/one"):
            turn: Any = [{"role": "user", "content": "Who are you?"}]
            chat = client.chat.completions.create(model=name, messages=turn, temperature=0, max_tokens=8)
            assert chat.model == name
            answers.append(chat.choices[0].message.content)
        assert answers[0] and answers[0] == answers[2]
        with pytest.raises(openai.NotFoundError, match=r"'org/three'.*org/one, org/two"):
            client.completions.create(model="org/three", prompt="x")
    other = ollama.Client(host=url)
    assert [model.model for model in other.list().models] == ["org/one", "org/two"]
    assert other.chat("org/two", [{"role": "user", "content": "Hi"}], options={"num_predict": 4}).done
    (running,) = [model for model in other.ps().models if model.model == "org/two"]
    assert running.expires_at is not None and running.expires_at.year < 2100
    assert other.generate("org/two", keep_alive=0).done_reason == "unload"
