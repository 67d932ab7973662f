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

import numpy as np
import pandas as pd

from simdist.report.figures import panels
from simdist.report.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from simdist.studies.comparison import compare

experiment = runpy.run_path("../experiments/mitigations/run.py")
study = experiment["Study"](nodes=(8, 16), n_seeds=3, steps=128, ring=True)
rows = study.rows()
sizes = [8 * nodes for nodes in study.nodes]
schedules = [schedule for schedule in rows["none"][sizes[0]] if schedule != "sync"]
colours = dict(zip(schedules, (ORANGE, GREY, SKY, BLUE, GREEN, PURPLE, VERMILLION), strict=False))

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
            axes.barh(place, found.speedup, height=1 / (len(schedules) + 2), color=colours[schedule], label=schedule)
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set_yticks(range(len(sizes)), [f"{size} GPUs" for size in sizes])
    axes.set_title(straggler, loc="left", fontsize="medium", fontweight="bold")
    axes.invert_yaxis()
lines[-1].set_xlabel("speed-up over sync")
handles, names = lines[0].get_legend_handles_labels()
figure.legend(handles[: len(schedules)], names[: len(schedules)], loc="outside lower center", ncols=3, frameon=False)
figure

# %% [markdown]
# *Figure 1. Speed-up over synchronous SGD for each kind of straggler, means of 3 seeds of 128 steps. The line is
# synchronous SGD.*
#
# **Result.** Meeting seldom pays against transient stragglers and slow links. It does not pay against a persistent
# straggler, nor against bursts that last longer than a period. Backup workers with servers are slowest on this network
# under every straggler. With a ring they are faster than synchronous SGD under transient stragglers, and on 128 GPUs
# also under bursts, where only DiLoCo gains as much.

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
added_s = np.array(
    [
        [rows[each][largest][schedule].step_s - rows["none"][largest][schedule].step_s for each in stragglers]
        for schedule in ["sync", *schedules]
    ]
)
figure, (axes,) = panels(height_in=4.2)
for bar, schedule in enumerate(["sync", *schedules]):
    places = np.arange(len(stragglers)) + (bar - len(schedules) / 2) / (len(schedules) + 3)
    colour = colours.get(schedule, BLACK)
    axes.bar(places, 1e3 * added_s[bar], width=1 / (len(schedules) + 3), color=colour, label=schedule)
axes.set_xticks(range(len(stragglers)), stragglers)
axes.set_ylabel("added to a step (ms)")
axes.legend(frameon=False, ncols=2)
figure

# %% [markdown]
# *Figure 2. By how much a step is longer with a straggler than without, on 128 GPUs.*
#
# **Result.** Backup workers lose next to nothing to ranks that are late. To a slow NIC they lose most with servers,
# which are all behind a NIC, and as much as synchronous SGD with a ring. All others lose the same to a persistent
# straggler; averages that hide lose least to transient ones and to links.

# %% [markdown]
# ## The numbers of the text
#
# Each line is a phrase of the text above, made from the results.

# %%
under_bursts = {schedule: found.speedup for schedule, found in rows["bursts"][largest].items()}
fastest = sorted(under_bursts, key=under_bursts.__getitem__)[-2:]
assert sorted(fastest) == ["backup-ring", "diloco-64-workernode"]
assert all(rows["transient"][size]["backup-ring"].speedup > 1 for size in sizes)
print(f"> on {largest} GPUs also under bursts")
