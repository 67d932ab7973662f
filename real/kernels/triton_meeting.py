# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
# mypy: disable-error-code="import-not-found, import-untyped"
"""A collective with simulated peers on a GPU, without waits of the host.

`_arrive` notes when the stream gets to the collective. `_hold` computes from this, and from the ends of earlier
collectives, when the last member is ready, and when the collective ends; see `simdist.traces.peers`. It spins until
then. All times are nanoseconds of `%globaltimer`, the clock of the GPU. They stay on the device. 0 is not yet known.

NCCL's kernels take multiprocessors and memory bandwidth from the kernels beside them. So does `_hold`: it takes as many
thread blocks as NCCL has channels, also while it waits, and copies as many bytes as a ring moves, evenly over its time.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from real.kernels.triton_candidates import ceil_div, tl, triton
from simdist.traces.peers import PeerArrivals

CHUNK = 4096  # int32 that a thread block copies at once
NEVER = -(2**62)  # a lag: the peers do not depend on this source
_MOST_LOOKS = 10**8  # a minute or more, after which a kernel no longer waits for an earlier collective
_SIZES = ("number", "width", "n_chunks")  # no specialised kernels for sizes divisible by 16, or for 1


def note_time(times: Tensor, number: int) -> None:
    """Write the time at which the current stream gets here.

    Args:
        times: int64 `[n]`, on a GPU.
        number: Where to write.
    """
    _arrive[(1,)](times, number)


@dataclass(frozen=True, slots=True)
class PeerTables:
    """The collectives of a run, on a GPU.

    Args:
        arrived: Times at which the stream got to each collective, int64 `[n]`.
        ends: Start of the run, and end of each collective, int64 `[n + 1]`; 0 where it is not known yet.
        sources: Numbers of the ends that the peers of each collective depend on, int32 `[n, k]`.
        lags: Nanoseconds from each of these ends until the last peer is ready, int64 `[n, k]`; or `NEVER`.
        durations: Nanoseconds from the readiness of the last member to the end, int64 `[n]`.
        scratch: int32 to copy from and to, at least `CHUNK` of them.
    """

    arrived: Tensor
    ends: Tensor
    sources: Tensor
    lags: Tensor
    durations: Tensor
    scratch: Tensor

    @classmethod
    def of(cls, peers: PeerArrivals, device: torch.device, *, scratch_nbytes: int) -> "PeerTables":
        """Put on a device what a rank knows of its peers."""
        lags = np.where(np.isfinite(peers.lag_s), np.rint(1e9 * np.maximum(peers.lag_s, 0.0)), NEVER).astype(np.int64)
        return cls(
            torch.zeros(len(peers), dtype=torch.int64, device=device),
            torch.zeros(len(peers) + 1, dtype=torch.int64, device=device),
            torch.from_numpy(peers.sources.astype(np.int32)).to(device),
            torch.from_numpy(lags).to(device),
            torch.from_numpy(np.rint(1e9 * peers.seconds).astype(np.int64)).to(device),
            torch.zeros(max(CHUNK, scratch_nbytes // 4), dtype=torch.int32, device=device),
        )


def hold(meetings: PeerTables, number: int, *, channels: int, nbytes: int) -> None:
    """Hold the current stream until a collective ends, and write its end.

    Args:
        meetings: The collectives.
        number: Number of the collective.
        channels: Thread blocks.
        nbytes: Bytes to copy.
    """
    width = meetings.sources.shape[1]
    n_chunks = ceil_div(nbytes, 4 * CHUNK * channels)
    _hold[(channels,)](
        meetings.arrived,
        meetings.ends,
        meetings.sources,
        meetings.lags,
        meetings.durations,
        meetings.scratch,
        number,
        width,
        n_chunks,
        meetings.scratch.numel() // CHUNK,
        WIDTH=triton.next_power_of_2(width),
        CHUNK=CHUNK,
        NEVER=NEVER,
        MOST_LOOKS=_MOST_LOOKS,
    )


@triton.jit
def _globaltimer():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["number"])
def _arrive(times, number):
    tl.store(times + number, _globaltimer())


@triton.jit(do_not_specialize=_SIZES)
def _hold(  # noqa: PLR0913 (pointers and sizes one by one)
    arrived,
    ends,
    sources,
    lags,
    durations,
    scratch,
    number,
    width,
    n_chunks,
    n_places,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    NEVER: tl.constexpr,
    MOST_LOOKS: tl.constexpr,
):
    """The first thread block computes the end, and the others wait for it."""
    block = tl.program_id(0)
    took = tl.load(durations + number)
    if block == 0:
        begin = tl.load(arrived + number)
        at = tl.arange(0, WIDTH)
        lag = tl.load(lags + number * width + at, mask=at < width, other=NEVER)
        source = tl.load(sources + number * width + at, mask=at < width, other=0)
        end = tl.load(ends + source, mask=lag > NEVER, other=1, volatile=True)
        n_looks = 0
        while (tl.min(end, axis=0) == 0) & (n_looks < MOST_LOOKS):
            end = tl.load(ends + source, mask=lag > NEVER, other=1, volatile=True)
            n_looks += 1
        ready = tl.max(tl.where(lag > NEVER, end + lag, 0), axis=0)
        tl.store(ends + number + 1, tl.maximum(begin, ready) + took)
    end_at = tl.load(ends + number + 1, volatile=True)
    while end_at == 0:
        end_at = tl.load(ends + number + 1, volatile=True)
    at = tl.arange(0, CHUNK)
    for chunk in range(n_chunks):
        due = end_at - took + took // n_chunks * chunk
        while _globaltimer() < due:
            pass
        place = (chunk * tl.num_programs(0) + block) % n_places
        entries = tl.load(scratch + place * CHUNK + at, volatile=True)
        tl.store(scratch + place * CHUNK + at, entries)
    while _globaltimer() < end_at:
        pass
