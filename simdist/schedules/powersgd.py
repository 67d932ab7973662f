"""PowerSGD: gradients of matrices are sent as low-rank factors."""

from collections.abc import Sequence
from typing import ClassVar, Literal, final

import numpy as np
from pydantic import Field

from simdist.plan import AllReduce, Buffer, Group, LowRank, Matrix, Op
from simdist.plan.lanes import COMM, COMPUTE
from simdist.plan.optimizers import OptimizerName
from simdist.schedules import parts
from simdist.schedules.gradient import GRADIENT_TRAITS, Exchange, GradientSchedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import REQUIRED, LabelForm, piece, written
from simdist.schedules.tuning import Allowance, Axis
from simdist.settings.units import Whole

_RANKS = (1, 2, 4, 8, 16, 32)  # ranks that `tune` tries
_SEED = 0  # PowerSGDState's `random_seed`


@final
class PowerSGD(GradientSchedule):
    """Send factors P and Q of each matrix M, with M = P Q^T. Their error is added to the next gradient.

    From the previous step's Q: P = M Q, all-reduced; orthonormalize its columns; Q = M^T P, averaged. Every rank then
    has the same P Q^T, the projection of the mean on the columns of P. A matrix of n rows and m columns sends r (n + m)
    numbers instead of n m. Tensors of one dimension, and matrices that save too little, are all-reduced in one buffer.

    As in PyTorch, P is computed on the compute stream, after the bucket's backward pass. The rest overlaps with that
    stream. Uncompressed tensors have no residual, because it would change nothing.

    Source:
        Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
        NeurIPS 2019, arXiv 1905.13727, algorithms 1 and 2;
        torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {},
        {"rank": 4, "warmup_steps": 2, "first_bucket_nbytes": 1000, "bucket_nbytes": 1_000_000},
        {"rank": 2, "min_compression_rate": 1.5, "bucket_nbytes": None, "shared_update": True},
    )

    place: ClassVar[int] = 110
    sends_part: ClassVar[bool] = True
    orthonormalizes: ClassVar[bool] = True
    tried_buckets_nbytes: ClassVar[tuple[int | None, ...]] = (parts.BUCKET_NBYTES, None)

    label_form: ClassVar[LabelForm] = (
        "powersgd",
        (
            piece("rank", before="-", default=REQUIRED),
            piece("min_compression_rate", before="-min", default=2),
            piece("warmup_steps", before="-warmup", default=0),
            *GRADIENT_TRAITS,
        ),
    )
    kind: Literal["powersgd"] = "powersgd"
    rank: Whole = Field(default=1, ge=1)
    """Columns of the factors (`matrix_approximation_rank`), at most the rows or columns of a matrix."""
    min_compression_rate: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """A matrix is sent as factors if these have fewer elements by more than this factor."""
    warmup_steps: Whole = Field(default=0, ge=0)
    """First steps, which all-reduce whole gradients instead (`start_powerSGD_iter`)."""

    @classmethod
    def sending_axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return the factor ranks that send at least the allowed share, or else the highest rank."""
        least = allowed.min_density
        if least is None:
            return ()
        tensors = job.tensor_counts, job.tensor_rows
        ranks = [rank for rank in _RANKS if cls(rank=rank).sent_share(*tensors) >= least]
        return (cls.axis("rank", ranks or _RANKS[-1:]),)

    def default_label(self) -> str:
        """Return the label, such as `powersgd-4` or `powersgd-4-min1.5-warmup100`."""
        return written(self, self.label_form)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return also that factors cannot be sent in half precision."""
        found = super().problems(shape)
        if self.compression == "fp16":
            found.append(("compression", "fp16: factors are sent in the gradients' own type: leave it out"))
        return found

    def workload_problems(self, optimizer: OptimizerName, *, has_rows: bool = True) -> list[tuple[str, str]]:
        """Return also that no tensor is known to be a matrix."""
        found = super().workload_problems(optimizer, has_rows=has_rows)
        hint = "write e.g. {name: weight, count: 1000, rows: 10}"
        return found if has_rows else [*found, ("kind", f"powersgd: no tensor of the workload states its rows: {hint}")]

    def unused_settings(self, shape: Shape) -> list[str]:
        """Return also a sentence if the warm-up never ends."""
        found = super().unused_settings(shape)
        if self.warmup_steps >= shape.n_steps:
            found.append(f"warms up in all of the {shape.n_steps} steps: it is synchronous SGD")
        return found

    def unused_in(self, job: Job) -> list[str]:
        """Return a sentence if it sends no less than synchronous SGD."""
        share = self.sent_share(job.tensor_counts, job.tensor_rows)
        if share == 1:
            return ["sends no matrix as factors: a lower rank or min_compression_rate would"]
        return [f"sends {share:.3g} times as much as whole gradients: write a lower rank"] if share > 1 else []

    def warms_up(self, step: int) -> bool:
        """Tell whether `step` belongs to the warm-up."""
        return step < self.warmup_steps

    def cycle(self, job: Job) -> range:
        """Return the second step after the warm-up, because the first one draws Q."""
        return range(self.warmup_steps + 1, self.warmup_steps + 2)

    def first_exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Draw Q instead of using the previous step's, with the seed that PyTorch uses for the bucket."""
        return self._exchange(sent, number, job, int(np.random.RandomState(_SEED).randint(10**9, size=number + 1)[-1]))

    def exchange(self, sent: Buffer, number: int, job: Job) -> Exchange:
        """Project, all-reduce P, project on that, average Q, multiply."""
        return self._exchange(sent, number, job, None)

    def sent_share(self, counts: Sequence[int], rows: Sequence[int]) -> float:
        """Return the sent share of all elements after the warm-up, given the elements and rows of tensors."""
        tensors = zip(rows, counts, strict=True)
        return sum(self._factor_count(n, count // n) or count for n, count in tensors) / sum(counts)

    def _factor_count(self, rows: int, columns: int) -> int:
        """Return the elements of both factors of a matrix; 0 if it is sent uncompressed."""
        count = min(rows, columns, self.rank) * (rows + columns)
        return count if count * self.min_compression_rate < rows * columns else 0

    def _exchange(self, sent: Buffer, number: int, job: Job, seed: int | None) -> Exchange:
        matrices = self.matrices(sent, job)
        world = Group(job.world_size)
        if not matrices:
            return Exchange((AllReduce(sent.name, world, algorithm=self.algorithm),))
        n_rest = sent.count - sent.padding - sum(matrix.rows * matrix.columns for matrix in matrices)
        left = Buffer(f"left.{number}", sum(each.rank * each.rows for each in matrices), job.dtype)
        right = Buffer(f"right.{number}", sum(each.rank * each.columns for each in matrices), job.dtype)
        rest = Buffer(f"rest.{number}", max(n_rest, 1), job.dtype)
        residual = Buffer(f"residual.{number}", sent.count, job.dtype, initialized=True)

        def stage(name: Literal["left", "right", "product"], seed: int | None = None) -> LowRank:
            others = rest.name if n_rest else None
            names = sent.name, residual.name, left.name, right.name
            return LowRank(name, *names, matrices, others, seed, COMPUTE if name == "left" else COMM)

        ops: list[Op] = [stage("left", seed)]
        ops += [AllReduce(rest.name, world, algorithm=self.algorithm)] if n_rest else []
        ops += [AllReduce(left.name, world, "sum", self.algorithm), stage("right")]
        ops += [AllReduce(right.name, world, algorithm=self.algorithm), stage("product")]
        return Exchange(tuple(ops), buffers=(residual, left, right, *((rest,) if n_rest else ())))

    def matrices(self, sent: Buffer, job: Job) -> tuple[Matrix, ...]:
        """Return the matrices of a bucket that are sent as factors, equal shapes together, in PyTorch's order."""
        assert sent.tensors is not None
        first, last = sent.tensors
        found: dict[tuple[int, int], list[Matrix]] = {}
        end = sent.count - sent.padding
        for tensor in reversed(range(first, last) if job.tensor_rows else ()):
            rows = job.tensor_rows[tensor]
            count = job.tensor_counts[tensor]
            columns = count // rows
            end = end - count
            if self._factor_count(rows, columns):
                matrix = Matrix(end, rows, columns, min(rows, columns, self.rank))
                found.setdefault((rows, columns), []).append(matrix)
        return tuple(matrix for alike in found.values() for matrix in alike)
