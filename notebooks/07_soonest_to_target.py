# %% [markdown]
# # Which schedule trains my model soonest?
#
# **Question.** A schedule that averages rarely has short steps, and may learn less in each. Which schedule trains a
# model soonest, and what does a small task say about a large one?
#
# **Answer.** It depends more on the data than on the cluster. If all ranks have similar data, hierarchical SGD reaches
# the target sooner than synchronous SGD: its steps are shorter, and it needs no more of them. Local SGD needs more, and
# four seeds do not tell whether it is sooner. If each rank has its own kind of data, local SGD is later although its
# steps are the shortest, and hierarchical SGD cannot be distinguished from synchronous SGD. Drift shows which schedule
# may lose. A bound based on drift is far above the truth if drift costs nothing. A small task shows which terms matter,
# but not how much.
#
# **Source.** The noise scale is that of [arXiv 1812.06162](https://arxiv.org/abs/1812.06162). Hierarchical SGD is
# analysed by Wang, Wang, Chen and Ji, [arXiv 2010.12998](https://arxiv.org/abs/2010.12998). The bound below is not
# their theorem: in the task here, all ranks have similar data, drift has a closed form, and the bound is derived.
#
# Curves are recorded, because they take minutes. This records them again; do the same with `split`:
#
#     simdist learn notebooks/data/learning.yaml --task digits --evaluate-every 8 --seeds 4 \
#         --target "accuracy >= 0.7" -o notebooks/data/learning/digits

# %%
# %matplotlib inline
from pathlib import Path

import numpy as np
import torch

from real.execution import virtual
from real.models.tasks import CURVATURES, TaskFunctions
from simdist.files import read_jsonl
from simdist.learning.curves import Curve, parse_target
from simdist.learning.summary import Learned, curves_record, learned_row
from simdist.learning.timing import timed, training_plan
from simdist.learning.training import TaskSetting
from simdist.report.figures import panels
from simdist.report.learning import learning_figure
from simdist.report.palette import BLACK, BLUE, GREEN, VERMILLION
from simdist.scenario import load
from simdist.scenario.sampling import run_seeds
from simdist.studies.columns import Column, factor_with_interval, seconds_with_interval
from simdist.studies.tables import table_text

torch.set_num_threads(1)
scenario = load("data/learning.yaml")
target = parse_target("accuracy >= 0.7")
N_SEEDS = 4


def described(task):
    """Return what a plan must know of a task."""
    tensors = ((name, tuple(each.shape), str(each.dtype)[6:]) for name, each in task.make(0)[0].named_parameters())
    return TaskSetting("task", tuple(tensors), "task", evaluate_every=8)


def recorded(name):
    """Put recorded curves and simulated times together."""
    rows = {(row["schedule"], row["seed"]): row for row in read_jsonl(Path(f"data/learning/{name}/rows.jsonl"))}
    setting, found = described(TaskFunctions(name, 0)), []
    for schedule in scenario.schedules:
        keep = [rows[schedule.name, seed] for seed in run_seeds(scenario.seed, N_SEEDS)]
        curves = [Curve(**{field: row[field] for field in Curve.__dataclass_fields__}) for row in keep]
        found.append(Learned(timed(scenario, schedule, setting, n_seeds=N_SEEDS), curves))
    return found


learned = {name: recorded(name) for name in ("digits", "split")}

# %% [markdown]
# ## By step, and by time
#
# 16 ranks on four nodes train two small tasks, with the exact values of all ranks. In `digits`, all ranks have similar
# data. In `split`, seven of eight samples of a rank show one of two digits. Times are those of ResNet-50 on the same
# nodes, with one in fifty late by 200 ms in a step.

# %%
figure = learning_figure(curves_record(learned["digits"], target, title="digits: data alike on all ranks"))
figure.axes[0].set_ylabel("accuracy of the average model (share)")
figure

# %% [markdown]
# *Figure 1. Accuracy of the average of all ranks on `digits`, by step and by simulated time; means of 4 seeds.*
#
# **Result.** Local SGD, hierarchical SGD and DiLoCo learn nearly as much per step as `sync`, and have shorter steps.
# Top-k of one value in a hundred learns least per step, at this learning rate.

# %%
figure = learning_figure(curves_record(learned["split"], target, title="split: each rank has its own digits"))
figure.axes[0].set_ylabel("accuracy of the average model (share)")
figure

# %% [markdown]
# *Figure 2. The same on `split`.*
#
# **Result.** The less often ranks average with ranks that have other data, the less they learn per step. Shorter steps
# do not make up for it.

