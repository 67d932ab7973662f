# %% [markdown]
# # Your own cluster
#
# **Question.** My links are measured, and I know how late my workers are. Should I change how my job synchronises, and
# to what?
#
# **Answer.** For the cluster and job that ship here (8 nodes at 400 Mbit/s, a model of 4 MB): average pairs every 2
# steps and all ranks every 4 (`hsgd-2-2,4-world`). Of the schedules that make training 1.5 times as fast it is the most
# cautious one. Predicted are 1.56 times (95 % interval: 1.54 to 1.58); performed three times, its own mean time was met
# within 1 %, and as synchronous SGD took 10 % longer than predicted, 1.72 were measured. The answer is clear if the
# network is 0.6 to 1.0 times as fast as calibrated, and another one at 0.4 or 1.4 times; the borders lie in between.
#
# **Source.** The project's own measurements: links by `real.calibrate`, and the job performed three times, on an
# [emulated cluster](../experiments/emulated_cluster/README.md); [data/record.py](data/record.py) makes all of it.
#
# **Your turn.** Copy [data/job.yaml](data/job.yaml), describe your job in it, and name your files in the next cell. The
# first one names the cluster file that `real.calibrate -o` writes, the recording of how late your workers are, and the
# schedules, the one that you have now first; the second one is what `real.calibrate --json` writes.

# %%
# %matplotlib inline
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm
from matplotlib.patches import Patch, Rectangle

from simdist.cost import price
from simdist.plan import AllReduce, occurrences
from simdist.plan.delays import DrawnDelays
from simdist.report import palette, speedup_figure
from simdist.report.figures import panels
from simdist.runs.building import build, delays, simulate
from simdist.scenario import Scenario, load
from simdist.studies.comparison import Row, row
from simdist.studies.measuring import ScheduleTimes, measure

JOB = "data/job.yaml"
CALIBRATION = "data/calibration.json"
TARGET = 1.5  # speed-up over sync that is worth a change

job = load(JOB)
cluster, workload = job.cluster, job.workload
n_MB = 4 * sum(workload.tensor_counts) / 1e6
print(f"{cluster.nodes} nodes x {cluster.gpus_per_node} ranks, {n_MB:g} MB of parameters, {job.steps} steps")
for schedule in job.schedules:
    print(" ", schedule.name)

# %% [markdown]
# The schedules stand in the order in which you would take them: the first one that is fast enough. The simulator says
# how long a step takes. It does not say how well a model learns that is averaged less often; hence the order, from the
# most cautious to the boldest.
#
# ## What was measured
#
# `real.calibrate` times all-reduces of several sizes among the ranks of a node, among one rank of each node, and among
# all, and fits a line for each link and an overhead of each collective. Nothing else of these predictions is measured
# on the cluster.


