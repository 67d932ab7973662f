"""Nothing hangs: each way in which ranks fail to meet, or fail later, ends in one error that names the rank."""

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from processes import places, reserved_port, run, start, torchrun_forks  # noqa: E402
from timeouts import SOON_S, TIMEOUT_S, await_end  # noqa: E402

from real.processes import heartbeat, launch  # noqa: E402
from real.processes.beats import Heartbeat  # noqa: E402
from real.processes.heartbeat import Guard  # noqa: E402
from real.processes.launch import Connection, RankPlace, connect, place  # noqa: E402
from real.processes.rendezvous import bounded  # noqa: E402
from real.processes.signing import SignedStore  # noqa: E402
from simdist.errors import RunError  # noqa: E402

START_S = TIMEOUT_S / 3  # ranks start slowly under load


def meet(start_timeout_s: float = TIMEOUT_S) -> None:
    with connect(timeout_s=min(START_S, start_timeout_s), start_timeout_s=start_timeout_s) as connection:
        ones = torch.ones(3, device=connection.device)
        dist.all_reduce(ones)
        connection.agree("plan", "abc")
        connection.barrier("end")
        print("sum", int(ones[0]), connection.backend, connection.device.type)


def meet_again() -> None:
    """Rank 0 comes last to the second meeting."""
    meet()
    if os.environ["RANK"] == "0":
        time.sleep(0.5)
    meet()


def meet_with_another_count() -> None:
    """The agent of rank 1 has joined later, and has counted fewer restarts."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0" if os.environ["RANK"] == "1" else "3"
    meet()


def meet_over_nccl() -> None:
    """Pretend that the rank has a GPU and NCCL; print what its process group is given."""
    make = dist.init_process_group
    launch.gpu_of = lambda here: f"GPU of rank {here.rank}"
    launch._n_gpus = lambda: 1
    dist.is_nccl_available = lambda: True
    torch.cuda.set_device = lambda device: None

    def init_process_group(backend: str | None = None, *others: object, **given: object) -> None:
        print(backend, given.pop("device_id", None))
        make("gloo", *others, **given)

    dist.init_process_group = init_process_group
    for backend in ("auto", "gloo"):
        with connect(backend=backend, timeout_s=START_S):
            pass


def disagree(stray: int) -> None:
    with connect(timeout_s=20.0) as connection:
        connection.agree("plan", "other" if connection.place.rank == stray else "usual")


def reduce_forever(timeout_s: float) -> None:
    """Let the collectives stop when a rank is killed, and ask the guard why."""
    with connect(timeout_s=START_S) as connection:
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        while True:
            connection.guard.position += 1
            try:
                dist.all_reduce(torch.ones(1000), group=group)
            except RuntimeError as error:
                raise connection.guard.explain(error, "all_reduce(grad.3)") from error
            if connection.guard.position == 20:
                print("running")


def reduce_late(stray: int, timeout_s: float) -> None:
    with connect(timeout_s=START_S) as connection:
        group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        guard = connection.guard
        guard.position = 120
        if connection.place.rank == stray:
            while not guard.failed.wait(0.1):
                pass
            guard.check()
        guard.position = 128
        try:
            dist.all_reduce(torch.ones(1000), group=group)
        except RuntimeError as error:
            raise guard.explain(error, "all_reduce(grad.3)") from error


def fail(stray: int) -> None:
    with connect(timeout_s=20.0) as connection:
        if connection.place.rank == stray:
            raise ValueError("the disk is full")
        assert connection.guard.failed.wait(15.0)
        connection.guard.check()


def miss_barrier(stray: int, timeout_s: float) -> None:
    with connect(timeout_s=START_S) as connection:
        if connection.place.rank != stray:
            replace(connection, timeout_s=timeout_s).barrier("start")
        connection.guard.failed.wait(START_S)


def wait_for_sigterm() -> None:
    with connect(timeout_s=20.0) as connection, connection.guard.ending_on_sigterm():
        print("running")
        threading.Event().wait(15.0)


def use(backend: str, device: str) -> None:
    with connect(backend=backend, device=device, timeout_s=20.0):
        pass


def test_ranks_meet_and_reduce_and_part() -> None:
    endings = run(meet, 3)
    assert [ending.output for ending in endings.values()] == ["sum 3 gloo cpu\n"] * 3
    assert {ending.code for ending in endings.values()} == {0}


@pytest.mark.parametrize("host", ["rank 0", "agent"])
def test_ranks_meet_again(host: str) -> None:
    with reserved_port() as port:
        agent = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False) if host == "agent" else None
        environ = {"TORCHELASTIC_USE_AGENT_STORE": str(agent is not None)}
        endings = run(meet_again, 2, port=port, environ=environ)
    assert [ending.output for ending in endings.values()] == ["sum 2 gloo cpu\n" * 2] * 2
    assert [ending.code for ending in endings.values()] == [0, 0]


def test_ranks_meet_whose_agents_count_restarts_differently() -> None:
    endings = run(meet_with_another_count, 2)
    assert [ending.output for ending in endings.values()] == ["sum 2 gloo cpu\n"] * 2


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Return a function that lets torch find GPUs of these UUIDs."""

    def have(uuids: list[str]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=uuids[n]))
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    return have


