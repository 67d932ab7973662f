"""How fast are collectives sent message by message?

    python benchmarks/expansion.py          exit code 1 if a target is missed
    python benchmarks/expansion.py --json   the numbers for machines

A ring all-reduce over 1024 members that begin at different times is 2.1 million messages.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from expansion import Wire, Wires, play, rounds

from benchmarks.engines import peak_nbytes
from simdist.plan import AllReduce, Group

TARGET_S, TARGET_MIB = 1.0, 1024.0


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    op = AllReduce("grad", Group(options.members), algorithm="ring")
    wires = Wires(np.arange(options.members) // 8, Wire(5e-6, 100e9), Wire(25e-6, 3e9))
    start_s = np.random.default_rng(0).uniform(0, 1e-3, options.members)
    seconds = []
    for _ in range(options.repetitions):
        begin_s = time.perf_counter()
        played = play(rounds(op), wires, nbytes=1e9, start_s=start_s)
        seconds.append(time.perf_counter() - begin_s)
    peak_mib = peak_nbytes() / 2**20
    row = {"members": options.members, "messages": played.n_messages, "seconds": min(seconds), "peak_MiB": peak_mib}
    print(json.dumps(row) if options.json else "  ".join(f"{key} {value:,.4g}" for key, value in row.items()))
    return int(min(seconds) > TARGET_S or peak_mib > TARGET_MIB)


if __name__ == "__main__":
    sys.exit(main())
