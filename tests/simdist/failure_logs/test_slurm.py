"""What is counted in the output of `sacct`. Rows have the shapes of outputs in public issues and test suites."""

import json
from pathlib import Path

import numpy as np
import pytest

from simdist.errors import ScenarioError
from simdist.failure_logs.intervals import event_bounds
from simdist.failure_logs.reading import program_of, read_failures
from simdist.failure_logs.records import Exposure, LoggedFailures
from simdist.failure_logs.slurm_jobs import gpus_of, hosts_of

HOUR_S = 3600.0
HEADER = "JobID|JobName|State|Start|End|Elapsed|AllocTRES|NodeList"


def tres(n_gpus: int, n_nodes: int = 1) -> str:
    return f"billing=8,cpu=96,gres/gpu:h100={n_gpus},gres/gpu={n_gpus},mem=1T,node={n_nodes}"


def row(job, state, start, hours, *, gpus=8, hosts="cn1", name="train") -> str:
    """Return a row: `start` is hours after the first of March, which may be negative."""
    begin = np.datetime64("2026-03-01T00:00:00") + np.timedelta64(round(start * 3600), "s")
    seconds = round(hours * 3600)
    end = begin + np.timedelta64(seconds, "s")
    elapsed = f"{seconds // 86400}-{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    shown = "Unknown" if state == "RUNNING" else end
    nodes = max(1, len(hosts_of(hosts)))
    return f"{job}|{name}|{state}|{begin}|{shown}|{elapsed}|{tres(gpus, nodes)}|{hosts}"


def read(tmp_path: Path, *rows: str, header: str | None = HEADER, name: str = "sacct.txt") -> LoggedFailures:
    path = tmp_path / name
    path.write_text("\n".join([*([header] if header else []), *rows, ""]), encoding="utf-8")
    assert program_of(path) == "Slurm"
    (found,) = read_failures([path])
    return found


def causes(found: LoggedFailures) -> list[str]:
    return [each.cause for each in found.interruptions]


def test_only_ends_that_nobody_wanted_are_interruptions(tmp_path):
    found = read(
        tmp_path,
        row(1, "COMPLETED", 0, 2),
        row(2, "NODE_FAIL", 2, 2),
        row(3, "FAILED", 4, 2),
        row(4, "OUT_OF_MEMORY", 6, 2),
        row(5, "PREEMPTED", 8, 2),
        row(6, "TIMEOUT", 10, 2),
        row(7, "CANCELLED by 1000", 12, 2),
        row(8, "CANCELLED by 0", 14, 2),
        row(9, "FAILED", 16, 0.01),
        row(10, "RUNNING", 18, 2),
    )
    assert causes(found) == ["node failure", "failed job", "out of memory", "preemption"]
    assert found.not_counted == {
        "reached the time limit": 1,
        "cancelled by a user": 1,
        "cancelled by root": 1,
        "ended in the first minute": 1,
    }
    assert found.exposure == Exposure(18 * HOUR_S + 36, 18 * HOUR_S + 36, 8 * (18 * HOUR_S + 36))
    assert any("cancelled by root" in note for note in found.notes)


def test_steps_are_no_jobs(tmp_path):
    rows = row(1, "NODE_FAIL", 0, 5), row("1.batch", "CANCELLED by 1000", 0, 5), row("1.0", "FAILED", 1, 4)
    found = read(tmp_path, *rows)
    assert causes(found) == ["node failure"]
    assert found.exposure.job_s == 5 * HOUR_S


def test_one_event_that_ends_several_jobs_is_one(tmp_path):
    found = read(
        tmp_path,
        row(1, "NODE_FAIL", 0, 5, hosts="cn[1-2]"),
        row(2, "NODE_FAIL", 0, 5.01, hosts="cn[3-4]"),
        row("3_1", "FAILED", 6, 2, hosts="cn5"),
        row("3_2", "FAILED", 6.5, 1.5, hosts="cn6"),
        row(4, "FAILED", 6, 2, hosts="cn7"),
    )
    assert [(each.cause, each.n_ended) for each in found.interruptions] == [
        ("node failure", 2),
        ("failed job", 2),
        ("failed job", 1),
    ]