def test_a_gpu_is_known_by_its_uuid(gpus: Callable[[list[str]], None]) -> None:
    """A launcher may show a rank only its own GPU, as number 0."""
    gpus(["a", "b"])
    assert [launch.gpu_of(RankPlace(rank, 4, rank, 4)) for rank in range(4)] == ["a", "b", "a", "b"]
    gpus(["c"])
    assert launch.gpu_of(RankPlace(3, 4, 3, 4)) == "c"
    gpus([])
    assert launch.gpu_of(RankPlace(0, 1, 0, 1)) == ""


def test_ranks_with_a_gpu_each_take_nccl_and_ranks_that_share_one_take_gloo(gpus: Callable[[list[str]], None]) -> None:
    gpus(["only mine"])
    here = RankPlace(3, 4, 3, 4)
    only = torch.device("cuda", 0)
    assert launch.backend_and_device(here, "auto", "auto", own_gpus=True) == ("nccl", only)
    assert launch.backend_and_device(here, "nccl", "cuda", own_gpus=True) == ("nccl", only)
    assert launch.backend_and_device(here, "auto", "auto", own_gpus=False) == ("gloo", only)
    with pytest.raises(RunError, match="nccl needs a GPU for each rank, found 1 GPUs for 4 ranks on this machine"):
        launch.backend_and_device(here, "nccl", "auto", own_gpus=False)


def test_nccl_takes_a_gpu_that_ranks_share_if_the_user_and_the_release_let_it(
    gpus: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(["shared"])
    here, shared = RankPlace(1, 2, 1, 2), torch.device("cuda", 0)
    release = [2, 30, 3]
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: tuple(release))
    monkeypatch.setenv(launch.SHARES_GPU, "1")
    assert launch.backend_and_device(here, "nccl", "auto", own_gpus=False) == ("nccl", shared)
    assert launch.backend_and_device(here, "auto", "auto", own_gpus=False) == ("gloo", shared)
    release[1] = 29
    with pytest.raises(RunError, match="nccl needs a GPU for each rank"):
        launch.backend_and_device(here, "nccl", "auto", own_gpus=False)
    release[1] = 30
    monkeypatch.setenv(launch.SHARES_GPU, "0")
    with pytest.raises(RunError, match="nccl needs a GPU for each rank"):
        launch.backend_and_device(here, "nccl", "auto", own_gpus=False)


def test_nccl_is_bound_to_the_gpu_of_the_rank_and_gloo_to_none() -> None:
    (ending,) = run(meet_over_nccl, 1).values()
    assert ending.output == "cpu:gloo,cuda:nccl cuda:0\ngloo None\n"


