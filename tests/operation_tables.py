"""Tables of operations of jobs with pipelines, timed by recursion over single operations, apart from simdist."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

Key = tuple[int, int, str, int]
"""An operation: data-parallel rank, stage, kind, and number within worker and kind."""
Seconds = Callable[[int, int, str, int], float]
"""Seconds of an operation without waiting."""

GATHER, REDUCE, LATE_REDUCE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
EMBEDDING, CLIP = "embedding-grads-all-reduce", "optimizer-clip-main-grad"


@dataclass(frozen=True)
class PipelineJob:
    """A job; with chunks, all forward passes come first, chunk after chunk, then all backward passes; else 1F1B."""

    n_dp: int = 2
    n_stages: int = 2
    n_batches: int = 2
    n_chunks: int = 1
    overlaps: bool = False

    def passes(self, way: str) -> list[tuple[int, int]]:
        """Return chunk and micro-batch of the computing in a direction, in order."""
        chunks = range(self.n_chunks) if way == "forward" else reversed(range(self.n_chunks))
        return [(chunk, batch) for chunk in chunks for batch in range(self.n_batches)]

    def moved(self, stage: int, way: str, by: int) -> list[tuple[int, int]]:
        """Return what is sent (1) or received (-1), in order."""
        return [each for each in self.passes(way) if self.neighbour(stage, way, each[0], by)]

    def neighbour(self, stage: int, way: str, chunk: int, by: int) -> tuple[int, int] | None:
        """Return stage and chunk of the model chunk behind (1) or before (-1) one, in the direction of a pass."""
        other = chunk * self.n_stages + stage + (by if way == "forward" else -by)
        found = other % self.n_stages, other // self.n_stages
        return found if 0 <= other < self.n_chunks * self.n_stages else None

    def computing(self, dp: int, stage: int) -> list[Key]:
        n = self.n_chunks * self.n_batches
        forward, backward = ([(dp, stage, f"{way}-compute", i) for i in range(n)] for way in ("forward", "backward"))
        ahead = min(self.n_stages - stage, n) if self.n_chunks == 1 else n
        mixed = [each for i in range(n) for each in (backward[i], *forward[ahead + i : ahead + i + 1])]
        return forward[:ahead] + mixed

    def tail(self, dp: int, stage: int) -> list[Key]:
        """Return what a worker does after all computing."""
        shared = [EMBEDDING] if stage in (0, self.n_stages - 1) else []
        reduced = [LATE_REDUCE] if self.overlaps else [REDUCE] * self.n_chunks
        kinds = ["layernorm-grads-all-reduce", *shared, *reduced, CLIP, "optimizer"]
        return [(dp, stage, kind, kinds[:i].count(kind)) for i, kind in enumerate(kinds)]

    def waits(self, key: Key) -> list[Key]:
        """Return what an operation waits for."""
        dp, stage, kind, number = key
        way, _, what = kind.partition("-")
        computing, passes = self.computing(dp, stage), self.passes(way)

        def own(kind: str, number: int) -> list[Key]:
            return [(dp, stage, kind, number)] if number >= 0 else []

        if what == "compute":
            chunk, batch = passes[number]
            found = computing[: computing.index(key)][-1:]
            if way == "forward" and batch == 0:
                found += own(GATHER, chunk)
            received = self.moved(stage, way, -1)
            return found + (own(f"{way}-recv", received.index((chunk, batch))) if (chunk, batch) in received else [])
        if what == "send":
            return own(kind, number - 1) + own(f"{way}-compute", passes.index(self.moved(stage, way, 1)[number]))
        if what == "recv":
            index = passes.index(self.moved(stage, way, -1)[number])
            before = computing[: computing.index((dp, stage, f"{way}-compute", index))][:-1]
            early = before[-1:] if way == "backward" and not index else own(f"{way}-compute", index - 1)
            return own(kind, number - 1) + early
        if kind == GATHER:
            return own(kind, number - 1)
        if kind == REDUCE and self.overlaps:
            earlier = own(REDUCE, number - 1) or own(GATHER, self.n_chunks - 1)
            return earlier + own("backward-compute", (number + 1) * self.n_batches - 1)
        tail = self.tail(dp, stage)
        before = (computing + tail)[: len(computing) + tail.index(key)]
        return before[-1:] + (own(REDUCE, self.n_chunks - 1) if self.overlaps else [])

    def together(self, key: Key) -> list[Key]:
        """Return the operations that start together with one, itself among them."""
        dp, stage, kind, number = key
        way, _, end = kind.partition("-")
        if end in ("send", "recv"):
            by, other = (1, "recv") if end == "send" else (-1, "send")
            chunk, batch = self.moved(stage, way, by)[number]
            there, their_chunk = self.neighbour(stage, way, chunk, by) or (stage, chunk)
            return [key, (dp, there, f"{way}-{other}", self.moved(there, way, -by).index((their_chunk, batch)))]
        dp_ranks = range(self.n_dp) if kind in (GATHER, REDUCE, LATE_REDUCE, CLIP) else [dp]
        stages = {EMBEDDING: {0, self.n_stages - 1}, CLIP: range(self.n_stages)}.get(kind, [stage])
        return [(each, other, kind, number) for each in dp_ranks for other in stages]

    def operations(self) -> list[tuple[Key, dict[str, int]]]:
        """Return all operations of a step, with their chunks and micro-batches."""
        found: list[tuple[Key, dict[str, int]]] = []
        for dp in range(self.n_dp):
            for stage in range(self.n_stages):
                for key in self.computing(dp, stage):
                    chunk, batch = self.passes(key[2].partition("-")[0])[key[3]]
                    found.append((key, {"mc": chunk, "mb_id": batch, "gmc": chunk * self.n_stages + stage}))
                for way in ("forward", "backward"):
                    for end, by in (("send", 1), ("recv", -1)):
                        n = len(self.moved(stage, way, by))
                        found += [((dp, stage, f"{way}-{end}", number), {}) for number in range(n)]
                for chunk in range(self.n_chunks):
                    found.append(((dp, stage, GATHER, chunk), {"mc": chunk}))
                    if self.overlaps:
                        found.append(((dp, stage, REDUCE, chunk), {"mc": self.n_chunks - 1 - chunk}))
                found += [(key, {}) for key in self.tail(dp, stage)]
        return found


def timed(job: PipelineJob, seconds: Seconds) -> list[dict]:
    """Return the rows of one step."""

    @functools.cache
    def start_s(key: Key) -> float:
        return max((end_s(each) for each in job.waits(key)), default=0.0)

    @functools.cache
    def end_s(key: Key) -> float:
        return max(start_s(each) for each in job.together(key)) + seconds(*key)

    return [
        {"dp_rank": key[0], "stage": key[1], "rank": key[1] * job.n_dp + key[0], "optype": key[2], "seq_id": key[3]}
        | {"start_ts": start_s(key), "duration": end_s(key) - start_s(key)}
        | {"mc": -1, "mb_id": -1, "gmc": -1}
        | more
        for key, more in job.operations()
    ]


def table(job: PipelineJob, seconds: Seconds, steps: tuple[int, ...] = (7,)) -> pd.DataFrame:
    """Return a table with the same operations in every step."""
    return pd.DataFrame([row | {"step": step} for step in steps for row in timed(job, seconds)])


def makespan(rows: list[dict]) -> float:
    return max(row["start_ts"] + row["duration"] for row in rows)


def written(folder: Path, frame: pd.DataFrame, name: str = "job.csv") -> Path:
    path = folder / name
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path, index=False)
    return path


def steady(**changed: float) -> Seconds:
    """Return 1 s forward, 2 s backward, and nothing else."""
    kinds = {"forward-compute": 1.0, "backward-compute": 2.0} | {key.replace("_", "-"): s for key, s in changed.items()}
    return lambda dp, stage, kind, number: kinds.get(kind, 0.0)


def random_seconds(seed: int) -> Seconds:
    def drawn(dp: int, stage: int, kind: str, number: int) -> float:
        most = 2.0 if "compute" in kind else 0.5
        return random.Random(f"{seed} {dp} {stage} {kind} {number}").uniform(0.1, most)

    return drawn
