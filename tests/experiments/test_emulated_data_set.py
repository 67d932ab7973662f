"""The data sets that the emulated cluster serves: sizes as drawn, and every picture shows its number."""

import errno
import sys
from pathlib import Path

import numpy as np
import pytest
from data_files import read_index

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "emulated_cluster"
sys.path.insert(0, str(FOLDER))

from data_set import SampleSet, contents, generate  # noqa: E402
from data_set import main as generate_command  # noqa: E402
from pictures import _comment, sample_number  # noqa: E402

from real.data.sources import decode_image, decode_raw  # noqa: E402
from simdist.errors import RunError, ScenarioError  # noqa: E402


def test_larger_set_begins_with_the_smaller_one() -> None:
    small, large = (list(contents(SampleSet(n_samples=n, nbytes=6000))) for n in (2, 3))
    assert large[:2] == small
    assert len({content for _, content in large}) == 3
    assert list(contents(SampleSet(n_samples=2, nbytes=6000, seed=1))) != small


@pytest.mark.parametrize("format_", ["jpeg", "png"])
def test_files_have_the_sizes_that_were_drawn(format_: str) -> None:
    samples = SampleSet(n_samples=6, nbytes=9000, sigma=0.6, format=format_, seed=5)
    drawn = [9000 * np.exp(0.6 * np.random.default_rng([5, sample]).standard_normal()) for sample in range(6)]
    assert [len(content) for _, content in contents(samples)] == [max(4000, round(nbytes)) for nbytes in drawn]


def test_sizes_come_from_the_picture_and_hardly_from_filling() -> None:
    from io import BytesIO

    from PIL import Image

    for nbytes in (4000, 110_000):
        for _, content in contents(SampleSet(n_samples=3, nbytes=nbytes, sigma=0)):
            with Image.open(BytesIO(content)) as image:
                assert len(image.info.get("comment", b"")) < 0.1 * nbytes


def test_filling_is_exact_where_one_comment_is_not_enough() -> None:
    rng = np.random.default_rng(0)
    for nbytes in (0, 4, 5, 65537, 65538, 65540, 65541, 65542, 131_074, 200_000):
        assert len(_comment(b"\xff\xd8\xff\xd9", nbytes, rng)) == 4 + nbytes


@pytest.mark.parametrize("format_", ["jpeg", "png"])
def test_sample_number_is_read_from_the_decoded_sample(format_: str) -> None:
    samples = SampleSet(n_samples=5, nbytes=8000, format=format_)
    for sample, (each, content) in enumerate(contents(samples)):
        out = np.empty((3, 48, 48), np.uint8)
        decode_image(content, out, each.name)
        assert sample_number(out) == sample


def test_raw_file_is_the_sample_itself() -> None:
    samples = SampleSet(n_samples=3, nbytes=3 * 40 * 40 + 5, format="raw", sigma=0)
    for sample, (each, content) in enumerate(contents(samples)):
        out = np.empty((3, 40, 40), np.uint8)
        decode_raw(content, out, each.name)
        assert sample_number(out) == sample


def test_picture_without_a_number_is_noticed() -> None:
    with pytest.raises(RunError, match="no sample's number"):
        sample_number(np.zeros((3, 48, 48), np.uint8))


def test_generated_set_matches_its_index_and_is_not_overwritten(tmp_path: Path) -> None:
    samples = SampleSet(n_samples=5, nbytes=5000, n_classes=2)
    assert generate(tmp_path, samples) == sum(path.stat().st_size for path in tmp_path.rglob("*.jpg"))
    index = read_index(tmp_path / "index.csv")
    assert list(index.labels) == [0, 1, 0, 1, 0]
    assert all(index[sample].matches((tmp_path / index.names[sample]).read_bytes()) for sample in range(5))
    with pytest.raises(ScenarioError, match=r"index\.csv: is there already"):
        generate(tmp_path, samples)


def test_interrupted_generation_leaves_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    generate(tmp_path, SampleSet(n_samples=1, nbytes=5000))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match=r"0000/00000000\.jpg: cannot be written: No space left"):
        generate(tmp_path, SampleSet(n_samples=1, nbytes=6000), force=True)
    assert not (tmp_path / "index.csv").exists()


def test_wrong_sample_sets_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--samples", "0"], "samples is 0: write a number from 1"),
        (["--samples", "1", "--size", "1 kB"], "size is 1000: write a number from 4000"),
        (["--samples", "1", "--size", "much"], "--size 'much'"),
        (["--samples", "1", "--format", "raw", "--sigma", "1"], "raw samples are all of one size"),
    ):
        assert generate_command([str(tmp_path), *options]) == 2
        assert message in capsys.readouterr().err
    assert generate_command([str(tmp_path), "--samples", "2", "--format", "raw", "--size", "5 kB"]) == 0
    assert "2 raw files of uint8 [3, 40, 40], 9.6 kB" in capsys.readouterr().out
