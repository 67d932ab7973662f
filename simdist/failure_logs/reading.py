"""Which program wrote a log, and what several logs say together."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

from simdist.errors import ScenarioError, naming_file
from simdist.failure_logs.goodput import goodput_failures, is_goodput_record, parse_goodput
from simdist.failure_logs.records import LoggedFailures
from simdist.failure_logs.slurm import slurm_failures
from simdist.failure_logs.slurm_jobs import SlurmJob, begin_of, is_table, jobs_of_json, jobs_of_table
from simdist.failure_logs.torchrun import is_of_torchrun, parse_torchrun, torchrun_failures
from simdist.files import lines_of, open_unpacked

LogProgram: TypeAlias = Literal["Slurm", "torchrun", "ml-goodput-measurement"]

_FIRST_LINES = 20
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OF_JSON = ("{", "[{", "[\n", "[\r\n")


def program_of(path: Path) -> LogProgram | None:
    """Return the program that wrote a log; None if it is none of those that are read here.

    Raises:
        ScenarioError: It cannot be read.
    """
    if not path.is_file():
        return None
    with naming_file(path, "read", ScenarioError):
        first = list(islice(filter(str.strip, _lines(path)), _FIRST_LINES))
        if not first:
            return None
        if first[0].lstrip().startswith(_OF_JSON) and (program := _program_of_json(path, first)):
            return program
        if is_table(first):
            return "Slurm"
        return "torchrun" if any(map(is_of_torchrun, _lines(path))) else None


def _program_of_json(path: Path, first: Sequence[str]) -> LogProgram | None:
    try:
        if any(is_goodput_record(json.loads(line)) for line in first):
            return "ml-goodput-measurement"
    except (ValueError, RecursionError):
        pass  # it goes on in the next line
    try:
        document = json.loads("".join(_lines(path)))
    except (ValueError, RecursionError):
        return None
    if isinstance(document, list) and any(map(is_goodput_record, document[:_FIRST_LINES])):
        return "ml-goodput-measurement"
    return "Slurm" if isinstance(document, dict) and isinstance(document.get("jobs"), list) else None


def _lines(path: Path) -> Iterator[str]:
    with open_unpacked(path) as file:
        for number, line in enumerate(lines_of(file)):
            text = line.decode("utf-8", errors="replace") if number else line.decode("utf-8-sig", errors="replace")
            yield _COLOURS.sub("", text)


def read_failures(paths: Sequence[Path]) -> list[LoggedFailures]:
    """Return what logs say, those of one program together, in the order of the programs' first logs.

    Args:
        paths: Logs of which `program_of` knows the program.

    Raises:
        ScenarioError: One cannot be read, is damaged, or says nothing.
    """
    of_program: dict[LogProgram, list[Path]] = {}
    for path in paths:
        program = program_of(path)
        if program is None:
            raise ScenarioError(f"{path}: is no log of Slurm, torchrun or ml-goodput-measurement")
        of_program.setdefault(program, []).append(path)
    return [_READERS[program](files) for program, files in of_program.items()]


def _of_slurm(paths: Sequence[Path]) -> LoggedFailures:
    jobs: dict[tuple[str, float], SlurmJob] = {}
    begins_s: list[float | None] = []
    for path in paths:
        lines = _read(path)
        begins_s.append(begin_of(lines, str(path)))
        is_json = bool(lines) and lines[0].lstrip().startswith("{")
        found = jobs_of_json("".join(lines), str(path)) if is_json else jobs_of_table(lines, str(path))
        jobs |= {(job.job_id, job.start_s): job for job in found}  # several logs may have the same
    known_s = [each_s for each_s in begins_s if each_s is not None]
    begin_s = min(known_s) if len(known_s) == len(paths) else None
    return slurm_failures(list(jobs.values()), _named(paths), begin_s=begin_s)


def _of_torchrun(paths: Sequence[Path]) -> LoggedFailures:
    logs = []
    for path in paths:
        with naming_file(path, "read", ScenarioError):
            logs.append(parse_torchrun(_lines(path), str(path)))
    return torchrun_failures(logs)


def _of_goodput(paths: Sequence[Path]) -> LoggedFailures:
    records = [record for path in paths for record in parse_goodput("".join(_read(path)), str(path))]
    return goodput_failures(records, _named(paths))


def _read(path: Path) -> list[str]:
    with naming_file(path, "read", ScenarioError):
        return list(_lines(path))


def _named(paths: Sequence[Path]) -> str:
    return " and ".join(map(str, paths))


_READERS: dict[LogProgram, Callable[[Sequence[Path]], LoggedFailures]] = {
    "Slurm": _of_slurm,
    "torchrun": _of_torchrun,
    "ml-goodput-measurement": _of_goodput,
}
