"""Profiles of ranks of jobs of which everything is known, without traces in between."""

from dataclasses import replace

from kineto_truth import Bucket, Delay, Device, Truth, simulate

from simdist.profiles.steps.model import Gradient, RankProfile

__all__ = ["Bucket", "Delay", "Truth", "changed", "profiles_of", "without_input"]


def profiles_of(truth: Truth, device: Device = "cpu", *, hosts: bool = True) -> list[RankProfile]:
    """Return what the traces of a job say, if they are read without error."""
    lived = simulate(truth, device)
    gradients = tuple(
        Gradient(count, bucket.backward_s / len(bucket.counts)) for bucket in truth.buckets for count in bucket.counts
    )
    return [
        RankProfile(
            path=f"rank{rank}.json",
            rank=rank,
            world_size=truth.n_ranks,
            hostname=f"node{rank // truth.gpus_per_node}" if hosts else None,
            local_gpu=rank % truth.gpus_per_node if device == "cuda" else None,
            n_gpus=truth.gpus_per_node if device == "cuda" else None,
            device=device,
            device_name="",
            backend="gloo" if device == "cpu" else "nccl",
            steps=tuple(each.step for each in lived[rank]),
            gradients=gradients if truth.shapes else (),
            dtype="float32",
            batch_size=truth.batch_size,
            host_waits=not truth.run_ahead,
            notes=(),
        )
        for rank in range(truth.n_ranks)
        if rank not in truth.missing
    ]


def without_input(**parameters: object) -> Truth:
    """Return a job whose batches are there already."""
    return Truth(input_s=0.0, copy_s=0.0, **parameters)


def changed(profiles: list[RankProfile], rank: int, **changes: object) -> list[RankProfile]:
    """Return the profiles, one of them changed."""
    return [replace(each, **changes) if each.rank == rank else each for each in profiles]
