"""The first words of two machines: each proves that it knows the secret, and neither sends it.

    worker -> leader   HELLO      what it is, a nonce
    leader -> worker   CHALLENGE  what it is, a nonce, HMAC(secret, "leader", both)
    worker -> leader   PROOF      HMAC(secret, "worker", both)
    leader -> worker   WELCOME, or REFUSED with a reason

The proofs are HMAC-SHA256 (RFC 2104) of all that both have said, nonces included, and of the side that
speaks: no proof can be played back, neither to the side that made it nor later. They are compared in constant
time. They say who is there at the beginning. What comes later is protected by TLS, or by the network.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any

from penstock.nodes.wire.channel import Channel
from penstock.nodes.wire.frames import Frame, Kind, WireError

#: The form of all messages. Another number is another form.
PROTOCOL = 2
_MAX_BYTES = 1 << 14
#: What both sides must have in common: these differences are refused by name.
_SAME = {"protocol": "protocol", "version": "version of Penstock", "code": "code that computes"}
_SAME_SECRET = "give leader and workers the same PENSTOCK_NODES_SECRET or --nodes-secret-file"


class Refused(Exception):
    """One side does not take the other. `is_final`: trying again is of no use."""

    def __init__(self, reason: str, is_final: bool = True) -> None:
        super().__init__(reason)
        self.is_final = is_final


def greet(channel: Channel, secret: str, own: dict[str, Any]) -> dict[str, Any]:
    """A worker's part. `own` says what it is. Returns what the leader is. Raises Refused and OSError."""
    hello = own | {"nonce": secrets.token_hex(32)}
    channel.send(Frame(Kind.HELLO, hello))
    challenge = _expect(channel, Kind.CHALLENGE)
    proof = str(challenge.pop("proof", ""))
    if not _is_equal(proof, _proof(secret, "leader", hello, challenge)):
        raise Refused(f"the leader does not know our secret: {_SAME_SECRET}")
    _check_same(challenge, own)
    channel.send(Frame(Kind.PROOF, {"proof": _proof(secret, "worker", hello, challenge)}))
    _expect(channel, Kind.WELCOME)
    return challenge


def admit(channel: Channel, secret: str, own: dict[str, Any]) -> dict[str, Any]:
    """The leader's part, up to WELCOME or REFUSED, which welcome() and refuse() send. Returns what the worker
    is. Raises Refused and OSError."""
    hello = _expect(channel, Kind.HELLO)
    challenge = own | {"nonce": secrets.token_hex(32)}
    proof = _proof(secret, "leader", hello, challenge)
    channel.send(Frame(Kind.CHALLENGE, challenge | {"proof": proof}))
    given = str(_expect(channel, Kind.PROOF).get("proof"))
    if not _is_equal(given, _proof(secret, "worker", hello, challenge)):
        raise Refused(f"the secrets differ: {_SAME_SECRET}")
    _check_same(hello, own)
    return hello


def welcome(channel: Channel) -> None:
    """Raises OSError."""
    channel.send(Frame(Kind.WELCOME))


def refuse(channel: Channel, error: Refused) -> None:
    """Raises OSError."""
    channel.send(Frame(Kind.REFUSED, {"reason": str(error), "is_final": error.is_final}))


def _check_same(other: dict[str, Any], own: dict[str, Any]) -> None:
    for name, what in _SAME.items():
        if other.get(name) != own[name]:
            raise Refused(
                f"the {what} differs: {own[name]} here, {str(other.get(name))[:80]} there. Install the same "
                "Penstock on all machines"
            )


def _is_equal(given: str, proof: str) -> bool:
    """compare_digest() of texts raises an error for all but ASCII, which a stranger may send."""
    return hmac.compare_digest(given.encode(errors="backslashreplace"), proof.encode())


def _proof(secret: str, side: str, hello: dict[str, Any], challenge: dict[str, Any]) -> str:
    text = json.dumps([PROTOCOL, side, hello, challenge], sort_keys=True).encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def _expect(channel: Channel, kind: Kind) -> dict[str, Any]:
    """The fields of the next frame. Nothing but short fields is taken from a side that has proved nothing."""
    frame = channel.receive(max_fields=_MAX_BYTES)
    if frame.kind is Kind.REFUSED:
        raise Refused(str(frame.fields.get("reason"))[:500], bool(frame.fields.get("is_final", True)))
    if frame.kind is not kind:
        raise WireError(f"{frame.kind.name} came in place of {kind.name}")
    return dict(frame.fields)