def test_a_requeued_job_tells_how_long_it_waited(tmp_path):
    rows = row(1, "NODE_FAIL", 0, 5), row(1, "PREEMPTED", 5.5, 2), row(1, "COMPLETED", 8, 2), row(2, "FAILED", 0, 1)
    found = read(tmp_path, *rows)
    assert found.recovery_s == {"schedule": (0.5 * HOUR_S,), "lasts": (0.5 * HOUR_S,)}


def test_time_before_the_log_begins_does_not_count(tmp_path):
    window = row(1, "FAILED", -100, 101), row(2, "RUNNING", -50, 60, hosts="cn2"), row(3, "NODE_FAIL", 2, 3)
    found = read(tmp_path, *window)
    assert found.exposure.job_s == (60 - 51 + 3) * HOUR_S  # from the end of job 1 on
    assert causes(found) == ["node failure"]  # the end of job 1 says where the log begins
    assert any("# sacct --starttime" in note for note in found.notes)
    for command in (
        "# sacct -a --starttime 2026-03-01 -P",
        "$ sacct -S2026-03-01T00:00",
        "# sacct --starttime=2026-03-01",
    ):
        found = read(tmp_path, HEADER, *window, header=command)
        assert found.exposure.job_s == (1 + 10 + 3) * HOUR_S
        assert causes(found) == ["failed job", "node failure"]
    both = row(1, "NODE_FAIL", 0, 5), row(2, "NODE_FAIL", 1, 4.01, hosts="cn2"), row(3, "COMPLETED", 9, 5)
    assert causes(read(tmp_path, *both)) == []  # they are one event
    truncated = row(1, "FAILED", 0, 1), row(2, "RUNNING", 0, 10, hosts="cn2"), row(3, "NODE_FAIL", 2, 3)
    found = read(tmp_path, *truncated)
    assert found.exposure.job_s == (1 + 10 + 3) * HOUR_S
    assert causes(found) == ["failed job", "node failure"]


def test_time_in_which_a_job_was_suspended_does_not_count(tmp_path):
    times = "2026-03-01T00:00:00|2026-03-01T09:00:00|05:00:00"
    found = read(tmp_path, f"1|x|NODE_FAIL|{times}|{tres(8)}|cn1", row(1, "COMPLETED", 9.5, 2))
    assert found.exposure.job_s == 7 * HOUR_S
    assert found.recovery_s == {"schedule": (0.5 * HOUR_S,)}


def test_one_job_after_the_other_counts_whole(tmp_path):
    found = read(tmp_path, row(1, "FAILED", 0, 60), row(2, "COMPLETED", 61, 60))
    assert (found.exposure.job_s, causes(found)) == (120 * HOUR_S, ["failed job"])


def test_jobs_without_gpus_are_left_out_beside_jobs_with_some(tmp_path):
    found = read(tmp_path, row(1, "COMPLETED", 0, 3, gpus=0), row(2, "FAILED", 0, 3))
    assert found.exposure.gpu_s == 24 * HOUR_S
    assert "1 job without GPUs: left out." in found.notes


def test_several_logs_may_have_the_same_jobs(tmp_path):
    (tmp_path / "a").write_text("\n".join([HEADER, row(1, "FAILED", 0, 5), row(2, "FAILED", 9, 5)]), encoding="utf-8")
    (tmp_path / "b").write_text("\n".join([HEADER, row(2, "FAILED", 9, 5), row(3, "FAILED", 19, 5)]), encoding="utf-8")
    (found,) = read_failures([tmp_path / "a", tmp_path / "b"])
    assert (len(found.interruptions), found.exposure.job_s) == (3, 15 * HOUR_S)