# %% [markdown]
# ## To the target
#
# Intervals are 95 % confidence intervals over the seeds, paired with those of `sync`.

# %%
columns = (
    Column("schedule"),
    Column("speed-up per step", "speedup", "speedup_ci95", form=factor_with_interval),
    Column("steps to target", "steps_to_target", form="{:,.0f}".format),
    Column("time to target", "target_s", "target_s_ci95", form=seconds_with_interval),
    Column("speed-up to target", "target_speedup", "target_speedup_ci95", form=factor_with_interval),
)
for name, found in learned.items():
    rows = [learned_row(each, found[0], target) for each in found]
    print(table_text(f"{name}: {target}", columns, rows), end="\n\n")

# %% [markdown]
# By step all but top-k look alike: 1.3 to 1.4 times as fast. To the target, `digits` keeps 1.35 for hierarchical and
# 1.09 for local SGD. Four seeds cannot distinguish local SGD and DiLoCo from `sync`. On `split`, local SGD takes twice
# the steps and loses, and DiLoCo loses, too. The interval of hierarchical SGD contains 1. Top-k loses on both tasks:
# its step is faster by a sixth, but it needs three to four times the steps. The 95 % intervals of four seeds are wide.

# %% [markdown]
# ## The terms of the theory
#
# Theory depends on three terms: the noise of gradients, the drift of ranks between averages, and the cost of drift. The
# cost is measured directly, as the loss of the average model against the mean loss of the ranks' models. To second
# order, the difference is half the curvature along the drift, times the mean square of the drift. These runs are in
# float64, with 48 steps.


# %%
def trained(name, label, n_steps, seed=0, on_step=None):
    """Train a task in float64 by a schedule."""
    task = TaskFunctions(name, seed)

    def make(rank):
        module, optimizer, _ = task.make(rank)
        module.double()
        return module, optimizer

    def batch(step, rank):
        inputs, targets = task.batch(step, rank)
        return inputs.double(), targets

    tensors = tuple((each, tuple(p.shape), "float64") for each, p in make(0)[0].named_parameters())
    (schedule,) = (each for each in scenario.schedules if each.name == label)
    plan = training_plan(scenario.changed(steps=n_steps), schedule, TaskSetting("task", tensors, "task", 8))
    return virtual.train_together(plan, make, task.loss, batch, seed=seed, on_step=on_step, batched=True)


def stacked(modules):
    """Return parameters of all ranks, `[16, n]`."""
    return torch.stack([torch.cat([each.detach().flatten() for each in module.parameters()]) for module in modules])


def anatomy(name, label, n_steps=48):
    """Return drift, its mean square, mean loss of the ranks' models and loss of their average, after each step."""
    task, rows = TaskFunctions(name, 0), []
    probes = [task.batch(10_000 + number, rank) for number in range(2) for rank in range(16)]
    inputs, targets = torch.cat([each for each, _ in probes]).double(), torch.cat([each for _, each in probes])
    average, *_ = task.make(0)
    average.double()

    @torch.no_grad()
    def note(_step, modules):
        vectors = stacked(modules)
        mean = vectors.mean(dim=0)
        torch.nn.utils.vector_to_parameters(mean, average.parameters())
        losses = [task.loss(module(inputs), targets).item() for module in modules]
        square = (vectors - mean).square().sum(dim=1).mean()
        together = task.loss(average(inputs), targets).item()
        rows.append(((square.sqrt() / mean.norm()).item(), square.item(), np.mean(losses), together))

    trained(name, label, n_steps, on_step=note)
    return np.round(np.array(rows), 7)


labels = {"local-8": VERMILLION, "hsgd-2-4,8-world": GREEN}
found = {label: anatomy("split", label) for label in labels}
figure, (left, right) = panels(2, height_in=3.8)
steps = np.arange(1, 49)
for label, colour in labels.items():
    drift, _, apart, together = found[label].T
    left.plot(steps, 100 * drift, color=colour)
    right.plot(steps, apart, color=colour, linestyle="--", label=f"{label}: mean of the ranks")
    right.plot(steps, together, color=colour, label=f"{label}: their average")
left.set(xlabel="steps", ylabel="drift (% of the parameters' norm)", ylim=(0, None))
right.set(xlabel="steps", ylabel="loss per sample on data of all ranks")
figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
figure