def test_missing_variables_are_named_with_the_way_to_start() -> None:
    environ = places(0, 2, 29500)
    del environ["RANK"], environ["MASTER_PORT"]
    with pytest.raises(RunError, match=r"RANK, MASTER_PORT not set.*torchrun --standalone --nproc-per-node"):
        place(environ)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "2", r"RANK=2 is not in 0\.\.1"),
        ("LOCAL_RANK", "-1", r"LOCAL_RANK=-1 is not in 0\.\.1"),
        ("WORLD_SIZE", "two", "WORLD_SIZE='two'"),
    ],
)
def test_a_place_out_of_range_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        place(places(0, 2, 29500) | {name: value})


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(RunError, match="MASTER_PORT must be a port from 1 to 65535, found '70000'"), connected(70000):
        pass


def test_place_reads_what_torchrun_sets() -> None:
    assert place(places(1, 4, 29500)) == RankPlace(rank=1, world_size=4, local_rank=1, local_world_size=4)


def test_a_rank_that_never_starts_is_named_on_every_other_rank() -> None:
    endings = run(meet, 4, 8.0, ranks=[0, 3])  # time enough for both to start on a busy machine
    for ending in endings.values():
        assert ending.code == 1
        assert (
            "ranks 1, 2 have not answered the roll call of 4 ranks within 8 s" in ending.output
        )  # of itself or another


def test_ranks_say_so_when_rank_0_never_starts() -> None:
    (ending,) = run(meet, 2, 2.0, ranks=[1]).values()
    assert "rank 0, which hosts the store at localhost:" in ending.output
    assert "does not answer" in ending.output


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"], ids=["mute", "http"]
)
def test_a_port_that_another_program_has_is_named(answer: bytes) -> None:
    with listening(answer) as port:
        endings = run(meet, 2, 2.0, port=port)
    assert f"cannot host the store at port {port}" in endings[0].output
    assert f"which hosts the store at localhost:{port}, does not answer" in endings[1].output
    for ending in endings.values():
        assert ending.code == 1
        assert "choose another --master-port, or use torchrun --standalone" in ending.output


def test_a_port_that_another_run_has_is_named_and_the_other_run_goes_on() -> None:
    with start(reduce_forever, 2, 60.0) as first:
        first.until("running")
        second = run(meet, 2, START_S, port=first.port)
        assert "cannot host the store" in second[0].output
        assert "found its rank taken by another process in the store" in second[1].output
        for ending in second.values():
            assert "choose another --master-port" in ending.output
        assert [first.code(rank) for rank in (0, 1)] == [None, None]


def test_ranks_that_disagree_are_named() -> None:
    for ending in run(disagree, 3, 1).values():
        assert "plan must be the same on every rank; most have 'usual', but found 'other' on rank 1" in ending.output


def test_nccl_without_gpus_says_which_rank_and_to_use_gloo() -> None:
    endings = run(use, 2, "nccl", "auto", environ={"CUDA_VISIBLE_DEVICES": ""})
    for ending in endings.values():
        assert "nccl needs a GPU for each rank, found 0 GPUs for 2 ranks on this machine" in ending.output
        assert "use --backend gloo" in ending.output


def test_cuda_without_gpus_says_to_use_the_cpu() -> None:
    (ending,) = run(use, 1, "auto", "cuda", environ={"CUDA_VISIBLE_DEVICES": ""}).values()
    assert "use --device cpu --backend gloo" in ending.output


def test_nccl_on_the_cpu_is_refused() -> None:
    (ending,) = run(use, 1, "nccl", "cpu").values()
    assert "nccl moves tensors of GPUs only, and --device is cpu; use --backend gloo" in ending.output


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_a_collective_is_named_by_the_others(victim: int) -> None:
    with start(reduce_forever, 3, 10.0) as ranks:
        ranks.until("running")
        ranks.signal(victim, signal.SIGKILL)
        endings = ranks.wait()
    for rank in {0, 1, 2} - {victim}:
        assert endings[rank].code == 1
        assert f"RunError: all_reduce(grad.3): rank {victim} (" in endings[rank].output
        assert f"pid {ranks.pid(victim)})" in endings[rank].output


