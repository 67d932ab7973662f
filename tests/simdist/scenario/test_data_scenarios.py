"""Scenarios with a data set: what they say, what they become, and one clear error or warning for what is wrong."""

# ruff: noqa: E501  (the tables are read row by row)

from pathlib import Path

import numpy as np
import pytest

from simdist.errors import ScenarioError
from simdist.plan import Dataset
from simdist.runs.building import dataset, job
from simdist.scenario import Scenario, dump, load, loads
from simdist.scenario.data import DataSettings, Lognormal
from simdist.scenario.warnings import warnings_of

GOLDEN_SIZES = [104168, 83788, 84119, 131016, 190580]
GOOD = """\
cluster:
  nodes: 2
  gpus_per_node: 2
  fabric: ideal
  network: {latency: 20 us, bandwidth: 10 Gbit/s}
  storage: {latency: 1 ms, bandwidth: 1 GB/s}
  disk: {read: 2 GB/s, write: 1 GB/s}
  memory: {bandwidth: 8 GB/s}
workload: {tensors: [{name: weight, count: 1000}], batch_size: 8, forward: 20 ms, sample_size: 150 kB}
input:
  source: storage
  data: {samples: 330, file_size: 110 kB}
steps: 3 epochs
schedules:
  - {kind: sync}
  - {kind: sync, input: {policy: datacache}}
"""


