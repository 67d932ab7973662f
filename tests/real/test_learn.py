"""`python -m real.learn`: what it answers, and closed forms of what training by a schedule comes to."""

import io
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from timeouts import TIMEOUT_S

torch = pytest.importorskip("torch")

from real.learn import main  # noqa: E402
from real.models.tasks import CURVATURES, TASKS  # noqa: E402
from simdist.learning.training import describe  # noqa: E402
from simdist.plan import codec  # noqa: E402
from simdist.schedules import HierarchicalSGD, Job, LocalSGD, Schedule, Sync  # noqa: E402

LR, N_SAMPLES, N_RANKS = 0.5, 4, 8  # of the task `quadratic`

LINES = {
    "imports": "import torch",
    "make": "def make(rank):\n    m = torch.nn.Linear(3, 2)\n    return m, torch.optim.SGD(m.parameters(), lr=0.1)",
    "loss": "def loss(outputs, targets):\n    return (outputs - targets).square().mean()",
    "batch": "def batch(step, rank):\n    g = torch.Generator().manual_seed(100 * step + rank)\n"
    "    return torch.randn(5, 3, generator=g), torch.randn(5, 2, generator=g)",
    "evaluate": "def evaluate(module):\n    return module.weight.norm().item()",
}


def ask(request: Mapping[str, object]) -> tuple[int, list[dict]]:
    out = io.StringIO()
    status = main(io.StringIO(json.dumps(request)), out)
    return status, [json.loads(line) for line in out.getvalue().splitlines()]


def task(folder: Path, **changed: str) -> str:
    path = folder / "task.py"
    path.write_text("\n".join((LINES | changed).values()))
    return str(path)


def learn(folder: Path, schedule: Schedule, name: str, n_steps: int, n_ranks: int = N_RANKS, **more) -> list[dict]:
    micro_batches = more.pop("micro_batches", 1)
    _, [described] = ask({"describe": True, "task": name})
    counts = tuple(math.prod(shape) for _, shape, _ in described["tensors"])
    job = Job(
        n_ranks,
        n_ranks // 2,
        n_steps,
        tensor_counts=counts,
        dtype=described["tensors"][0][2],
        micro_batches=micro_batches,
    )
    codec.save(schedule.plan(job), folder / "plan.json")
    status, lines = ask({"plan": str(folder / "plan.json"), "task": name, **more})
    assert status == 0, lines
    return lines


@pytest.mark.parametrize("name", TASKS)
def test_tasks_that_ship_learn_at_once(name: str, tmp_path: Path) -> None:
    header, how, *found, done = learn(tmp_path, LocalSGD(period=4), name, 10, n_ranks=4, evaluate_every=4)
    assert (header["ranks"], how) == (4, {"batched": True, "why": None})
    assert header["memory_nbytes"] > 10**8
    assert [(each["step"], len(each["losses"])) for each in found] == [(0, 0), (4, 4), (8, 4), (10, 2)]
    assert found[-1]["average"]["loss"] < found[0]["average"]["loss"] or name == "split"
    assert (found[1]["drift"], found[2]["drift"]) == (0.0, 0.0)
    assert found[3]["drift"] > 0
    lowest, highest = found[-1]["ranks"]["loss"]
    assert lowest <= found[-1]["rank0"]["loss"] <= highest
    assert done["done"]


@pytest.mark.parametrize("period", [1, 4])
def test_a_noisy_quadratic_follows_its_closed_form(period: int, tmp_path: Path) -> None:
    schedule = LocalSGD(period=period) if period > 1 else Sync()
    runs = [learn(tmp_path, schedule, "quadratic", 18, seed=seed, evaluate_every=3)[2:-1] for seed in range(25)]
    shrinks, curvatures = 1 - LR * CURVATURES.numpy(), CURVATURES.numpy()
    for at, step in enumerate(row["step"] for row in runs[0]):
        geometric = (1 - shrinks ** (2 * step)) / (1 - shrinks**2)
        average = shrinks ** (2 * step) + LR**2 / N_SAMPLES / N_RANKS * geometric
        apart = LR**2 / N_SAMPLES * (1 - 1 / N_RANKS) * (1 - shrinks ** (2 * (step % period))) / (1 - shrinks**2)
        for who, moment in (("average", average), ("rank0", average + apart)):
            losses = np.array([run[at][who]["loss"] for run in runs])
            expected = float(curvatures @ moment / 2)
            error = losses.std(ddof=1) / len(losses) ** 0.5
            assert abs(losses.mean() - expected) <= 3 * error + 1e-12, (step, who)


