"""Ranks on nodes of the emulated cluster, started fast: as forks of a process that has loaded torch."""

import atexit
import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import processes

CLONE_NEWNET = 0x40000000
EXPERIMENT = Path(__file__).resolve().parents[1] / "experiments" / "emulated_cluster"


def launch(
    nodes: Sequence,
    ranks_per_node: int,
    command: Sequence[str],
    *,
    timeout_s: float,
    scheduling: str = "realtime",
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """Do what `network.launch` does, without `torchrun`; return what each rank printed."""
    places = [(node.name, str(local)) for node in nodes for local in range(ranks_per_node)]
    environ = {
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": nodes[0].address,
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # as there
        "SIMDIST_EMULATED_CLUSTER": nodes[0].about,
        **(environ or {}),
    }
    endings = processes.run(enter, len(places), places, command, environ=environ, timeout_s=timeout_s)
    assert {ending.code for ending in endings.values()} == {0}, endings
    return [ending.output for ending in endings.values()]


def enter(places: Sequence[tuple[str, str]], command: Sequence[str]) -> None:
    """Go to the node of this rank, and run what it runs, with what is registered for the exit."""
    sys.path[:0] = [str(EXPERIMENT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    name, os.environ["LOCAL_RANK"] = places[int(os.environ["RANK"])]
    with Path("/run/netns", name).open() as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
    is_module = command[0] == "-m"
    try:
        processes.run_as_main(command[is_module], is_module, *command[is_module + 1 :])
    finally:
        atexit._run_exitfuncs()  # a fork would skip them