def test_a_table_without_header_tells_its_columns_by_their_values(tmp_path):
    """Exit code, state, CPUs, elapsed, CPU time, submit, start, end and empty memory, as gc3pie asks for them."""
    found = read(
        tmp_path,
        "123|1:0|NODE_FAIL|8|01:21:47|00:00:00|2016-09-23T18:44:37|2016-09-23T18:44:37|2016-09-23T20:06:24|||",
        "123.0|-2:0|CANCELLED by 9|8|01:21:47|00:00:00|2016-09-23T18:44:37|2016-09-23T18:44:37|2016-09-23T20:06:24|||",
        "124|0:0|COMPLETED|1|00:01:06|00:00:00|2016-09-24T10:48:34|2016-09-24T10:47:28|2016-09-24T10:48:34|||",
        "125|0:1|TIMEOUT|4|00:01:11|00:00:00|2016-10-11T17:10:00|2016-10-11T17:10:23|2016-10-11T17:11:34|||",
        header=None,
    )
    assert causes(found) == ["node failure"]
    assert found.exposure == Exposure(4907 + 66 + 71, None, None)


def test_of_two_columns_without_header_the_allocated_one_counts(tmp_path):
    """As Open XDMoD asks for them: the request comes first, and does not name GPUs of a whole node."""
    times = "2026-03-01T00:00:00|2026-03-01T00:00:00|2026-03-01T00:00:01|2026-03-01T05:00:01|05:00:00|0:0"
    wanted = "cpu=96,node=2"
    found = read(tmp_path, f"7|7|hpc|gpu|{times}|NODE_FAIL|2|192|{wanted}|{tres(16, 2)}|cn[1-2]|train", header=None)
    assert found.exposure == Exposure(5 * HOUR_S, 10 * HOUR_S, 80 * HOUR_S)


def test_a_job_that_never_started_is_none(tmp_path):
    """Job, name, partition, state, elapsed, exit code, start, end and nodes, as `sacct -X -n -P` prints them."""
    found = read(
        tmp_path,
        "301099|ktg|l40s|TIMEOUT|23:30:11|0:0|2026-09-04T18:52:13|2026-09-05T18:22:24|gl111",
        "305318|ktg|l40s|COMPLETED|18:39:50|0:0|2026-09-05T18:23:21|2026-09-06T13:03:11|gl111",
        "314831|ktg|b200,l40s|CANCELLED by 30154|00:00:00|0:0|None|2026-09-06T12:59:09|None assigned",
        header=None,
    )
    assert found.exposure.job_s == 84611 + 67190
    assert found.not_counted == {"reached the time limit": 1}


def test_a_job_that_lost_a_node_and_went_on_is_resized(tmp_path):
    rows = row(7, "RESIZING", 0, 3, hosts="cn[1-4]"), row(7, "TIMEOUT", 3, 2, hosts="cn[1-3]")
    found = read(tmp_path, *rows)
    assert found.not_counted == {"resized while running": 1, "reached the time limit": 1}
    assert found.exposure.node_s == (4 * 3 + 3 * 2) * HOUR_S


@pytest.mark.parametrize("delimiter", ["|", ",", ";", "\t", "@", "::"])
def test_separators(tmp_path, delimiter):
    line = row(1, "NODE_FAIL", 0, 5).replace(tres(8), "node=1").replace("|", delimiter)
    found = read(tmp_path, line, header=HEADER.replace("|", delimiter))
    assert causes(found) == ["node failure"]


ZONE = "2026-03-29T01:00:00+0100|2026-03-29T07:00:00+0200"  # of SLURM_TIME_FORMAT=%FT%T%z: clocks go on by an hour
TWO = (row(1, "NODE_FAIL", 0, 5), row(2, "COMPLETED", 5, 19))


