"""What is counted in logs of torchrun. Messages have the shapes of logs in public issues, of torch 1.9 to 2.13."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from simdist.errors import ScenarioError
from simdist.failure_logs.intervals import event_bounds
from simdist.failure_logs.reading import program_of, read_failures
from simdist.failure_logs.records import LoggedFailures


def read(tmp_path: Path, *texts: str) -> LoggedFailures:
    paths = [tmp_path / f"node{i}.log" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
        assert program_of(path) == "torchrun"
    (found,) = read_failures(paths)
    return found


def stamp(seconds: float, level: str = "I") -> str:
    """Return the beginning of a message of torch 2.4 and later: without a year."""
    at = np.datetime64("2026-03-01T00:00:00.000") + np.timedelta64(round(1000 * seconds), "ms")
    date, clock = str(at).split("T")
    return f"{level}{date[5:7]}{date[8:]} {clock}000 20395 torch/distributed/elastic/agent/server/api.py:553]"


def rendezvous(seconds: float, *, ranks: int = 8, nodes: int = 1) -> list[str]:
    return [
        f"{stamp(seconds)} [default] Rendezvous complete for workers. Result:",
        f"{stamp(seconds)}   master_addr=localhost",
        f"{stamp(seconds)}   group_world_size={nodes}",
        f"{stamp(seconds)}   global_world_sizes=[{', '.join([str(ranks)] * (ranks // nodes))}]",
    ]


def failed(seconds: float, code: int = 1) -> str:
    return f"{stamp(seconds, 'E')} failed (exitcode: {code}) local_rank: 1 (pid: 20401) of binary: /usr/bin/python"


def block(*failures: tuple[int, int], at: str = "2026-06-08_19:04:45", host: str = "c561-007") -> str:
    """Return the block of ChildFailedError; the first (rank, exit code) is the root cause."""
    entries = [
        f"[{i}]:\n  time      : {at}\n  host      : {host}\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {102930 + i})\n  error_file: <N/A>\n  traceback : To enable traceback see: https://"
        for i, (rank, code) in enumerate(failures)
    ]
    others = "\n".join(entries[1:]) or "  <NO_OTHER_FAILURES>"
    rule = "-" * 60
    return (
        f"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{'=' * 60}\ntrain.py FAILED\n{rule}\n"
        f"Failures:\n{others}\n{rule}\nRoot Cause (first observed failure):\n{entries[0]}\n{'=' * 60}"
    )


def log(*lines: str | Iterable[str]) -> str:
    return "\n".join(each if isinstance(each, str) else "\n".join(each) for each in lines) + "\n"


def watchdog(prefix: str, rank: int, ms: int, timeout_ms: int = 600_000) -> str:
    return (
        f"[rank{rank}]:[E{prefix} ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, "
        f"Timeout(ms)={timeout_ms}) ran for {ms} milliseconds before timing out."
    )


def test_rounds_tell_exposure_failures_and_restarts(tmp_path):
    found = read(
        tmp_path,
        log(
            rendezvous(0),
            "step 1 loss 3.5",
            failed(7200, -9),
            f"{stamp(7200)} [default] Worker group FAILED. 3/3 attempts left; will restart worker group",
            rendezvous(7290),
            failed(10_890, 1),
            rendezvous(11_000),
            f"{stamp(14_600)} [default] worker group successfully finished. Waiting 300 seconds for other agents",
        ),
    )
    assert [(each.cause, each.effect) for each in found.interruptions] == [
        ("killed (SIGKILL)", "process"),
        ("error in the program", "process"),
    ]
    assert found.exposure.job_s == pytest.approx(7200 + 3600 + 3600)
    assert found.exposure.gpu_s == pytest.approx(8 * 14400)
    assert found.recovery_s["start"] == pytest.approx([90, 110])


def test_all_failures_of_a_round_are_one_event(tmp_path):
    """As of a node of four GPUs, of which three ranks failed in the same second."""
    found = read(tmp_path, block((0, 1), (2, 1), (3, 1)))
    (event,) = found.interruptions
    assert (event.n_ended, event.hosts, event.cause) == (3, {"c561-007"}, "error in the program")
    assert found.exposure.job_s is None
    assert any("LOGLEVEL=INFO" in note for note in found.notes)


def test_ranks_that_the_agent_ended_did_not_fail(tmp_path):
    found = read(tmp_path, log(failed(3, -9), block((1, -9), (0, -15))))
    (event,) = found.interruptions
    assert (event.cause, event.n_ended) == ("killed (SIGKILL)", 1)


@pytest.mark.parametrize(
    ("code", "cause"), [(-11, "crashed (SIGSEGV)"), (-6, "aborted (SIGABRT)"), (7, "error in the program")]
)
def test_the_root_cause_is_the_cause(tmp_path, code, cause):
    (event,) = read(tmp_path, block((0, code), (1, -9))).interruptions
    assert event.cause == cause


@pytest.mark.parametrize("prefix", ["704.7s\t1469\t", "3: ", "[default0]:", "(RayWorkerWrapper pid=4009) "])
def test_prefixes_of_launchers(tmp_path, prefix):
    text = log(failed(3, -9), block((0, -9), at="2026-03-25_17:13:24"))
    (event,) = read(tmp_path, "".join(prefix + line for line in text.splitlines(keepends=True))).interruptions
    assert (event.cause, event.hosts) == ("killed (SIGKILL)", {"c561-007"})


def test_a_time_out_of_nccl_is_a_hang_that_began_earlier(tmp_path):
    """Five ranks report the same operation, within a second, before their processes abort."""
    found = read(
        tmp_path,
        log(
            rendezvous(0),
            watchdog("301 02:07:08.408271257", 0, 600_060),
            watchdog("301 02:07:08.414640780", 4, 600_067),
            "[rank0]:[E301 02:07:08.465150152 ProcessGroupNCCL.cpp:1664] Exception detected by watchdog at work: 1580",
            failed(7640, -6),
        ),
    )
    (event,) = found.interruptions
    assert (event.cause, event.effect, event.hung_s) == ("collective time-out", "hang", 600.06)
    assert found.exposure.job_s == pytest.approx(7628.408271 - 600.06)
    assert found.recovery_s == {"timeouts.collective": (600.06,)}


def test_a_message_without_time_tells_the_time_out(tmp_path):
    """As of torch 2.0: half an hour was set, and seven hours passed."""
    line = watchdog("", 0, 25_624_887, 1_800_000)
    found = read(tmp_path, line.replace("[rank0]:[E ", "[E "))
    assert found.recovery_s == {"timeouts.collective": (25624.887,)}


def test_a_message_without_time_is_as_late_as_the_next_one(tmp_path):
    hang = watchdog("", 7, 1_800_734).replace("[rank7]:[E ", "[E ")
    found = read(tmp_path, log(rendezvous(0), hang, failed(10_800, -6), rendezvous(10_920)))
    (event,) = found.interruptions
    assert (event.cause, event.effect) == ("collective time-out", "hang")
    assert found.exposure.job_s == pytest.approx(10_800 - 1800.734)
    assert found.recovery_s["start"] == (120.0,)


def test_colours_of_a_terminal_are_no_part_of_a_message(tmp_path):
    text = log(rendezvous(0), failed(3600, -9))
    found = read(tmp_path, "\n".join(f"\x1b[33m{line}\x1b[0m" for line in text.splitlines()))
    assert found.exposure.job_s == pytest.approx(3600)


def test_a_rank_that_died_is_the_cause_of_the_hang_of_other_nodes(tmp_path):
    first = log(rendezvous(0, ranks=16, nodes=2), failed(3600, -9))
    second = log(rendezvous(1, ranks=16, nodes=2), watchdog("0301 01:10:02.000000000", 9, 601_000), failed(4210, -6))
    found = read(tmp_path, first, second)
    (event,) = found.interruptions
    assert (event.cause, event.hung_s, event.n_ended) == ("killed (SIGKILL)", 0.0, 2)
    assert found.exposure.gpu_s == pytest.approx(16 * 3600)
    assert found.exposure.node_s == pytest.approx(2 * 3600)


def test_agents_in_one_log_are_one_job(tmp_path):
    begins = [line for at in (0, 0.2, 0.3) for line in rendezvous(at, ranks=24, nodes=3)]
    again = [line for at in (4000, 4000.1, 4001) for line in rendezvous(at, ranks=24, nodes=3)]
    found = read(tmp_path, log(begins, failed(3600, 1), failed(3601, 1), failed(3603, -6), again, f"{stamp(5000)} x"))
    assert len(found.interruptions) == 1
    assert found.exposure.gpu_s == pytest.approx(24 * (3600 + 1000))


@pytest.mark.parametrize("signal", ["15", "Signals.SIGTERM", "2", "Signals.SIGHUP"])
def test_a_signal_from_outside_is_no_failure(tmp_path, signal):
    stop = f"{stamp(7200, 'W')} Received {signal} death signal, shutting down workers"
    found = read(tmp_path, log(rendezvous(0), stop, failed(7201, -15), block((0, -15))))
    assert (found.interruptions, found.not_counted) == ((), {"stopped by a signal": 1})
    assert found.exposure.job_s == pytest.approx(7200)


CANCELLED = "slurmstepd: error: *** STEP 19.0 ON cn17 CANCELLED AT 2000-03-01T02:00:00"


def test_slurm_says_that_a_node_failed(tmp_path):
    """Slurm's message names the cause, also of ranks that were stopped, or died, before it was written."""
    said = "srun: error: Node failure on cn37", f"{CANCELLED} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
    stopped = f"{stamp(7199, 'W')} Received Signals.SIGTERM death signal, shutting down workers"
    for before, end_s in ((), 7200), ((failed(7100, -6),), 7100), ((stopped,), 7199):
        found = read(tmp_path, log(rendezvous(0), before, said, rendezvous(9000), f"{stamp(9900)} x"))
        assert [(each.cause, each.effect) for each in found.interruptions] == [("node failure", "node")]
        assert found.exposure.job_s == pytest.approx(end_s + 900, abs=1)
        assert found.recovery_s == {}  # Slurm started the job again