# %% [markdown]
# *Figure 3. After each step of `split`: distance of ranks from their average, and losses on one batch that all ranks
# share. Solid: loss of the average model; dashed: mean loss of the ranks' models.*
#
# **Result.** Drift is a saw-tooth, and averages within nodes cut it from 36 % to 21 % of the parameters' norm, before
# an average of all ranks. Between averages, the ranks' models get worse on data of all ranks, but their average does
# not. The solid line of local SGD falls more slowly, which is the cost of its drift.

# %%
for name in learned:
    for when, part in (("first", slice(1, 11)), ("last", slice(-11, None))):
        told = [scale for curve in learned[name][0].curves for scale in curve.noise_scale[part]]
        scales = [scale for scale in told if scale]
        if scales:
            scale = f"{np.median(scales):,.0f} samples, in {len(scales)} of {len(told)} evaluations that tell it"
            print(f"{name}, sync, {when} 80 steps: median noise scale {scale}")
for label in labels:
    drift, square, apart, together = found[label][6::8].T  # each step before an average of all
    print(
        f"split, {label}, before an average of all: drift {drift.mean():.1%}, loss of ranks {apart.mean():.2f}, of "
        f"their average {together.mean():.2f}, curvature {np.mean(2 * (apart - together) / square):.2f}"
    )

# %% [markdown]
# ## A bound and the truth
#
# On `quadratic`, f, its smoothness L = 1 and the variance of a batch's gradient, s² = 10 / 4, are known. Groups of m of
# the n ranks average every I steps, all ranks every G. Consider ranks i steps after an average of their group and g
# steps after one of all. For each coordinate of curvature c, with a = 1 - r c and V(k) = r² / 4 (1 - a^2k) / (1 - a²),
# their mean square distance from the average of all is
#
#     D = (1 - 1/m) V(i) + (1/m - 1/n) V(g)
#
# The terms are the noise of a rank within its group, and the noise of groups. This is exact; local SGD has m = 1. Now
# take any f with an L-Lipschitz gradient and r L <= 1. With -x y = ((x - y)² - x² - y²) / 2 and a mean square error of
# its gradient of at most L² D, one step of the average gives
#
#     mean |grad f|² <= 2 (f(0) - f*) / (r T) + r L s² / n + L² mean D
#
# Because V(k) <= r² k / 4, the mean square D is at most r² s² ((1 - 1/m) i + (1/m - 1/n) g). So a hierarchy is between
# local SGD with its shorter and with its longer period, like the published bound with random groups.

# %%
RATE, N, SEEDS, N_STEPS = 0.5, 16, 6, 64
curvatures = CURVATURES.numpy()
shrinks = 1 - RATE * curvatures
every = np.arange(N_STEPS)  # steps done


def variance(k):
    """Of a rank's own noise, k steps after it had none, `[n_steps, 10]`."""
    return RATE**2 / 4 * (1 - shrinks ** (2 * np.asarray(k)[:, None])) / (1 - shrinks**2)


def drift_of(group, inner, outer):
    """Mean square distance from the average, `[n_steps]`."""
    within = (1 - 1 / group) * variance(every % inner)
    return (within + (1 / group - 1 / N) * variance(every % outer)).sum(axis=1)


drifts = {
    "sync": np.zeros(N_STEPS),
    "local-8": drift_of(1, 8, 8),
    "hsgd-2-4,8-world": drift_of(4, 2, 8),
}
colours = {"sync": BLUE, **labels}
moment = shrinks ** (2 * every[:, None]) + variance(every) / N
running = np.cumsum((curvatures**2 * moment).sum(axis=1)) / (every + 1)

over_truth = {}
figure, (left, right) = panels(2, height_in=3.8)
for label, exact in drifts.items():
    apart, gradients = [], []
    for seed in range(SEEDS):
        vectors = []
        trained("quadratic", label, N_STEPS, seed, on_step=lambda _, modules, to=vectors: to.append(stacked(modules)))
        ranks = np.stack([np.ones((N, 10)), *(each.numpy() for each in vectors[:-1])])
        mean = ranks.mean(axis=1)
        apart.append(((ranks - mean[:, None]) ** 2).sum(axis=2).mean(axis=1))
        gradients.append(((curvatures * mean) ** 2).sum(axis=1))
    measured = np.cumsum(np.mean(gradients, axis=0)) / (every + 1)
    bound = curvatures.sum() / (RATE * (every + 1)) + RATE * 2.5 / N + np.cumsum(exact) / (every + 1)
    left.plot(every, exact, color=colours[label])
    left.plot(every, np.round(np.mean(apart, axis=0), 9), ".", color=colours[label])
    right.plot(every + 1, np.round(measured, 9), ".", color=colours[label])
    right.plot(every + 1, bound, "--", color=colours[label], label=f"bound, {label}")
    share = np.cumsum(exact)[-1] / N_STEPS / bound[-1]
    over_truth[label] = bound[-1] / measured[-1]
    said = f"measured {measured[-1]:.3f}, exact {running[-1]:.3f}, bound {bound[-1]:.3f}"
    print(f"{label}, squared gradient, mean of {N_STEPS} steps: {said}, of which drift {share:.0%}")
