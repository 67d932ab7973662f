"""How fast are samples in memory, and what does the loader cost beside torch's own?

    python benchmarks/loader.py            tables; exit code 1 if a target is missed
    python benchmarks/loader.py --quick    tiny sizes, to see that it works; seconds
    python benchmarks/loader.py --json     the numbers for machines

`memory`: samples copied out of the node's store in random order, against numpy's copy between arrays of this process
in the same order. `loader`: time per batch of the loader of a plan, against a `DataLoader` whose workers open and
decode the same local JPEG files with the same function, as many as the loader has threads that decode. Ratios compare
runs of one process, taken turn by turn; absolute numbers belong to the machine.
"""

import io
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.tables import benchmark_parser, conclude
from real.data.filecache import FileCache
from real.data.loader import Loader, LoaderLimits
from real.data.memory import Geometry, MemoryStore
from real.data.sample_index import SampleIndex, make_index
from real.data.sources import Sources, decode_image
from real.data.storages import open_storage
from real.processes.rendezvous import RankPlace
from simdist.caching import BatchReads
from simdist.caching.lookup import DISK
from simdist.plan.index import Entry

LEAST_OF_MEMCPY, MOST_OF_DATALOADER = 0.5, 1.1
SIDE = 224
SHAPE = (3, SIDE, SIDE)


@dataclass(frozen=True)
class Sizes:
    """How much to run."""

    memory_samples: int = 400
    sample_nbytes: int = 500_000
    images: int = 512
    image_side: int = 500  # about that of ImageNet
    batch: int = 32
    workers: int = 2
    repetitions: int = 7


QUICK = Sizes(20, 50_000, 16, 64, 4, 1, 1)


def memory(sizes: Sizes) -> dict[str, object]:
    """Compare the store with plain copies."""
    count, nbytes = sizes.memory_samples, sizes.sample_nbytes
    draw = np.random.default_rng(0)
    samples = draw.integers(0, 256, (count, nbytes), dtype=np.uint8)
    outs = np.ones_like(samples)
    store = MemoryStore(Geometry(count, count, nbytes))
    order = draw.permutation(count).tolist()
    try:
        put_s = seconds(lambda: [store.put(sample, samples[sample]) for sample in range(count)])
        pairs = [
            (
                seconds(lambda: store.get_many(order, outs)),
                seconds(lambda: [np.copyto(out, samples[sample]) for sample, out in zip(order, outs, strict=True)]),
            )
            for _ in range(sizes.repetitions + 1)
        ][1:]
        assert (outs == samples[order]).all()
    finally:
        store.close()
    total_gb = count * nbytes / 1e9
    return {
        "samples": count,
        "kB": nbytes / 1e3,
        "put GB/s": total_gb / put_s,
        "get GB/s": total_gb / statistics.median(get_s for get_s, _ in pairs),
        "memcpy GB/s": total_gb / statistics.median(copy_s for _, copy_s in pairs),
        "get over memcpy": statistics.median(copy_s / get_s for get_s, copy_s in pairs),
    }


class Plain(Dataset[tuple[Tensor, int]]):
    """Opens and decodes a file, as everybody writes it."""

    def __init__(self, folder: Path, index: SampleIndex) -> None:
        self.folder, self.index = folder, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        name = self.index.names[sample]
        out = np.empty(SHAPE, np.uint8)
        decode_image((self.folder / name).read_bytes(), out, name)
        return torch.from_numpy(out), int(self.index.labels[sample])


