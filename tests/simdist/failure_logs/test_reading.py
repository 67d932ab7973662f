"""Which program wrote a log."""

import gzip
import json
import random

import pytest

from simdist.errors import ScenarioError
from simdist.failure_logs.reading import program_of, read_failures

TABLE = "JobID|State|Start|Elapsed\n1|NODE_FAIL|2026-03-01T00:00:00|02:00:00\n"
NCCL = "# nThread 1 nGpus 8 minBytes 8\n#       size         count      type   redop     time\n 8 2 float sum 9.1\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (TABLE, "Slurm"),
        ("JobIDRaw,JobID,State\n", "Slurm"),
        ("301099|ktg|l40s|CANCELLED by 30154|00:00:00|0:0\n", "Slurm"),
        ("Epoch 1\n[rank0]:[E321 02:07:08 ProcessGroupNCCL.cpp:607] Watchdog\n", "torchrun"),
        ("[rank0]: Traceback\nINFO:torch.distributed.elastic.agent.server.api:x\n", "torchrun"),
        ('{"job_name": "a", "job_start_time": 1704070800.0}\n', "ml-goodput-measurement"),
        (NCCL, None),
        ("", None),
        ('{"model_type": "llama", "hidden_size": 4096}', None),
        ('{"train_batch_size": 4}\n{', None),
        ("a|b|c\n1|2|3\n", None),
    ],
)
def test_programs(tmp_path, text, program):
    path = tmp_path / "file.log"
    path.write_text(text, encoding="utf-8")
    assert program_of(path) == program


JOB = {
    "job_id": 71,
    "state": {"current": ["NODE_FAIL"]},
    "time": {"elapsed": 900, "start": 1_700_000_000, "end": 1_700_000_900},
    "tres": {"allocated": [{"type": "gres", "name": "gpu", "count": 16}]},
}
RECORDS = [{"job_name": "a", key: 1000 * i} for i in range(3) for key in ("job_start_time", "tpu_init_start_time")]
RECORDS += [{"job_name": "a", "step_count": i, "step_start_time": 100 + i} for i in range(3)]
WHOLE = {
    "table": TABLE + "2|FAILED|2026-03-02T00:00:00|1-02:00:00\n",
    "no header": "1|NODE_FAIL|2026-03-01T00:00:00|2026-03-01T02:00:00|02:00:00|cpu=4,gres/gpu=8,node=2\n" * 3,
    "JSON": json.dumps({"jobs": [JOB, JOB]}),
    "records": "\n".join(map(json.dumps, RECORDS)),
    "export": json.dumps([{"jsonPayload": each} for each in RECORDS]),
    "messages": "I0301 00:00:00.5 7 torch/distributed/run.py] Rendezvous complete for workers. Result:\n"
    "E0301 02:00:00.5 7 torch/distributed/api.py] failed (exitcode: -9) local_rank: 0\n"
    "Root Cause (first observed failure):\n  time      : 2026-03-01_02:00:01\n  exitcode  : -9 (pid: 1)\n",
}
PARTS = (
    "|",
    ":",
    "-",
    "{",
    "}",
    "[",
    "]",
    ",",
    '"',
    "9",
    "\0",
    "null",
    "true",
    "1e400",
    "NaN",
    "-1",
    "{}",
    "9999-12-31",
)


@pytest.mark.parametrize("name", WHOLE)
def test_a_damaged_log_is_read_or_refused_with_its_name(tmp_path, name):
    chance = random.Random(name)
    path = tmp_path / "file"
    for _ in range(150):
        text = WHOLE[name]
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(text) + 1)
            text = text[:at] + chance.choice(PARTS) * chance.randint(0, 1) + text[at + chance.randint(0, 9) :]
        path.write_text(text, encoding="utf-8")
        if program_of(path) is None:
            continue
        try:
            found = read_failures([path])
        except ScenarioError as error:
            assert str(path) in str(error)  # noqa: PT017 - any other error is a failure
        else:
            assert all(each.exposure.job_s is None or each.exposure.job_s >= 0 for each in found)


def test_packed_logs(tmp_path):
    path = tmp_path / "sacct.txt.gz"
    path.write_bytes(gzip.compress(TABLE.encode()))
    assert program_of(path) == "Slurm"
    assert len(read_failures([path])[0].interruptions) == 1


def test_logs_of_one_program_are_read_together(tmp_path):
    (tmp_path / "sacct").write_text(TABLE, encoding="utf-8")
    (tmp_path / "more").write_text(TABLE.replace("1|", "2|").replace("-01T", "-02T"), encoding="utf-8")
    (tmp_path / "run").write_text("x ProcessGroupNCCL failed (exitcode: 1) local_rank: 0\n", encoding="utf-8")
    found = read_failures([tmp_path / name for name in ("sacct", "run", "more")])
    assert [(each.program, len(each.interruptions)) for each in found] == [("Slurm", 2), ("torchrun", 1)]


def test_another_file_is_refused(tmp_path):
    (tmp_path / "x").write_text(NCCL, encoding="utf-8")
    with pytest.raises(ScenarioError, match="is no log of Slurm, torchrun or ml-goodput-measurement"):
        read_failures([tmp_path / "x"])
    assert program_of(tmp_path / "missing") is None