def edited(*edits: tuple[str, str]) -> str:
    text = GOOD
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def message_of(text: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        loads(text, name="x.yaml")
    return str(caught.value)


def test_epochs_are_steps_of_the_data_set() -> None:
    scenario = loads(GOOD)
    assert scenario.steps == 3 * (330 // (4 * 8))
    assert loads(edited(("3 epochs", "1 epoch"))).steps == 10
    assert loads(edited(("3 epochs", "7"))).steps == 7
    assert warnings_of(scenario) == ()


def test_a_step_reads_the_samples_of_all_its_passes() -> None:
    scenario = loads(edited(("batch_size: 8", "batch_size: 8, micro_batches: 3")))
    assert scenario.steps == 3 * (330 // (4 * 24))
    found, described = dataset(scenario), job(scenario)
    assert found is not None
    assert found.batch_size == 24
    assert described.batch_nbytes == 24 * 150_000
    assert "a step of 4 ranks reads 384" in message_of(edited(("batch_size: 8", "batch_size: 8, micro_batches: 12")))


def test_scenario_becomes_the_data_set_of_its_plans() -> None:
    edits = [
        ("file_size: 110 kB", "file_size: 110 kB, shuffle: node, eviction: lru, start: warm, seed: 5"),
        ("write: 1 GB/s", "write: 1 GB/s, capacity: 20 MB"),
        ("8 GB/s", "8 GB/s, capacity: 30 MB"),
        ("source: storage", "source: storage\n  readers: 3\n  decode_workers: 4"),
    ]
    assert dataset(loads(GOOD)) == Dataset(330, 8, 2, 150_000, (110_000,))
    assert dataset(loads(edited(*edits))) == Dataset(
        330, 8, 2, 150_000, (110_000,), "node", 5, 20_000_000, 30_000_000, "lru", True, 3, 4
    )
    assert dataset(loads(edited(("source: storage", "source: device")))) is None


# ---------------------------------------------------------------- sizes of files


def test_drawn_sizes_are_the_same_for_ever_and_lognormal() -> None:
    drawn = Lognormal(median_nbytes=110_000, sigma=0.5).drawn(20_000, seed=3)
    assert drawn[:5].tolist() == GOLDEN_SIZES
    logs = np.log(drawn / 110_000)
    assert abs(logs.mean()) < 4 * 0.5 / np.sqrt(20_000)
    assert logs.std() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(2 * 20_000))
    assert Lognormal(median_nbytes=1, sigma=5.0).drawn(100, seed=0).min() == 1


def write_index(folder: Path, *lines: str) -> Path:
    path = folder / "index.csv"
    path.write_text("\n".join(["name,label,nbytes,crc32", *lines]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("size", ["110 kB", "{median: 110 kB, sigma: 0.5}", "{index: index.csv}"])
def test_scenario_round_trips_with_sizes_in_every_form(tmp_path: Path, size: str) -> None:
    write_index(tmp_path, *(f"a/{number}.jpg,{number % 7},{1000 + number},{number}" for number in range(330)))
    (tmp_path / "x.yaml").write_text(edited(("110 kB", size)), encoding="utf-8")
    scenario = load(tmp_path / "x.yaml")
    again = loads(dump(scenario), name="x.yaml")  # from anywhere: the sizes stand in it
    assert again == scenario
    assert dump(again) == dump(scenario)
    assert dataset(again) == dataset(scenario)


def test_index_tells_how_many_samples_there_are(tmp_path: Path) -> None:
    path = write_index(tmp_path, *(f"{number}.jpg,0,{1000 + number},0" for number in range(70)))
    text = edited(("samples: 330, file_size: 110 kB", f"file_size: {{index: {path}}}"))
    built = dataset(loads(text))
    assert (built.n_samples, built.file_nbytes) == (70, tuple(range(1000, 1070)))
    wrong = edited(("110 kB", f"{{index: {path}}}"))
    assert message_of(wrong) == "x.yaml:12: input.data.samples: 330, but file_size lists 70: leave samples out"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a.jpg,0,10"], "{path}:2: 3 columns ('a.jpg,0,10'); there are 4"),
        (["a.jpg,0,10,5", "b.jpg,0,-1,5"], "{path}:3: nbytes '-1': write a whole number from 1 to 1099511627776"),
        (["a.jpg,0,0,5"], "{path}:2: nbytes '0': write a whole number from 1 to 1099511627776"),
        (["a.jpg,0,1099511627777,5"], "{path}:2: nbytes '1099511627777': write a whole number from 1 to 1099511627776"),
        (["a.jpg,0,1e3,5"], "{path}:2: nbytes '1e3': write a whole number from 1 to 1099511627776"),
        (
            ["a.jpg,0,10,5", "b.jpg,0,1,5", "a.jpg,0,9,5"],
            "{path}:4: name 'a.jpg' is in line 2 too; write each file once",
        ),
        (["../a.jpg,0,10,5"], "{path}:2: name '../a.jpg' leaves the folder; write a path inside it: class/1.jpg"),
        (["a.jpg,0,10,4294967296"], "{path}:2: crc32 '4294967296': write a whole number from 0 to 4294967295"),
        ([], "{path} lists no file"),
    ],
)
def test_broken_index_is_refused_with_its_line(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write_index(tmp_path, *lines)
    found = message_of(edited(("110 kB", f"{{index: {path}}}")))
    assert found == "x.yaml:12: input.data.file_size: " + message.format(path=path)


def test_file_that_is_no_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sizes.csv"
    path.write_text("file,size\na,1\n", encoding="utf-8")
    found = message_of(edited(("110 kB", f"{{index: {path}}}")))
    assert found == f"x.yaml:12: input.data.file_size: {path}:1: 'file,size': the header is name,label,nbytes,crc32"
    found = message_of(edited(("110 kB", f"{{index: {tmp_path / 'none.csv'}}}")))
    assert found.startswith("x.yaml:12: input.data.file_size: cannot read '")
    assert found.endswith("': No such file or directory")
    assert message_of(edited(("110 kB", "{index: 3}"))) == (
        "x.yaml:12: input.data.file_size: {'index': 3} is not a file: write e.g. {index: index.csv}"
    )


@pytest.mark.parametrize(
    "content", [b"name,label,nbytes,crc32\n\xff\xfe,0,1,1\n", b'name,label,nbytes,crc32\n"' + b"x" * 200_000]
)
def test_index_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index.csv"
    path.write_bytes(content)
    assert message_of(edited(("110 kB", f"{{index: {path}}}"))).startswith("x.yaml:12: input.data.file_size: ")


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("policy: datacache", "policy: cached", "x.yaml:16: schedules[1].input.policy: 'cached': write 'naive', 'files', 'memory', 'datacache' or 'staged'"),
        ("110 kB}", "110 kB, policy: cached}", "x.yaml:12: input.data.policy: 'cached': write 'naive', 'files', 'memory', 'datacache' or 'staged'"),
        ("110 kB}", "110 kB, shuffle: yes}", "x.yaml:12: input.data.shuffle: 'yes': write 'global', 'node' or 'none'"),
        ("110 kB}", "110 kB, eviction: fifo}", "x.yaml:12: input.data.eviction: 'fifo': write 'none' or 'lru'"),
        ("110 kB}", "110 kB, start: hot}", "x.yaml:12: input.data.start: 'hot': write 'cold' or 'warm'"),
        ("110 kB}", "110 kB, seed: -1}", "x.yaml:12: input.data.seed: -1: write at least 0"),
        ("110 kB}", "110}", "x.yaml:12: input.data.file_size: 110: a size needs a unit: write e.g. 45 MB"),
        ("110 kB}", "{median: 1 kB}}", "x.yaml:12: input.data.file_size.sigma: required key 'sigma' is missing: write e.g. sigma: 1.5"),
        ("110 kB}", "{median: 1 kB, sigma: 1, mean: 1 kB}}", "x.yaml:12: input.data.file_size.mean: unknown key 'mean': did you mean 'median'?"),
        ("110 kB}", "{median: 1 kB, sigma: 0}}", "x.yaml:12: input.data.file_size.sigma: 0 is not a factor: write a finite number above 0"),
        ("110 kB}", "{median: 1 kB, sigma: 11}}", "x.yaml:12: input.data.file_size.sigma: 11: write at most 10"),
        ("110 kB}", "0 B}", "x.yaml:12: input.data.file_size: '0 B': a file has 1 B or more"),
        ("110 kB}", "1.2 TB}", "x.yaml:12: input.data.file_size: '1.2 TB': a file has 1.1 TB (2^40 B) or less"),
        ("110 kB}", "[1 kB, 1 PB]}", "x.yaml:12: input.data.file_size: '1 PB': a file has 1.1 TB (2^40 B) or less"),
        ("110 kB}", "{median: 1 kB, sigma: 10}}", "x.yaml:12: input.data.file_size: {median: 1 kB, sigma: 10} draws files of up to 4.77 TB; a file has 1.1 TB (2^40 B) or less: write a smaller median or sigma"),
        ("samples: 330, file_size: 110 kB", "samples: 2e9, file_size: 1 TB", "x.yaml:12: input.data.file_size: 2,000,000,000 files have 2000000 PB; all of a data set have 4612 PB (2^62 B) or less"),
        ("samples: 330", "samples: 3e9", "x.yaml:12: input.data.samples: 3000000000.0: write at most 2147483648"),
        ("110 kB}", "[]}", "x.yaml:12: input.data.file_size: []: write the size of one file or more"),
        ("110 kB}", "[1 kB, 2]}", "x.yaml:12: input.data.file_size: 2: a size needs a unit: write e.g. 45 MB"),
        ("110 kB}", "[1 kB, 2 kB]}", "x.yaml:12: input.data.samples: 330, but file_size lists 2: leave samples out"),
        ("samples: 330, ", "", "x.yaml:12: input.data.samples: how many samples are there? Write e.g. samples: 1281167"),
        ("samples: 330", "samples: 0", "x.yaml:12: input.data.samples: 0: write at least 1"),
        ("samples: 330", "samples: 31", "x.yaml:12: input.data.samples: 31: a step of 4 ranks reads 32, and an epoch has one step or more"),
        ("samples: 330", "sample: 330", "x.yaml:12: input.data.sample: unknown key 'sample': did you mean 'samples'?"),
        (", file_size: 110 kB", "", "x.yaml:12: input.data.file_size: required key 'file_size' is missing: write e.g. file_size: 110 kB"),
        ("3 epochs", "0 epochs", "x.yaml:13: steps: '0 epochs': write 1 epoch or more"),
        ("3 epochs", "3 epoch s", "x.yaml:13: steps: '3 epoch s' is not a whole number: write e.g. 8"),
        ("3 epochs", "2.5 epochs", "x.yaml:13: steps: '2.5 epochs' is not a whole number of epochs: write e.g. 2 epochs"),
        ("  disk: {read: 2 GB/s, write: 1 GB/s}\n", "", "x.yaml:15: schedules[1].input.policy: datacache keeps files on local disks: write cluster.disk, e.g. {read: 2 GB/s, write: 1 GB/s}"),
        ("  memory: {bandwidth: 8 GB/s}\n", "", "x.yaml:15: schedules[1].input.policy: datacache keeps samples in memory: write cluster.memory, e.g. {bandwidth: 10 GB/s, capacity: 200 GB}"),
        ("  storage: {latency: 1 ms, bandwidth: 1 GB/s}\n", "", "x.yaml:10: input.source: 'storage': the cluster has none, write cluster.storage or another source"),
        ("write: 1 GB/s", "write: 0 GB/s", "x.yaml:7: cluster.disk.write: "),
        ("bandwidth: 8 GB/s", "bandwidth: 0", "x.yaml:8: cluster.memory.bandwidth: "),
        ("source: storage", "source: storage\n  readers: 0", "x.yaml:12: input.readers: 0: write at least 1"),
        ("source: storage", "source: storage\n  num_workers: 4", "x.yaml:17: schedules[1].input.policy: datacache: workers of a DataLoader share no memory, and begin at once: write naive or files"),
        ("source: storage", "source: storage\n  num_workers: -1", "x.yaml:12: input.num_workers: -1: write at least 0"),
        ("source: storage", "source: storage\n  num_workers: 4\n  prefetch_factor: 0", "x.yaml:13: input.prefetch_factor: 0: write at least 1"),
        ("policy: datacache", "decode_workers: 0", "x.yaml:16: schedules[1].input.decode_workers: 0: write at least 1"),
    ],
)  # fmt: skip
def test_broken_data_set_is_named_with_its_line_and_path(old: str, new: str, message: str) -> None:
    found = message_of(edited((old, new)))
    assert message in found
    assert len(found.splitlines()) == 1


@pytest.mark.parametrize("key", ["policy: files", "readers: 3", "decode_workers: 2"])
def test_schedule_that_reads_a_data_set_that_is_not_there_is_refused(key: str) -> None:
    text = edited(("  data: {samples: 330, file_size: 110 kB}\n", ""), ("3 epochs", "3"), ("policy: datacache", key))
    hint = "there is no data set to read: write input.data: {samples: ..., file_size: ...} in the scenario"
    assert message_of(text) == f"x.yaml:15: schedules[1].input.{key.split(':')[0]}: {hint}"


def test_sizes_that_are_drawn_are_refused_only_if_one_of_them_is_too_large() -> None:
    """The largest of these 330 is e^(3 * 2.2) times the median; e^(3 * 8.3) times could be drawn."""
    wide = loads(edited(("110 kB", "{median: 1 GB, sigma: 3}")))
    assert 2**39 < max(dataset(wide).file_nbytes) < 2**40
    assert "draws files of up to 8.01 TB; " in message_of(edited(("110 kB", "{median: 10 GB, sigma: 3}")))


def test_epochs_of_no_data_set_are_refused() -> None:
    text = edited(("  data: {samples: 330, file_size: 110 kB}\n", ""), (", input: {policy: datacache}", ", label: two"))
    hint = "how many samples are there? Write input.data: {samples: ..., file_size: ...}"
    assert message_of(text) == f"x.yaml:12: steps: '3 epochs': {hint}"


def test_schedules_that_differ_in_their_input_have_labels_that_tell() -> None:
    text = (
        GOOD
        + "  - {kind: sync, input: {policy: files, prefetch: 4, readers: 2, decode_workers: 3}}\n"
        + "  - {kind: sync, input: {prefetch: 4}}\n"
    )
    names = [schedule.name for schedule in loads(text).schedules]
    assert names == ["sync", "sync+datacache", "sync+files+prefetch4+readers2+workers3", "sync+prefetch4"]


# ---------------------------------------------------------------- without effect


@pytest.mark.parametrize(
    ("edits", "warnings"),
    [
        ([("source: storage", "source: device"), (", input: {policy: datacache}", ", label: two")], [
            "input.data has no effect: with input.source device nothing is read",
            "cluster.storage has no effect: with input.source device nothing reads from it",
        ]),
        ([("source: storage", "source: memory")], [
            "input.data has no effect: with input.source memory nothing is read",
            "cluster.storage has no effect: with input.source memory nothing reads from it",
            "schedules[1].input.policy has no effect: with input.source memory nothing is read",
        ]),
        ([("policy: datacache", "policy: files")], ["cluster.memory has no effect: the policies files, naive keep no samples"]),
        ([("policy: datacache", "policy: memory")], ["cluster.disk has no effect: the policies memory, naive keep no files"]),
        ([("{kind: sync}", "{kind: sync, input: {policy: files}}"), ("110 kB", "110 kB, policy: staged")], ["input.data.policy has no effect: every schedule has its own"]),
        ([("policy: datacache", "policy: memory"), ("110 kB", "110 kB, start: warm"), ("  disk: {read: 2 GB/s, write: 1 GB/s}\n", "")], ["input.data.start has no effect: the policies memory, naive keep no files"]),
        ([("{kind: sync}\n", ""), ("  - {kind: sync, input: {policy: datacache}}", "{kind: sync}")], [
            "cluster.disk has no effect: the policy naive keeps no files",
            "cluster.memory has no effect: the policy naive keeps no samples",
        ]),
        ([("write: 1 GB/s", "write: 1 GB/s, capacity: 0"), ("8 GB/s", "8 GB/s, capacity: 0 B")], [
            "cluster.disk has no effect: its capacity of 0 B holds no file",
            "cluster.memory has no effect: its capacity of 0 B holds no sample",
        ]),
        ([("write: 1 GB/s", "write: 1 GB/s, capacity: 110 kB"), ("8 GB/s", "8 GB/s, capacity: 149 kB")], ["cluster.memory has no effect: its capacity of 149 kB holds no sample"]),
        ([("write: 1 GB/s", "write: 1 GB/s, latency: 10 ms")], [
            "cluster.disk.latency of 10 ms is that of a hard disk, which does 100 files per second: write operations_per_s if yours does more",
        ]),
        ([("write: 1 GB/s", "write: 1 GB/s, latency: 10 ms, operations_per_s: 100")], []),
        ([("write: 1 GB/s", "write: 1 GB/s, latency: 90 us")], []),
        ([("write: 1 GB/s", "write: 1 GB/s, latency: 10 ms, operations_per_s: unlimited")], []),
        ([("source: storage", "source: storage\n  prefetch_factor: 4")], [
            "input.prefetch_factor has no effect: without input.num_workers, prefetch counts batches",
        ]),
        ([("source: storage", "source: storage\n  num_workers: 4\n  prefetch_factor: 3\n  readers: 4"), ("policy: datacache", "policy: files"), ("  memory: {bandwidth: 8 GB/s}\n", "")], [
            "input.readers has no effect: with input.num_workers, each worker loads whole batches",
        ]),
        ([("source: storage", "source: memory\n  num_workers: 4"), ("  - {kind: sync, input: {policy: datacache}}\n", ""), ("  disk: {read: 2 GB/s, write: 1 GB/s}\n", ""), ("  memory: {bandwidth: 8 GB/s}\n", "")], [
            "input.num_workers has no effect: with input.source memory nothing is loaded",
            "input.data has no effect: with input.source memory nothing is read",
            "cluster.storage has no effect: with input.source memory nothing reads from it",
        ]),
        ([("110 kB", "110 kB, eviction: lru")], ["input.data.eviction has no effect: nothing that is kept has a capacity"]),
        ([("110 kB", "110 kB, eviction: lru"), ("8 GB/s", "8 GB/s, capacity: 1 GB")], []),
        ([("110 kB", "110 kB, eviction: lru"), ("write: 1 GB/s", "write: 1 GB/s, capacity: 1 GB"), ("policy: datacache", "policy: staged"), ("  memory: {bandwidth: 8 GB/s}\n", "")], [
            "input.data.eviction has no effect: what is staged in stays, and nothing else that is kept has a capacity",
        ]),
        ([("110 kB", "110 kB, shuffle: none, seed: 3")], ["input.data.seed has no effect: nothing of the data set is random"]),
        ([("110 kB", "{median: 1 kB, sigma: 1}, shuffle: none, seed: 3")], []),
        ([("  nodes: 2", "  nodes: 2\n  host: {cores_per_node: 8}")], ["cluster.host.cores_per_node has no effect: workload.decode is 0"]),
        ([("  nodes: 2", "  nodes: 2\n  host: {cores_per_node: 8}"), ("150 kB", "150 kB, decode: 4 ms")], []),
        ([("  data: {samples: 330, file_size: 110 kB}\n", ""), ("3 epochs", "30"), (", input: {policy: datacache}", ", label: two"), ("source: storage", "source: storage\n  readers: 4\n  decode_workers: 2"), ("150 kB", "150 kB, decode: 4 ms"), ("1 ms,", "1 ms, open: 2 ms, operations_per_s: 10000,")], [
            "input.readers has no effect: without data a batch is one request",
            "input.decode_workers has no effect: without data a batch is one request",
            "cluster.storage.open has no effect: without data a batch is one request",
            "cluster.storage.operations_per_s has no effect: without data a batch is one request",
            "cluster.disk has no effect: without data a batch is one request",
            "cluster.memory has no effect: without data a batch is one request",
            "workload.decode has no effect: without data a batch is one request",
        ]),
    ],
)  # fmt: skip
def test_setting_without_effect_warns(edits: list[tuple[str, str]], warnings: list[str]) -> None:
    assert list(warnings_of(loads(edited(*edits)))) == warnings


def test_data_written_in_python_equals_the_file() -> None:
    scenario: Scenario = loads(GOOD)
    assert scenario.input.data == DataSettings(samples=330, file_nbytes=110_000)
    assert (
        scenario.changed({"input.data": DataSettings(file_nbytes=(1000,) * 40), "steps": 1}).input.data.n_samples == 40
    )
