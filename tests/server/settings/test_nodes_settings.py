"""The settings of several machines, and LeaderWorkerSet's variables."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock_server.settings.settings import Settings
from penstock_server.settings.sources import add_flags, make_settings

SECRET = "a secret of the tests"
LWS = {"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "lws-0.lws.default"}


def settings_of(command: str, *flags: str, **environ: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser, command)
    return make_settings(vars(parser.parse_args(flags)) | {"command": command}, environ, command == "serve")


def test_one_machine_needs_nothing() -> None:
    assert settings_of("serve", "m").leader_config("m") is None
    assert settings_of("serve", "m", LWS_GROUP_SIZE="1").leader_config("m") is None
    assert settings_of("serve", "m", PENSTOCK_NODES_SECRET=SECRET).leader_config("m") is None


def test_a_leader_and_a_worker() -> None:
    flags = "m", "--nodes", "3", "--rank", "0", "--nodes-secret", SECRET, "--nodes-listen", "10.0.0.1:7"
    leader = settings_of("serve", *flags).leader_config("m")
    assert leader is not None
    assert (leader.num_nodes, leader.rank, leader.host, leader.port) == (3, 0, "10.0.0.1", 7)
    assert leader.model == "m" and SECRET not in repr(leader)
    worker = settings_of(
        "worker", "--rank", "1", "--leader", "far", PENSTOCK_NODES_SECRET=SECRET
    ).worker_config()
    assert (worker.rank, worker.host, worker.port, worker.secret) == (1, "far", 8570, SECRET)
    flags = "--rank", "1", "--leader", "[::1]:9", "--nodes-secret", SECRET
    six = settings_of("worker", *flags).worker_config()
    assert (six.host, six.port) == ("::1", 9)


def test_the_variables_of_leader_worker_set() -> None:
    worker = settings_of("worker", PENSTOCK_NODES_SECRET=SECRET, **LWS).worker_config()
    assert (worker.rank, worker.host, worker.port) == (2, "lws-0.lws.default", 8570)
    leader = settings_of("serve", "m", PENSTOCK_NODES_SECRET=SECRET, **LWS | {"LWS_WORKER_INDEX": "0"})
    config = leader.leader_config("m")
    assert config is not None and config.num_nodes == 3
    told = settings_of("worker", "--rank", "1", "--leader", "near:5", PENSTOCK_NODES_SECRET=SECRET, **LWS)
    assert (told.rank, told.leader) == (1, "near:5")  # flags win
    with pytest.raises(ConfigError, match="LWS_GROUP_SIZE"):
        settings_of("worker", **LWS | {"LWS_GROUP_SIZE": "many"})


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("serve", ("m", "--nodes", "2"), "PENSTOCK_NODES_SECRET"),
        ("serve", ("m", "--nodes", "2", "--rank", "1"), "penstock worker --rank 1"),
        ("serve", ("m", "--nodes", "0"), "nodes is at least 2"),
        ("serve", ("m", "--nodes-listen", "10.0.0.1:7"), "--nodes-listen: .* leave it out"),
        (
            "serve",
            ("m", "--nodes", "1", "--nodes-ssl-certfile", "c", "--nodes-return-limit", "5"),
            "--nodes-return-limit and --nodes-ssl-certfile: .* leave them out",
        ),
        ("serve", ("m", "--nodes", "2", "--nodes-secret", SECRET, "--nodes-listen", "a:b"), "HOST:PORT"),
        ("serve", ("m", "--nodes", "2", "--nodes-secret", SECRET, "--nodes-ssl-keyfile", "k"), "certfile"),
        ("worker", ("--rank", "1"), "--leader HOST:PORT"),
        ("worker", ("--leader", "x"), "--rank 1"),
        ("worker", ("--rank", "1", "--leader", "x", "--nodes-secret-file", "/no/such"), "cannot read"),
        (
            "worker",
            ("--rank", "1", "--leader", "x", "--nodes-secret-file", "f", "--nodes-secret", SECRET),
            "leave one out",
        ),
    ],
)
def test_what_is_wrong_is_said(command: str, flags: tuple[str, ...], message: str) -> None:
    settings = settings_of(command, *flags)
    with pytest.raises(ConfigError, match=message):
        settings.leader_config("m") if command == "serve" else settings.worker_config()


def test_a_file_with_the_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    flags = "--rank", "1", "--leader", "x", "--nodes-secret-file", str(tmp_path / "secret")
    assert settings_of("worker", *flags).worker_config().secret == SECRET
