"""What goes wrong in a job, on purpose: does it end in time, alone, without a loss, and go on as if nothing had been?

    python experiments/fault_injections/run.py            do everything and print the table (root; 10 minutes)
    python experiments/fault_injections/run.py --write    also record the results, and write the table into the README
    python experiments/fault_injections/run.py --tables   print the table of the recorded results (seconds); with
                                                          --write, write it into the README again
    python experiments/fault_injections/run.py --only 3,8 some of them, by number, with all that is judged;
                                                          with --write, record these again

Disks that fill up are file systems in memory, which root alone can mount.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import job as jobs  # noqa: E402
from injections import INJECTIONS, Injection  # noqa: E402
from job import CHECKPOINTS, DISK, FAULT, GO, MARK, RUN, TRACE, Fault, Job  # noqa: E402

from simdist.report import markdown_table, print_tables, write_tables  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import loads  # noqa: E402
from simdist.traces.trace import Trace  # noqa: E402

PARTIAL = run_directory.PARTIAL
RESULTS, PAGE = HERE / "results" / "results.json", HERE / "README.md"
TIMEOUT_S = 6.0
LIMIT_S = TIMEOUT_S + 6.0 + 8.0  # until a process that stands still counts as silent; for last words
PATIENCE_S = 120.0  # for jobs that nothing disturbs
SCENARIO = """\
cluster: {nodes: 1, gpus_per_node: 2, fabric: ideal, network: ideal}
workload: {tensors: [{name: weight, count: 2000}], batch_size: 4, forward: 20 ms}
steps: 8
schedules: [{kind: sync}]
"""
DONE = re.compile(r"^parameters (\w+)$", re.M)
BEGINS = re.compile(r"^begins before step (\d+)$", re.M)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an injection.

    Args:
        kind: Of the job.
        text: What happened.
        seconds: From the fault, or the start, to the end of the last process that could end.
        left: Processes that had not ended within the limit.
        orphans: Processes that outlived their job.
        lost: What is wrong with results that were finished before; empty if all are whole.
        resumed: What the next start did.
        problem: What is wrong with that, or with who was named; empty if nothing is.
        said: A line of a rank that was not at fault.
    """

    kind: str
    text: str
    seconds: float
    left: int
    orphans: int
    lost: str
    resumed: str
    problem: str
    said: str

    @property
    def passed(self) -> bool:
        """All is as it should be."""
        return not (self.left or self.orphans or self.lost or self.problem) and self.seconds <= LIMIT_S


@dataclass(frozen=True, slots=True)
class Started:
    """The processes of a job, by rank, and what they print."""

    children: Mapping[int, BaseProcess]
    folder: Path

    def output(self, rank: int) -> str:
        """What a rank has printed."""
        path = self.folder / f"output-{rank}"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def running(self, *, but: Sequence[int] = ()) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, child in self.children.items() if rank not in but and child.is_alive()]

    def wait(self, until_s: float, *, but: Sequence[int] = ()) -> None:
        """Wait for all ranks to end, `but` some."""
        while self.running(but=but) and time.monotonic() < until_s:
            time.sleep(0.02)

    def kill(self) -> None:
        """End what has not ended."""
        for child in self.children.values():
            child.kill()
            child.join()


def start(
    job: Job,
    fault: Fault | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    absent: int | None = None,
    port: int,
    outputs: str = "",
) -> Started:
    """Start all ranks of a job, or what starts them."""
    folder = Path(job.folder, outputs)
    folder.mkdir(exist_ok=True)
    whole = job.kind in {"torchrun", "spawn"}
    children = {}
    for rank in [-1] if whole else range(job.world_size):
        if rank == absent:
            continue
        places = {
            "RANK": f"{rank}",
            "WORLD_SIZE": f"{job.world_size}",
            "LOCAL_RANK": f"{rank}",
            "LOCAL_WORLD_SIZE": f"{job.world_size}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
            "OMP_NUM_THREADS": "1",
            MARK: job.folder,
        }
        children[rank] = process(
            jobs.launch if whole else jobs.be_rank,
            (job, fault),
            places | dict(environ or {}),
            folder / f"output-{rank}",
        )
    return Started(children, folder)


def process(
    function: Callable[..., None],
    args: tuple[object, ...],
    environ: Mapping[str, str],
    output: Path,
) -> BaseProcess:
    """Start one process."""
    child = fork_server().Process(target=jobs.enter, args=(function, args, dict(environ), output))
    child.start()
    return child


