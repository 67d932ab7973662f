"""Errors for a user whose data set cannot be read: an outage, a wrong URL, labels that the model does not have."""

import errno
import os
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from data_files import content_of, entry  # noqa: E402
from data_runs import Looking, Still, perform  # noqa: E402
from processes import run  # noqa: E402
from torch import Tensor  # noqa: E402

from real import jobs, models  # noqa: E402
from real.data.sample_index import SampleIndex, check_labels, make_index  # noqa: E402
from real.data.storages import DataStorage, open_storage, read_storage_index  # noqa: E402
from simdist.errors import ScenarioError  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import loads  # noqa: E402

SCENARIO = """\
cluster:
  nodes: 2
  gpus_per_node: 1
  fabric: ideal
  network: ideal
  storage: {latency: 0.1 ms, bandwidth: 1 GB/s}
  disk: {read: 1 GB/s, write: 1 GB/s}
workload: {tensors: [{name: weight, count: 4}], batch_size: 3, forward: 1 ms, sample_size: 1000 B}
steps: 1 epochs
input: {source: storage, prefetch: 1, data: {samples: 12, file_size: 1000 B, policy: files}}
schedules: [{kind: sync}]
"""
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "host:2049: connection refused")


def written(path: Path) -> run_directory.RunDirectory:
    scenario = loads(SCENARIO, folder=path.parent)
    plan = build(scenario, scenario.schedules[0]).plan
    run_directory.write(path, scenario, plan, delays(scenario))
    return run_directory.read(path)


# --- outages ---


class Away(DataStorage):
    """Gives one answer per read, an error or a file; time passes in pauses, and `read_s` in each read."""

    def __init__(self, answers: Sequence[bytes | Exception], *, read_s: float = 0.0, timeout_s: float = 60.0) -> None:
        self.clock_s, self.read_s = 0.0, read_s
        super().__init__("nfs://host/set", self, "", timeout_s=timeout_s, now=lambda: self.clock_s, sleep=self._pass)
        self.answers = list(answers)

    def cat_file(self, path: str) -> bytes:
        self.clock_s += self.read_s
        match self.answers.pop(0):
            case bytes(content):
                return content
            case error:
                raise error

    def _pass(self, pause_s: float) -> None:
        self.clock_s += pause_s


AWAY = r"^cannot reach nfs://host/set: host:2049: connection refused; trying until 60 s are over$"


def test_an_outage_that_lasts_is_told() -> None:
    storage = Away([*[REFUSED] * 12, b"here", b"there"])
    with pytest.warns(RuntimeWarning, match=AWAY) as told:
        assert (storage.read("1.jpg"), storage.read("2.jpg")) == (b"here", b"there")
    assert len({str(each.message) for each in told}) == 1  # Python shows equal ones once


def test_a_short_outage_passes_without_a_word() -> None:
    storage = Away([*[REFUSED] * 6, b"here", *[REFUSED] * 6, b"there"])
    assert (storage.read("1.jpg"), storage.read("2.jpg")) == (b"here", b"there")


def test_the_time_in_which_a_server_is_silent_counts() -> None:
    storage = Away([TimeoutError(errno.ETIMEDOUT, "host:2049 does not answer"), b"here"], read_s=5.0)
    with pytest.warns(RuntimeWarning, match="cannot reach nfs://host/set: host:2049 does not answer; trying until"):
        assert storage.read("1.jpg") == b"here"


# --- what is not there ---


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_that_is_not_there_and_one_without_an_index_are_wrong_input(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with pytest.raises(ScenarioError, match=rf"{name}: there is no such folder$"):
            read_storage_index(open_storage(f"{scheme}{tmp_path}/{name}"))
    with pytest.raises(ScenarioError, match=r"has no index\.csv; `python -m real\.data\.indexing FOLDER` makes one"):
        read_storage_index(open_storage(f"{scheme}{tmp_path}"))


@pytest.mark.parametrize("kind", ["pipe", "line"])
def test_an_index_that_is_no_file_or_no_text_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / "index.csv")
    else:
        with (tmp_path / "index.csv").open("wb") as file:
            file.truncate(1 << 30)
    said = {"pipe": "it is a pipe: give a regular file", "line": "line 1 has more than 33,554,432 bytes"}[kind]
    with pytest.raises(ScenarioError, match=rf"index\.csv: cannot be read: {said}"):
        read_storage_index(open_storage(str(tmp_path)))


def test_a_run_without_its_data_set_ends_as_wrong_input_does(tmp_path: Path) -> None:
    path = written(tmp_path / "run").path
    where = ("--backend", "gloo", "--device", "cpu", "--timeout", 20)
    for ending in run(perform, 2, path, *where, "--data", tmp_path / "nowhere").values():
        assert ending.code == 2, ending.output
        assert f"error: {tmp_path}/nowhere: there is no such folder" in ending.output


# --- labels ---


def labelled(labels: Sequence[int]) -> SampleIndex:
    return make_index(entry(f"{at}.jpg", content_of(at), label) for at, label in enumerate(labels))


def test_labels_are_those_that_the_model_has_outputs_for() -> None:
    check_labels(labelled([0, 9]), 10, "/set")
    with pytest.raises(
        ScenarioError, match="/set: labels go up to 10, the model has 10 outputs: number the classes below that"
    ):
        check_labels(labelled([0, 10, 3]), 10, "/set")
    with pytest.raises(ScenarioError, match="/set: label -1 is below 0"):
        check_labels(labelled([0, -1]), 10, "/set")


def test_a_model_with_too_few_outputs_is_refused_before_the_run(tmp_path: Path) -> None:
    source = types.SimpleNamespace(
        sources=types.SimpleNamespace(shape=(1000,), index=labelled([0, 639])),
        options=types.SimpleNamespace(url="/set"),
    )

    def job(**_wanted: object) -> models.TrainingJob:
        return models.TrainingJob(Looking(), lambda output, _: output, Still(), batch, n_classes=10)

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(3, 1000), torch.zeros(3)

    make = jobs.model_maker(
        0, torch.device("cpu"), written(tmp_path / "run"), job, source, precision="fp32", saved=jobs.Saved(None)
    )
    with pytest.raises(ScenarioError, match=r"labels go up to 639, the model has 10 outputs: number the classes below"):
        make(None, None)