def loader(sizes: Sizes, folder: Path) -> dict[str, object]:
    """Compare the loader with torch's."""
    index = images(sizes, folder / "set")
    order = np.random.default_rng(0).permutation(sizes.images)
    n_batches = sizes.images // sizes.batch
    batches = order[: n_batches * sizes.batch].reshape(n_batches, sizes.batch)
    sampler = [batch.tolist() for batch in batches]
    theirs = DataLoader(
        Plain(folder / "set", index),
        batch_sampler=sampler,
        num_workers=sizes.workers,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    store = MemoryStore(Geometry(sizes.images, 0, int(np.prod(SHAPE))))
    files = FileCache(folder / "disk", index)
    sources = Sources(index, open_storage(str(folder / "set")), decode_image, SHAPE, files)
    for sample in range(sizes.images):
        sources.read(sample, keep=True)
    ours = Loader(
        reads(batches, sizes.repetitions + 1),
        sources,
        place=RankPlace(0, 1, 0, 1),
        store=store,
        failed=threading.Event(),
        limits=LoaderLimits(readers=2, decoders=sizes.workers),
    )
    out, labels = torch.empty(sizes.batch, *SHAPE, dtype=torch.uint8), torch.empty(sizes.batch, dtype=torch.int64)
    with ours:
        pairs = [
            (
                seconds(lambda first=turn * n_batches: [ours.load(first + k, out, labels) for k in range(n_batches)]),
                seconds(lambda: [None for _ in theirs]),
            )
            for turn in range(sizes.repetitions + 1)
        ][1:]
    store.close()
    return {
        "images": sizes.images,
        "batch": sizes.batch,
        "workers": sizes.workers,
        "loader ms": 1e3 * statistics.median(mine_s for mine_s, _ in pairs) / n_batches,
        "DataLoader ms": 1e3 * statistics.median(their_s for _, their_s in pairs) / n_batches,
        "loader over DataLoader": statistics.median(mine_s / their_s for mine_s, their_s in pairs),
    }


def reads(batches: np.ndarray, n_epochs: int) -> Iterator[BatchReads]:
    """Yield loads that find everything on disk."""
    for number in range(n_epochs * len(batches)):
        samples = batches[number % len(batches)][None]
        nothing = np.zeros(samples.shape, dtype=bool)
        where = np.full(samples.shape, DISK, dtype=np.uint8)
        yield BatchReads(number, number // len(batches), samples, where, np.full(samples.shape, -1), nothing, nothing)


def images(sizes: Sizes, folder: Path) -> SampleIndex:
    """Write JPEG files of about 110 kB at full size."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    entries = []
    for sample in range(sizes.images):
        coarse = Image.fromarray(
            draw.integers(0, 256, (sizes.image_side // 4, sizes.image_side // 4, 3), dtype=np.uint8)
        )
        file = io.BytesIO()
        coarse.resize((sizes.image_side, sizes.image_side)).save(file, "JPEG", quality=90)
        name, data = f"{sample}.jpg", file.getvalue()
        (folder / name).write_bytes(data)
        entries.append(Entry(name, sample % 10, len(data), zlib.crc32(data)))
    return make_index(entries)


def seconds(run: Callable[[], object]) -> float:
    """Return how long something takes."""
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def main() -> int:
    """Run everything and print it; return 1 if a target of the full sizes is missed."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--workers", type=int, help="threads that decode, and workers of the DataLoader")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.workers:
        sizes = Sizes(**{**asdict(sizes), "workers": options.workers})
    torch.set_num_threads(1)
    of_memory = memory(sizes)
    with tempfile.TemporaryDirectory() as folder:
        of_loader = loader(sizes, Path(folder))
    copied, spent = of_memory["get over memcpy"], of_loader["loader over DataLoader"]
    targets: list[dict[str, object]] = [
        {
            "what": "memory store over memcpy",
            "target": f">= {LEAST_OF_MEMCPY}",
            "reached": copied,
            "holds": copied >= LEAST_OF_MEMCPY,  # type: ignore[operator]
        },
        {
            "what": "time per batch over DataLoader",
            "target": f"<= {MOST_OF_DATALOADER}",
            "reached": spent,
            "holds": spent <= MOST_OF_DATALOADER,  # type: ignore[operator]
        },
    ]
    tables = {"samples in memory": [of_memory], "batches from local files": [of_loader]}
    return conclude(options, sizes, {"memory": of_memory, "loader": of_loader}, tables, targets)


if __name__ == "__main__":
    sys.exit(main())
