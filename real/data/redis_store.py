"""A store of decoded samples in a Redis server that the user runs: the same interface as shared memory, and slower.

It serves where several jobs read one data set, or where a server of its own has the memory. The server decides what
leaves when its memory is full (`maxmemory`, `maxmemory-policy`). A sample that has left is not there, nor is any while
the server does not answer; `complaint` then says why.

    store = RedisStore("redis://localhost:6379", prefix="imagenet-224", sample_nbytes=3 * 224 * 224)
"""

from collections.abc import Sequence

import numpy as np

from real.data.samples import Pixels, flat
from simdist.errors import RunError

_AT_ONCE = 32  # samples of a request: several MB, so that the way to the server and back is little of it


class RedisStore:
    """Keeps samples in Redis.

    Args:
        url: Of the server, as redis-py takes it.
        prefix: Of all keys: one per data set and form of its samples.
        sample_nbytes: Of each sample.
        timeout_s: Of a request.

    Raises:
        RunError: redis-py is not installed, or the server does not answer.
    """

    def __init__(self, url: str, *, prefix: str, sample_nbytes: int, timeout_s: float = 10.0) -> None:
        try:
            import redis
        except ImportError as error:
            raise RunError("redis-py is missing: pip install redis") from error
        self.url, self.prefix, self.sample_nbytes = url, prefix, sample_nbytes
        self.complaint = ""
        """What went wrong last."""
        self._failures = (redis.RedisError, OSError)
        self._no_room = redis.exceptions.OutOfMemoryError
        self._server = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        try:
            self._server.ping()
        except self._failures as error:
            raise RunError(f"Redis at {url}: {error}; is the server running, and reached from this machine?") from error

    def put(self, sample: int, data: Pixels, *, number: int = 0) -> bool:
        """Keep a sample; return False if the server has no room. Redis knows no loads: `number` says nothing to it."""
        source = flat(data, self.sample_nbytes, sample)
        try:
            return bool(self._server.set(self._key(sample), source.data))
        except self._no_room:
            return False
        except self._failures as error:
            return self._complain(error)

    def get(self, sample: int, out: Pixels) -> bool:
        """Copy a sample to `out`; return False if it is not there."""
        return self.get_many([sample], [out])[0]

    def get_many(self, samples: Sequence[int], outs: Sequence[Pixels]) -> list[bool]:
        """Copy several samples; return which were there."""
        there: list[bool] = []
        for first in range(0, len(samples), _AT_ONCE):
            some = samples[first : first + _AT_ONCE]
            for sample, value, out in zip(some, self._values(some), outs[first:], strict=False):
                there.append(self._take(sample, value, out))
        return there

    def evict(self, sample: int, *, number: int | None = None) -> bool:
        """Drop a sample; return whether it was there."""
        try:
            return bool(self._server.delete(self._key(sample)))
        except self._failures as error:
            return self._complain(error)

    def close(self) -> None:
        """Leave; the samples stay on the server."""
        self._server.close()

    def __contains__(self, sample: int) -> bool:
        try:
            return bool(self._server.exists(self._key(sample)))
        except self._failures as error:
            return self._complain(error)

    def _key(self, sample: int) -> str:
        return f"{self.prefix}:{sample}"

    def _values(self, samples: Sequence[int]) -> Sequence[bytes | str | None]:
        try:
            return self._server.mget([self._key(sample) for sample in samples])
        except self._failures as error:
            self._complain(error)
            return [None] * len(samples)

    def _take(self, sample: int, value: bytes | str | None, out: Pixels) -> bool:
        target = flat(out, self.sample_nbytes, sample)
        if not isinstance(value, bytes):  # text only if the URL asks for it
            return False
        if len(value) != self.sample_nbytes:
            raise RunError(
                f"{self.url}: {self._key(sample)} has {len(value)} bytes, samples of this run {self.sample_nbytes}; "
                "give each form of a data set a prefix of its own"
            )
        np.copyto(target, np.frombuffer(value, np.uint8))
        return True

    def _complain(self, error: Exception) -> bool:
        self.complaint = f"Redis at {self.url}: {error}"
        return False
