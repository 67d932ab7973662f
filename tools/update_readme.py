"""Write into README.md what its commands print.

    python tools/update_readme.py            write
    python tools/update_readme.py --check    exit with 1 if the README is out of date
    python tools/update_readme.py --speed    also run the benchmark and write its table

`<!-- output: NAME -->` stands before a code block with the output of a command, `<!-- file: PATH -->` before one with
the contents of a file. The table of `<!-- table: speed -->` differs from run to run and is not checked.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def demo() -> str:
    """Return what `make demo` prints last."""
    return _printed("experiments/hsgd_stragglers/run.py")


def first() -> str:
    """Return the table of the first scenario."""
    return _compared("docs/examples/first.yaml")


def gradients() -> str:
    """Return the table of the ways to average gradients."""
    return _compared("cloud-gradients")


def data() -> str:
    """Return the table of the ways to read data."""
    return _compared("cloud-data", "--baseline", "naive")


def imported() -> str:
    """Return what slowed the job of which the traces ship."""
    with _job() as (_, said):
        return said


def whatif() -> str:
    """Return what stragglers cost that job, and what would help."""
    with _job() as (scenario, _):
        return _said("whatif", scenario)


def tuned() -> str:
    """Return the schedule that is best for that job."""
    with _job() as (scenario, _):
        return _said("tune", scenario, "--global-every", "8")


@contextlib.contextmanager
def _job() -> Iterator[tuple[str, str]]:
    """Import the traces that ship; yield the scenario and what was said."""
    with tempfile.TemporaryDirectory() as folder:
        scenario = f"{folder}/job.yaml"
        yield scenario, _said("import", "docs/examples/traces", "--steps", "81:113", "-o", scenario)


def sweep() -> str:
    """Return the fastest schedules of the first sweep on 16 nodes."""
    with tempfile.TemporaryDirectory() as folder:
        _said("sweep", "docs/examples/sweep.yaml", "-o", folder, "--workers", "0")
        return _said("results", folder, "--fastest", "--where", "cluster.nodes=16")


def _compared(scenario: str, *options: str) -> str:
    return _said("compare", scenario, *options)


def _said(*args: str) -> str:
    from simdist.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(args)
    return out.getvalue()


def _printed(script: str) -> str:
    import runpy

    argv, sys.argv = sys.argv, [script]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = argv
    return out.getvalue()


OUTPUTS: dict[str, Callable[[], str]] = {
    "demo": demo,
    "first": first,
    "gradients": gradients,
    "data": data,
    "sweep": sweep,
    "imported": imported,
    "whatif": whatif,
    "tuned": tuned,
}


def speed_table() -> str:
    """Run the benchmark and return its numbers as a table."""
    printed = subprocess.run([sys.executable, "benchmarks/engines.py", "--json"], check=True, capture_output=True)
    measured = json.loads(printed.stdout)
    sizes, whole, large = measured["sizes"], measured["compare"], measured["scaling"]["by_ranks"][-1]
    rows = [
        f"| {sizes['ranks']} ranks x {sizes['steps']} steps | `des`, rank-ops/s | `fast`, rank-ops/s | ratio "
        f"| `fast`, {sizes['batch_seeds']} seeds at once, no trace |",
        "|---|---|---|---|---|",
    ]
    for row in measured["engines"]:
        rows.append(
            f"| {row['schedule']} | {row['des_rank_ops_per_s'] / 1e6:.2f} M | {row['fast_rank_ops_per_s'] / 1e6:.0f} M "
            f"| {row['fast_over_des']:.0f} | {row['batch_rank_ops_per_s'] / 1e6:,.0f} M |"
        )
    return "\n".join(
        [
            *rows,
            "",
            f"* Comparing {whole['schedules']} schedules on {whole['ranks']} GPUs, {whole['steps']} steps x "
            f"{whole['seeds']} seeds: {whole['seconds']:.1f} s.",
            f"* Hierarchical SGD on {large['ranks']:,} ranks, {large['steps']} steps, building and proving the plan "
            f"included: {large['build_s'] + large['measure_s']:.1f} s and {large['peak_MiB']:.0f} MiB.",
        ]
    )


def updated(text: str) -> str:
    """Return the README with every marked block as it is now."""

    def block(match: re.Match[str]) -> str:
        kind, name = match[2], match[3]
        inside = OUTPUTS[name]() if kind == "output" else (ROOT / name).read_text(encoding="utf-8")
        lines = "\n".join(line.rstrip() for line in inside.strip("\n").splitlines())
        return f"{match[1]}\n{match[4]}\n{lines}\n```\n"

    return re.sub(r"(<!-- (output|file): (\S+) -->)\n(```\w*)\n.*?```\n", block, text, flags=re.S)


def main() -> int:
    """Update or check the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--speed", action="store_true")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = updated(before)
    if arguments.check:
        return int(before != after)
    if arguments.speed:
        table = f"<!-- table: speed -->\n{speed_table()}\n<!-- end -->"
        after = re.sub(r"<!-- table: speed -->\n.*?<!-- end -->", lambda _: table, after, flags=re.S)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
