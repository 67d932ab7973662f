"""How fast, and in how much memory, are the traces of a large job imported?

    python benchmarks/importing.py            tables; exit code 1 if a target is missed; 6 GB of temporary files
    python benchmarks/importing.py --gz       the same traces, compressed
    python benchmarks/importing.py --quick    so small that the numbers mean nothing; seconds
    python benchmarks/importing.py --json     the numbers for machines

64 ranks leave a trace each of 20 steps of a model as large as ResNet-50, about 200,000 events per rank, as the profiler
lays them out. One trace is written event by event; those of the other ranks are copies of its text in which the rank,
the machine and the GPU are others. `simdist import` reads them all; then one process reads one trace of 1 GB, which
repeats the steps at later times. Memory is that of all processes together, looked at ten times a second.
"""

import argparse
import gzip
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kineto_traces import trace_of  # noqa: E402
from kineto_truth import Bucket, Delay, Truth  # noqa: E402

from benchmarks.tables import table  # noqa: E402

TARGET_S, TARGET_MIB, TARGET_LARGE_MIB = 60.0, 2048.0, 1024.0
N_TENSORS, N_PARAMETERS = 161, 25_557_032  # torchvision's resnet50
BUCKET = 27  # tensors; six buckets, as 25 MiB of parameters of 4 bytes make
STRAGGLER = 5
N_WITHIN = 6  # ops within each op, such as views and copies
WINDOW_US = 10_000_000  # a copy of the steps is so much later than the one before
READ = """
import sys
from pathlib import Path
from simdist.profiles.steps.ranks import profile_rank
print(len(profile_rank(Path(sys.argv[1])).steps))
"""


@dataclass(frozen=True)
class Sizes:
    """How much there is to import: ranks, steps of each, and how often the single large trace repeats them."""

    ranks: int = 64
    steps: int = 20
    repeats: int = 13


@dataclass(frozen=True)
class Run:
    """Resources of a command: seconds that passed, those of all processors, and the most memory of its processes."""

    wall_s: float
    cpu_s: float
    peak_MiB: float


def main() -> int:
    """Measure, print; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="4 ranks, 6 steps")
    parser.add_argument("--gz", action="store_true", help="compress the traces")
    options = parser.parse_args()
    sizes = Sizes(ranks=4, steps=6, repeats=2) if options.quick else Sizes()
    with tempfile.TemporaryDirectory() as folder:
        found = [imported(Path(folder), sizes, is_packed=options.gz), read_large(Path(folder), sizes)]
    targets = [
        target("import of all ranks, s", found[0]["s"], TARGET_S),
        target("import of all ranks, MiB", found[0]["peak_MiB"], TARGET_MIB),
        target("one large trace, MiB", found[1]["peak_MiB"], TARGET_LARGE_MIB),
    ]
    if options.json:
        print(json.dumps({"measured": found, "load": os.getloadavg()[0], "targets": targets}, indent=1))
    else:
        print(table(f"{sizes.ranks} ranks x {sizes.steps} steps, load {os.getloadavg()[0]:.1f}", found))
        print(table("targets (for 64 ranks x 20 steps, 2 cores, plain)", targets))
    return int(not options.quick and not all(each["holds"] for each in targets))


def target(what: str, reached: float, limit: float) -> dict[str, Any]:
    """Return a row of the table of targets."""
    return {"what": what, "target": f"<= {limit:g}", "reached": reached, "holds": reached <= limit}


def imported(folder: Path, sizes: Sizes, *, is_packed: bool) -> dict[str, Any]:
    """Write the traces of all ranks and import them."""
    traces = folder / "traces"
    n_events, nbytes = write_ranks(traces, sizes, is_packed=is_packed)
    command = [sys.executable, "-m", "simdist", "import", str(traces), "-o", str(folder / "job.yaml")]
    return row("simdist import", n_events, nbytes, run(command))


def read_large(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Write one trace with many steps and read it."""
    path = folder / "large.json"
    n_events = write_large(path, sizes)
    return row("one trace", n_events, path.stat().st_size, run([sys.executable, "-c", READ, str(path)]))


def row(what: str, n_events: int, nbytes: int, taken: Run) -> dict[str, Any]:
    """Return a row of the table of what was measured."""
    return {
        "what": what,
        "events": n_events,
        "MB": nbytes / 1e6,
        "s": taken.wall_s,
        "cpu_s": taken.cpu_s,
        "peak_MiB": taken.peak_MiB,
        "events_per_s": n_events / taken.wall_s,
    }


def run(command: list[str]) -> Run:
    """Run a command in a session of its own, and watch how much memory its processes have."""
    began_s, began_cpu_s = time.perf_counter(), processor_s()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    peaks = [0.0]
    watcher = threading.Thread(target=watch, args=(process, peaks))
    watcher.start()
    _, errors = process.communicate()
    wall_s = time.perf_counter() - began_s
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)}: {errors.decode()}")
    return Run(wall_s, processor_s() - began_cpu_s, max(peaks) / 2**20)