def test_levels_keep_ranks_between_their_shortest_and_their_longest_period(tmp_path: Path) -> None:
    schedules = [
        LocalSGD(period=2),
        HierarchicalSGD(levels={2: 4, 8: 8}, intra_node_gradients=False),
        LocalSGD(period=8),
    ]
    drifts = [
        np.mean([line["drift"] for line in learn(tmp_path, each, "quadratic", 32, evaluate_every=1)[2:-1]])
        for each in schedules
    ]
    assert drifts[0] < 0.9 * drifts[1] < 0.8 * drifts[2]


def test_noise_scale_is_variance_over_squared_gradient(tmp_path: Path) -> None:
    rows = [learn(tmp_path, Sync(), "quadratic", 1, n_ranks=64, seed=seed)[2] for seed in range(10)]
    expected = len(CURVATURES) / float(CURVATURES.square().sum())
    assert np.mean([row["noise_scale"] for row in rows]) == pytest.approx(expected, rel=0.05)


def test_curvature_is_that_of_the_loss_along_the_drift(tmp_path: Path) -> None:
    at = [learn(tmp_path, LocalSGD(period=4), "quadratic", 1, n_ranks=64, seed=seed)[3] for seed in range(10)]
    shrinks, curvatures = 1 - LR * CURVATURES.numpy(), CURVATURES.numpy()
    square = float((shrinks**2).sum())  # of the average's norm; after one step, ranks drift alike in all directions
    assert np.mean([row["curvature"] for row in at]) == pytest.approx(square * curvatures.mean(), rel=0.05)
    together = learn(tmp_path, Sync(), "quadratic", 1)[3]
    assert (together["drift"], together["curvature"]) == (0.0, None)


def test_rates_clipping_schedulers_and_passes_are_the_loop_s_own(tmp_path: Path) -> None:
    scheduled = LINES["make"].replace("\n    return m, ", "\n    o = ") + (
        "\n    return m, o, torch.optim.lr_scheduler.ExponentialLR(o, 0.9)\nmax_norm = 0.2"
    )
    at_once, alone = (
        learn(
            tmp_path, LocalSGD(period=3), task(tmp_path, make=make), 6, lr_factor=2.0, micro_batches=2, evaluate_every=4
        )
        for make in (
            scheduled,
            scheduled.replace("    return m, o", "    m.add_module(str(rank), torch.nn.Identity())\n    return m, o"),
        )
    )
    assert at_once[1]["why"] is None
    assert "rank 1 has another" in alone[1]["why"]
    namespace: dict = {}
    exec(Path(task(tmp_path, make=scheduled)).read_text(), namespace)
    ranks = []
    for rank in range(N_RANKS):
        torch.manual_seed(0)
        ranks.append(namespace["make"](rank))
    for optimizer in (each[1] for each in ranks):
        optimizer.param_groups[0]["lr"] *= 2
    for step in range(6):
        for rank, (module, optimizer, scheduler) in enumerate(ranks):
            optimizer.zero_grad()
            for number in (2 * step, 2 * step + 1):
                inputs, targets = namespace["batch"](number, rank)
                (namespace["loss"](module(inputs), targets) / 2).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.2)
            optimizer.step()
            scheduler.step()
        if step % 3 == 2:
            for tensors in zip(*(each[0].parameters() for each in ranks), strict=True):
                mean = torch.stack([each.detach() for each in tensors]).mean(dim=0)
                for each in tensors:
                    each.data.copy_(mean)
    expected = {"metric": pytest.approx(ranks[0][0].weight.norm().item(), rel=1e-6)}
    assert at_once[-2]["rank0"] == expected
    assert alone[-2]["rank0"] == expected
    for name in ("noise_scale", "curvature"):
        one, other = ([each[name] for each in lines[2:-1]] for lines in (at_once, alone))
        assert any(one)
        assert one == pytest.approx(other, rel=2e-3)  # of differences of losses, in float32