@cache
def fork_server() -> ForkServerContext:
    """Start the process that all others are forks of; the environment says where it finds what it loads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["job", "torch._dynamo", "torch.distributed.run"])
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, {"PYTHONPATH": path}):
        forkserver.ensure_running()
    return context


@contextmanager
def free_port() -> Iterator[int]:
    """Give a port that no other process is given meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def undisturbed(job: Job) -> dict[int, tuple[int, str]]:
    """Run a job to its end; return where each rank began and a digest of its parameters.

    Raises:
        RuntimeError: It failed, with what the ranks have printed.
    """
    with free_port() as port:
        started = start(job, port=port, outputs="again")
        started.wait(time.monotonic() + PATIENCE_S)
        started.kill()
    codes = [child.exitcode for child in started.children.values()]
    where = Path(job.folder) if job.kind == "spawn" else started.folder
    ranks = range(job.world_size) if job.kind == "spawn" else started.children
    outputs = {rank: Started({}, where).output(rank) for rank in ranks}
    if any(codes):
        raise RuntimeError("\n".join(outputs.values()))
    found = {rank: (BEGINS.findall(text)[-1:], DONE.findall(text)[-1:]) for rank, text in outputs.items()}
    return {rank: (int(begins[0]), digest[0]) for rank, (begins, digest) in found.items() if begins and digest}


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What jobs leave that nothing disturbs: in a folder; and the parameters of the ranks of a script."""

    folder: Path
    digests: Mapping[int, str]


def prepare(folder: Path) -> Undisturbed:
    """Do every job once, undisturbed."""
    (folder / DISK).mkdir()
    scenario = loads(SCENARIO)
    run_directory.write(folder / RUN, scenario, build(scenario, scenario.schedules[0]).plan, delays(scenario))
    undisturbed(Job("real", str(folder), PATIENCE_S, world_size=2))
    found = undisturbed(Job("script", str(folder), PATIENCE_S))
    return Undisturbed(folder, {rank: digest for rank, (_, digest) in found.items()})


def inject(injection: Injection, known: Undisturbed, folder: Path) -> Result:
    """Do an injection in an empty folder, and judge what comes of it."""
    world_size = 2 if injection.kind in {"real", "torchrun"} else 4
    right = Job(injection.kind, str(folder), TIMEOUT_S, world_size=world_size)
    job = replace(right, **injection.changes)
    fault = Fault(injection.action, injection.moment, injection.rank) if injection.action else None
    secret = {"SIMDIST_SECRET": "of the ranks"} if injection.secret else {}
    environ = {**injection.environ, **secret}
    stopped = [injection.rank] if injection.action == "SIGSTOP" else []
    with ExitStack() as stack:
        disk = folder / DISK
        disk.mkdir()
        if injection.action == "fills" or injection.before == "read-only":
            stack.enter_context(small_disk(disk))
        leave_results(injection, known, folder)
        port = stack.enter_context(free_port())
        if injection.before == "port taken":
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        absent = injection.rank if injection.absent else None
        for number in range(injection.times):
            (folder / FAULT).unlink(missing_ok=True)
            begin_s = time.time()
            started = start(job, fault, environ=environ, absent=absent, port=port)
            stack.callback(started.kill)
            if number + 1 < injection.times:
                started.wait(time.monotonic() + LIMIT_S)
        problem = disturb(injection, job, started, port) if injection.meanwhile else ""
        if fault and not await_file(folder / FAULT) and "=" not in injection.action:
            problem = problem or "the fault never came"
        since_s = (folder / FAULT).stat().st_mtime if (folder / FAULT).exists() else begin_s
        started.wait(time.monotonic() + LIMIT_S + 5.0, but=stopped)
        if injection.meanwhile == "continued":
            os.kill(started.children[injection.rank].pid or 0, signal.SIGCONT)
            stopped = []
            started.wait(time.monotonic() + LIMIT_S)
        left = started.running(but=stopped)
        (folder / GO).touch()
        started.kill()
        orphans = find_orphans([child.pid for child in started.children.values()], str(folder))
        seconds = time.time() - since_s
        problem = problem or unnamed(injection, started)
        if injection.before == "read-only":
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        (disk / "ballast").unlink(missing_ok=True)
        lost = "" if injection.before == "two runs" else losses(injection, known, folder)
        resumed, wrong = try_again(injection, right, known)
        lost = lost or ("" if wrong else losses(injection, known, folder))
        if injection.kind == "script" and injection.moment.startswith("write trace") and not is_whole(disk / PARTIAL):
            lost = lost or f"{PARTIAL} is not whole"
        return Result(
            injection.kind,
            injection.text,
            round(seconds, 1),
            len(left),
            orphans,
            "" if injection.meanwhile == "folder deleted" else lost,
            resumed,
            problem or wrong,
            last_words(injection, started),
        )


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Let the folder be a disk of 1 MB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def leave_results(injection: Injection, known: Undisturbed, folder: Path) -> None:
    """Put the results of an earlier, finished job there, and do what is done before the next one."""
    shutil.copytree(known.folder / RUN, folder / RUN)
    shutil.copy(known.folder / TRACE, folder / TRACE)
    (folder / CHECKPOINTS).mkdir()
    if injection.before in {"finished", "cut newest checkpoint", "cut all checkpoints"}:
        shutil.copytree(known.folder / CHECKPOINTS, folder / CHECKPOINTS, dirs_exist_ok=True)
    if injection.before.startswith("cut"):
        found = sorted((folder / CHECKPOINTS).iterdir(), reverse=True)
        for path in found if injection.before == "cut all checkpoints" else found[:1]:
            os.truncate(path, path.stat().st_size // 2)
    if injection.before == "two runs":
        report = folder / RUN / run_directory.REPORT
        report.write_text(json.dumps(json.loads(report.read_text()) | {"run": "another"}))
    if injection.before == "link":
        (folder / CHECKPOINTS / ".lock").symlink_to(folder / TRACE)
    if injection.before == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(folder / DISK)], check=True)


def disturb(injection: Injection, job: Job, started: Started, port: int) -> str:
    """Do what happens while a rank waits, and let it go on; return what went wrong."""
    folder = Path(job.folder)
    if not await_file(folder / FAULT):
        return "the fault never came"
    problem = ""
    match injection.meanwhile:
        case "second start":
            with free_port() as other:
                second = start(job, port=other, outputs="second")
                second.wait(time.monotonic() + LIMIT_S)
                hang = second.running()
                second.kill()
            said = [second.output(rank) for rank in second.children]
            if hang or not all("writes there: wait for its end, or end it" in each for each in said[:1]):
                problem = f"the second start: {said}"
        case "folder deleted":
            shutil.rmtree(folder / (RUN if injection.kind == "real" else CHECKPOINTS))
        case "launcher killed" | "all killed":
            started.kill()
        case "continued":  # when the others have ended
            pass
        case beats:
            environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", MARK: job.folder}
            process(jobs.forge, (job, beats.removeprefix("beats ")), environ, folder / "intruder")
            time.sleep(2.0)
    if not injection.meanwhile.startswith("beats alive"):
        (folder / GO).touch()
    return problem


def await_file(path: Path) -> bool:
    """Wait for a file; return whether it came."""
    end_s = time.monotonic() + PATIENCE_S / 4
    while not path.exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    return path.exists()


def find_orphans(sessions: Sequence[int | None], mark: str, *, within_s: float = LIMIT_S) -> int:
    """Return how many processes of a job are left that were not waited for, and end them."""
    end_s = time.monotonic() + within_s
    while (found := list(orphans_now(sessions, mark))) and time.monotonic() < end_s:
        time.sleep(0.1)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return len(found)


def orphans_now(sessions: Sequence[int | None], mark: str) -> Iterator[int]:
    """Yield the processes of these sessions, and those that have a mark in their environment."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            marked = f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if state not in "ZX" and (marked or int(session) in sessions):
            yield int(path.name)


