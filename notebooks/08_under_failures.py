# %% [markdown]
# # What do failures cost, and what would help?
#
# **Question.** How much of 30 days on 128 nodes trains the model? What would spare nodes, replicas that continue, local
# SGD or another interval between checkpoints change? And is it true?
#
# **Answer.** With four spare nodes, 95.4 % of the time trains the model at full pace. Failures take 1.7 %, as much as
# one rank that is a little slow, and checkpoints take 1.1 %. Without spare nodes, 0.2 % less is trained. If the other
# replicas continue, 1.0 % more is. Local SGD trains 0.8 % less, because nothing hides its averages. Checkpoints every
# hour are about right. Jobs that were made to fail took as long as predicted to within 10 %, half of them within
# 0.7 %.
#
# **Source.** [A scenario](../docs/examples/failures.yaml) of 1,024 H100 with the failure rates of
# [Llama 3](https://arxiv.org/abs/2407.21783), and [runs that really failed](../experiments/failures/README.md).

# %%
# %matplotlib inline
import json
from pathlib import Path

import numpy as np

from simdist import goodput, load
from simdist.report.figures import panels
from simdist.report.palette import BLACK, BLUE, GREY, ORANGE, PALE_GREY, VERMILLION
from simdist.runs.attempts import CATEGORIES
from simdist.scenario.sampling import run_seeds
from simdist.studies.goodput import in_words
from simdist.studies.statistics import mean_interval
from simdist.studies.suffering import suffer

scenario = load("../docs/examples/failures.yaml")
study = goodput(scenario)
study.frame()[["schedule", "on_failure", "goodput", "ettr", "steps"]].round({"goodput": 3, "ettr": 3, "steps": -3})

# %% [markdown]
# *Table 1. Goodput is calm steps that count over the time of the job. ETTR counts slow steps, too.*
#
# ## Where the time goes

# %%
figure = study.plot()
figure

# %% [markdown]
# *Figure 1. Left: the time that does not train at full pace, by cause, means of 20 seeds. Right: goodput if failures
# come up to eight times as often or as seldom.*
#
# **Result.** Most is lost to a slow rank, to steps that are done again and to checkpoints. If failures come eight times as
# often, goodput falls to 82.5 %.

# %% [markdown]
# ## What would help?
#
# All rows meet the same failures, so their differences are paired. One replica of `hsdp-8` is a node. With `continue`,
# the others train on while a replica is away.


# %%
def half_width(values):
    """Return half of the 95 % interval of a mean."""
    low, high = mean_interval(values) or (0.0, 0.0)
    return (high - low) / 2


seeds = run_seeds(scenario.seed, 20)
failures = {"spare": scenario.failures, "restart": None, "continue": None}
for policy in ("restart", "continue"):
    failures[policy] = scenario.changed({"failures.on_failure": policy, "failures.spares": 0}).failures
trained = {row.schedule: row.trained for row in study}
found = {
    f"{schedule}, {policy}": suffer(each, steady, seeds)
    for schedule, steady in trained.items()
    for policy, each in failures.items()
}
names = list(found)
first = found[names[0]].trained_per_s
gains = {name: 100 * (each.trained_per_s / first - 1) for name, each in found.items()}
halves = {}  # of intervals: paired, and as if each row met failures of its own
for name, each in found.items():
    paired, own, base = (
        half_width(values)
        for values in (gains[name], 100 * each.trained_per_s / first.mean(), 100 * first / first.mean())
    )
    halves[name] = (paired, np.hypot(own, base))

figure, (axes,) = panels(height_in=2.8)
for place, name in enumerate(names):
    color = BLUE if "local" in name else VERMILLION
    mean = gains[name].mean()
    paired, apart = halves[name]
    axes.errorbar(mean, place, xerr=apart, color=GREY, capsize=3)
    axes.errorbar(mean, place, xerr=paired, color=color, fmt="o", linewidth=3)
axes.axvline(0, color=BLACK, linewidth=1)
axes.set_yticks(range(len(names)), names)
axes.invert_yaxis()
axes.set_xlabel(f"trained in 30 days, compared with {names[0]} (%)")
figure

# %% [markdown]
# *Figure 2. Thick: 95 % intervals of paired differences over 20 seeds. Thin and grey: the same, if each row met
# failures of its own. The first row is compared with itself.*
#
# **Result.** Replicas that continue gain 0.7 to 1.2 %. Spare nodes gain little over a restart, but surely: 0.1 to 0.2 %.
# Local SGD costs 0.8 % while nothing fails. A replica that is away costs it no more than the others.

# %% [markdown]
# ## How far apart should checkpoints be?

# %%
steady = trained["hsdp-8"]
hours = np.geomspace(1 / 8, 8, 13)
curves = {policy: [] for policy in ("spare", "continue")}
for policy, points in curves.items():
    for each in hours:
        n_steps = max(1, round(3600 * each / steady.job.step_s))
        points.append(100 * suffer(failures[policy], steady.with_interval(n_steps), seeds).goodput.mean())
stated_h = steady.job.checkpoints.every_steps * steady.job.step_s / 3600
young_h = study[0].young_s / 3600

figure, (axes,) = panels(height_in=3.0)
for (policy, points), color, marker in zip(curves.items(), (VERMILLION, BLUE), "os", strict=True):
    axes.plot(hours, points, marker=marker, color=color, label=policy)