@pytest.mark.parametrize("why", ["", " DUE TO TIME LIMIT", " DUE TO PREEMPTION", " DUE TO JOB REQUEUE"])
def test_slurm_says_that_a_job_was_stopped(tmp_path, why):
    progress = " 22%|==   | 11/50 [1:55:52<6:50:13, 631.11s/it]"
    found = read(tmp_path, log(rendezvous(0), f"{progress}{CANCELLED}{why} ***"))
    assert (found.interruptions, found.not_counted) == ((), {"stopped by a signal": 1})
    assert found.exposure.job_s == 7200


def test_messages_of_other_launchers_have_times(tmp_path):
    """Of nvidia-resiliency-ext, whose messages do not name torch."""

    def line(clock: str, text: str) -> str:
        return f"[2025-09-01 {clock}:00,123] [INFO] [ft_launcher7@n1] {text}"

    complete = "[default] Rendezvous complete for workers. Result:"
    text = log(
        line("10:00", complete),
        "  group_world_size=2",
        "  global_world_sizes=[16, 16]",
        line("12:00", "failed (exitcode: -9) local_rank: 0 (pid: 12) of binary: python"),
        line("12:01", complete),
        line("14:01", "[default] worker group successfully finished. Waiting 300 seconds for other agents to finish."),
    )
    found = read(tmp_path, text)
    assert [each.cause for each in found.interruptions] == ["killed (SIGKILL)"]
    assert (found.exposure.gpu_s, found.recovery_s) == (4 * 16 * 3600, {"start": (60.0,)})


