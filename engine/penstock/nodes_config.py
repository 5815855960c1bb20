"""NodesConfig: what a user decides about a model that several machines share."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import ConfigError

#: The port at which a leader waits for workers.
DEFAULT_PORT = 8570
#: Characters of a secret, at least.
LEAST_SECRET = 16


@dataclass(frozen=True)
class NodesConfig:
    """Of the leader (rank 0) or of a worker."""

    secret: str = field(repr=False)
    #: Machines, the leader among them; a worker need not know.
    num_nodes: int = 2
    rank: int = 0
    #: Where the leader listens, or where a worker finds it.
    host: str = ""
    port: int = DEFAULT_PORT
    #: Seconds of silence after which a machine is taken for lost.
    timeout_s: float = 10.0
    #: Seconds for which requests wait for a machine that is lost.
    return_s: float = 60.0
    #: The leader's certificate and its key (PEM), and what a worker trusts. None: plain TCP.
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    #: The model's name for workers that were told none; "": as the leader's engine was told.
    model: str = ""

    def __post_init__(self) -> None:
        if self.num_nodes < 2 or not 0 <= self.rank < self.num_nodes:
            raise ConfigError(
                f"--rank {self.rank} of --nodes {self.num_nodes}: nodes is at least 2, and ranks are 0 (the "
                f"leader) to {max(1, self.num_nodes - 1)}"
            )
        if len(self.secret) < LEAST_SECRET:
            raise ConfigError(
                f"machines that share a model need a secret of at least {LEAST_SECRET} characters, the same "
                "on each: set PENSTOCK_NODES_SECRET, or give a file with --nodes-secret-file"
            )
        if not self.timeout_s > 0 or self.return_s < 0:
            raise ConfigError("--nodes-timeout must be above 0 seconds, and --nodes-return-limit at least 0")

    def tls(self) -> ssl.SSLContext | None:
        """For the leader's sockets, or for a worker's. Raises ConfigError."""
        try:
            if self.certificate is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.certificate, self.key)
                return context
            if self.authority is not None:
                return ssl.create_default_context(cafile=str(self.authority))
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"the certificate of --nodes can't be used: {error}") from None
        return None
