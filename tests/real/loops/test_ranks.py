"""A script that has made its own process group, which waits for half an hour, is watched as any other."""

import os
import threading
import time
from pathlib import Path

import loops
import pytest
from processes import run, start, torchrun_forks
from timeouts import SOON_S, TIMEOUT_S
from trainings import Training

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import real  # noqa: E402

START_S = 20.0


def train(how: str, timeout_s: float, stray: int = 1, start_timeout_s: float = TIMEOUT_S) -> None:
    """Train in the script's process group; in step 3 one rank goes wrong."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if how == "never wraps" and rank == stray:
        time.sleep(TIMEOUT_S)
    module, optimizer = Training().make()
    launch = real.Launch(timeout_s=timeout_s, start_timeout_s=start_timeout_s)
    with real.wrap(module, optimizer, loops.SMALL_BUCKETS, n_steps=6, launch=launch) as worker:
        for step in worker.steps():
            if step == 3:
                print("at step 3")
                if rank == stray:
                    if how == "leaves":
                        break
                    loops.fail(how)
                if how == "stops":
                    dist.barrier()  # of the script: no collective of ours comes to an end here
            loops.one_step(module, optimizer, step)


def train_twice(init_method: str) -> None:
    """See that the script's process group is as it was, and that nothing of ours is left."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    method = f"{init_method}{os.environ['MASTER_PORT']}" if init_method.startswith("tcp") else init_method
    environ = {} if method == "env://" else {"rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", init_method=method, **environ)
    for _ in range(2):
        module, optimizer = Training().make()
        with real.wrap(
            module, optimizer, loops.SMALL_BUCKETS, n_steps=2, launch=real.Launch(timeout_s=START_S)
        ) as worker:
            for step in worker.steps():
                loops.one_step(module, optimizer, step)
        left = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
        ones = torch.ones(2)
        dist.all_reduce(ones)
        groups = len(dist.distributed_c10d._world.pg_map)
        print(f"sum {int(ones[0])}, threads {left}, groups {groups}")
    dist.destroy_process_group()


@pytest.mark.parametrize("init_method", ["env://", "tcp://localhost:", "file://"])
def test_the_process_group_of_the_script_stays_as_it_was(init_method: str, tmp_path: Path) -> None:
    method = f"file://{tmp_path}/meet" if init_method == "file://" else init_method
    for ending in run(train_twice, 2, method).values():
        assert ending.output == "sum 2, threads [], groups 1\n" * 2
        assert ending.code == 0


@pytest.mark.parametrize(
    ("how", "stray", "message"),
    [
        ("raises", 0, "bad batch"),
        ("raises", 1, "bad batch"),
        ("is killed", 0, "which hosts the store at"),
        ("is killed", 1, "ended without a word"),
    ],
)
def test_a_rank_that_fails_is_named_by_the_others(how: str, stray: int, message: str) -> None:
    endings = run(train, 3, how, START_S, stray)
    for rank in {0, 1, 2} - {stray}:
        assert endings[rank].code == 1
        assert f"RunError: rank {stray} (" in endings[rank].output.replace("step 3: ", "")
        assert message in endings[rank].output


def test_a_rank_that_leaves_its_loop_early_ends_the_others() -> None:
    for rank, ending in run(train, 3, "leaves", SOON_S).items():
        assert ending.code == 1
        assert rank == 1 or "rank 1 (" in ending.output
        assert "this rank left its loop before step 3 of 6" in ending.output


@pytest.mark.parametrize(("stray", "message"), [(0, "which hosts the store at"), (1, "has been silent for")])
def test_a_rank_that_stands_still_ends_the_others_although_they_wait_in_a_collective_of_the_script(
    stray: int, message: str
) -> None:
    with start(train, 3, "stops", SOON_S, stray) as ranks:
        ranks.until("at step 3")
        endings = ranks.wait([rank for rank in (0, 1, 2) if rank != stray])
    for ending in endings.values():
        assert ending.code == 1
        assert f"waits for what will not come: rank {stray} (" in ending.output
        assert message in ending.output


@pytest.mark.parametrize(("stray", "message"), [(0, "rank 0 has not come within"), (1, "rank 1 has not answered")])
def test_a_rank_that_never_wraps_is_named(stray: int, message: str) -> None:
    with start(train, 3, "never wraps", SOON_S, stray, SOON_S) as ranks:
        endings = ranks.wait([rank for rank in (0, 1, 2) if rank != stray])
    for ending in endings.values():
        assert ending.code == 1
        assert message in ending.output


RESTART = """
import os, signal
import loops
import real
import torch.distributed as dist
from trainings import Training
attempt, rank, port = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "MASTER_PORT"))
store = dist.PrefixStore(attempt, dist.TCPStore("localhost", int(port)))  # torch 2.13 would read stale keys
dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
module, optimizer = Training().make()
with real.wrap(module, optimizer, loops.SMALL_BUCKETS, n_steps=3, launch=real.Launch(timeout_s=20.0)) as worker:
    for step in worker.steps():
        if step == 1 and attempt == "0" and worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loops.one_step(module, optimizer, step)
os.write(1, f"attempt {attempt} ended\\n".encode())
dist.destroy_process_group()
"""


def test_ranks_that_torchrun_starts_again_meet_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RESTART, encoding="utf-8")
    (ending,) = run(torchrun_forks, 1, "--standalone", "--nproc-per-node=2", "--max-restarts=1", script).values()
    assert ending.code == 0, ending.output
    assert ending.output.count("attempt 1 ended") == 2
