"""How two nodes find out that they belong to one run and mean the same data set, before a sample is sent.

Samples in memory bear no checksum, and the port of a node that is gone may be taken by anybody. So each side proves
that it knows the run's token, without saying it:

    proof = HMAC-SHA256(token, side + what it says of its data set)

The client begins; a server says nothing to who has no proof. This keeps out strangers, and other runs. It does not hide
anything from who listens on the way between nodes: run on a network that you trust.

Source: RFC 2104 (HMAC).
"""

import hmac
import socket
from dataclasses import dataclass, field
from typing import Literal

from real.data.memory import Geometry
from real.data.wire import HELLO, receive, send
from simdist.errors import RunError

_MAGIC = b"simdist2"
_LEAST_TOKEN_NBYTES = 16  # 128 bits: nobody guesses them


@dataclass(frozen=True, slots=True)
class Meeting:
    """What both sides of a connection must have in common.

    Args:
        token: Of the run: random, at least 16 bytes, known to its ranks only.
        data_set: SHA-256 of all that says what a sample is.
        geometry: Of the stores: as many samples, of one size.
    """

    token: bytes = field(repr=False)
    data_set: bytes
    geometry: Geometry

    def __post_init__(self) -> None:
        if len(self.token) < _LEAST_TOKEN_NBYTES:
            raise RunError(f"meeting of peers: a token of {len(self.token)} bytes; give {_LEAST_TOKEN_NBYTES} or more")
        if len(self.data_set) != 32:  # bytes of a SHA-256
            raise RunError(f"meeting of peers: a digest of {len(self.data_set)} bytes; a SHA-256 has 32")


def greet(connection: socket.socket, meeting: Meeting, *, who: str, deadline_s: float) -> None:
    """Begin a connection as its client.

    Raises:
        OSError: The other side does not answer, or is no rank of this run.
        RunError: It is, and serves another data set; `who` names it.
    """
    send(connection, [_words(meeting, "client")], deadline_s=deadline_s)
    theirs = _heard(connection, meeting, "server", deadline_s=deadline_s)
    ours = _described(meeting)
    if theirs != ours:
        raise RunError(
            f"{who} serves {theirs[0]} samples of {theirs[1]} bytes, this rank reads {ours[0]} of {ours[1]}"
            f"{'' if theirs[:2] != ours[:2] else ' of another data set'}; start all ranks with the same data set"
        )


def welcome(connection: socket.socket, meeting: Meeting, *, deadline_s: float) -> None:
    """Begin a connection as its server.

    Raises:
        OSError: The other side is no rank of this run, or means another data set.
    """
    theirs = _heard(connection, meeting, "client", deadline_s=deadline_s)
    send(connection, [_words(meeting, "server")], deadline_s=deadline_s)
    if theirs != _described(meeting):
        raise ConnectionAbortedError("reads another data set")


def _described(meeting: Meeting) -> tuple[int, int, bytes]:
    return meeting.geometry.n_samples, meeting.geometry.sample_nbytes, meeting.data_set


def _words(meeting: Meeting, side: Literal["client", "server"]) -> bytes:
    return HELLO.pack(_MAGIC, *_described(meeting), _proof(meeting, side, *_described(meeting)))


def _heard(
    connection: socket.socket, meeting: Meeting, side: Literal["client", "server"], *, deadline_s: float
) -> tuple[int, int, bytes]:
    """Return what the other side says of its data set: samples, bytes of each, digest."""
    answer = bytearray(HELLO.size)
    receive(connection, answer, deadline_s=deadline_s)
    magic, n_samples, sample_nbytes, data_set, proof = HELLO.unpack(answer)
    if magic != _MAGIC:
        raise ConnectionAbortedError(f"does not serve samples: began with {magic!r}")
    if not hmac.compare_digest(proof, _proof(meeting, side, n_samples, sample_nbytes, data_set)):
        raise ConnectionAbortedError("is not of this run")
    return n_samples, sample_nbytes, data_set


def _proof(meeting: Meeting, side: str, n_samples: int, sample_nbytes: int, data_set: bytes) -> bytes:
    said = HELLO.pack(_MAGIC, n_samples, sample_nbytes, data_set, b"")
    return hmac.digest(meeting.token, side.encode() + said, "sha256")