@pytest.mark.parametrize(
    ("changed", "status", "message"),
    [
        ({"loss": ""}, 2, "there is no function `loss`"),
        ({"imports": "import no_such_module"}, 2, "cannot be run: ModuleNotFoundError: No module named 'no_such_mod"),
        ({"make": "def make(rank):\n    return 3"}, 2, "make(0) returns int; it should return (module, optimizer)"),
        ({"batch": "def batch(step, rank):\n    return 1, 2"}, 2, "batch(0, 0) returns ['int', 'int']; it should"),
        ({"loss": "def loss(outputs, targets):\n    return outputs"}, 2, "loss returns Tensor of shape [5, 2]; it sh"),
        ({"evaluate": "def evaluate(module):\n    return 'good'"}, 2, "evaluate returns str; it should return a numb"),
        ({"evaluate": "def evaluate(module):\n    return {}"}, 2, "evaluate returns {}; it should return a metric"),
        (
            {"evaluate": "def evaluate(module):\n    return {'a': '0.7'}"},
            2,
            "evaluate returns {'a': 'str'}; it should",
        ),
        ({"imports": "import torch\nmax_norm = '1'"}, 2, "max_norm is '1'; it should be a number above 0"),
        ({"imports": "import torch\nautocast = True"}, 2, "autocast is True; write torch.bfloat16 or torch.float16"),
        (
            {"make": LINES["make"].replace("Linear(3, 2)", "Linear(3, 2, bias=rank == 0)")},
            2,
            "make(1) makes another model than make(0): Error(s) in loading state_dict for Linear: Unexpected key(s)",
        ),
        ({"loss": "def loss(outputs, targets):\n    raise SystemExit('bye')"}, 1, "task.py, line 6: SystemExit: bye"),
        (
            {"evaluate": "calls = []\ndef evaluate(module):\n    calls.append(0)\n    return {f'm{len(calls)}': 0}"},
            2,
            "evaluate returns {'m2': 'int'}; it should return m1, as it did before",
        ),
        (
            {
                "make": LINES["make"].replace(
                    "torch.optim.SGD(m.parameters(), lr=0.1)", "torch.optim.LBFGS(m.parameters())"
                )
            },
            2,
            "make(0) returns LBFGS, whose `step` takes more than the gradients",
        ),
        (
            {
                "loss": "def loss(outputs, targets):\n    nll = torch.nn.functional.nll_loss\n"
                "    return nll(outputs, targets.int())"
            },
            1,
            "task.py, line 7: RuntimeError",
        ),
        ({"evaluate": "def evaluate(module):\n    return 1 / 0"}, 1, "task.py, line 11: ZeroDivisionError: division"),
        (
            {"loss": "def loss(outputs, targets):\n    return outputs.mean() * (targets[0, 0] - 1).neg().log()"},
            1,
            "the loss of rank 1 at step 1 is nan",
        ),
    ],
)
def test_a_bad_task_gets_one_clear_error(changed: dict, status: int, message: str, tmp_path: Path) -> None:
    codec.save(Sync().plan(Job(2, 2, 3, tensor_counts=(6, 2))), tmp_path / "plan.json")
    ended, lines = ask({"plan": str(tmp_path / "plan.json"), "task": task(tmp_path, **changed)})
    assert ended == status
    assert message in lines[-1]["error"]
    assert lines[-1].get("diverged") == ("the loss of rank" in message or None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {
                "batch": "data = iter(torch.randn(99, 5, 3))\ndef batch(step, rank):\n"
                "    return next(data), torch.ones(5, 2)"
            },
            "batch(0, 0) is another when it is asked for again",
        ),
        (
            {"make": LINES["make"].replace("\n    return", "\n    m.requires_grad_(False)\n    return")},
            "the model of make(0) has no parameter that is trained",
        ),
        (
            {"make": LINES["make"].replace("SGD(m.", "SGD(torch.nn.Linear(3, 2).")},
            "the optimizer of make(0) updates parameters that are not its model's",
        ),
        (
            {"batch": "def batch(step, rank):\n    return torch.ones(0, 3), torch.ones(0, 2)"},
            "tensors with samples",
        ),
        (
            {"batch": "def batch(step, rank):\n    return torch.ones(5, 3).double(), torch.ones(5, 2)"},
            "but got Double and Float (of batch(0, 0), float64 [5, 3] and float32 [5, 2])",
        ),
    ],
)
def test_a_task_that_cannot_be_learned_is_refused_when_it_is_described(
    changed: dict, message: str, tmp_path: Path
) -> None:
    status, [line] = ask({"task": task(tmp_path, **changed), "describe": True})
    assert status == (1 if "Double" in message else 2)
    assert message in line["error"]


def test_a_model_of_which_not_even_a_step_fits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("real.learn.free_memory_nbytes", lambda: 95)
    status, [line] = ask({"task": task(tmp_path), "describe": True})
    assert status == 1
    assert "a step of a single rank takes 9.6e-08 GB or more, and less is free: take a smaller model" in line["error"]


def test_memory_is_what_the_process_then_takes(tmp_path: Path) -> None:
    _, [described] = ask({"describe": True, "task": "text"})
    counts = tuple(math.prod(shape) for _, shape, _ in described["tensors"])
    codec.save(Sync().plan(Job(64, 8, 2, tensor_counts=counts)), tmp_path / "plan.json")
    request = json.dumps({"plan": str(tmp_path / "plan.json"), "task": "text", "evaluate_every": 1})
    script = f"import io, sys; from real.learn import main, process_nbytes; main(io.StringIO({request!r}), sys.stdout)"
    ended = subprocess.run(
        [sys.executable, "-c", f"{script}; print(process_nbytes())"], capture_output=True, text=True, check=True
    )
    header, *_, taken_nbytes = ended.stdout.splitlines()
    assert int(taken_nbytes) == pytest.approx(json.loads(header)["memory_nbytes"], rel=0.15)


