"""The settings of a model that several machines share: `penstock serve --nodes` and `penstock worker`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from penstock.errors import ConfigError
from penstock.nodes_config import DEFAULT_PORT, NodesConfig
from penstock_server.settings.entries import setting
from penstock_server.settings.values import parse_int, parse_seconds

_BOTH = ("serve", "worker")


@dataclass(frozen=True)
class NodesSettings:
    """Part of Settings."""

    nodes: int = setting(
        "nodes",
        "machines that share the model, this one among them: each computes some of the layers; default: "
        "LWS_GROUP_SIZE (LeaderWorkerSet), else 1",
        1,
        commands=("serve",),
        parse=parse_int,
    )
    rank: int | None = setting(
        "nodes",
        "which of these machines this is: 0 serves, the others are workers; default: LWS_WORKER_INDEX, else "
        "0 for serve",
        commands=_BOTH,
        parse=parse_int,
    )
    leader: str = setting(
        "nodes",
        "where a worker finds rank 0, as HOST or HOST:PORT; default: LWS_LEADER_ADDRESS; port "
        f"{DEFAULT_PORT} if none is given",
        "",
        commands=("worker",),
        metavar="HOST:PORT",
    )
    nodes_listen: str = setting(
        "nodes",
        "where rank 0 waits for its workers",
        f"0.0.0.0:{DEFAULT_PORT}",
        commands=("serve",),
        metavar="HOST:PORT",
        tags=("nodes",),
    )
    nodes_secret: str = setting(
        "nodes",
        "secret of at least 16 characters that all machines of a model know; prefer the variable, since "
        "other users see flags in `ps`",
        "",
        metavar="TEXT",
        secret=True,
    )
    nodes_secret_file: Path | None = setting("nodes", "file with this secret", parse=Path, metavar="FILE")
    nodes_timeout: float = setting(
        "nodes",
        "seconds of silence after which a machine is taken for lost",
        10.0,
        parse=parse_seconds,
        metavar="SECONDS",
        tags=("nodes",),
    )
    nodes_return_limit: float = setting(
        "nodes",
        "seconds for which requests wait for a machine that is lost, or for another one in its place; then "
        "they get an error",
        60.0,
        commands=("serve",),
        parse=parse_seconds,
        metavar="SECONDS",
        tags=("nodes",),
    )
    nodes_ssl_certfile: Path | None = setting(
        "nodes",
        "rank 0's certificate (PEM): machines talk over TLS; without it, their network must be trusted",
        commands=("serve",),
        parse=Path,
        metavar="FILE",
        tags=("nodes",),
    )
    nodes_ssl_keyfile: Path | None = setting(
        "nodes",
        "its private key, if --nodes-ssl-certfile lacks it",
        commands=("serve",),
        parse=Path,
        metavar="FILE",
        tags=("nodes",),
    )
    nodes_ssl_ca: Path | None = setting(
        "nodes",
        "certificate (PEM) by which a worker knows its leader; a worker with it speaks TLS alone",
        commands=("worker",),
        parse=Path,
        metavar="FILE",
    )

    def leader_config(self, model: str) -> NodesConfig | None:
        """For `serve`; None where one machine computes the model. `model`: its name for workers. Raises
        ConfigError."""
        if self.nodes == 1 and not self.rank:
            self._check_alone()
            return None
        if self.rank:
            raise ConfigError(
                f"--rank {self.rank} is no leader: run `penstock worker --rank {self.rank} --leader "
                "HOST:PORT`, or serve with --rank 0"
            )
        if self.nodes_ssl_keyfile is not None and self.nodes_ssl_certfile is None:
            raise ConfigError("--nodes-ssl-keyfile is the key of a certificate: add --nodes-ssl-certfile")
        host, port = _place("--nodes-listen", self.nodes_listen)
        return NodesConfig(
            self._secret(),
            self.nodes,
            0,
            "" if host == "0.0.0.0" else host,
            port,
            self.nodes_timeout,
            self.nodes_return_limit,
            self.nodes_ssl_certfile,
            self.nodes_ssl_keyfile,
            model=model,
        )

    def _check_alone(self) -> None:
        """Raises ConfigError for settings of several machines; a secret may stand in the environment of
        all."""
        given = [
            f"--{each.name.replace('_', '-')}"
            for each in fields(NodesSettings)
            if "nodes" in each.metadata["tags"] and getattr(self, each.name) != each.default
        ]
        if given:
            raise ConfigError(
                f"{' and '.join(given)}: for several machines, and this is one: add --nodes N, or leave "
                f"{'it' if len(given) == 1 else 'them'} out"
            )

    def worker_config(self) -> NodesConfig:
        """For `worker`. Raises ConfigError."""
        if not self.rank or not self.leader:
            raise ConfigError(
                "a worker needs its number and its leader: penstock worker --rank 1 --leader HOST:PORT"
            )
        host, port = _place("--leader", self.leader)
        return NodesConfig(
            self._secret(),
            self.rank + 1,
            self.rank,
            host,
            port,
            self.nodes_timeout,
            authority=self.nodes_ssl_ca,
        )

    def _secret(self) -> str:
        if self.nodes_secret_file is None:
            return self.nodes_secret
        if self.nodes_secret:
            raise ConfigError(
                "a secret (--nodes-secret or PENSTOCK_NODES_SECRET) and --nodes-secret-file: leave one out"
            )
        try:
            return self.nodes_secret_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --nodes-secret-file {self.nodes_secret_file}: {error}") from None


def lws_values(environ: Mapping[str, str]) -> dict[str, object]:
    """Settings by the variables that LeaderWorkerSet sets in a pod of Kubernetes; {} elsewhere, and in a
    group of one. Raises ConfigError."""
    size, index = environ.get("LWS_GROUP_SIZE", "1"), environ.get("LWS_WORKER_INDEX", "0")
    if not (size.isdecimal() and index.isdecimal()):
        raise ConfigError(
            f"LWS_GROUP_SIZE is {size!r} and LWS_WORKER_INDEX {index!r}; both are whole numbers"
        )
    if int(size) < 2:
        return {}
    return {"nodes": int(size), "rank": int(index), "leader": environ.get("LWS_LEADER_ADDRESS", "")}


def _place(flag: str, text: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):  # a name, or an IPv6 address without brackets
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{flag} {text}: write HOST:PORT, such as 10.0.0.1:{DEFAULT_PORT}")
    return host.strip("[]"), int(port)
