"""The script of the documentation, with DistributedDataParallel and wrapped, runs and computes the same."""

from pathlib import Path
from typing import Any

import loops
import pytest
from processes import ROOT, run

from simdist.schedules import LocalSGD, Schedule, Sync

torch = pytest.importorskip("torch")

DDP, WRAPPED = (ROOT / "docs" / "examples" / name for name in ("train_ddp.py", "train.py"))
SMALL = "--images", 202, "--batch-size", 8, "--epochs", 3  # 13 batches of a rank, of which the last one has 5 images


def trained(path: Path, schedule: Schedule | None, kept: Path, *options: object) -> tuple[dict[str, Any], str]:
    """Train on 2 ranks; return the checkpoint and what rank 0 prints."""
    endings = run(loops.run_example, 2, path, schedule, *SMALL, "--checkpoint", kept, *options)
    assert {ending.code for ending in endings.values()} == {0}, endings
    return torch.load(kept, weights_only=True), endings[0].output


@pytest.mark.sentinel
def test_the_wrapped_script_computes_what_it_did_with_ddp_also_resumed_and_compiled(tmp_path: Path) -> None:
    expected, printed = trained(DDP, None, tmp_path / "ddp.pt")
    trained(WRAPPED, Sync(), tmp_path / "wrapped.pt", "--stop-after", 1)
    found, _ = trained(WRAPPED, Sync(), tmp_path / "wrapped.pt", "--compile", "aot_eager")
    for name in ("model", "ema"):
        assert found[name].keys() == expected[name].keys()
        for key, value in expected[name].items():
            torch.testing.assert_close(found[name][key], value, rtol=0, atol=1e-12)
    assert found["epoch"] == 3
    assert found["scheduler"] == expected["scheduler"]
    assert printed.count("accuracy") == 3


def test_the_wrapped_script_learns_by_local_sgd_in_mixed_precision(tmp_path: Path) -> None:
    found, printed = trained(WRAPPED, LocalSGD(period=4), tmp_path / "wrapped.pt", "--amp")
    first, *_, last = (float(line.split()[3].rstrip(",")) for line in printed.splitlines())
    assert last < first / 2
    assert found["scheduler"]["last_epoch"] == 21