def unnamed(injection: Injection, started: Started) -> str:
    """Say who does not name the rank at fault, or does not end as it should; nothing if all do."""
    if injection.before == "two runs":
        return "" if re.search(injection.named or "", validated(started.folder / RUN)) else "two runs are not told"
    for rank, child in started.children.items():
        said, killed = started.output(rank), child.exitcode == -signal.SIGKILL and "launcher" not in injection.meanwhile
        pattern = injection.named or rf"rank {injection.rank}\b"
        excused = rank == injection.rank and (killed or not injection.named)
        right = (
            child.exitcode == 0 if injection.named is None else excused or (child.exitcode and re.search(pattern, said))
        )
        if not right:
            return f"rank {rank} ended with {child.exitcode}: {said[-300:]}"
    return ""


def losses(injection: Injection, known: Undisturbed, folder: Path) -> str:
    """Say what is wrong with results that were finished before the injection; nothing if all are whole."""
    if not (folder / RUN).exists():
        return ""
    is_old = (folder / TRACE).read_bytes() == (known.folder / TRACE).read_bytes()
    return validated(folder / RUN) if is_old or is_whole(folder / TRACE) else f"{TRACE} is not whole"


def is_whole(path: Path) -> bool:
    """Return whether a trace has the last operation of every rank."""
    return path.exists() and bool(np.isfinite(Trace.load(path).end_s[-1]).all())