axes.axvline(stated_h, color=BLACK, linewidth=1, label="as stated")
axes.axvline(young_h, color=BLACK, linewidth=1, linestyle=":", label="Young")
axes.set_xscale("log")
axes.set_xticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
axes.minorticks_off()
axes.set_xlabel("time between checkpoints (h)")
axes.set_ylabel("goodput (%)")
axes.legend(frameon=False)
figure

# %% [markdown]
# *Figure 3. Goodput of hsdp-8 by the interval between checkpoints, means of 20 seeds with the same failures. Lines:
# the interval of the scenario, and Young's formula.*
#
# **Result.** The optimum is flat: half an hour or two hours lose at most 0.6 points. With `continue`, fewer failures end an
# attempt, so checkpoints may lie further apart.

# %% [markdown]
# ## Is it true?
#
# Nobody lends 128 nodes for 30 days. [The experiment](../experiments/failures/README.md) fails small jobs on purpose,
# and predicts each run before it is performed.

# %%
runs = json.loads(Path("../experiments/failures/results.json").read_text())
measured_s = np.array([run["measured_s"] for run in runs])
errors = 100 * (np.array([run["predicted_s"] for run in runs]) / measured_s - 1)
sums = {each: np.sum([run["categories"].get(each, (0, 0)) for run in runs], axis=0) for each in CATEGORIES}
shown = [each for each, seconds in sums.items() if each != "productive" and seconds.max() > 5]

figure, (dots, bars) = panels(2, height_in=3.2)
dots.axhspan(-5, 5, color=PALE_GREY, linewidth=0)
dots.axhline(0, color=BLACK, linewidth=1)
dots.plot(measured_s, errors, "o", color=VERMILLION)
dots.set_ylim(-12, 12)
dots.set_xlabel("measured time of a run (s)")
dots.set_ylabel("error of the prediction (%)")
places = np.arange(len(shown))
for side, (label, color, hatch) in enumerate((("predicted", ORANGE, ""), ("measured", BLUE, "////"))):
    seconds = [sums[each][side] for each in shown]
    bars.barh(places + 0.4 * side - 0.2, seconds, height=0.38, color=color, hatch=hatch, linewidth=0, label=label)
bars.set_yticks(places, [in_words(each) for each in shown])
bars.invert_yaxis()
bars.set_xlabel("time of all runs beside productive steps (s)")
bars.legend(frameon=False, loc="lower right")
figure

# %% [markdown]
# *Figure 4. Left: error of the total time of each run; grey: within 5 %. Right: time of all runs that did not train.*
#
# **Result.** All totals are within 10 %, half of them within 0.7 %. Steps that are done again are exact.

# %% [markdown]
# ## The numbers of the text
#
# Each line is a phrase of the text above, made from the results.

# %%
spare = study[0]
lost = {each: 100 * share for each, share in spare.shares.items()}
of_failures = sum(lost[each] for each in ("wasted_progress", "infrastructure_recovery", "training_preparation"))
assert abs(of_failures - lost["step_time_deviation"]) < 0.3
steady_gain = 100 * (trained["hsdp-8"].job.step_s / trained["hsdp-8-local-8"].job.step_s - 1)
among = {schedule: gains[f"{schedule}, continue"].mean() - gains[f"{schedule}, spare"].mean() for schedule in trained}
assert abs(among["hsdp-8"] - among["hsdp-8-local-8"]) < 0.1
near = [point for each, point in zip(hours, curves["spare"], strict=True) if 0.49 < each < 2.01]
best_h = {policy: hours[int(np.argmax(points))] for policy, points in curves.items()}
assert abs(best_h["spare"] - 1) < 0.1 < best_h["continue"] - best_h["spare"]
assert all(run["predicted_attempts"] == run["measured_attempts"] for run in runs)
half = f"half of them within {np.median(abs(errors)):.1f} %."
most = f"{np.ceil(abs(errors).max()):.0f} %"


def reach(name):
    """Return the ends of the interval of a gain, without their sign."""
    mean = abs(gains[name].mean())
    return f"{mean - halves[name][0]:.1f} to {mean + halves[name][0]:.1f} %"


for phrase in (
    f"{100 * spare.goodput:.1f} % of the time trains the model at full pace.",
    f"Failures take {of_failures:.1f} %,",
    f"checkpoints take {lost['checkpoint_save']:.1f} %.",
    f"Without spare nodes, {-gains['hsdp-8, restart'].mean():.1f} % less is trained.",
    f"replicas continue, {gains['hsdp-8, continue'].mean():.1f} % more is.",
    f"Local SGD trains {-gains['hsdp-8-local-8, spare'].mean():.1f} % less,",
    f"as long as predicted to within {most}, {half}",
    f"goodput falls to {100 * study.curves[0].points[-1].goodput:.1f} %.",
    f"Replicas that continue gain {reach('hsdp-8, continue')}.",
    f"but surely: {reach('hsdp-8, restart')}.",
    f"Local SGD costs {-steady_gain:.1f} % while nothing fails.",
    f"lose at most {np.ceil(10 * (max(near) - min(near))) / 10:.1f} points.",
    f"All totals are within {most}, {half}",
):
    print(">", phrase)