def test_a_rank_that_stands_still_is_named_by_the_others() -> None:
    with start(reduce_forever, 3, 3.0) as ranks:
        ranks.until("running")
        ranks.signal(1, signal.SIGSTOP)
        endings = ranks.wait([0, 2])
    for ending in endings.values():
        assert (
            f"all_reduce(grad.3): rank 1 ({socket.gethostname()}, pid {ranks.pid(1)}) has been silent" in ending.output
        )


def test_a_store_that_stands_still_holds_nobody_up() -> None:
    with start(reduce_forever, 3, 3.0) as ranks:
        ranks.until("running")
        ranks.signal(0, signal.SIGSTOP)
        endings = ranks.wait([1, 2])
    for ending in endings.values():
        assert f"all_reduce(grad.3): rank 0 ({socket.gethostname()}, pid {ranks.pid(0)}), which hosts" in ending.output
        assert "has not answered for" in ending.output


def test_a_rank_that_is_late_is_named_with_its_position() -> None:
    endings = run(reduce_late, 3, 1, SOON_S)
    for rank in (0, 2):
        assert "all_reduce(grad.3): rank 1 has not arrived: rank 1 (" in endings[rank].output
        assert "is at operation 120, the others at 128" in endings[rank].output


def test_a_rank_that_fails_tells_the_others_why() -> None:
    endings = run(fail, 3, 0)
    assert "ValueError: the disk is full" in endings[0].output
    for rank in (1, 2):
        assert f"RunError: rank 0 ({socket.gethostname()}, pid " in endings[rank].output
        assert ") failed: the disk is full" in endings[rank].output


def test_a_rank_that_misses_a_barrier_is_named() -> None:
    assert f"barrier 'start': rank 1 has not come within {SOON_S:g} s" in run(miss_barrier, 2, 1, SOON_S)[0].output


def test_sigterm_names_the_rank_that_failed_first() -> None:
    with start(wait_for_sigterm, 3) as ranks:
        ranks.until("running")
        ranks.signal(2, signal.SIGKILL)
        ranks.signal(0, signal.SIGTERM)
        ranks.signal(1, signal.SIGTERM)
        endings = ranks.wait()
    for rank in (0, 1):
        assert "was ended by SIGTERM: rank 2 (" in endings[rank].output
        assert "ended without a word (killed?)" in endings[rank].output


def start_a_rank() -> None:
    child = os.fork()
    if child:
        os.write(1, f"child {child}\n".encode())  # whole, beside what the child prints
        os.waitpid(child, 0)
        return
    with connect(exit_with_parent=True):
        print("running")
        time.sleep(40)


def test_a_rank_ends_with_the_process_that_started_it() -> None:
    with start(start_a_rank, 1) as ranks:
        ranks.until("running\n")
        ranks.until("child")
        child = int(ranks.output(0).split("child ")[1].split()[0])
        ranks.signal(0, signal.SIGKILL)
        ranks.wait()
        await_end([child])
        assert "the process that started it is gone; it ends too" in ranks.output(0)


def forge(environ_secret: str) -> None:
    """Beat in the name of rank 1, and say in that of rank 0 that it has failed; with a secret of one's own."""
    host, port = "localhost", int(os.environ["MASTER_PORT"])
    signed = SignedStore(dist.PrefixStore("real/0", dist.TCPStore(host, port)), environ_secret.encode())
    for count in range(10**6, 10**9):
        for rank, state in ((1, "alive"), (0, "failed")):
            beat = Heartbeat(rank, count, 0, socket.gethostname(), "another machine", 1, state, "forged")
            signed.set(f"beat/{rank}", json.dumps(asdict(beat)))
            signed.store.set(f"beat/{rank}", json.dumps(asdict(beat)))
        time.sleep(0.01)


def test_beats_without_the_secret_neither_keep_a_dead_rank_alive_nor_kill_one_that_lives() -> None:
    with (
        start(reduce_forever, 2, 3.0, environ={"SIMDIST_SECRET": "of the ranks"}) as ranks,
        start(forge, 1, "another", port=ranks.port),
    ):
        ranks.until("running")
        time.sleep(2.0)  # some beats
        assert [ranks.code(rank) for rank in (0, 1)] == [None, None]
        ranks.signal(1, signal.SIGSTOP)
        ending = ranks.wait([0])[0]
    assert f"rank 1 ({socket.gethostname()}, pid {ranks.pid(1)}) has been silent" in ending.output
    assert "forged" not in ending.output


