"""How fast are collectives sent message by message?

    python benchmarks/expansion.py          exit code 1 if a target is missed
    python benchmarks/expansion.py --json   the numbers for machines

A ring all-reduce over 1024 members that begin at different times is 2.1 million messages, which go round by round.
A direct one has members that send to all others, who wait for ports: those go one by one.
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
PER_NODE, TARGET_PER_S = (8, 1), 8e3  # members of a node, messages of a direct all-reduce


def messages_per_s(n_members: int, members_of_node: int) -> float:
    """Return how many messages of a direct all-reduce are sent in a second of the processor."""
    wires = Wires(np.arange(n_members) // members_of_node, Wire(5e-6, 100e9), Wire(25e-6, 3e9))
    start_s = np.random.default_rng(0).uniform(0, 1e-3, n_members)
    messages = list(rounds(AllReduce("grad", Group(n_members), algorithm="direct")))
    begin_s = time.process_time()
    return play(messages, wires, nbytes=1e9, start_s=start_s).n_messages / (time.process_time() - begin_s)


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1024)
    parser.add_argument("--direct", type=int, default=128, help="members of the direct all-reduce")
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
    direct_per_s = [messages_per_s(options.direct, members_of_node) for members_of_node in PER_NODE]
    row = {"members": options.members, "messages": played.n_messages, "seconds": min(seconds), "peak_MiB": peak_mib}
    row |= {f"direct_{n}_per_s": each for n, each in zip(PER_NODE, direct_per_s, strict=True)}
    print(json.dumps(row) if options.json else "  ".join(f"{key} {value:,.4g}" for key, value in row.items()))
    return int(min(seconds) > TARGET_S or peak_mib > TARGET_MIB or min(direct_per_s) < TARGET_PER_S)


if __name__ == "__main__":
    sys.exit(main())
