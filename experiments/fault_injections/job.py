"""One process of a job of an injection: a rank with the fault that is planted in it, or an intruder at the store.

A job is a training script with `real.wrap`, under its own process group or ours, or `python -m real`. Every rank notes
its times, so a fault finds its moment where an operation of step 5 begins. Faults of files meet their writer:

torn      killed with half of the file written, before it has its name
killed    killed with all of it written, before it has its name
full      the disk has no room for the second half
"""

import hashlib
import hmac
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from errno import ENOSPC
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

import real
import real.session
import simdist.files
from real.processes.beats import Heartbeat
from real.processes.signing import SignedStore
from real.recording.recorder import Recorder
from simdist.plan import Plan
from simdist.plan.walk import occurrences
from simdist.runs import run_directory
from simdist.schedules import LocalSGD

STEP = 5  # in which a fault is planted
EVERY = 2  # steps from one checkpoint to the next
DISK = "disk"
RUN, TRACE, CHECKPOINTS = f"{DISK}/run", f"{DISK}/trace.npz", f"{DISK}/checkpoints"
FAULT, GO = "fault", "go"  # the fault has come; the rank that waits may go on
MARK = "SIMDIST_INJECTION"  # in the environment of all processes of an injection


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks do.

    Args:
        kind: A script that lets us connect the ranks, that has made its process group, or that is started by torch's
            `start_processes`; `python -m real`, or that under torchrun.
        folder: For everything that is left behind.
        timeout_s: For each wait for others.
        world_size: Ranks.
        n_steps: Of the script.
        period: Steps from one average to the next.
        hidden: Width of the model.
    """

    kind: Literal["script", "own group", "spawn", "real", "torchrun"]
    folder: str
    timeout_s: float
    world_size: int = 4
    n_steps: int = 8
    period: int = 3
    hidden: int = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong in a rank.

    Args:
        action: A signal, `raises`, `leaves`, `exits`, `sleeps`, `waits` until it may go on, `fills` the disk; a fault
            of files; or a field of the job that is different there, as `n_steps=9`.
        moment: `start`, `between` steps, at the `end` of the loop, before a `barrier` of the script, while times are
            brought `together`; the name of an operation; or `write NAME`.
        rank: Where.
    """

    action: str
    moment: str
    rank: int