def test_an_old_beat_that_is_written_again_is_no_sign_of_life() -> None:
    store = SignedStore(dist.HashStore(), b"secret")
    guard = Guard(store, 0, 2, store_at="here")
    beats = [json.dumps(asdict(Heartbeat(1, count, 0, "host", "machine", 1, "alive", ""))) for count in (1, 2)]
    for text in reversed(beats):
        store.set("beat/1", text)
        guard._table.read()
    assert guard._table.beats[1].count == 2


def test_a_process_that_stood_still_does_not_blame_the_store() -> None:
    guard = Guard(SignedStore(dist.HashStore(), b"secret"), 0, 1, store_at="here", store_rank=None)
    guard.start(START_S, START_S)
    guard._pulse._last_s = 0.0
    guard.find_stuck_store(0.2)
    assert guard.cause == ""
    guard.leave()


def test_a_store_that_does_not_answer_is_blamed_before_the_ranks_that_it_keeps_from_coming(monkeypatch) -> None:
    guard = Guard(SignedStore(dist.HashStore(), b"secret"), 0, 1, store_at="here", store_rank=None)
    guard.start(START_S, START_S)
    with pytest.raises(RunError, match="rank 3 has not come"):
        bounded(partial(time.sleep, 1.0), 0.05, lambda: "rank 3 has not come", guard)
    monkeypatch.setattr(heartbeat, "_SETTLE_S", -1.0)  # then the last beat was too long ago
    with pytest.raises(RunError, match="the store at here, has not answered"):
        bounded(partial(time.sleep, 1.0), 0.05, lambda: "rank 3 has not come", guard)
    guard.leave()


# --- the end of a job ---


class Gate:
    """Holds up calls, as a machine does that swaps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_allowed = math.inf
        self._n_waiting = 0

    def __call__(self) -> None:
        with self._changed:
            self._n_waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._n_allowed > 0, START_S)
            self._n_allowed -= 1
            self._n_waiting -= 1

    def allow(self, n: float) -> None:
        """Let this many calls through from now on."""
        with self._changed:
            self._n_allowed = n
            self._changed.notify_all()

    def await_caller(self) -> None:
        """Wait until a call is held up."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._n_waiting > 0 and self._n_allowed == 0, START_S)


@dataclass(frozen=True)
class GatedStore(SignedStore):
    """A connection to the store that can be held up."""

    reads: Gate = field(default_factory=Gate)
    writes: Gate = field(default_factory=Gate)

    def multi_get(self, keys):
        self.reads()
        return super().multi_get(keys)

    def set(self, key, text):
        self.writes()
        super().set(key, text)


@pytest.fixture
def two() -> Iterator[list[Connection]]:
    """Two ranks of one process that have met. Rank 0 hosts the store, rank 1 is held up in exchanges."""
    store = SignedStore(dist.HashStore(), b"")
    late = GatedStore(store.store, store.secret)
    late.reads.allow(0)
    guards = [Guard(store, rank, 2, store_at="here") for rank in (0, 1)]
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda guard: guard.start(START_S, START_S), guards)]
    yield [
        Connection(RankPlace(rank, 2, rank, 2), torch.device("cpu"), "gloo", guards[rank], stores, START_S)
        for rank, stores in enumerate((store, late))
    ]
    late.reads.allow(math.inf)
    for guard in reversed(guards):
        guard.leave()


def let_go(late: Connection) -> None:
    assert isinstance(late.store, GatedStore)
    late.store.reads.allow(math.inf)


def n_beats(connection: Connection, rank: int) -> int:
    return connection.guard._table.beats[rank].count