# %%
def all_reduce_s(nbytes: int, *, nodes: int, ranks_per_node: int) -> float:
    """Return what the simulator says that an all-reduce takes on part of the cluster."""
    bare = {"tensors": [{"name": "all", "count": nbytes // 4}], "batch_size": 1, "forward_s": 0.0, "optimize_s": 0.0}
    part = cluster.model_copy(update={"nodes": nodes, "gpus_per_node": ranks_per_node})
    once = {"cluster": part, "workload": bare, "disturbances": (), "schedules": [{"kind": "sync"}], "steps": 1}
    return simulate(job.changed(**once)).makespan_s


calibration = json.loads(Path(CALIBRATION).read_text(encoding="utf-8"))
nodes, ranks_per_node = calibration["nodes"], calibration["ranks_per_node"]
GROUPS = {  # where -> nodes, ranks of each, colour, marker, line
    "world": (nodes, ranks_per_node, palette.BLUE, "o", "-"),
    "one per node": (nodes, 1, palette.VERMILLION, "s", "--"),
    "node": (1, ranks_per_node, palette.GREEN, "^", "-."),
}
figure, (axis,) = panels(height_in=4.0)
for where, (n, m, color, marker, line) in GROUPS.items():
    rows = [each for each in calibration["measurements"] if (each["op"], each["where"]) == ("all_reduce", where)]
    sizes = np.array([each["nbytes"] for each in rows])
    low, median, high = (1e3 * np.array([np.quantile(each["seconds"], q) for each in rows]) for q in (0.1, 0.5, 0.9))
    bars = {"yerr": [median - low, high - median], "fmt": marker, "color": color, "mfc": "none", "capsize": 4}
    axis.errorbar(sizes / 1e6, median, **bars, label=f"{where} ({n * m} ranks): measured")
    dense = np.geomspace(sizes.min(), sizes.max(), 30).astype(int)
    fitted = [1e3 * all_reduce_s(int(size), nodes=n, ranks_per_node=m) for size in dense]
    axis.plot(dense / 1e6, fitted, line, color=color, label=f"{where}: fit")
    fits = np.array([1e3 * all_reduce_s(int(size), nodes=n, ranks_per_node=m) for size in sizes])
    misses = [f"{miss:+.0%} at {size / 1e6:.2g} MB" for miss, size in zip(fits / median - 1, sizes, strict=True)]
    print(f"{where}: the fit misses by {', '.join(misses)}")
axis.set(xscale="log", yscale="log", xlabel="size of the all-reduce (MB)", ylabel="time (ms)")
axis.set_xticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
axis.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
axis.minorticks_off()
axis.legend(frameon=False)
figure

# %% [markdown]
# *Figure 1. Measured all-reduces and the fitted model. Points: medians of the repetitions; bars: from the 10th to the
# 90th percentile.*
#
# **Result.** One line per link and one overhead describe all groups from 1 MB on within 5 %; look here first if your
# predictions miss, and distrust those whose messages are of a size where the points leave the line, here 64 and 256 kB
# among all (-10 and +23 %).

# %% [markdown]
# ## How late are the workers?
#
# The job replays a recording: by how many seconds each rank was late in each step ([make one from your
# logs](../docs/how-to/use-your-own-delays.md)).

# %%
late_s = delays(job)["host"][0]
often = (late_s.max(axis=1) > 0.05).mean()
print(f"late by {1e3 * late_s.mean():.1f} ms on average; in {often:.0%} of the steps some rank by 50 ms or more")
figure, (axis,) = panels(height_in=3.2)
axis.grid(visible=False)
shown = axis.imshow(
    1e3 * late_s.T.clip(1e-3), aspect="auto", cmap="cividis", norm=LogNorm(1, 300), origin="lower", interpolation="none"
)
axis.set(xlabel="step", ylabel="rank")
bar = figure.colorbar(shown, ax=axis, label="late (ms)", extend="min")
bar.set_ticks([1, 3, 10, 30, 100, 300], labels=["1", "3", "10", "30", "100", "300"])
figure

# %% [markdown]
# *Figure 2. What was recorded: by how much each rank was late in each step.*
#
# **Result.** Rank 5 is late in every step, by 6 ms in the median, which no schedule can hide for good; all others are
# late now and then, rarely by a hundred or more.

# %% [markdown]
# ## Which schedule?
#
# One recording is one history. For an interval we draw steps of it anew, with replacement: 12 histories of 120 steps.
# All schedules live through the same histories.

# %%
N_HISTORIES, N_STEPS = 12, 120
RESAMPLED = job.changed(steps=N_STEPS, disturbances=[job.disturbances[0].model_copy(update={"resample_steps": 1})])
BUILT = [build(RESAMPLED, schedule) for schedule in RESAMPLED.schedules]


def histories(seeds: Sequence[int], scale: float) -> DrawnDelays:
    """Return delays made of steps of the recording, drawn with replacement, times `scale`."""
    drawn = [np.random.default_rng(seed).integers(len(late_s), size=N_STEPS) for seed in seeds]
    return DrawnDelays({"host": scale * late_s[drawn]})


def measured(scenario: Scenario, *, n_histories: int, scale: float = 1.0) -> list[ScheduleTimes]:
    """Simulate every schedule of a scenario through some histories, all at once; the plans are those of the job."""
    priced = (replace(each, costs=price(each.plan, scenario.cluster, scenario.workload)) for each in BUILT)
    return [measure(scenario, each, n_seeds=n_histories, draw=partial(histories, scale=scale)) for each in priced]


def speedups(scenario: Scenario, *, n_histories: int = 6, scale: float = 1.0) -> list[Row]:
    """Return the speed-up of every schedule over the first one, with its interval over histories."""
    found = measured(scenario, n_histories=n_histories, scale=scale)
    return [row(each, found[0]) for each in found]


def first_to_reach(target: float, gains: Sequence[float]) -> int:
    """Return which schedule is the most cautious one that gains that much; 0, the present one, if none does."""
    return next((index for index, gain in enumerate(gains) if gain >= target), 0)


@dataclass(frozen=True)
class Answer:
    """Which schedule is the most cautious one that reaches the target: by means, and by both ends of intervals."""

    by_mean: int
    by_low_end: int
    by_high_end: int

    @property
    def is_open(self) -> bool:
        """Say whether more histories might give another answer: an interval that counts holds the target."""
        return self.by_low_end != self.by_high_end

    def may_be(self, index: int) -> bool:
        """Say whether a schedule is the answer by one of the three."""
        return index in (self.by_mean, self.by_low_end, self.by_high_end)


def answer(rows: Sequence[Row]) -> Answer:
    """Decide."""
    gains = [each.speedup for each in rows], *zip(*(each.speedup_ci95 for each in rows), strict=True)
    return Answer(*(first_to_reach(TARGET, each) for each in gains))


LABELS = [schedule.name for schedule in job.schedules]
rows_of_job = speedups(job, n_histories=N_HISTORIES)
choice = answer(rows_of_job).by_mean
print(f"the most cautious schedule that reaches {TARGET:g}: {LABELS[choice]}")
for label, each in zip(LABELS, rows_of_job, strict=True):
    print(f"  {label:17} {each.speedup:.2f} ({each.speedup_ci95[0]:.2f} to {each.speedup_ci95[1]:.2f})")

# %%
figure = speedup_figure(rows_of_job, title=f"{job.name}: {cluster.nodes} nodes x {cluster.gpus_per_node} ranks")
figure

# %% [markdown]
# *Figure 3. Speed-up over synchronous SGD, and where the time of a step goes. Bars: 95 % confidence intervals over 12
# histories, by Student's t.*
#
# **Result.** Communication costs more than stragglers here: half precision alone gains 32 %, averaging every other step
# 27 %, and from a period of 4 on the target is reached, with the whole interval.

# %% [markdown]
# ## Where does the answer change?
#
# The same question for other networks and other stragglers: the bandwidth of a node, and how late workers are compared
# with the recording.

# %%
RATES = {rate: rate * 1e6 / 8 for rate in (100, 200, 400, 800, 1600, 3200)}  # Mbit/s -> bytes per second
SCALES = (0, 0.5, 1, 2, 4, 8)
FACES = (palette.PALE_GREY, palette.YELLOW, palette.SKY, palette.GREEN, palette.ORANGE, palette.PURPLE, palette.BLUE)[
    : len(LABELS)
]


def with_link(scenario: Scenario, link: str, **update: object) -> Scenario:
    """Return the scenario with a changed link."""
    changed = getattr(scenario.cluster, link).model_copy(update=update)
    return scenario.changed(cluster=scenario.cluster.model_copy(update={link: changed}))


grid = {
    (rate, scale): speedups(with_link(job, "network", bandwidth_Bps=RATES[rate]), scale=scale)
    for rate, scale in itertools.product(RATES, SCALES)
}
answers = [[answer(grid[rate, scale]) for rate in RATES] for scale in SCALES]
n_open = sum(each.is_open for line in answers for each in line)
print(f"{n_open} of {len(grid)} answers are open")


# %%
OPEN = {"facecolor": "none", "edgecolor": palette.BLACK, "linewidth": 1.8, "linestyle": (0, (3, 2))}
OPEN_LABEL = "open: another answer at one end of the 95 % intervals"


def draw_answers(axis, answers: Sequence[Sequence[Answer]]) -> None:
    """Colour cells by the schedule that is the answer there by the mean, and frame those that are open."""
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    norm = BoundaryNorm(np.arange(len(LABELS) + 1) - 0.5, len(LABELS))
    colors = [[each.by_mean for each in line] for line in answers]
    axis.pcolormesh(colors, cmap=ListedColormap(FACES), norm=norm, edgecolors=palette.WHITE, linewidth=1.5)
    inset = 0.006 * len(answers[0])  # cells are narrower if there are many
    for i, line in enumerate(answers):
        for j, each in enumerate(line):
            if each.is_open:
                axis.add_patch(Rectangle((j + inset, i + 0.07), 1 - 2 * inset, 0.86, **OPEN))
    axis.tick_params(length=0)


figure, (axis,) = panels(height_in=4.5)
draw_answers(axis, answers)
for (i, scale), (j, rate) in itertools.product(enumerate(SCALES), enumerate(RATES)):
    found, index = grid[rate, scale], answers[i][j].by_mean
    shown = found[index] if index else max(found, key=lambda each: each.speedup)
    around = (shown.speedup_ci95[1] - shown.speedup_ci95[0]) / 2
    name = shown.schedule if index else f"{LABELS[0]}\nbest: {shown.schedule}"
    axis.text(j + 0.5, i + 0.5, f"{name}\n{shown.speedup:.2f} ± {around:.2f}", ha="center", va="center", fontsize=9)
axis.set_xticks(np.arange(len(RATES)) + 0.5, RATES)
axis.set_yticks(np.arange(len(SCALES)) + 0.5, [f"x {scale:g}" for scale in SCALES])
axis.set(xlabel="bandwidth of a node's link (Mbit/s)", ylabel="lateness over the recorded one (ratio)")
figure.legend([Patch(**OPEN)], [OPEN_LABEL], loc="outside lower center", frameon=False)
figure

# %% [markdown]
# *Figure 4. The most cautious schedule that is at least 1.5 times as fast as synchronous SGD, and its speed-up;
# synchronous SGD itself where none is, with the best of the others. Means and 95 % intervals of six histories, by
# Student's t. Framed: some interval holds 1.5, so that at one of its ends the answer is another.*
#
# **Result.** The network decides: at 100 Mbit/s half precision is enough, even if workers are twice as late as
# recorded. At 200 it falls just short, and the answer is open. At 400 Mbit/s averages every four steps are needed. From
# 800 Mbit/s on nothing gains clearly more than half, except `local-8` without any lateness; workers that are later move
# the answer to bolder schedules up to 400 Mbit/s, and at 800 below the target.

# %% [markdown]
# ## How far off may the calibration be?
#
# One number at a time is multiplied, all others stay as they are.

# %%
FACTORS = 2.0 ** np.arange(-2, 2.1, 0.25)


def varied(name: str, factor: float) -> list[Row]:
    """Return the speed-ups if one number is another."""
    match name:
        case "network bandwidth":
            return speedups(with_link(job, "network", bandwidth_Bps=factor * cluster.network.bandwidth_Bps))
        case "bandwidth in a node":
            return speedups(with_link(job, "fabric", bandwidth_Bps=factor * cluster.fabric.bandwidth_Bps))
        case "overhead of a collective":
            overhead_s = factor * cluster.collectives.overhead_s
            return speedups(job.changed("cluster.collectives.overhead_s", overhead_s))
        case "time of computation":
            spent = {key: factor * getattr(workload, key) for key in ("forward_s", "backward_s", "optimize_s")}
            return speedups(job.changed(workload=workload.model_copy(update=spent)))
        case "lateness of workers":
            return speedups(job, scale=factor)
    raise ValueError(name)


NAMES = (
    "network bandwidth",
    "bandwidth in a node",
    "overhead of a collective",
    "time of computation",
    "lateness of workers",
)
changes = [[answer(varied(name, factor)) for factor in FACTORS] for name in NAMES]
print(f"{LABELS[choice]} is the answer; where does that begin and end? Tried: x {FACTORS[0]:g} to x {FACTORS[-1]:g}")
for name, line in zip(NAMES, changes, strict=True):
    clear = [i for i, each in enumerate(line) if each.by_mean == choice and not each.is_open]
    perhaps = [i for i, each in enumerate(line) if each.may_be(choice)]
    borders = (perhaps[0] - 1, clear[0]), (clear[-1], perhaps[-1] + 1)  # another answer and this one, and back
    told = [
        f"between x {FACTORS[low]:.2f} and x {FACTORS[high]:.2f}" if low >= 0 and high < len(FACTORS) else "nowhere"
        for low, high in borders
    ]
    print(f"  {name:24} begins {told[0]:25} ends {told[1]}")

# %%
figure, (axis,) = panels(height_in=3.1)
draw_answers(axis, changes)
shown = range(0, len(FACTORS), 2)
axis.set_xticks(np.array(shown) + 0.5, [f"x {FACTORS[i]:.2g}" for i in shown])
axis.axvline(len(FACTORS) / 2, color=palette.BLACK, lw=1, ls=(0, (4, 3)))
axis.set_yticks(np.arange(len(NAMES)) + 0.5, NAMES)
axis.invert_yaxis()
axis.set_xlabel("the number over what was calibrated (ratio)")
used = sorted({each.by_mean for line in changes for each in line})
figure.legend(
    [*(Patch(color=FACES[i]) for i in used), Patch(**OPEN)],
    [*(LABELS[i] for i in used), OPEN_LABEL],
    loc="outside lower center",
    ncols=4,
    frameon=False,
)
figure

# %% [markdown]
# *Figure 5. The answer if one calibrated number were another, by means of six histories. Vertical, dashed: as
# calibrated. Framed: some interval holds 1.5, so that at one of its ends the answer is another.*
#
# **Result.** What matters most is the network's bandwidth and the time of computation: the answer is clear from 0.59
# and 0.50 times what was calibrated up to just that, and it has changed at 1.41 and 1.19 times; where in between is not
# told by six histories. Workers may be as late as recorded, perhaps twice.

# %% [markdown]
# ## Check it for real
#
# Three commands predict, perform and compare, on your machines; with `--program MODULE:FUNCTION` instead of sleeps your
# own model computes.
#
#     simdist plan job.yaml -o runs/job
#     torchrun --nnodes 8 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m real runs/job
#     simdist validate runs/job --cluster cluster.yaml
#
# For the job that ships this was done on the emulated cluster, three times. Nothing that was measured there enters a
# prediction.

# %%
shipped = load("data/job.yaml")


def quiet(n_nodes: int, n_steps: int) -> Scenario:
    """Return the job that ships without stragglers, on some nodes."""
    part = shipped.cluster.model_copy(update={"nodes": n_nodes})
    return shipped.changed(cluster=part, disturbances=(), steps=n_steps)


def read_runs(path: str, scenario_of: Callable[[dict], Scenario]) -> list[dict]:
    """Read runs that were performed, and predict each."""
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    return [each | {"predicted_s": simulate(scenario_of(each), label=each["schedule"]).makespan_s} for each in rows]


performed = read_runs("data/job.json", lambda each: shipped)
control = read_runs("data/control.json", lambda each: quiet(each["nodes"], each["steps"]))
base_s = np.mean(performed[0]["measured_s"])
for each in performed:
    mean_s = np.mean(each["measured_s"])
    gained = performed[0]["predicted_s"] / each["predicted_s"], base_s / mean_s
    error = f"error {each['predicted_s'] / mean_s - 1:+6.1%}"
    print(f"{each['schedule']:17} {error}, speed-up {gained[0]:.2f} predicted, {gained[1]:.2f} measured")

# %%
figure, (times, errors) = panels(2, height_in=3.6)
labels = [each["schedule"] for each in performed]
predicted = np.array([1e3 * each["predicted_s"] / each["steps"] for each in performed])
repeats = np.array([1e3 * np.array(each["measured_s"]) / each["steps"] for each in performed])
mean = repeats.mean(axis=1)
y = np.arange(len(labels))
times.plot(predicted, y, "D", ms=7, color=palette.BLUE, mfc="none", label="predicted")
spread = [mean - repeats.min(axis=1), repeats.max(axis=1) - mean]
times.errorbar(mean, y, xerr=spread, fmt="o", ms=5, color=palette.VERMILLION, capsize=4, label="measured")
times.set_yticks(y, labels)
times.invert_yaxis()
times.set(xlim=(0, None), xlabel="time of a step (ms)", title="the job, 8 nodes")
times.legend(frameon=False, loc="center left")
few = list(dict.fromkeys(each["schedule"] for each in control))
for offset, n, color, marker in ((-0.12, 4, palette.SKY, "s"), (0.12, 8, palette.BLUE, "o")):
    rows = [each for each in control if each["nodes"] == n]
    found = 100 * (np.array([[each["predicted_s"] / s for s in each["measured_s"]] for each in rows]) - 1)
    spread = [found.mean(axis=1) - found.min(axis=1), found.max(axis=1) - found.mean(axis=1)]
    places = np.arange(len(few)) + offset
    errors.errorbar(found.mean(axis=1), places, xerr=spread, fmt=marker, color=color, capsize=4, label=f"{n} nodes")
errors.axvline(0, color=palette.BLACK, lw=1)
errors.set_yticks(range(len(few)), few)
errors.invert_yaxis()
errors.set(xlabel="error of the makespan (%)", title="without stragglers")
errors.legend(frameon=False, loc="lower left")
figure

# %% [markdown]
# *Figure 6. Left: predicted and measured time of a step of every schedule; bars: the least and the most of three runs.
# Right: error of three schedules on 4 and on 8 nodes, three runs each; bars: the least and the most; below 0 the
# prediction is too fast.*
#
# **Result.** With stragglers, mean times of schedules that average parameters are met within 1 %, and the answer is
# confirmed; gradients that are averaged in every step take 10 and 25 % longer on 8 nodes than predicted, so half
# precision gains less than local SGD with period 2, the other way round than predicted.

# %% [markdown]
# Why does it miss? On 4 nodes the same schedules are met within 4 %. What is different on 8 is that 16 processes share
# the two cores of the machine that plays the cluster, and hand over to one another in every round of a ring. So let us
# divide what was missed by the number of rounds.


# %%
def n_rounds(scenario: Scenario, label: str) -> int:
    """Return how many rounds of rings over all ranks a run goes through."""
    (schedule,) = (each for each in scenario.schedules if each.name == label)
    plan = build(scenario, schedule).plan
    n_collectives = sum(len(each.rows) for each in occurrences(plan) if isinstance(each.op, AllReduce))
    return n_collectives * 2 * (scenario.cluster.world_size - 1)


for each in control:
    rounds = n_rounds(quiet(each["nodes"], each["steps"]), each["schedule"])
    missed_ms = 1e3 * (np.array(each["measured_s"]) - each["predicted_s"]) / rounds
    span = f"{missed_ms.min():.1f} to {missed_ms.max():.1f} ms a round missed"
    print(f"{each['nodes']} nodes, {each['schedule']:9} {rounds / each['steps']:4.0f} rounds a step, {span}")

# %% [markdown]
# On 8 nodes every round takes 0.4 to 1.1 ms longer than it should, whatever is sent in it; averages have the fewest
# rounds and miss least. So the best explanation is the machine that plays the cluster, which was not idle either, and
# not the links; on a machine for each node we expect what 4 nodes show, and have not tried. It tells how to check a
# prediction, though: perform the schedule that you leave, too, not just the one that you go to.
#
# ## The decision
#
# **Go to `hsgd-2-2,4-world`: 1.6 times as fast as synchronous SGD, clearly so on a network that is up to 40 % slower
# than calibrated; on one that is faster, `local-4` or `local-8` may be needed. Watch the loss: whether the model learns
# as well with averages every four steps is not simulated.**

# %% [markdown]
# ## The numbers of the text
#
# Each line is a phrase of the text above, made from the results; they are those of the files that ship.

# %%
chosen = rows_of_job[choice]
by_label = {label: each.speedup for label, each in zip(LABELS, rows_of_job, strict=True)}
mean_s = {each["schedule"]: np.mean(each["measured_s"]) for each in performed}
errors_of = {each["schedule"]: each["predicted_s"] / mean_s[each["schedule"]] - 1 for each in performed}
averaging = [label for label in errors_of if not label.startswith("sync")]
longer = {label: 1 / (1 + errors_of[label]) - 1 for label in ("sync", "sync-fp16")}


def misses_at(where: str, least_nbytes: int, most_nbytes: int) -> list[float]:
    """Return by how much the fit misses the medians of a group, for some sizes."""
    n, m, *_ = GROUPS[where]
    found = []
    for each in calibration["measurements"]:
        if (each["op"], each["where"]) == ("all_reduce", where) and least_nbytes <= each["nbytes"] <= most_nbytes:
            fit_s = all_reduce_s(each["nbytes"], nodes=n, ranks_per_node=m)
            found.append(fit_s / np.median(each["seconds"]) - 1)
    return found


large = max(abs(miss) for where in GROUPS for miss in misses_at(where, 900_000, 10**9))
small = misses_at("world", 0, 500_000)
always_late = [rank for rank in range(late_s.shape[1]) if late_s[:, rank].min() > 0.002]
clear_from = {}
changed_at = {}
for name, line in zip(NAMES, changes, strict=True):
    clear = [i for i, each in enumerate(line) if each.by_mean == choice and not each.is_open]
    perhaps = [i for i, each in enumerate(line) if each.may_be(choice)]
    clear_from[name] = FACTORS[clear[0]], FACTORS[clear[-1]]
    changed_at[name] = FACTORS[max(perhaps[0] - 1, 0)], FACTORS[min(perhaps[-1] + 1, len(FACTORS) - 1)]
by_rate = {rate: {scale: answers[i][j] for i, scale in enumerate(SCALES)} for j, rate in enumerate(RATES)}
half_precision = LABELS.index("sync-fp16")
assert all(
    by_rate[100][scale].by_mean == half_precision and not by_rate[100][scale].is_open for scale in (0, 0.5, 1, 2)
)
assert by_rate[200][1].is_open
assert LABELS[by_rate[200][1].by_mean] == "hsgd-2-2,4-world"
assert LABELS[by_rate[400][1].by_mean] == "hsgd-2-2,4-world"
no_gain = [(rate, scale) for rate in (800, 1600, 3200) for scale in SCALES if by_rate[rate][scale].by_mean == 0]
assert len(no_gain) == 3 * len(SCALES) - 1
assert LABELS[by_rate[800][0].by_mean] == "local-8"
bandwidth, computing = clear_from["network bandwidth"], clear_from["time of computation"]
assert mean_s["sync-fp16"] > mean_s["local-2"]
assert bandwidth[1] == computing[1] == 1
assert clear_from["lateness of workers"][1] == 1
assert 2 < changed_at["lateness of workers"][1] < 3
low, high = chosen.speedup_ci95

for phrase in (
    f"({cluster.nodes} nodes at {8 * cluster.network.bandwidth_Bps / 1e6:.0f} Mbit/s, a model of {n_MB:.0f} MB)",
    "average pairs every 2 steps and all ranks every 4",
    f"make training {TARGET:g} times as fast it is the most cautious one.",
    f"Predicted are {chosen.speedup:.2f} times (95 % interval: {low:.2f} to {high:.2f}); performed three times,",
    f"its own mean time was met within {np.ceil(100 * abs(errors_of[chosen.schedule])):.0f} %,",
    f"as synchronous SGD took {100 * longer['sync']:.0f} % longer than predicted,",
    f"{mean_s['sync'] / mean_s[chosen.schedule]:.2f} were measured.",
    f"clear if the network is {bandwidth[0]:.1f} to {bandwidth[1]:.1f} times as fast as calibrated,",
    "another one at {:.1f} or {:.1f} times".format(*changed_at["network bandwidth"]),
    f"describe all groups from 1 MB on within {np.ceil(100 * large):.0f} %;",
    f"here 64 and 256 kB among all ({100 * small[0]:.0f} and {100 * small[1]:+.0f} %).",
    f"Rank {always_late[0]} is late in every step, by {1e3 * np.median(late_s[:, always_late[0]]):.0f} ms in the median,",
    f"half precision alone gains {100 * by_label['sync-fp16'] - 100:.0f} %,",
    f"averaging every other step {100 * by_label['local-2'] - 100:.0f} %, and from a period of 4 on the target is reached",
    "at 100 Mbit/s half precision is enough, even if workers are twice as late as recorded.",
    "At 200 it falls just short, and the answer is open. At 400 Mbit/s averages every four steps are needed.",
    "From 800 Mbit/s on nothing gains clearly more than half,",
    "bolder schedules up to 400 Mbit/s, and at 800 below the target",
    f"the answer is clear from {bandwidth[0]:.2f} and {computing[0]:.2f} times what was calibrated up to just that,",
    f"it has changed at {changed_at['network bandwidth'][1]:.2f} and {changed_at['time of computation'][1]:.2f} times;",
    "mean times of schedules that average parameters are met within "
    f"{np.ceil(100 * max(abs(errors_of[label]) for label in averaging)):.0f} %,",
    f"in every step take {100 * longer['sync']:.0f} and {100 * longer['sync-fp16']:.0f} % longer on 8 nodes than predicted,",
    "half precision gains less than local SGD with period 2, the other way round than predicted",
):
    print(">", phrase)