right.plot(every + 1, running, color=BLACK, label="exact, all schedules")
left.set(xlabel="steps", ylabel="mean square of drift (per rank)", ylim=(0, None))
right.set(xlabel="steps", ylabel="mean squared gradient (per step so far)", yscale="log")
figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
figure

# %% [markdown]
# *Figure 4. `quadratic` on 16 ranks. Left: drift; lines are the closed form, dots the mean of 6 runs. Right: squared
# gradient at the average model; dots are the mean of 6 runs, the line is exact, dashes are the bound.*
#
# **Result.** Drift matches the closed form. On this task it costs nothing: the gradient is linear, so drift does not
# affect the average of the ranks. The bound must hold for every equally smooth f, so it charges drift in full: it is 3
# times the truth for `sync`, 12 times for hierarchical SGD, 29 times for local SGD, and mostly drift.

# %% [markdown]
# ## Conclusions for a large model
#
# Step times need no small model, because they are simulated for the large one. The noise scale shows whether averages
# of more ranks pay, and can be measured on the large model with one GPU. On `split`, it also includes the differences
# between the data of ranks. The order of schedules by drift, and so by bounds, carries over if data are distributed
# over ranks in the same way. It shows which schedules may lose, not which do. The cost of drift depends on how the
# curvature changes along it, from nothing on `quadratic` to twice the steps on `split`. So only a task with similar
# data and a similar model shows it. Steps to a target, final accuracy, the best learning rate, and gains smaller than
# the intervals above do not carry over.

# %% [markdown]
# ## The numbers of the text
#
# Each line is a phrase of the text above, computed from the results.

# %%
reached = {
    name: {each["schedule"]: each for each in (learned_row(one, of_task[0], target) for one in of_task)}
    for name, of_task in learned.items()
}


def holds_one(name, label):
    """Say whether the interval of a speed-up to the target holds 1."""
    low, high = reached[name][label]["target_speedup_ci95"]
    return low <= 1 <= high


def steps(name, label):
    """Return how many times as many steps as synchronous SGD a schedule takes to the target."""
    return reached[name][label]["steps_to_target"] / reached[name]["sync"]["steps_to_target"]


top_k = "hitopk-0.01-mstopk"
step_gains = [each["speedup"] for label, each in reached["digits"].items() if label not in ("sync", top_k)]
digits_gains = {label: each["target_speedup"] for label, each in reached["digits"].items()}
assert all(holds_one("digits", label) for label in ("local-8", "diloco-8"))
assert steps("digits", "hsgd-2-4,8-world") < 1 < steps("digits", "local-8")
assert reached["digits"]["hsgd-2-4,8-world"]["target_speedup_ci95"][0] > 1
assert holds_one("split", "hsgd-2-4,8-world")
assert all(reached["split"][label]["target_speedup_ci95"][1] < 1 for label in ("local-8", "diloco-8"))
assert all(reached[name][top_k]["target_speedup_ci95"][1] < 1 for name in reached)
assert 1.9 < steps("split", "local-8") < 2.1
assert 1 / 7 < reached["digits"][top_k]["speedup"] - 1 < 1 / 5
assert all(3 < steps(name, top_k) < 4 for name in reached)
before = {label: 100 * found[label][6::8, 0].mean() for label in labels}

for phrase in (
    f"By step all but top-k look alike: {min(step_gains):.1f} to {max(step_gains):.1f} times as fast.",
    f"`digits` keeps {digits_gains['hsgd-2-4,8-world']:.2f} for hierarchical and {digits_gains['local-8']:.2f} for local SGD",
    f"cut it from {before['local-8']:.0f} % to {before['hsgd-2-4,8-world']:.0f} % of the parameters' norm,",
    f"it is {over_truth['sync']:.0f} times the truth for `sync`, {over_truth['hsgd-2-4,8-world']:.0f} times for hierarchical",
    f"SGD, {over_truth['local-8']:.0f} times for local SGD, and mostly drift.",
):
    print(">", phrase)