def test_the_host_of_the_store_outlasts_a_rank_that_is_held_up_in_the_last_exchange(two: list[Connection]) -> None:
    host, late = two
    with ThreadPoolExecutor() as pool:
        last = pool.submit(late.exchange, "the end", "b")
        assert host.exchange("the end", "a") == ["a", "b"]
        leaving = pool.submit(host.guard.leave)
        begin = n_beats(host, 1)
        while n_beats(host, 1) < begin + 5 and not leaving.done():  # its guard reads the table all the while
            time.sleep(0.05)
        has_left = leaving.done()
        let_go(late)
        assert last.result() == ["a", "b"]
        leaving.result(START_S)
    assert not has_left


def test_the_host_of_the_store_waits_for_no_rank_that_goes_on_alone_after_the_last_exchange(
    two: list[Connection], capfd
) -> None:
    host, other = two
    let_go(other)
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda each: each.barrier("the end"), two)]
        pool.submit(host.guard.leave).result(START_S)
    assert capfd.readouterr().err == ""
    with pytest.raises(RunError, match=r"barrier 'later': rank 0 \(.*, which hosts the store at here, has left"):
        raise other.guard.explain(RuntimeError("Failed to recv, got 0 bytes"), "barrier 'later'")


def test_a_rank_leaves_the_store_alone_once_its_host_may_leave(two: list[Connection]) -> None:
    host, other = two
    let_go(other)
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda each: each.barrier("the end"), two)]
        pool.submit(host.guard.leave).result(START_S)
    other.guard._pulse._thread.join(START_S)
    assert not other.guard._pulse.is_alive
    assert other.guard.cause == ""


def test_the_host_of_the_store_waits_for_beats_that_began_after_its_final_message() -> None:
    memory = dist.HashStore()
    here, there = GatedStore(memory, b""), GatedStore(memory, b"")
    host, other = (Guard(store, rank, 2, store_at="here") for rank, store in enumerate((here, there)))
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda guard: guard.start(START_S, START_S), (host, other))]
        here.writes.allow(0)
        here.writes.await_caller()  # it writes that it lives
        leaving = pool.submit(host.leave)
        while not host._pulse._wake.is_set():  # it waits for a beat
            time.sleep(0.01)
        here.writes.allow(1)
        here.writes.await_caller()  # it has read the table, and writes its final message
        begin = other._pulse.n_beats
        while other._pulse.n_beats < begin + 3:  # these beats have not seen it
            time.sleep(0.01)
        there.reads.allow(0)
        there.reads.await_caller()
        here.reads.allow(0)
        here.writes.allow(math.inf)
        here.reads.await_caller()
        while not host._pulse._wake.is_set():  # it waits for further beats
            time.sleep(0.01)
        begin = host._pulse.n_beats
        here.reads.allow(math.inf)
        while host._pulse.n_beats < begin + 9 and not leaving.done():
            time.sleep(0.01)
        has_left = leaving.done()
        there.reads.allow(math.inf)
        leaving.result(START_S)
    assert not has_left
    assert other._table.beats[0].state == "done"
    other.leave()


def test_a_rank_that_begins_a_step_without_the_exchange_before_it_ends_the_wait_of_the_others(
    two: list[Connection],
) -> None:
    waiting, passer = two
    waiting.guard.step, passer.guard.step = 4, 5
    with (
        waiting.guard.calling("called worker.average() before step 4"),
        pytest.raises(
            RunError,
            match=r"^the average: rank 0 called worker\.average\(\) before step 4, rank 1 did not \(at step 4\)",
        ),
    ):
        waiting.exchange("the average", "a", before_step=4)


@pytest.mark.parametrize(("step", "n_exchanges"), [(4, 0), (5, 1)], ids=["is before the step", "has been there"])
def test_a_rank_that_is_late_or_has_been_there_does_not_end_the_wait(
    two: list[Connection], step: int, n_exchanges: int
) -> None:
    waiting, other = two
    waiting.guard.step, other.guard.step, other.guard.n_exchanges = 4, step, n_exchanges
    counts = waiting.guard.beat_counts()
    while n_beats(waiting, 1) < counts[1] + 3:
        time.sleep(0.05)
    assert waiting.guard.compare_with_passers(4, counts) == ""


