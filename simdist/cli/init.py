"""`simdist init`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from simdist.cli import common
from simdist.drafts.drafting import PRECISIONS, STEPS, DraftOptions, draft
from simdist.errors import ScenarioError
from simdist.runs.nccl_tests import OPS


@click.command("init")
@click.option(
    "-o", "--output", type=common.path_type, metavar="FILE", default="scenario.yaml", help="The file to write."
)
@click.option(
    "--from",
    "sources",
    type=common.file_name,
    multiple=True,
    metavar="FILE|MODULE:FUNCTION",
    help="A job, a PyTorch model, a table of nccl-tests or a log of failures, see below; repeat it.",
)
@click.option("--cluster", type=common.file_name, metavar="FILE|PRESET", help="Machines and links.")
@click.option("--nodes", type=common.positive, metavar="N", help="Machines.")
@click.option("--gpus-per-node", type=common.positive, metavar="N", help="Ranks of each machine.")
@click.option("--workload", type=common.file_name, metavar="FILE|PRESET", help="Model and batch.")
@click.option("--batch-size", type=common.positive, metavar="N", help="Samples per GPU and pass.")
@click.option("--sequence", type=common.positive, metavar="N", help="Tokens of a sample, with --from.")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Of forward and backward pass.")
@click.option("--forward", metavar="TIME", help="Measured time of a forward pass, such as '20 ms'.")
@click.option("--utilization", metavar="SHARE", help="Share of the GPU's peak that the passes reach, with --from.")
@click.option("--input", "shape", metavar="SHAPE", help="Sample of a PyTorch model that returns none: 3x224x224.")
@click.option(
    "--device", type=click.Choice(["meta", "cpu"]), default="meta", help="Of a PyTorch model; cpu: in memory."
)
@click.option("--op", type=click.Choice(OPS), help="Collective of a table of nccl-tests that names none.")
@click.option("--straggler-rate", metavar="SHARE", help="Probability that a rank is late in a step; 0 for none.")
@click.option("--straggler-delay", metavar="TIME", help="How late it is then.")
@click.option("--schedule", "labels", multiple=True, metavar="LABEL", help="To compare, such as local-8; repeat it.")
@click.option("--steps", type=common.positive, metavar="N", default=STEPS, help="Steps of a run.")
@click.option("--yes", is_flag=True, help="Ask nothing, also on a terminal.")
@click.option("--force", is_flag=True, help="Replace existing files.")
@common.options
def command(session: common.CliSession, *, output: Path, force: bool, yes: bool, **given: Any) -> None:
    """Write a scenario to begin with.

    Options state it. On a terminal, the command asks for the others. It looks for a job's environment (torchrun,
    Slurm, Open MPI) and for the GPUs of this machine, and marks each guess.

    --from reads a job of torchtitan (.toml) or llm-foundry (.yaml), the config.json of a Hugging Face model, and a
    configuration of Accelerate (.yaml) or DeepSpeed (.json). The last two have no model: add --from config.json or
    --workload. MODULE:FUNCTION takes no arguments and returns a PyTorch module, or (module, sample batch); its tensors
    and FLOPs are counted without values. Logs of Slurm's sacct, of torchrun and of ml-goodput-measurement tell
    failures: rates with intervals, and parts of a recovery. Any other file is output of nccl-tests: it calibrates the
    links of the cluster.
    """
    asks = not yes and sys.stdin.isatty() and sys.stderr.isatty()
    found = draft(DraftOptions(**given), output, ask=_ask if asks else None, say=session.say, force=force)
    found.write()
    session.wrote(output)
    session.result(found.document(), found.text())


def _ask(question: str, default: Any, check: Callable[[str], Any]) -> Any:
    try:
        answer = click.prompt(question, default=default, value_proc=_asked_again(check), err=True)
    except click.Abort:
        click.echo(err=True)  # the question has no end of line
        raise
    return answer


def _asked_again(check: Callable[[str], Any]) -> Callable[[object], Any]:
    """Turn a refusal into one after which click asks again."""

    def checked(text: object) -> Any:
        try:
            return check(str(text))
        except ScenarioError as error:
            raise click.UsageError(str(error)) from None

    return checked