def plant_in_files(action: str, name: str, *, before: Callable[[], object] = lambda: None) -> None:
    """Let this process meet a fault when it writes a file of that name, or a name that begins like it."""
    sync = simdist.files.sync

    def meet(part: Path, *flags: int) -> None:
        if not part.name.startswith(f".{name}"):
            sync(part, *flags)
            return
        before()
        if action != "killed":
            os.truncate(part, part.stat().st_size // 2)
        if action == "full":
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(part))
        os.kill(os.getpid(), signal.SIGKILL)

    simdist.files.sync = meet  # when a file gets its name
    if action != "killed":
        run_directory.sync = meet  # before any of several gets its name


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault that waits for its moment, if there is one for this rank."""

    fault: Fault | None
    folder: Path

    def at(self, moment: str) -> bool:
        """Do what is planted for this moment; return whether to leave the loop."""
        if self.fault is None or moment != self.fault.moment or (self.folder / FAULT).exists():
            return False
        (self.folder / FAULT).touch()
        match self.fault.action:
            case "raises":
                raise ValueError("bad batch")
            case "exits":
                os._exit(0)
            case "sleeps":
                time.sleep(1e6)
            case "waits":
                while not (self.folder / GO).exists():
                    time.sleep(0.01)
            case "fills":
                with suppress(OSError), (self.folder / DISK / "ballast").open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
            case "leaves":
                return True
            case action if action.startswith("SIG"):
                os.kill(os.getpid(), signal.Signals[action])
        return False

    def plant(self) -> None:
        """Let moments find the fault that no script tells of."""
        if self.fault is None:
            return
        action, moment = self.fault.action, self.fault.moment
        if moment.startswith("write "):
            plant_in_files(action, moment.removeprefix("write "), before=(self.folder / FAULT).touch)
        first, begin = Recorder.__init__, Recorder.begin
        moments: dict[int, str] = {}

        def watch(recorder: Recorder, plan: Plan, path: Path | None = None) -> None:
            first(recorder, plan, path)
            for each in occurrences(plan):
                moments.update({int(row): type(each.op).__name__ for row in each.rows[each.steps == STEP]})

        def meet(recorder: Recorder, index: int, at_s: float) -> None:
            begin(recorder, index, at_s)
            self.at(moments.get(index, ""))

        Recorder.__init__, Recorder.begin = watch, meet
        real.session.gather_trace = self._before("together", real.session.gather_trace)

    def _before(self, moment: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            self.at(moment)
            return function(*args, **options)

        return call


def be_rank(job: Job, fault: Fault | None) -> None:
    """Be a rank; the environment says which."""
    rank = int(os.environ["RANK"])
    planted = Planted(fault if fault and fault.rank == rank else None, Path(job.folder))
    if planted.fault and "=" in planted.fault.action:
        name, _, value = planted.fault.action.partition("=")
        job = replace(job, **{name: type(getattr(job, name))(value)})
    planted.plant()
    match job.kind:
        case "real":
            planted.at("start")
            sys.argv = ["real", str(Path(job.folder, RUN)), "--timeout", f"{job.timeout_s:g}", "--force"]
            runpy.run_module("real", run_name="__main__", alter_sys=True)
        case _:
            train(job, planted, with_barrier=fault is not None and fault.moment == "barrier")


def train(job: Job, planted: Planted, *, with_barrier: bool) -> None:
    """Be a training script; print where it begins and what it ends with."""
    folder, own_group = Path(job.folder), job.kind != "script"
    if own_group:
        dist.init_process_group("gloo")
    planted.at("start")
    torch.manual_seed(int(os.environ["RANK"]))
    module = nn.Sequential(nn.Linear(6, job.hidden), nn.Tanh(), nn.Linear(job.hidden, 3)).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    with real.wrap(
        module,
        optimizer,
        LocalSGD(period=job.period),
        n_steps=job.n_steps,
        checkpointing=real.Checkpointing(folder / CHECKPOINTS, every=EVERY),
        experiment=real.Experiment(trace=folder / TRACE),
        launch=real.Launch(timeout_s=job.timeout_s),
    ) as worker:
        print(f"begins before step {worker.step}", flush=True)
        for step in worker.steps():
            if step == STEP and planted.at("between"):
                break
            if step == STEP and with_barrier:
                planted.at("barrier")
                dist.barrier()
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + worker.rank)).double()
            optimizer.zero_grad()
            module(inputs + 0.1 * torch.randn_like(inputs)).square().mean().backward()
            optimizer.step()
        planted.at("end")
    content = b"".join(each.detach().numpy().tobytes() for each in module.parameters())
    print(f"parameters {hashlib.sha256(content).hexdigest()}", flush=True)
    if own_group:
        dist.destroy_process_group()


def launch(job: Job, fault: Fault | None) -> None:
    """Be what starts the ranks: torchrun, or a script with `start_processes`."""
    if job.kind == "torchrun":
        from torch.distributed.run import main

        arguments = json.dumps([asdict(replace(job, kind="real")), fault and asdict(fault)])
        main(["--standalone", f"--nproc-per-node={job.world_size}", str(Path(__file__).resolve()), arguments])
        return
    torch.multiprocessing.start_processes(be_spawned, args=(job, fault), nprocs=job.world_size, start_method="fork")


def be_spawned(rank: int, job: Job, fault: Fault | None) -> None:
    """Be a rank that a script has started."""
    redirect(Path(job.folder, f"output-{rank}"))
    os.environ["RANK"] = str(rank)
    be_rank(job, fault)


def forge(job: Job, state: str) -> None:
    """Write beats in the name of every rank, as one can who does not know the secret, and noise to the store's port."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection((address, port)) as noise:
        noise.sendall(os.urandom(4096))
    store = dist.PrefixStore("real/0", dist.TCPStore(address, port, is_master=False, wait_for_workers=False))
    none = hmac.digest(b"", b"real/0", "sha256")  # of a job without a secret
    end_s, count = time.monotonic() + 12.0, 10**6
    with suppress(RuntimeError):  # the store is gone
        while time.monotonic() < end_s and not Path(job.folder, GO).exists():
            count += 1
            for rank in range(job.world_size):
                beat = Heartbeat(rank, count, 0, "forged", "another machine", 1, state, "forged by an intruder")
                for secret in (none, b"guessed"):
                    SignedStore(store, secret).set(f"beat/{rank}", json.dumps(asdict(beat)))
            time.sleep(0.05)


def redirect(output: Path) -> None:
    """Let this process print into a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def enter(function: Callable[..., None], args: tuple[object, ...], environ: Mapping[str, str], output: Path) -> None:
    """Be a process in a session of its own."""
    os.setsid()
    redirect(output)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.update(environ)
    torch.set_num_threads(1)
    function(*args)


if __name__ == "__main__":
    found_job, found_fault = json.loads(sys.argv[1])
    be_rank(Job(**found_job), Fault(**found_fault) if found_fault else None)
