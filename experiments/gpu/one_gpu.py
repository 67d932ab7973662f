"""Measure what one GPU and its host take for copies and small operations; a rank runs this.

    python -m one_gpu FILE --backend nccl --device cuda

`real.calibrate` writes the same to a cluster file, which needs several ranks.
"""

import argparse
from pathlib import Path

import yaml

from real.calibration import machine
from real.calibration.steps import measure_small
from real.processes.launch import connect
from simdist.scenario import Cluster, Link, dump_cluster

MEASURED = ("memory_bandwidth", "host_bandwidth", "orthonormalize", "floors")  # of the device


def main() -> None:
    """Write the keys `device` and `host` of a cluster that were measured, to override a preset's."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--backend", choices=("gloo", "nccl"), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    options = parser.parse_args()
    with connect(backend=options.backend, device=options.device) as connection:
        device = machine.measure_device(connection)
        small = measure_small(connection)
    assert small is not None  # this is rank 0
    ideal = Cluster(nodes=1, gpus_per_node=1, fabric=Link.ideal(), network=Link.ideal())
    update = {
        "device": device.model_copy(update={"floors": small.floors}),
        "host": ideal.host.model_copy(update={"launches": small.launches}),
    }
    whole = yaml.safe_load(dump_cluster(ideal.model_copy(update=update)))
    found = {"device": {name: value for name, value in whole["device"].items() if name in MEASURED}}
    if launches := whole.get("host", {}).get("launches"):
        found["host"] = {"launches": launches}
    options.file.write_text(yaml.safe_dump(found), encoding="utf-8")


if __name__ == "__main__":
    main()