@pytest.mark.parametrize(
    "text",
    [
        "\n".join((HEADER, TWO[0], HEADER, TWO[1])),  # two outputs, one after the other
        "\ufeff" + "\n".join((HEADER, *TWO)),
        "\n".join((HEADER.replace("JobID", "JobIDRaw").replace("Elapsed", "ElapsedRaw"), *TWO)),
        "\n".join((HEADER, *TWO, "3|x|CANCELLED|2026-03-02T00:00:00|2026-03-02T00:00:00|INVALID||")),
        "# sacct --partition=gpu-Small --starttime 2026-03-01\n" + "\n".join((HEADER, *TWO)),
        f"JobID|State|Start|End\n1|NODE_FAIL|{ZONE}\n2|COMPLETED|2026-03-29T05:00:00Z|2026-03-30T00:00:00Z",
        ",JobID,State,Start,End,ElapsedRaw,AllocTRES\n"  # as pandas writes it
        f'0,1,NODE_FAIL,2026-03-01 00:00:00,2026-03-01 05:00:00,18000.0,"{tres(8)}"\n'
        f'1,2,COMPLETED,2026-03-01 05:00:00,2026-03-02 00:00:00,68400.0,"{tres(8)}"',
    ],
)
def test_outputs_that_people_have(tmp_path, text):
    path = tmp_path / "sacct.txt"
    path.write_text(text + "\n", encoding="utf-8")
    (found,) = read_failures([path])
    assert (causes(found), found.exposure.job_s) == (["node failure"], 24 * HOUR_S)


def test_columns_of_fixed_width_are_refused(tmp_path):
    text = (
        "JobID           JobName      State\n------------ ---------- ----------\n1234         train       NODE_FAIL\n"
    )
    (tmp_path / "sacct.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"sacct.txt:1: has columns of fixed width, .*--parsable2"):
        read_failures([tmp_path / "sacct.txt"])


NIGHT = "2025-10-26T02:50:00|2025-10-26T02:10:00|00:20:00"  # clocks go back from 3 to 2


@pytest.mark.parametrize("has_header", [True, False])
def test_a_job_may_run_while_clocks_go_back_or_while_others_were_suspended(tmp_path, has_header):
    suspended = row(3, "FAILED", 24, 5).replace("0-05:00:00", "0-02:00:00")
    rows = *TWO, row(4, "COMPLETED", 30, 1), suspended, f"5|x|FAILED|{NIGHT}|{tres(8)}|cn1"
    found = read(tmp_path, *rows, header=HEADER if has_header else None)
    assert causes(found) == ["failed job", "node failure", "failed job"]
    assert found.exposure.job_s == (24 + 1 + 2 + 1 / 3) * HOUR_S


def test_parts_of_a_heterogeneous_job_are_one_job(tmp_path):
    """The first part has no GPU, the second one lost its node, and both ran again."""
    parts = row("7+0", "CANCELLED by 0", 0, 5, gpus=0), row("7+1", "NODE_FAIL", 0, 5, hosts="cn[2-3]")
    again = row("7+0", "COMPLETED", 6, 2, gpus=0), row("7+1", "COMPLETED", 6, 2, hosts="cn[2,4]")
    found = read(tmp_path, *parts, *again)
    assert [(each.cause, each.n_ended, each.hosts) for each in found.interruptions] == [
        ("node failure", 1, {"cn1", "cn2", "cn3"})
    ]
    assert found.exposure == Exposure(7 * HOUR_S, 7 * 3 * HOUR_S, 7 * 8 * HOUR_S)
    assert found.recovery_s == {"schedule": (HOUR_S,)}
    assert (found.not_counted, found.notes) == ({}, ())


def test_a_log_of_failed_jobs_only_says_so(tmp_path):
    rows = [row(i, "NODE_FAIL", 10 * i, 5) for i in range(6)]
    assert any("Every job in it was interrupted" in note for note in read(tmp_path, *rows).notes)
    assert not any("Every job" in note for note in read(tmp_path, *rows, row(9, "COMPLETED", 70, 5)).notes)


def json_job(state, start_s, elapsed_s, *, new: bool, **more) -> dict[str, object]:
    """Return a job of `sacct --json` of Slurm 21.08, or as later releases write it."""
    number = {"set": True, "infinite": False, "number": elapsed_s} if new else elapsed_s
    job: dict[str, object] = {
        "job_id": 71,
        "array": {"job_id": 0, "task_id": {"set": False, "number": 0} if new else None},
        "allocation_nodes": 2,
        "nodes": "cn[1-2]",
        "kill_request_user": None,
        "state": {"current": [state] if new else state, "reason": "None"},
        "time": {"elapsed": number, "start": start_s, "end": start_s + elapsed_s, "suspended": 0},
        "tres": {"allocated": [{"type": "cpu", "name": "", "count": 9}, {"type": "gres", "name": "gpu", "count": 16}]},
    }
    return job | more


@pytest.mark.parametrize("new", [False, True])
def test_json(tmp_path, new):
    jobs = [
        json_job("NODE_FAIL", 1_700_000_000, 7200, new=new),
        json_job("CANCELLED", 1_700_100_000, 7200, new=new, kill_request_user="ann", job_id=72),
        json_job("PENDING", 0, 0, new=new, job_id=73),
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"meta": {}, "jobs": jobs, "errors": []}, indent=2), encoding="utf-8")
    assert program_of(path) == "Slurm"
    (found,) = read_failures([path])
    assert (causes(found), found.not_counted) == (["node failure"], {"cancelled by a user": 1})
    assert found.exposure == Exposure(14400, 28800, 230400)


