"""The messages by which a node asks another one for samples in memory: fixed form, over TCP, after a hello.

**Requests.** As often as it likes, a client then sends a head and so many wants. The server answers with one byte per
want, 1 if it has the sample; then the samples that it has, from where they lie; then one byte for each of these, 1 if
it was still the same sample when the last of it had been sent. Numbers are little-endian.
"""

import hmac
import struct
from collections.abc import Sequence

import numpy as np

from real.data.board import Want

# How many wants follow, and the seconds that the server may wait for samples that are about to come.
HEAD = struct.Struct("<qd")

WANT = np.dtype([("sample", "<i8"), ("local_rank", "<i8"), ("number", "<i8")])


def key_of(token: bytes, data_set: bytes) -> bytes:
    """Return what the ranks of a run must know to read a data set from one another.

    Args:
        token: Of the run: random, known to its ranks only.
        data_set: Digest of all that says what a sample is.
    """
    return hmac.digest(token, data_set, "sha256")


def packed(wants: Sequence[Want]) -> bytes:
    """Write wants."""
    return np.array([(want.sample, want.local_rank, want.number) for want in wants], WANT).tobytes()


def unpacked(data: bytes | bytearray) -> list[Want]:
    """Read what `packed` wrote."""
    return [Want(*fields) for fields in np.frombuffer(data, WANT).tolist()]
