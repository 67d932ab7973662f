# %% [markdown]
# # Which mitigation for which straggler?
#
# **Question.** A job waits for stragglers. Backup workers drop the late, local SGD and hierarchical SGD meet seldom,
# averages may hide behind the next steps, DiLoCo meets still less often. Which of them helps against which kind of
# straggler, and which against none?
#
# **Answer.** Against transient stragglers and bad links, whatever meets seldom, and best if its averages hide behind
# the next steps. Against a persistent straggler nothing but dropping it: who meets seldom still waits when he meets.
# A burst that outlasts a period is persistent for that period. Backup workers lose nothing to late ranks. Through
# servers they are the slowest on a network as thin as here. With a ring among the ranks that are in, they beat
# synchronous SGD under transient stragglers. They lose to it without stragglers, because they exchange the gradient in
# one piece.
#
# **Source.** [The experiment](../experiments/mitigations/README.md) has the scenario, the stragglers and their
# sources, and tables for up to 1,024 GPUs.

# %%
# %matplotlib inline
import runpy

import pandas as pd

from simdist.report.figures import panels
from simdist.report.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from simdist.studies.comparison import compare

experiment = runpy.run_path("../experiments/mitigations/run.py")
study = experiment["Study"](nodes=(8, 16), n_seeds=10, steps=128, ring=True)
rows = study.rows()
sizes = [8 * nodes for nodes in study.nodes]
schedules = [schedule for schedule in rows["none"][sizes[0]] if schedule != "sync"]
colours = dict(zip(schedules, (ORANGE, GREY, SKY, BLUE, GREEN, PURPLE, VERMILLION), strict=False))
whiskers = {"ecolor": BLACK, "elinewidth": 0.9, "capsize": 2}


def around(value, interval):
    """Return how far a 95 % interval reaches to both sides of a mean; None if it has no width."""
    low, high = interval or (value, value)
    return [[value - low], [high - value]] if low < high else None


# %% [markdown]
# ## Speed-up over synchronous SGD
#
# ResNet-50 on V100 GPUs, eight a node, 25 Gbit/s between nodes. All but DiLoCo meet every 8 steps at the latest;
# DiLoCo every 64. One rank in 16 is a backup: `backup` averages the gradients of the others on a server in each node,
# `backup-ring` by a ring among them. A step that is fast is not yet one that learns as much: these are speeds only.

# %%
figure, lines = panels(n_rows=len(rows), height_in=1.9, sharex=True)
for axes, (straggler, by_size) in zip(lines, rows.items(), strict=True):
    for row, size in enumerate(sizes):
        for bar, schedule in enumerate(schedules):
            found = by_size[size][schedule]
            place = row + (bar - len(schedules) / 2) / (len(schedules) + 2)
            style = {"height": 1 / (len(schedules) + 2), "color": colours[schedule], "error_kw": whiskers}
            reach = around(found.speedup, found.speedup_ci95)
            axes.barh(place, found.speedup, xerr=reach, label=schedule, **style)
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set_yticks(range(len(sizes)), [f"{size} GPUs" for size in sizes])
    axes.set_title(straggler, loc="left", fontsize="medium", fontweight="bold")
    axes.invert_yaxis()
lines[-1].set_xlabel("speed-up over sync")
handles, names = lines[0].get_legend_handles_labels()
figure.legend(handles[: len(schedules)], names[: len(schedules)], loc="outside lower center", ncols=3, frameon=False)
figure

# %% [markdown]
# *Figure 1. Speed-up over synchronous SGD for each kind of straggler, means of 10 seeds of 128 steps, with their
# 95 % intervals over seeds. The line is synchronous SGD.*
#
# **Result.** Meeting seldom pays against transient stragglers and slow links. It does not pay against a persistent
# straggler, nor against bursts that last longer than a period. Backup workers with servers are slowest on this network
# under every straggler. With a ring they are faster than synchronous SGD under transient stragglers. Under
# bursts, DiLoCo and averages that hide behind the next steps gain about a tenth on 128 GPUs. Backup workers with a
# ring may gain as much there, but their interval is too wide to tell.

# %% [markdown]
# ## The rule apart from its transport
#
# Nobody is late here. What do backup workers lose to synchronous SGD, and why? They wait for the whole gradient before
# they know who is in, so they exchange it in one bucket, after the backward pass. `sync-one-bucket` does the same for
# all ranks.

# %%
calm = study.scenario(study.nodes[0], "none")
sync = calm.schedules[0].model_copy(update={"bucket_nbytes": None, "label": "sync-one-bucket"})
parts = {"sync": rows["none"][sizes[0]]["sync"], "sync-one-bucket": compare(calm.changed(schedules=(sync,)))[0]}
parts |= {schedule: rows["none"][sizes[0]][schedule] for schedule in ("backup-ring", "backup")}
pd.DataFrame({schedule: {"step (ms)": 1e3 * found.step_s} for schedule, found in parts.items()}).T.round(1)

# %% [markdown]
# *Table 1. Milliseconds of a step without stragglers on 64 GPUs.*
#
# **Result.** The rule itself costs nothing: `backup-ring` takes as long as synchronous SGD with one bucket. The loss
# to `sync` is the overlap with the backward pass. The rest of what `backup` loses is its servers.

# %% [markdown]
# ## What a straggler costs each of them
#
# The speed-ups hold what exchanging less saves even where nobody is late. So here is what stragglers add to a step.

# %%
stragglers = [straggler for straggler in rows if straggler != "none"]
largest = sizes[-1]
figure, (axes,) = panels(height_in=4.2)
for bar, schedule in enumerate(["sync", *schedules]):
    calm_ms = 1e3 * rows["none"][largest][schedule].step_s
    for number, straggler in enumerate(stragglers):
        found = rows[straggler][largest][schedule]
        ends_ms = [1e3 * end for end in found.step_s_ci95 or ()]
        place = number + (bar - len(schedules) / 2) / (len(schedules) + 3)
        style = {"width": 1 / (len(schedules) + 3), "color": colours.get(schedule, BLACK), "error_kw": whiskers}
        reach = around(1e3 * found.step_s, ends_ms)
        axes.bar(place, 1e3 * found.step_s - calm_ms, yerr=reach, label=None if number else schedule, **style)
axes.set_xticks(range(len(stragglers)), stragglers)
axes.set_ylabel("added to a step (ms)")
axes.legend(frameon=False, ncols=2)
figure

# %% [markdown]
# *Figure 2. By how much a step is longer with a straggler than without, on 128 GPUs, with 95 % intervals over 10 seeds.*
#
# **Result.** Backup workers lose next to nothing to ranks that are late. To a slow NIC they lose most with servers,
# which are all behind a NIC, and as much as synchronous SGD with a ring. All others lose the same to a persistent
# straggler; averages that hide lose least to transient ones and to links.

# %% [markdown]
# ## The numbers of the text
#
# Each line is a phrase of the text above, made from the results.

# %%
under_bursts = rows["bursts"][largest]
gaining = ["local-8-overlap2", "diloco-64-workernode", "diloco-64-fragments8-overlap2"]
assert all(under_bursts[schedule].speedup_ci95[0] > 1 for schedule in gaining)
assert all(round(under_bursts[schedule].speedup, 1) == 1.1 for schedule in gaining)
assert 0.97 < under_bursts["backup-ring"].speedup_ci95[0] < 1.03
assert all(rows["transient"][size]["backup-ring"].speedup_ci95[0] > 1 for size in sizes)
print(f"> gain about a tenth on {largest} GPUs")
