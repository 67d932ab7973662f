"""Jobs in the output of Slurm's `sacct`: a table with separators, with or without its header, or `--json`.

Source:
    SchedMD/slurm, doc/man/man1/sacct.1 (fields, states), src/plugins/data_parser (JSON).
"""

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from simdist.errors import ScenarioError
from simdist.failure_logs.records import timestamp_s
from simdist.settings.base import shown

# fmt: off
# States that a job can be in, from the manual.
_STATES = frozenset((
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "CONFIGURING", "DEADLINE", "EXPEDITING", "FAILED",
    "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "POWER_UP_NODE", "PREEMPTED", "RECONFIG_FAIL",
    "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "RUNNING", "SIGNALING",
    "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED", "TIMEOUT", "UPDATE_DB",
))
# fmt: on
#: Writes what is read here.
COMMAND = (
    "sacct --allocations --duplicates --truncate --parsable2 --format=JobID,State,Start,End,Elapsed,AllocTRES,NodeList"
)

_JOB_ID = re.compile(r"\d+(_(\d+|\[.*\]))?(\+\d+)?(\.\w[\w.]*)?", re.ASCII)
_ELAPSED = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)(?:\.\d+)?", re.ASCII)
_SECONDS = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:Z|[+-]\d\d:?\d\d)?", re.ASCII)
_TRES = re.compile(r"(\w[\w/:.+-]*=[^,|]+)(,\w[\w/:.+-]*=[^,|]+)*", re.ASCII)
_COMMENTS = "#$"
_STARTTIME = re.compile(r"(?:--starttime[= ]|(?<!\S)-S) ?(\S+)")
_NO_TIME = frozenset(("", "Unknown", "None", "INVALID"))
_NO_NODES = frozenset(("", "None assigned", "None", "(null)"))
_MOST_NODES = 1_000_000
_MOST_S = 10 * 366 * 86400.0
_HEADER = re.compile(
    r"(?:^|[^\w\s]|\t)JobID(?:Raw)?(?:%-?\d+)?([^\w\s%]+|\t| +)|([^\w\s]+|\t)JobID(?:Raw)?\b", re.ASCII
)
_HOUR_S = 3600.0  # between local times of summer and winter
_COLUMNS = ("JobID", "State", "Start", "End", "Elapsed", "AllocTRES", "NodeList", "NNodes", "Restarts")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that ran, or one run of a job that was requeued.

    Args:
        job_id: With the task of an array or the part of a heterogeneous job, such as `1234_5` or `1234+1`.
        state: Without what follows it.
        killed_by: User who cancelled it, by number or name; empty if not stated.
        start_s: When it started.
        end_s: When it ended, or when the log was written.
        elapsed_s: How long it ran, without time in which it was suspended.
        n_gpus: GPUs; None if not stated.
        n_nodes: Nodes; None if not stated.
        hosts: Their names, as far as stated.
        n_restarts: How often it was requeued; None if not stated.
    """

    job_id: str
    state: str
    killed_by: str
    start_s: float
    end_s: float
    elapsed_s: float
    n_gpus: int | None
    n_nodes: int | None
    hosts: frozenset[str]
    n_restarts: int | None


def jobs_of_table(lines: Sequence[str], name: str) -> list[SlurmJob]:
    """Return the jobs of a table, without their steps and those that did not run.

    Args:
        lines: Of the file.
        name: Of the file, for errors.

    Raises:
        ScenarioError: A value is damaged, or the columns do not tell what is needed.
    """
    header, separator = _header_of(lines)
    if header is None:
        rows = [(number, line.rstrip("\n").split(separator)) for number, line in _filled(lines)]
        names = _names_without_header([cells for _, cells in rows], name)
    else:
        if separator.isspace() and separator != "\t":
            raise ScenarioError(
                f"{name}:{header}: has columns of fixed width, which cut values: write it with {COMMAND}"
            )
        rows = [
            (number, _cells(line, separator))
            for number, line in _filled(lines)
            if number > header and line.strip() != lines[header - 1].strip()  # several outputs one after the other
        ]
        names = [each.split("%")[0].strip() for each in _cells(lines[header - 1], separator)]
    known = {each.lower(): each for each in _COLUMNS} | {"allocnodes": "NNodes"}
    names = [known.get(each.lower(), each) for each in names]
    names = [each.removesuffix("Raw") if each.removesuffix("Raw") not in names else each for each in names]
    for needed in ("JobID", "State", "Start"):
        if needed not in names:
            raise ScenarioError(f"{name}: has no column {needed}: write it with {COMMAND}")
    if "Elapsed" not in names and "End" not in names:
        raise ScenarioError(f"{name}: has neither Elapsed nor End: write it with {COMMAND}")
    jobs: list[SlurmJob] = []
    for number, cells in rows:
        if len(cells) < len(names) or any(cells[len(names) :]):
            raise ScenarioError(
                f"{name}:{number}: {len(cells)} values in {len(names)} columns: the line is torn, or a value contains "
                f"{separator!r}: write another --delimiter"
            )
        values = dict(zip(names, (each.strip() for each in cells), strict=False))
        try:
            job = _job_of_row(values)
        except ValueError as error:
            raise ScenarioError(f"{name}:{number}: {error}") from None
        jobs += [job] if job else []
    return jobs


def _cells(line: str, separator: str) -> list[str]:
    """Return the values of a line. Other programs quote those with a comma; sacct does not."""
    line = line.rstrip("\r\n")
    return next(csv.reader([line])) if separator == "," else line.split(separator)


def _header_of(lines: Sequence[str]) -> tuple[int | None, str]:
    """Return the number of the line that names the columns, from 1, and what separates them."""
    for number, line in _filled(lines):
        if found := _HEADER.search(line):
            return number, found[1] or found[2]
        return None, "|"
    return None, "|"


def is_table(lines: Sequence[str]) -> bool:
    """Tell whether first lines of a file are those of a table, with its header or without."""
    if _header_of(lines)[0] is not None:
        return True
    rows = [line.rstrip("\n").split("|") for _, line in _filled(lines)]
    return any(
        len(cells) > 1 and bool(_JOB_ID.fullmatch(cells[0])) and any(cell.split(" ")[0] in _STATES for cell in cells)
        for cells in rows
    )


def _filled(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip() and line[0] not in _COMMENTS)


def begin_of(lines: Sequence[str], name: str) -> float | None:
    """Return when a log begins: `--starttime` in the command, if that stands above the table as a comment.

    Raises:
        ScenarioError: It is no date.
    """
    for number, line in enumerate(lines, 1):
        if line.strip() and line[0] not in _COMMENTS:
            break
        if found := _STARTTIME.search(line):
            try:
                return timestamp_s(found[1])
            except ValueError:
                raise ScenarioError(f"{name}:{number}: --starttime {shown(found[1])}: write e.g. 2026-03-01") from None
    return None


def _job_of_row(values: Mapping[str, str]) -> SlurmJob | None:
    """Return the job of a row; None of a step, and of a job that has not started."""
    job_id = values["JobID"]
    if not _JOB_ID.fullmatch(job_id):
        raise ValueError(f"JobID {shown(job_id)}: write a number of a job, such as 1234, 1234_5 or 1234.batch")
    if "." in job_id:
        return None
    state, killed_by = _state(values["State"])
    start_s = _time_s("Start", values["Start"])
    if start_s is None:
        return None
    end_s, elapsed_s = _end_and_elapsed(values, start_s)
    tres = values.get("AllocTRES", "")
    n_nodes = _whole("NNodes", values["NNodes"]) if values.get("NNodes") else _count_of(tres, "node")
    hosts = hosts_of(values.get("NodeList", ""))
    return SlurmJob(
        job_id,
        state,
        killed_by,
        start_s,
        end_s,
        elapsed_s,
        n_gpus=gpus_of(tres) if "AllocTRES" in values else None,
        n_nodes=len(hosts) if n_nodes is None and hosts else n_nodes,
        hosts=hosts,
        n_restarts=_whole("Restarts", values["Restarts"]) if values.get("Restarts") else None,
    )


def _end_and_elapsed(values: Mapping[str, str], start_s: float) -> tuple[float, float]:
    """Return when a job ended, and how long it ran, which is less if it was suspended."""
    end_s = _time_s("End", values.get("End", ""))
    has_elapsed = values.get("Elapsed", "") not in _NO_TIME
    if has_elapsed:
        elapsed_s = _elapsed_seconds(values["Elapsed"])
    elif end_s is not None:
        elapsed_s = end_s - start_s
    else:
        raise ValueError(f"End {shown(values.get('End', ''))} of a job without Elapsed: add Elapsed to --format")
    end_s = start_s + elapsed_s if end_s is None else end_s
    least_s = -_HOUR_S if has_elapsed else 0.0  # local time went back
    if not 0 <= elapsed_s <= _MOST_S or not least_s <= end_s - start_s <= _MOST_S:
        raise ValueError(
            f"{end_s - start_s:g} s from Start to End: write times in their order, at most ten years apart"
        )
    return (end_s if end_s >= start_s else start_s + elapsed_s), elapsed_s


def _state(text: str) -> tuple[str, str]:
    """Return a state and who cancelled the job."""
    word, _, rest = text.partition(" ")
    if word not in _STATES:
        cut = "it is cut off: write" if word.endswith("+") else "write"
        raise ValueError(f"State {shown(text)}: {cut} a state of Slurm, such as NODE_FAIL, with sacct --parsable2")
    return word, rest.removeprefix("by ").strip()


def _time_s(column: str, text: str) -> float | None:
    if text in _NO_TIME:
        return None
    if not _TIME.fullmatch(text):
        raise ValueError(f"{column} {shown(text)}: write e.g. 2026-03-01T12:00:00: unset SLURM_TIME_FORMAT for sacct")
    try:
        return timestamp_s(text)
    except ValueError:
        raise ValueError(f"{column} {shown(text)}: there is no such time") from None


def _elapsed_seconds(text: str) -> float:
    """Return the seconds of `D-HH:MM:SS`, or of a number of seconds; ValueError tells the right form."""
    if _SECONDS.fullmatch(text):
        return float(text)
    found = _ELAPSED.fullmatch(text)
    if not found:
        raise ValueError(f"Elapsed {shown(text)}: write e.g. 1-02:03:04 or 02:03:04")
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups())
    return float(((24 * days + hours) * 60 + minutes) * 60 + seconds)


def gpus_of(tres: str) -> int:
    """Return the GPUs of `AllocTRES`: those of all types together, or the sum of the types.

    >>> gpus_of("billing=8,cpu=96,gres/gpu:h100=8,gres/gpu=8,node=1"), gpus_of("cpu=4,node=1")
    (8, 0)
    """
    total = _count_of(tres, "gres/gpu")
    if total is not None:
        return total
    return sum(_whole(key, count) for key, count in _pairs(tres) if key.startswith("gres/gpu:"))


def _pairs(tres: str) -> Iterator[tuple[str, str]]:
    for each in filter(None, tres.split(",")):
        key, equals, count = each.partition("=")
        if not equals:
            raise ValueError(f"AllocTRES {shown(tres)}: write e.g. cpu=96,gres/gpu=8,node=1")
        yield key, count


def _count_of(tres: str, kind: str) -> int | None:
    return next((_whole(key, count) for key, count in _pairs(tres) if key == kind), None)


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ValueError(f"{name} {shown(text)}: write a whole number")
    return int(text)


def hosts_of(text: str) -> frozenset[str]:
    """Return the hosts of a list such as `cn[001-003,7],gpu1`.

    >>> sorted(hosts_of("cn[009-010],gpu1"))
    ['cn009', 'cn010', 'gpu1']

    Raises:
        ValueError: It is no such list.
    """
    if text in _NO_NODES:
        return frozenset()
    hosts: set[str] = set()
    for each in re.split(r",(?![^\[]*\])", text):
        parts = re.split(r"\[([^\]]*)\]", each)
        if any("[" in part or "]" in part for part in parts[::2]):
            raise ValueError(f"NodeList {shown(text)}: write e.g. cn[001-003],gpu1")
        choices = [_numbers(part, text) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts.update("".join(chosen) for chosen in itertools.islice(itertools.product(*choices), _MOST_NODES + 1))
        if len(hosts) > _MOST_NODES:
            raise ValueError(f"NodeList {shown(text)}: more than {_MOST_NODES:,} nodes")
    return frozenset(hosts)


def _numbers(ranges: str, text: str) -> list[str]:
    """Return the numbers of `001-003,7` with their zeros."""
    found: list[str] = []
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(each) > 20:
            raise ValueError(f"NodeList {shown(text)}: write e.g. cn[001-003],gpu1")
        ends = int(first), int(last or first)
        if not 0 <= ends[1] - ends[0] < _MOST_NODES:
            raise ValueError(f"NodeList {shown(text)}: {each} is no range of nodes")
        found += [str(number).zfill(len(first)) for number in range(ends[0], ends[1] + 1)]
    return found


def _names_without_header(rows: list[list[str]], name: str) -> list[str]:
    """Return the names of columns that their values tell; others are numbered.

    Raises:
        ScenarioError: The values do not tell which columns are state, start and elapsed time.
    """
    n = min(map(len, rows), default=0)
    columns = [[cells[i].strip() for cells in rows if "." not in cells[0]] for i in range(n)]
    of_state = [i for i in range(n) if _all(columns[i], lambda text: text.split(" ")[0] in _STATES)]
    of_tres = [i for i in range(n) if _all(columns[i], lambda text: bool(_TRES.fullmatch(text)))]
    times = [i for i in range(n) if _all(columns[i], lambda text: text in _NO_TIME or bool(_TIME.fullmatch(text)))]
    spans = [i for i in range(n) if _all(columns[i], lambda text: bool(_ELAPSED.fullmatch(text)))]
    places = [(start, end, span) for start, end in itertools.permutations(times, 2) for span in spans]
    fitting = [each for each in places if _fits(*(columns[i] for i in each))]
    if n == 0 or not _all(columns[0], lambda text: bool(_JOB_ID.fullmatch(text))) or not of_state or not fitting:
        raise ScenarioError(
            f"{name}: has no header, and its values do not tell JobID, State, Start, End and Elapsed: write it with "
            f"{COMMAND}"
        )
    start, end, span = fitting[0]
    named = {0: "JobID", of_state[0]: "State", start: "Start", end: "End", span: "Elapsed"}
    if of_tres:  # an allocation has all that was asked for, and more
        named[max(of_tres, key=lambda i: sum(text.count("=") for text in columns[i]))] = "AllocTRES"
    return [named.get(i, f"column {i + 1}") for i in range(n)]


def _all(texts: list[str], check: Callable[[str], bool]) -> bool:
    """Tell whether a column has values, and all pass a check."""
    filled = [text for text in texts if text]
    return bool(filled) and all(map(check, filled))


def _fits(starts: list[str], ends: list[str], spans: list[str]) -> bool:
    """Tell whether three columns are start, end and the time between: of most jobs that ended, and at least one ran.

    A job that was suspended ran for less, and local time may go back or on by an hour.
    """
    rows = zip(starts, ends, spans, strict=True)
    ended = [row for row in rows if _TIME.fullmatch(row[0]) and _TIME.fullmatch(row[1]) and row[2]]
    try:
        found = [(timestamp_s(end) - timestamp_s(start), _elapsed_seconds(span)) for start, end, span in ended]
    except ValueError:  # there is no such time
        return False
    n_equal = sum(between_s == elapsed_s for between_s, elapsed_s in found)
    return any(elapsed_s for _, elapsed_s in found) and n_equal > len(found) / 2


def jobs_of_json(text: str, name: str) -> list[SlurmJob]:
    """Return the jobs of `sacct --json` that ran.

    Args:
        text: Of the file.
        name: Of the file, for errors.

    Raises:
        ScenarioError: It is damaged.
    """
    try:
        jobs = json.loads(text)["jobs"]
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"{name}: is no JSON: {error}: write it with sacct --json") from None
    found: list[SlurmJob] = []
    for number, each in enumerate(jobs):
        try:
            job = _job_of_json(each)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"has no {error.args[0]}" if isinstance(error, KeyError) else str(error)
            raise ScenarioError(f"{name}: jobs[{number}]: {what}: write it with sacct --json") from None
        found += [job] if job else []
    return found


def _job_of_json(job: Mapping[str, object]) -> SlurmJob | None:
    state = _inside(job, "state")["current"]
    word, _ = _state(str(state[0] if isinstance(state, list) and state else state))
    times = _inside(job, "time")
    start_s = _number(times["start"], "time.start")
    if not start_s:
        return None
    elapsed_s = _number(times["elapsed"], "time.elapsed")
    tres = _inside(job, "tres").get("allocated") or []
    assert isinstance(tres, list)
    of_gpus = [each for each in tres if each["type"] == "gres" and str(each["name"]).split(":")[0] == "gpu"]
    total = [each for each in of_gpus if each["name"] == "gpu"] or of_gpus
    n_nodes = _number(job.get("allocation_nodes"), "allocation_nodes")
    killed_by = job.get("kill_request_user")
    n_restarts = job.get("restart_cnt")
    return SlurmJob(
        _json_id(job),
        word,
        str(killed_by or ""),
        start_s,
        max(_number(times["end"], "time.end"), start_s + elapsed_s),
        elapsed_s,
        n_gpus=int(sum(_number(each["count"], "tres") for each in total)),
        n_nodes=int(n_nodes) or None,
        hosts=hosts_of(str(job.get("nodes") or "")),
        n_restarts=None if n_restarts is None else int(_number(n_restarts, "restart_cnt")),
    )


def _json_id(job: Mapping[str, object]) -> str:
    for kind, sign, number in (("array", "_", "task_id"), ("het", "+", "job_offset")):
        part = job.get(kind)
        values = part if isinstance(part, dict) else {}
        whole = _number(values.get("job_id"), f"{kind}.job_id")
        if whole:
            return f"{int(whole)}{sign}{int(_number(values.get(number), f'{kind}.{number}'))}"
    return str(int(_number(job["job_id"], "job_id")))


def _inside(job: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = job[key]
    if not isinstance(value, dict):
        raise ValueError(f"{key} {shown(value)}: write keys below it")
    return value


def _number(value: object, key: str) -> float:
    """Return a number, which later releases put into an object; 0 for none."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) else 0
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError(f"{key} {shown(value)}: write a number, 0 or more")
    return float(value)
