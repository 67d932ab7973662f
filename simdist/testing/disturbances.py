"""Rules for disturbances."""

import numpy as np
from numpy.typing import NDArray

from simdist import scenario as scenarios
from simdist.runs.building import build, delay_sampler
from simdist.scenario import Scenario
from simdist.scenario.disturbances import KINDS, Disturbance
from simdist.testing.jobs import CLUSTERS, N_STEPS, engines_agree, scenario_of, telling

_SEEDS = (0, 1, 2)
_CHUNKS = (1, 7, 16, 1)  # steps
_N_PASSES = 3


def check_disturbance(disturbance: Disturbance) -> None:
    """Check a disturbance against the rules for every disturbance.

    Its delays are finite seconds, 0 or more. They depend on seed, step, micro-batch and rank only: other chunks, a
    longer run or other seeds do not change them. Its name in a scenario leads back to its class. Both engines simulate
    the same times with it.

    Args:
        disturbance: The disturbance, with its settings.

    Raises:
        AssertionError: It breaks a rule. The message names the rule and the case.
    """
    with telling(f"disturbance {disturbance.kind}"):
        kind = disturbance.kind_in_files()
        assert KINDS.find(kind) is type(disturbance), f"kind {kind!r} in a scenario is another class"
    for nodes, gpus_per_node in CLUSTERS:
        world_size = nodes * gpus_per_node
        if disturbance.range_faults(world_size, gpus_per_node):
            continue
        with telling(f"disturbance {disturbance.kind} on {nodes} nodes of {gpus_per_node} GPUs"):
            scenario = scenario_of(nodes, gpus_per_node, {"disturbances": (disturbance,)})
            (again,) = scenarios.loads(scenarios.dump(scenario)).disturbances
            assert again == disturbance, f"what is read back from YAML is {again!r}"
            for n in (1, _N_PASSES):
                workload = scenario.workload.model_copy(update={"micro_batches": n})
                _check_delays(scenario.model_copy(update={"workload": workload}), disturbance)
            engines_agree(scenario, build(scenario, scenario.schedules[0]))


def _check_delays(scenario: Scenario, disturbance: Disturbance) -> None:
    whole = _drawn(scenario, _SEEDS, (N_STEPS,))
    assert (np.isfinite(whole) & (whole >= 0)).all(), "delays are seconds, finite and 0 or more"
    chunks = _drawn(scenario, _SEEDS, _CHUNKS)
    assert np.array_equal(chunks, whole), f"delays are others when drawn in chunks of {_CHUNKS} steps"
    longer = _drawn(scenario, _SEEDS, (2 * N_STEPS,))
    assert np.array_equal(longer[:, :N_STEPS], whole), "delays are others in a longer run"
    alone = _drawn(scenario, _SEEDS[1:2], (N_STEPS,))
    assert np.array_equal(alone, whole[1:2]), "delays of a seed are others when it is drawn alone"
    differ = any(not np.array_equal(whole[0], each) for each in longer[1:, :N_STEPS])
    assert disturbance.is_random or not differ, "is_random is False, and seeds make a difference"
    assert not (disturbance.never_delays and whole.any()), "never_delays is True, and it delays"


def _drawn(scenario: Scenario, seeds: tuple[int, ...], chunks: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the delays of its channel, see `simdist.plan.delays`."""
    sampler = delay_sampler(scenario, seeds)
    taken = [sampler.take(n_steps) for n_steps in chunks]
    (channel,) = sampler.channels
    return np.concatenate([each[channel] for each in taken], axis=1)
