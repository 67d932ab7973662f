"""The injections, as data: what goes wrong, where and when, and how the job is to take it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Before = Literal[
    "", "cut newest checkpoint", "cut all checkpoints", "finished", "two runs", "link", "port taken", "read-only"
]
Meanwhile = Literal[
    "", "second start", "folder deleted", "beats alive", "beats failed", "launcher killed", "all killed", "continued"
]


@dataclass(frozen=True, slots=True)
class Injection:
    """What is done to a job, and what is expected of it.

    Args:
        kind: Of the job, see `job.Job`.
        action: See `job.Fault`.
        moment: See `job.Fault`.
        rank: See `job.Fault`; of a second start, the rank that stands for it.
        changes: Fields of the job that are different in all ranks.
        environ: Variables of the ranks.
        absent: The rank is never started.
        before: What is done to the folder first.
        times: How often the job is started with this fault.
        meanwhile: What is done while the rank `waits`.
        secret: The launcher has set `SIMDIST_SECRET`.
        named: Pattern that all other ranks print; by default, the rank. None: the job ends well.
        begins: Step before which a resumed job begins, at least.
        refused: Pattern with which a second try is refused; none if it ends as if undisturbed.
    """

    kind: Literal["script", "own group", "spawn", "real", "torchrun"]
    action: str = ""
    moment: str = ""
    rank: int = 0
    changes: Mapping[str, int] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    absent: bool = False
    before: Before = ""
    times: int = 1
    meanwhile: Meanwhile = ""
    secret: bool = False
    named: str | None = ""
    begins: int = 4
    refused: str = ""

    @property
    def text(self) -> str:
        """What happens, in words."""
        where = f"rank {self.rank} " if self.action or self.absent else ""
        changed = ", ".join(f"{name}={value}" for name, value in (*self.changes.items(), *self.environ.items()))
        moment = f", {self.moment}" if self.moment and self.action != "waits" else ""
        what = "never starts" if self.absent else "" if self.action == "waits" else f"{self.action}{moment}"
        twice = f"{self.times} times" if self.times > 1 else ""
        secret = "with a secret" if self.secret else ""
        return ", ".join(
            filter(None, (self.before, f"{where}{what}" if what else "", twice, self.meanwhile, secret, changed))
        )


def _each(kind: str, actions: str, moments: str, ranks: tuple[int, ...], **more: object) -> list[Injection]:
    return [
        Injection(kind, action, moment.replace("_", " "), rank, **more)  # type: ignore[arg-type]
        for action in actions.split()
        for moment in moments.split()
        for rank in ranks
    ]


FULL, CUT, LINKED = "No space left on device", "cut off or changed", "Too many levels of symbolic links"
INJECTIONS: tuple[Injection, ...] = (
    # a script
    *_each("script", "SIGKILL SIGSTOP", "start", (0, 3), begins=0),
    *_each("script", "SIGKILL SIGTERM SIGSTOP", "Forward AllReduce", (0, 3)),
    *_each("script", "SIGKILL SIGSTOP", "between", (0, 3)),
    *_each("script", "SIGKILL SIGSTOP", "end together", (0, 3), begins=8),
    *_each("script", "SIGSTOP", "between", (0, 3), meanwhile="continued"),
    *_each("script", "SIGINT", "AllReduce", (0, 3)),
    Injection("script", "waits", "between", meanwhile="all killed", named=".*"),
    *_each("script", "raises exits leaves sleeps", "between", (0, 3)),
    Injection("script", rank=3, absent=True, begins=0),
    Injection("script", rank=0, absent=True, begins=0),
    *_each("script", "n_steps=9 hidden=6 period=2", "start", (3,), begins=0, named="on rank 3|on ranks 3"),
    Injection("script", before="port taken", named="cannot host the store|does not answer", begins=0),
    Injection("script", environ={"MASTER_ADDR": "192.0.2.1"}, named="192.0.2.1", begins=0),
    *_each("script", "torn killed", "write_trace.npz", (0,), begins=8),
    *_each("script", "torn killed", "write_trace.", (0,), times=2, begins=8),
    Injection("script", "full", "write trace.npz", named=FULL, begins=8),
    *_each("script", "torn killed", "write_step-0000000006", (0,)),
    Injection("script", "full", "write step-0000000006", named=FULL),
    Injection("script", "fills", "start", named=FULL, begins=0),
    Injection("script", "fills", "between", named=FULL),
    Injection("script", "fills", "together", named=FULL, begins=8),
    Injection("script", "waits", "between", meanwhile="folder deleted", named=None, begins=8),
    Injection("script", before="read-only", named="Read-only file system|may not write", begins=0),
    Injection("script", "waits", "between", meanwhile="second start", named=None, begins=8),
    *_each("script", "waits", "between", (3,), meanwhile="beats failed", secret=True, named=None, begins=8),
    *_each("script", "waits", "between", (3,), meanwhile="beats failed", named="forged by an intruder"),
    *_each("script", "SIGSTOP", "between", (3,), meanwhile="beats alive", secret=True),
    *_each("script", "SIGSTOP", "between", (3,), meanwhile="beats alive", named="rank 3|has not arrived|rank 0"),
    Injection("script", before="cut newest checkpoint", named=None, begins=8),
    Injection("script", before="cut all checkpoints", named=CUT, refused=CUT),
    Injection("script", before="finished", changes={"world_size": 2}, named="on 4 ranks", begins=8),
    Injection("script", before="finished", changes={"period": 2}, named="is of plan", begins=8),
    Injection("script", before="finished", changes={"hidden": 6}, named="is of plan", begins=8),
    Injection("script", before="finished", changes={"n_steps": 5}, named="newest checkpoint is of 8 steps", begins=8),
    # a script with its own process group, which waits for half an hour
    *_each("own group", "SIGKILL SIGSTOP", "AllReduce barrier", (0, 3)),
    *_each("own group", "SIGTERM raises exits leaves sleeps", "between", (3,)),
    *_each("own group", "SIGKILL", "end", (0,), begins=8),
    Injection("spawn", "SIGKILL", "between", 3, named="process 3 terminated"),
    Injection("spawn", "raises", "between", 3, named="bad batch"),
    # python -m real
    *_each("real", "SIGKILL", "start Forward AllReduce together", (0, 1)),
    *_each("real", "SIGTERM SIGSTOP", "Backward", (0, 1)),
    *_each("real", "SIGSTOP", "Backward", (0, 1), meanwhile="continued"),
    Injection("real", "waits", "Forward", meanwhile="all killed", named=".*"),
    Injection("real", rank=1, absent=True),
    *_each("real", "torn killed", "write_trace.real write_real.json", (0,)),
    *_each("real", "torn killed", "write_trace.real", (0,), times=2),
    *_each("real", "full", "write_trace.real write_real.json", (0,), named=FULL),
    *_each("real", "fills", "start Forward together", (0,), named=FULL),
    Injection("real", "waits", "Forward", meanwhile="folder deleted", named="cannot be written", refused="no such run"),
    Injection("real", "waits", "Forward", meanwhile="second start", named=None),
    Injection("real", before="read-only", named="Read-only file system"),
    Injection("real", before="two runs", changes={"world_size": 0}, named="is of run 'another'"),
    Injection("torchrun", "waits", "Forward", meanwhile="launcher killed", named="is gone"),
    Injection("spawn", "waits", "between", meanwhile="launcher killed", named=".*"),
    Injection("script", before="link", named=LINKED, refused=LINKED),
)