def test_a_message_may_follow_other_text(tmp_path):
    """A terminal shows the key that stopped the job."""
    stop = f"^C{stamp(7200, 'W')} Received 2 death signal, shutting down workers"
    assert read(tmp_path, log(rendezvous(0), stop)).exposure.job_s == 7200


def test_a_process_that_somebody_ended_did_not_fail(tmp_path):
    found = read(tmp_path, log(rendezvous(0), failed(7200, -15), block((1, -15), (0, -15))))
    assert (found.interruptions, found.not_counted) == ((), {"stopped by a signal": 1})


def test_a_start_that_failed_is_no_interruption(tmp_path):
    closed = "torch.distributed.elastic.rendezvous.api.RendezvousClosedError"
    found = read(tmp_path, log(rendezvous(0), failed(3600), rendezvous(3700), failed(3710), rendezvous(3800), closed))
    assert len(found.interruptions) == 1
    assert found.not_counted == {"failed in the first minute": 1}
    assert any("1 rendezvous failed" in note for note in found.notes)


def test_a_job_that_hung_from_its_start_is_a_start_that_failed(tmp_path):
    hang = watchdog("0301 00:10:01.000000000", 0, 600_900)
    found = read(tmp_path, log(rendezvous(0), hang, failed(602, -6), rendezvous(700), f"{stamp(7900)} x"))
    assert (found.interruptions, found.not_counted) == ((), {"failed in the first minute": 1})
    assert found.exposure.job_s == pytest.approx(7200.1)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "GPU fault"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
    ],
)
def test_a_worker_may_say_the_cause(tmp_path, said, cause):
    (event,) = read(tmp_path, log(rendezvous(0), f"[rank3]: {said}", failed(3600, 1))).interruptions
    assert event.cause == cause


