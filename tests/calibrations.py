"""What a rank does that calibrates; a test of it imports more than that."""

import os

from real import calibrate


def command(ranks_per_node: int, *arguments: str) -> None:
    """Run the command on this rank, as if each `ranks_per_node` ranks had a machine of their own."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": str(rank % ranks_per_node), "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    print("exit code", calibrate.main(arguments))