def processor_s() -> float:
    """Return the processor time of the commands that have ended, their own processes included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watch(process: "subprocess.Popen[bytes]", peaks: list[float]) -> None:
    """Note the memory of a session until its first process has ended."""
    while process.poll() is None:
        peaks.append(sum(resident_nbytes(process.pid)))
        time.sleep(0.1)


def resident_nbytes(session: int) -> Iterator[int]:
    """Yield the resident memory of each process of a session.

    Source:
        proc(5): the sixth field of /proc/PID/stat is the session, the 24th the pages in memory.
    """
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[6 - 3]) == session:
            yield int(fields[24 - 3]) * os.sysconf("SC_PAGE_SIZE")


def write_ranks(folder: Path, sizes: Sizes, *, is_packed: bool) -> tuple[int, int]:
    """Write a trace for each rank; return their events, and their bytes."""
    folder.mkdir()
    usual, late = (Text.of(rank, sizes) for rank in (0, STRAGGLER))
    nbytes = 0
    for rank in range(sizes.ranks):
        text = (late if rank == STRAGGLER else usual).as_rank(rank)
        path = folder / f"rank{rank}.pt.trace.json{'.gz' if is_packed else ''}"
        path.write_bytes(gzip.compress(text, 1) if is_packed else text)
        nbytes += path.stat().st_size
    return usual.n_events * sizes.ranks, nbytes


def write_large(path: Path, sizes: Sizes) -> int:
    """Write a trace that repeats the steps; return its events."""
    text = Text.of(0, sizes)
    with path.open("wb") as file:
        file.write(text.head)
        for repeat in range(sizes.repeats):
            file.write((b"," if repeat else b"") + text.later(repeat * WINDOW_US, repeat * 1000))
        file.write(text.tail)
    return text.n_events * sizes.repeats


@dataclass(frozen=True)
class Text:
    """A trace, as the profiler lays it out: what stands before the events, they themselves, and what follows."""

    head: bytes
    events: bytes
    tail: bytes
    n_events: int

    @classmethod
    def of(cls, rank: int, sizes: Sizes) -> "Text":
        """Write the trace of a rank."""
        document = trace_of(truth(sizes), rank)
        events = [each for event in document.pop("traceEvents") for each in (event, *within(event))]
        head = json.dumps({**document, "host_name": "node0"})[:-1] + ', "traceEvents": [\n'
        return cls(head.encode(), ",\n".join(map(laid_out, events)).encode(), b'\n],"traceName": "x" }', len(events))

    def as_rank(self, rank: int) -> bytes:
        """Return this trace as if it were another rank's."""
        head = re.sub(rb'"rank": \d+', b'"rank": %d' % rank, self.head)
        head = head.replace(b'"node0"', b'"node%d"' % (rank // 8))
        events = re.sub(rb'"device": \d', b'"device": %d' % (rank % 8), self.events)
        return head + events + self.tail

    def later(self, us: int, steps: int) -> bytes:
        """Return the events as if they were later, with higher numbers of steps."""
        moved = re.sub(rb'"ts": (\d+)', lambda found: b'"ts": %d' % (int(found[1]) + us), self.events)
        return re.sub(rb"ProfilerStep#(\d+)", lambda found: b"ProfilerStep#%d" % (int(found[1]) + steps), moved)


def truth(sizes: Sizes) -> Truth:
    """Return a job that is as large as ResNet-50 on many GPUs, and of which one rank is late once."""
    counts = [N_PARAMETERS // N_TENSORS] * N_TENSORS
    buckets = tuple(Bucket(tuple(counts[at : at + BUCKET]), 0.018, 0.010) for at in range(0, N_TENSORS, BUCKET))
    late = Delay("compute", rank=STRAGGLER, step=sizes.steps // 2, seconds=0.05)
    return Truth(
        n_ranks=max(sizes.ranks, STRAGGLER + 1),
        n_steps=sizes.steps,
        forward_s=0.06,
        buckets=buckets,
        delays=(late,),
        noise=True,
    )


def within(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what an operator of a real model does within, and `kineto_traces` leaves out."""
    if event.get("cat") != "cpu_op":
        return
    step_us = event["dur"] / (2 * N_WITHIN + 2)
    for number in range(N_WITHIN):
        args = {
            "External id": event["args"]["External id"],
            "Record function id": 0,
            "Concrete Inputs": ["", "[64, 256, 56, 56]", "[802816, 3136, 56, 1]", ""],
            "Input type": ["float", "ScalarList", "ScalarList", ""],
            "Input Strides": [[802816, 3136, 56, 1], [], [], []],
            "Input Dims": [[64, 256, 56, 56], [], [], []],
            "Ev Idx": number,
        }
        times = {"ts": round(event["ts"] + (2 * number + 1) * step_us, 3), "dur": round(step_us, 3)}
        yield {**event, "name": "aten::as_strided", **times, "args": args}


def laid_out(event: dict[str, Any]) -> str:
    """Write an event over several lines, its arguments on one, as the profiler does."""
    lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in event.items() if key != "args"]
    if "args" in event:
        lines.append(f'    "args": {{\n      {json.dumps(event["args"])[1:-1]}\n    }}')
    return "  {\n" + ",\n".join(lines) + "\n  }"


if __name__ == "__main__":
    sys.exit(main())