def test_messages_of_torch_1_have_the_year(tmp_path):
    def line(clock: str, text: str) -> str:
        return f"[INFO] 2021-12-08 {clock} api: [default] {text}"

    found = read(
        tmp_path,
        log(
            line("12:28:26,098", "Starting elastic_operator with launch configs:"),
            line("12:28:30,000", "Rendezvous complete for workers. Result:"),
            "  group_world_size=2",
            "  global_world_sizes=[2]",
            "[ERROR] 2021-12-08 13:28:30,500 api: failed (exitcode: -11) local_rank: 0 (pid: 9) of binary: python",
        ),
    )
    assert found.exposure.gpu_s == pytest.approx(2 * 3600.5)


def test_a_log_goes_on_in_the_next_year(tmp_path):
    new_year = (
        "I0101 00:30:00.000000 7 torch/distributed/elastic/agent/server/api.py:9] failed (exitcode: 1) local_rank: 0"
    )
    begin = [line.replace("I0301 00", "I1231 23") for line in rendezvous(0)]
    found = read(tmp_path, log(begin, new_year))
    assert found.exposure.job_s == 5400


def test_without_messages_of_level_info_the_launch_is_the_begin(tmp_path):
    launch = (
        "W0301 00:00:00.000000 7 torch/distributed/run.py:874] Setting OMP_NUM_THREADS environment variable for each"
    )
    found = read(tmp_path, log(launch, failed(7200, -9), block((1, -9), at="2026-03-01_02:00:00"), launch))
    assert (found.exposure.job_s, found.exposure.gpu_s) == (7200, None)
    assert any("rates are per job" in note for note in found.notes)


def test_a_log_that_says_nothing_is_refused(tmp_path):
    with pytest.raises(ScenarioError, match=r"node0\.log: no message of torchrun tells when it ran.*LOGLEVEL=INFO"):
        read(tmp_path, "INFO:torch.distributed.elastic.multiprocessing.redirects:not supported\n")


def test_intervals_contain_the_rate_of_generated_logs(tmp_path):
    rng = np.random.default_rng(4)
    mean_s = 20_000.0
    held = 0
    for _ in range(400):
        lines: list[str] = []
        at_s = 0.0
        while at_s < 150_000:
            lines += rendezvous(at_s, ranks=4)
            length_s = max(60.0, rng.exponential(mean_s))
            lines += [failed(at_s + length_s, int(rng.choice([1, -9, -11])))]
            at_s += length_s + rng.uniform(20, 300)
        found = read(tmp_path, log(lines))
        low, high = event_bounds(len(found.interruptions))
        held += low <= (found.exposure.gpu_s or 0.0) / (4 * mean_s) <= high
    assert held >= 380
