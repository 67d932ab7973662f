"""Which program wrote a log."""

import gzip

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