def test_tasks_are_run_as_scripts_are_and_ranks_begin_alike(tmp_path: Path) -> None:
    """A file beside the task is found; each rank has its own parameters; the model keeps what it computes."""
    (tmp_path / "beside.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def forward(self, x):\n"
        "        self.last = super().forward(x)\n"
        "        return self.last\n"
    )
    make = LINES["make"].replace("m = torch.nn.Linear", "torch.manual_seed(rank)\n    m = Net")
    path = task(tmp_path, imports="import torch\nfrom beside import Net", make=make)
    _, how, *found, _ = learn(tmp_path, Sync(), path, 3, evaluate_every=1)
    assert how["why"] is None
    assert [row["drift"] for row in found] == [0.0] * 4
    assert len({row["average"]["metric"] for row in found}) == 4


def test_half_precision_is_that_of_each_rank(tmp_path: Path) -> None:
    """Convolutions of all ranks at once round otherwise in bfloat16 than each alone; matrices do not."""
    images = ", ".join(
        f"torch.nn.Conv2d({n_in}, {n_out}, 3, padding=1), torch.nn.BatchNorm2d({n_out}), torch.nn.ReLU(), {pool}"
        for n_in, n_out, pool in ((3, 8, "torch.nn.MaxPool2d(2)"), (8, 16, "torch.nn.AdaptiveAvgPool2d(1)"))
    )
    changed = {
        "imports": "import torch\nautocast = torch.bfloat16",
        "batch": LINES["batch"].replace("torch.randn(5, 3,", "torch.randn(5, 3, 8, 8,"),
        "evaluate": "def evaluate(module):\n    return module(torch.ones(1, 3, 8, 8)).sum()",
    }
    for layers, at_once in ((images, False), ("torch.nn.AdaptiveAvgPool2d(1)", True)):
        n_inputs = 3 if at_once else 16
        layer = f"torch.nn.Sequential({layers}, torch.nn.Flatten(), torch.nn.Linear({n_inputs}, 2))"
        half = task(tmp_path, make=LINES["make"].replace("torch.nn.Linear(3, 2)", layer), **changed)
        _, how, *_ = learn(tmp_path, Sync(), half, 2, n_ranks=4)
        assert how["batched"] is at_once, how["why"]
        assert at_once or how["why"] == "with all ranks at once, the gradient of a rank would not be the same"


def test_what_lies_where_it_is_started_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert describe("quadratic", 1).metrics == ("loss",)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"task": "digit"}, "there is no such Python file; tasks that ship: digits, text, quadratic, split"),
        ({"task": "digits", "lr": 1}, "lr: Unexpected keyword"),
        ({"task": "digits", "lr_factor": 0}, "lr_factor: Input should be greater than 0"),
        ({"task": "digits", "plan": "nowhere.json"}, "nowhere.json: cannot be read as a plan"),
    ],
)
def test_bad_requests_are_refused(request_: dict, message: str) -> None:
    status, lines = ask(request_)
    assert status == 2
    assert message in lines[0]["error"]


def test_a_plan_that_does_not_fit_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    codec.save(Sync().plan(Job(2, 2, 3, tensor_counts=(10**13, 2))), tmp_path / "plan.json")
    status, lines = ask({"plan": str(tmp_path / "plan.json"), "task": task(tmp_path)})
    assert (status, len(lines), lines[0]["memory_nbytes"] > 8e13) == (1, 2, True)
    assert "GB for its buffers and beside them; the host has" in lines[1]["error"]


def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    request = json.dumps({"describe": True, "task": task(tmp_path)}).encode()
    process = subprocess.Popen(
        [sys.executable, "-m", "real.learn"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    process.stdin.write(request)
    process.stdin.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait() == 0


def test_it_ends_with_who_asked(tmp_path: Path) -> None:
    path, up = tmp_path / "endless.py", tmp_path / "up"
    path.write_text(f"import pathlib, time\npathlib.Path({str(up)!r}).touch()\ntime.sleep(600)\n")
    request = json.dumps({"task": str(path), "describe": True}).encode()
    ask = f"import subprocess, sys; subprocess.run([sys.executable, '-m', 'real.learn'], input={request!r})"
    asker = subprocess.Popen([sys.executable, "-c", ask])
    _until(up.exists)
    (child,) = Path(f"/proc/{asker.pid}/task/{asker.pid}/children").read_text().split()
    asker.kill()
    asker.wait()
    _until(lambda: not Path(f"/proc/{child}").exists())


def _until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)