def validated(run: Path) -> str:
    """Return what `simdist validate` has against a run directory."""
    done = subprocess.run([sys.executable, "-m", "simdist", "validate", str(run)], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def try_again(injection: Injection, job: Job, known: Undisturbed) -> tuple[str, str]:
    """Start the job again, undisturbed; return what it did, and what is wrong with that."""
    if injection.kind == "torchrun":
        job = replace(job, kind="real")
    try:
        found = undisturbed(replace(job, timeout_s=PATIENCE_S))
    except RuntimeError as error:
        refused = bool(injection.refused and re.search(injection.refused, str(error)))
        return "refused", "" if refused else f"the next start failed: {str(error)[-300:]}"
    if injection.refused:
        return "not refused", "the next start was not refused"
    if job.kind == "real":
        return "measured again", ""
    begins = min(step for step, _ in found.values())
    if len(found) != job.world_size or begins < injection.begins:
        return f"from step {begins}", f"it begins before step {begins}, {injection.begins} were done"
    same = {rank: digest for rank, (_, digest) in found.items()} == known.digests
    return f"from step {begins}: same", "" if same else "other parameters"


def last_words(injection: Injection, started: Started) -> str:
    """Return the last line of the first rank that is not at fault, or of the one that is if it is alone."""
    ranks = [rank for rank in started.children if rank != injection.rank] or list(started.children)
    lines = [line for rank in ranks[:1] for line in started.output(rank).strip().splitlines()]
    return re.sub(r"/tmp/\S*?/(\d+)/", "", lines[-1])[:300] if lines else ""


def run(injections: Sequence[Injection], folder: Path, *, at_a_time: int = 2) -> Iterator[Result]:
    """Do injections, some at a time; yield what came of each."""
    (folder / "undisturbed").mkdir()
    known = prepare(folder / "undisturbed")

    def one(number: int) -> Result:
        (folder / f"{number}").mkdir()
        return inject(injections[number], known, folder / f"{number}")

    with ThreadPoolExecutor(at_a_time) as pool:
        yield from pool.map(one, range(len(injections)))


def table(results: Sequence[Result]) -> str:
    """Return the table of the page."""
    lines = ["| job | fault | ended after | left behind | finished results | next start | at fault is named |"]
    for each in results:
        ended = f"{each.seconds:g} s" if not each.left else f"**{each.left} hang**"
        cells = (
            each.kind,
            each.text,
            ended,
            f"{each.orphans}",
            each.lost.strip() or "whole",
            each.resumed,
            "yes" if not each.problem else f"**{each.problem}**",
        )
        lines.append(f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |")
    return markdown_table(lines)


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Return every table of the page by its name there."""
    n_hanging, n_orphans = sum(bool(each.left) for each in results), sum(bool(each.orphans) for each in results)
    n_lost = sum(bool(each.lost) for each in results)
    n_wrong = sum(bool(each.problem) for each in results)
    overview = (
        f"Of {len(results)} injections, {sum(each.passed for each in results)} went as they should: {n_hanging} hang, "
        f"{n_orphans} leave orphans, {n_lost} lose or mix results, {n_wrong} resume wrongly or do not name the fault. "
        f"The longest took {max(each.seconds for each in results):g} s; the limit is {LIMIT_S:g} s."
    )
    return {"injections overview": overview, "injections": table(results)}


def recorded() -> list[Result]:
    """Return the recorded results."""
    return [Result(**each) for each in json.loads(RESULTS.read_text(encoding="utf-8"))]


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--only", type=lambda text: [int(each) for each in text.split(",")])
    options = parser.parse_args()
    chosen = [INJECTIONS[number] for number in options.only] if options.only else INJECTIONS
    if options.tables:
        results = recorded()
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            results = []
            for number, each in enumerate(run(chosen, Path(folder))):
                results.append(each)
                place = options.only[number] if options.only else number
                print(f"{place:3} {'ok  ' if each.passed else 'FAIL'} {each.seconds:5.1f} s  {each.kind}: {each.text}")
                if options.only or not each.passed:
                    print(json.dumps(asdict(each), indent=2), flush=True)
    if options.write:
        RESULTS.parent.mkdir(exist_ok=True)
        if options.only:
            known = {(each.kind, each.text): each for each in [*recorded(), *results]}
            results = [known[each.kind, each.text] for each in INJECTIONS]
        RESULTS.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n", encoding="utf-8")
        write_tables(PAGE, tables(results))
    elif not options.only:
        print_tables(tables(results))
    return int(not all(each.passed for each in results))


if __name__ == "__main__":
    sys.exit(main())