def test_json_tells_parts_of_a_job(tmp_path):
    jobs = [
        json_job(
            "FAILED", 1_700_000_000, 7200, new=True, job_id=71 + i, het={"job_id": 71, "job_offset": {"number": i}}
        )
        for i in range(2)
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"jobs": jobs}), encoding="utf-8")
    (found,) = read_failures([path])
    assert ([each.n_ended for each in found.interruptions], found.exposure.job_s) == ([1], 7200)


DAMAGED = {
    "state": ("1|x|LOST|2026-03-01T00:00:00|Unknown|00:10:00||", ":2: State 'LOST'"),
    "cut state": ("1|x|CANCELLED+|2026-03-01T00:00:00|Unknown|00:10:00||", "it is cut off"),
    "job": ("one|x|FAILED|2026-03-01T00:00:00|Unknown|00:10:00||", ":2: JobID 'one'"),
    "relative time": ("1|x|FAILED|4 Sep 11:18|4 Sep 11:18|00:00:23||", "unset SLURM_TIME_FORMAT"),
    "no such day": ("1|x|FAILED|2026-02-30T00:00:00|Unknown|00:10:00||", "there is no such time"),
    "order": ("1|x|FAILED|2026-03-02T00:00:00|2026-03-01T00:00:00|00:10:00||", "-86400 s from Start to End"),
    "elapsed": ("1|x|FAILED|2026-03-01T00:00:00|Unknown|10 min||", "Elapsed '10 min': write e.g. 1-02:03:04"),
    "GPUs": ("1|x|FAILED|2026-03-01T00:00:00|Unknown|00:10:00|gres/gpu=many|", "gres/gpu 'many'"),
    "nodes": ("1|x|FAILED|2026-03-01T00:00:00|Unknown|00:10:00||cn[1-", "NodeList 'cn[1-'"),
    "begin": ("# sacct -S now-2days", "write e.g. 2026-03-01"),
    "torn": ("1|x|FAILED|2026-03-01", "4 values in 8 columns"),
    "separator in a value": ("1|a|b|FAILED|2026-03-01T00:00:00|Unknown|00:10:00||x", "9 values in 8 columns"),
    "nothing ran": ("1|x|PENDING|Unknown|Unknown|00:00:00||", "no job in it ran"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named_with_its_line_and_remedy(tmp_path, name):
    line, message = DAMAGED[name]
    with pytest.raises(ScenarioError) as error:
        read(tmp_path, *([line, HEADER] if line[0] == "#" else [HEADER, line]), header=None)
    assert message in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "sacct.txt"))


