"""Profiler traces of a real training job, and the scenario made of them.

    paths = find_traces(["traces/"])
    profiles, left_out = readable(profile_all(paths))       a RankProfile, or a remark, for each file
    imported = import_job(profiles, name="job")             an ImportedJob: scenario, delays, stragglers, proof, notes
    write_scenario(imported, Path("job.yaml"))

`what_slowed` takes profiles, too. It names the causes of delays in a job that cannot become a scenario. Data flows one
way, and each package imports only those before it:

    kineto/      a trace file -> events of one rank, in columns
    steps/       events -> `steps.model.RankProfile`: the steps of one rank, divided into phases and parts
    job/         profiles -> `job.job.TracedJob`: ranks and steps in order, groups, matched collectives, clocks, units
    estimates/   the job -> times of an undisturbed step, stragglers, noise, links, tensors, a proof by simulation
    stages       the three stages that put these together
    importing    the results and what is said about them
    writing      the files of a scenario

`trace_files` reads files in processes of their own. `summaries` reads summaries of collectives in place of traces.
"""

from typing import TYPE_CHECKING

from simdist import exporting

if TYPE_CHECKING:
    from simdist.profiles.importing import ImportedJob, SlowedJob, import_job, what_slowed
    from simdist.profiles.stages import ImportOptions
    from simdist.profiles.trace_files import find_traces, profile_all, readable
    from simdist.profiles.writing import write_scenario

__all__ = [
    "ImportOptions",
    "ImportedJob",
    "SlowedJob",
    "find_traces",
    "import_job",
    "profile_all",
    "readable",
    "what_slowed",
    "write_scenario",
]

__getattr__, __dir__ = exporting(
    __name__,
    {
        "ImportOptions": "stages",
        "ImportedJob": "importing",
        "SlowedJob": "importing",
        "find_traces": "trace_files",
        "import_job": "importing",
        "profile_all": "trace_files",
        "readable": "trace_files",
        "what_slowed": "importing",
        "write_scenario": "writing",
    },
)