def test_the_host_of_the_store_says_who_is_missing_when_it_leaves_after_the_timeout(
    two: list[Connection], capfd
) -> None:
    host, _ = two
    host.guard.n_exchanges += 1
    host.guard._timeout_s = 0.2
    host.guard.leave()
    assert "which hosts the store, leaves: rank 1 has not answered at the end for 0.2 s" in capfd.readouterr().err


def test_a_host_that_fails_leaves_when_the_others_know_the_cause(two: list[Connection], capfd) -> None:
    host, other = two
    host.guard.n_exchanges += 1  # an exchange that the other rank will never complete
    host.guard.fail("the disk is full")
    host.guard.leave()
    assert other.guard.cause.endswith("failed: the disk is full")
    assert capfd.readouterr().err == ""


def test_a_rank_that_leaves_has_told_so_however_long_ago_its_last_beat_was(two: list[Connection]) -> None:
    host, other = two
    other.guard._pulse._last_s = 0.0  # it has stood still
    other.guard.leave()
    host.guard._pulse.await_beat(START_S)
    assert host.guard._table.beats[1].state == "done"


def test_a_signed_value_counts_under_its_own_key_only() -> None:
    store = SignedStore(dist.HashStore(), b"secret")
    store.set("beat/0", "alive")
    store.store.set(store._name("beat/1"), store.store.get(store._name("beat/0")))
    assert store.multi_get(["beat/0", "beat/1"]) == ["alive", None]


def test_a_store_is_at_the_address_of_the_job_and_at_no_other() -> None:
    with start(reduce_forever, 1, 3.0, environ={"MASTER_ADDR": "127.0.0.1"}) as ranks:
        ranks.until("running")
        socket.create_connection(("127.0.0.1", ranks.port), timeout=5.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", ranks.port), timeout=5.0)


def test_ranks_with_another_secret_are_missing() -> None:
    with (
        start(meet, 2, 4.0, ranks=[0]) as first,
        start(meet, 2, 4.0, ranks=[1], port=first.port, environ={"SIMDIST_SECRET": "another"}),
    ):
        assert "rank 1 has not answered the roll call" in first.wait()[0].output


def stand_by() -> None:
    with connect(timeout_s=100.0):
        time.sleep(100)


EXIT = """
import threading, time
import torch, torch.distributed as dist
from real.processes.launch import connect
with connect(timeout_s=100.0):
    threading.Thread(target=dist.all_reduce, args=(torch.ones(1000),), daemon=True).start()
    time.sleep(0.5)
    raise ValueError("the disk is full")
"""


@pytest.mark.sentinel
def test_an_error_ends_the_process_although_a_collective_still_waits() -> None:
    with (
        start([sys.executable, "-c", EXIT], 2, ranks=[0]) as failing,
        start(stand_by, 2, ranks=[1], port=failing.port),
    ):
        (ending,) = failing.wait().values()
    assert ending.code == 1
    assert "ValueError: the disk is full" in ending.output


RESTART = """
import os
import torch, torch.distributed as dist
from real.processes.launch import connect
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
with connect(timeout_s=20.0) as connection, connection.guard.ending_on_sigterm():
    connection.agree("plan", attempt)
    if attempt == "0" and connection.place.rank == 1:
        raise ValueError("the disk is full")
    connection.barrier("end")
    os.write(1, f"attempt {attempt} ended\\n".encode())
"""


def test_a_run_restarted_by_torchrun_meets_anew(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESTART, encoding="utf-8")
    (ending,) = run(torchrun_forks, 1, "--standalone", "--nproc-per-node=2", "--max-restarts=1", script).values()
    assert ending.code == 0, ending.output
    assert ending.output.count("attempt 1 ended") == 2
    assert "attempt 0 ended" not in ending.output


@contextmanager
def connected(port: int) -> Iterator[None]:
    with connect(environ=places(0, 1, port)):
        yield


@contextmanager
def listening(answer: bytes) -> Iterator[int]:
    """Accept connections and answer each with some bytes, or never."""
    accepted = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            accepted.append(connection)
            if answer:
                with suppress(OSError):  # who asked may have given up
                    connection.recv(100)
                    connection.sendall(answer)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)
    for connection in accepted:
        connection.close()