def test_a_table_without_a_needed_column_names_the_command(tmp_path):
    with pytest.raises(ScenarioError, match=r"has no column Start: write it with sacct .*--duplicates"):
        read(tmp_path, "1|FAILED|00:10:00", header="JobID|State|Elapsed")
    with pytest.raises(ScenarioError, match="has no header, and its values do not tell"):
        read(tmp_path, "1|FAILED|00:10:00", header=None)


@pytest.mark.parametrize(
    ("text", "n"), [("gres/gpu:a100=4,gres/gpu:h100=2", 6), ("gres/gpu=8,gres/gpu:a100=8", 8), ("cpu=4,gres/gpu=2", 2)]
)
def test_gpus_of_types_are_in_the_sum(text, n):
    assert gpus_of(text) == n


def test_hosts_of_several_brackets():
    assert hosts_of("r[1-2]n[08-10]") == {f"r{rack}n{node}" for rack in "12" for node in ("08", "09", "10")}
    assert hosts_of("None assigned") == frozenset()


def drawn_log(rng: np.random.Generator, gpu_rate_per_h: float, *, truncate: bool) -> list[str]:
    """Return 20 days of jobs of 8 GPUs on 5 nodes, as `sacct --starttime` lists them, or with --truncate."""
    rows: list[str] = []
    for node in range(5):
        begin = -600.0 - rng.uniform(0, 100)
        job = 1000 * node
        while begin < 480:
            length = float(rng.exponential(1 / (8 * gpu_rate_per_h)))
            ends = begin + length
            is_running = ends > 480
            length = 480 - begin if is_running else length
            if begin + length > 0:
                start = max(begin, 0.0) if truncate else begin
                state = "RUNNING" if is_running else "FAILED"
                rows.append(row(job, state, start, begin + length - start, hosts=f"cn{node}"))
            job += 1
            begin += length + rng.uniform(0.1, 2.0)
    return rows


@pytest.mark.parametrize("truncate", [False, True])
def test_intervals_contain_the_rate_of_generated_logs(tmp_path, truncate):
    rng = np.random.default_rng(17)
    rate = 1 / 2000  # per GPU-hour: a job fails after 250 h
    held = naive = 0
    for _ in range(400):
        rows = drawn_log(rng, rate, truncate=truncate)
        found = read(tmp_path, *rows)
        low, high = event_bounds(len(found.interruptions))
        gpu_h = (found.exposure.gpu_s or 0.0) / HOUR_S
        held += low <= rate * gpu_h <= high
        cells = [each.split("|") for each in rows]
        n_failed = sum(each[2] == "FAILED" for each in cells)
        whole_h = sum(8 * (24 * int(each[5].split("-")[0]) + int(each[5].split("-")[1][:2])) for each in cells)
        low, high = event_bounds(n_failed)
        naive += low <= rate * whole_h <= high
    assert held >= 380
    assert truncate or naive < 350  # time before the log's begin would make failures rarer than they are


def test_starts_that_fail_in_their_first_minute_are_tries(tmp_path):
    """Job 1 is down twice: it comes back with the third try, then with the first. Job 2 never came so far."""
    second = 1 / 3600
    rows = (
        row(1, "NODE_FAIL", 0, 5),
        row(1, "FAILED", 6, 30 * second),
        row(1, "FAILED", 7, 50 * second),
        row(1, "FAILED", 8, 1),
        row(1, "COMPLETED", 10, 1),
        row(2, "FAILED", 0, 10 * second),
        row(2, "COMPLETED", 1, 1),
    )
    tries = read(tmp_path, *rows).tries
    assert tries is not None
    assert (tries.n_succeeded, tries.n_tries, tries.lost_s) == (2, 4, (30.0, 50.0))
    assert tries.back_off_s == (HOUR_S - 30.0, HOUR_S - 50.0)
    assert read(tmp_path, row(1, "COMPLETED", 0, 5)).tries is None
