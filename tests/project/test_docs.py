"""The documentation is true: links resolve, commands print what the pages show, code blocks run, settings are listed.

    python tests/project/test_docs.py    write what commands print now into the pages

A page is played from top to bottom in a copy of the working directory: a `console` block runs its `$` lines and must
show their output, of which a line `...` stands for any lines; a `python` block runs (a `>>>` one as a doctest), or, if
it defines a schedule, becomes a module in the working directory; a `yaml` block that begins with `# NAME.yaml` is
written there, another one is put over the first scenario, and both must load without warnings; so must one that has
`scenario`, a sweep of a scenario in docs/examples.
"""

import argparse
import contextlib
import difflib
import doctest
import functools
import importlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest

from simdist import sweeps
from simdist.cli import main
from simdist.plan import algorithms
from simdist.scenario import load, loads, strict_yaml
from simdist.scenario.warnings import warnings_of
from simdist.schedules import KINDS, Schedule, kinds
from simdist.settings.base import Settings
from simdist.testing import check_schedule
from simdist.tuning import candidates

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {"build", "dist", "node_modules"}  # and hidden folders
MARKDOWN = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in SKIPPED or part.startswith(".") for part in path.relative_to(ROOT).parts)
)
SENTINELS = ("README.md", "add-a-schedule.md")
PAGES = [path for path in MARKDOWN if path == ROOT / "README.md" or path.is_relative_to(ROOT / "docs")]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.yaml"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
NAMES = r"simdist|torchrun|python -m real[\w.]*|python experiments/[\w/]+\.py"
CALL = rf"(?:OMP_NUM_THREADS=1 )?(?:\.venv/bin/)?({NAMES}) (.*)$"
PROGRAM = re.compile(rf"^(?:\$ |    )?{CALL}")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_markdown = pytest.mark.parametrize("path", MARKDOWN, ids=relative)
each_page = pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.sentinel if path.name in SENTINELS else ()) for path in PAGES],
    ids=relative,
)


# ---------------------------------------------------------------- links


def prose(path: Path) -> str:
    """Return a page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))


def anchors(path: Path) -> set[str]:
    """Return the names that GitHub and MyST give to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@each_markdown
def test_relative_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        assert file.exists(), f"{relative(path)}: {target}: there is no {file}"
        assert not anchor or anchor in anchors(file), f"{relative(path)}: {target}: no such heading"


@each_markdown
def test_no_line_begins_with_a_percent_sign(path: Path) -> None:
    """MyST takes such a line and the rest of its paragraph for a comment, which the site leaves out."""
    assert re.findall(r"^\s*%.*", FENCE.sub("", path.read_text(encoding="utf-8")), re.M) == []


def test_every_page_is_reached_from_the_index() -> None:
    reached, todo = set(), [ROOT / "docs" / "index.md"]
    while todo:
        page = todo.pop()
        if page in reached or not page.is_relative_to(ROOT / "docs"):
            continue
        reached.add(page)
        found = re.findall(r"\]\(([^)\s:#]+\.md)(?:#[^)]*)?\)", prose(page))
        todo += [(page.parent / target).resolve() for target in found]
    assert set(PAGES) - {ROOT / "README.md"} <= reached


# ---------------------------------------------------------------- the map of the tree

CONTRIBUTING = ROOT / "docs" / "contributing.md"


def mapped(package: str) -> set[str]:
    """Return the names that the map of the tree gives to what lies in a package."""
    block = CONTRIBUTING.read_text(encoding="utf-8").split("```text\n")[2].partition("```")[0]
    of_package = re.search(rf"^{package}/ .*\n((?:  .*\n)*)", block, re.M)
    assert of_package
    names = (line.strip().split("  ")[0] for line in of_package[1].splitlines())  # what follows says what it is
    return {name.strip("/") for line in names for name in line.split()}


@pytest.mark.parametrize("package", ["simdist", "real"])
def test_the_map_of_the_tree_names_every_package_and_module(package: str) -> None:
    inside = [path for path in (ROOT / package).iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"]
    assert mapped(package) == {path.stem for path in inside if not path.stem.startswith("_")}


def test_files_that_the_page_for_contributors_names_exist() -> None:
    named = set(re.findall(r"`((?:simdist|real|tests|tools|docs)/[\w./-]+)`", CONTRIBUTING.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Block:
    """A block of code: its language (`indented` if it has no fence), its text, and where both stand in the page."""

    language: str
    text: str
    start: int
    line: int


def blocks(text: str) -> Iterator[Block]:
    fenced = [(match.start(2), match.end(2), match[1]) for match in FENCE.finditer(text)]
    found = [(start, end, language) for start, end, language in fenced]
    for match in re.finditer(rf"^    {CALL}", text, re.M):
        if not any(start <= match.start() < end for start, end, _ in fenced):
            found.append((match.start(), match.end(), "indented"))
    for start, end, language in sorted(found):
        yield Block(language, text[start:end], start, text.count("\n", 0, start) + 1)


def run_command(line: str) -> tuple[int, str, str]:
    """Run a line such as `$ simdist compare first.yaml  # a comment`; return exit code, stdout and stderr."""
    match = PROGRAM.match(line)
    assert match, f"no command of simdist: {line!r}"
    arguments = shlex.split(match[2], comments=True)
    if match[1] == "torchrun":
        return run_ranks(arguments)
    if match[1] != "simdist":
        command = [sys.executable, *match[1].split()[1:], *arguments]
        environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
        return ended.returncode, ended.stdout, ended.stderr if ended.returncode else ""
    if arguments[0] in ("sweep", "learn") or "--task" in arguments:
        arguments += ["--workers", "0"]  # whose table is the same; other processes would import everything again
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def briefly(command: str) -> str:
    """Return a command that trains with one seed."""
    return re.sub(r"simdist learn (?!.*--seeds)", "simdist learn --seeds 1 ", command)


def run_ranks(arguments: list[str]) -> tuple[int, str, str]:
    """Run what follows `torchrun`; return the worst exit code and what the ranks print, those that fail as stderr.

    The ranks start without torchrun itself, from a server that has loaded torch.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--standalone", action="store_true", required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("-m", action="store_true", dest="is_module")
    parser.add_argument("program")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    found = parser.parse_args(arguments)
    endings = processes.run(processes.run_as_main, found.nproc_per_node, found.program, found.is_module, *found.rest)
    code = max(abs(ending.code) for ending in endings.values())
    printed = "".join(ending.output for ending in endings.values())
    return code, "" if code else printed, printed if code else ""


def command_outputs(text: str) -> Iterator[tuple[str, str]]:
    """Split a `console` block into commands and what they print."""
    for part in re.split(r"^(?=\$ )", text, flags=re.M):
        if part.strip():
            command, _, output = part.partition("\n")
            yield command, output


def same_output(shown: str, printed: str) -> bool:
    def tidy(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())

    pattern = "\n".join("(?s:.*)" if line == "..." else re.escape(line) for line in tidy(shown).split("\n"))
    return re.fullmatch(pattern, tidy(printed)) is not None


# ---------------------------------------------------------------- playing a page


@dataclass(frozen=True)
class Shown:
    """A command of a page, what the page shows of its output, where in the page, and what it prints."""

    command: str
    where: str
    shown: str
    start: int
    printed: str

    @property
    def right(self) -> bool:
        return not self.shown.strip() or same_output(self.shown, self.printed)


class Player:
    """Plays a page in the current directory, in which new schedules are modules."""

    def __init__(self) -> None:
        self._names: dict[str, object] = {"__name__": "page"}
        self.new_schedules: list[str] = []

    def play(self, path: Path) -> Iterator[Shown]:
        for block in blocks(path.read_text(encoding="utf-8")):
            where = f"{relative(path)}:{block.line}"
            match block.language:
                case "indented":  # without output, so it need not be the same
                    self._run(briefly(block.text), where)
                case "console":
                    start = block.start
                    for command, shown in command_outputs(block.text):
                        start += len(command) + 1
                        yield Shown(command, where, shown, start, self._run(command, where))
                        start += len(shown)
                case "python":
                    self._python(block, where)
                case "yaml":
                    play_yaml(block.text, where)
                case "text":
                    pass
                case _:
                    assert "simdist " not in block.text, f"{where}: call the block `console`, or `text` if it is none"

    def _run(self, command: str, where: str) -> str:
        code, printed, err = run_command(command)
        assert code == 0, f"{where}: {command.strip()}\n{err}"
        return printed

    def _python(self, block: Block, where: str) -> None:
        kind = re.search(r'^class (\w+)\(\w*Schedule\):.*?^    kind: Literal\["(\w+)"\]', block.text, re.M | re.S)
        if kind:
            Path(f"{kind[2]}.py").write_text(block.text, encoding="utf-8")
            importlib.invalidate_caches()
            self.new_schedules.append(f"{kind[2]}:{kind[1]}")
        elif block.text.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block.text, self._names, where, where, 0)
            with contextlib.redirect_stdout(io.StringIO()) as report:
                failed = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, clear_globs=False)
            assert not failed.failed, report.getvalue()
            self._names = test.globs
        else:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, where, "exec"), self._names)


def is_sweep(text: str) -> bool:
    return "scenario" in tree_of(text)


def tree_of(text: str) -> dict[object, object]:
    root = strict_yaml.parse(text).root
    assert isinstance(root, dict)
    return root


def play_yaml(text: str, where: str) -> None:
    name = re.match(r"# (\S+\.yaml)\n", text)
    if name:
        Path(name[1]).write_text(text, encoding="utf-8")
    if is_sweep(text):
        _ = sweeps.load(name[1]) if name else sweeps.loads(text, name=where, folder=Path("docs/examples"))
        return
    if name:
        scenario = load(name[1])
    else:
        first = Path("docs/examples/first.yaml").read_text(encoding="utf-8")
        scenario = loads(strict_yaml.dump(tree_of(first) | tree_of(text)), name=where, folder=Path("docs/examples"))
    assert not warnings_of(scenario), f"{where}: {warnings_of(scenario)}"


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Player]:
    """Go to a copy of what commands in pages use; take back the modules that the page adds."""
    compiled = shutil.ignore_patterns("__pycache__")  # other tests may import from there right now
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=compiled)
    shutil.copytree(ROOT / "experiments", folder / "experiments", ignore=compiled)
    demo = folder / "experiments" / "demo" / "scenario.yaml"  # is performed, and no page shows a number of it
    demo.write_text(demo.read_text(encoding="utf-8").replace("steps: 24", "steps: 8"), encoding="utf-8")
    before = list(sys.path)
    player = Player()
    try:
        with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
            processes.answer_in_forks(patch)
            yield player
    finally:
        sys.path[:] = before
        for name in player.new_schedules:
            sys.modules.pop(name.partition(":")[0], None)
        candidates.class_of.cache_clear()
        algorithms.find.cache_clear()


@each_page
def test_everything_on_a_page_runs_and_prints_what_it_shows(path: Path, tmp_path: Path) -> None:
    with copied(tmp_path) as player:
        for each in player.play(path):
            assert each.right, f"{each.where}: {each.command}\n{each.printed}"
        for name in player.new_schedules:
            check_schedule(KINDS.find(name))


# ---------------------------------------------------------------- files and tables that stand in two places


@each_page
def test_files_shown_are_the_files(path: Path) -> None:
    for name, shown in re.findall(r"<!-- file: (\S+) -->\n+```\w*\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
        assert shown.strip() == (ROOT / name).read_text(encoding="utf-8").strip(), f"{relative(path)}: {name}"


@each_page
def test_differences_shown_are_those_of_the_files_and_change_few_lines(path: Path) -> None:
    shown = re.findall(r"<!-- diff: (\S+) (\S+) -->\n```diff\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
    for before, after, text in shown:
        lines = [(ROOT / name).read_text(encoding="utf-8").splitlines() for name in (before, after)]
        assert text.splitlines() == list(difflib.unified_diff(*lines, n=1, lineterm=""))[2:], f"{before} {after}"
        changes = difflib.SequenceMatcher(None, *lines).get_opcodes()
        assert sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal") <= 6


@pytest.mark.parametrize("path", EXAMPLES, ids=relative)
def test_examples_load_without_warnings(path: Path) -> None:
    if is_sweep(path.read_text(encoding="utf-8")):
        sweeps.load(path)
    else:
        assert warnings_of(load(path)) == ()


# ---------------------------------------------------------------- reference


SECTIONS = {  # class -> heading of its section in docs/reference/scenario.md
    "Scenario": "The file",
    "Cluster": "cluster",
    "Leaf": "Leaf switches",
    "Link": "Links",
    "TablePoint": "Points of a table",
    "Range": "uncertain",
    "Device": "cluster.device",
    "DeviceOverride": "cluster.slow_devices",
    "Storage": "cluster.storage",
    "Disk": "cluster.disk",
    "HostMemory": "cluster.memory",
    "ClusterHost": "cluster.host",
    "HostLaunches": "cluster.host.launches",
    "DeviceFloors": "cluster.device.floors",
    "WorkloadLaunches": "workload.launches",
    "ClusterTopology": "cluster.topology",
    "ClusterCollectives": "cluster.collectives",
    "DataSettings": "input.data",
    "Lognormal": "input.data.file_size",
    "Workload": "workload",
    "Transformer": "workload.transformer",
    "Tensor": "workload.tensors",
    "MeasuredStep": "workload.step_times",
    "Peak": "Precision",
    "Utilization": "Precision",
    "MeasuredBatch": "Precision",
    "Host": "host",
    "InputSettings": "input",
    "ScheduleInput": "Input of a schedule",
    "CheckpointSettings": "checkpoint",
    "Failures": "failures",
    "FailureCause": "failures.causes",
    "Worst": "failures.causes.worst",
    "SameFailureAgain": "failures.causes.again",
    "Recovery": "failures.recovery",
    "Alerts": "failures.recovery.alerts",
    "Tries": "failures.recovery.tries",
    "Transient": "transient",
    "Persistent": "persistent",
    "Jitter": "jitter",
    "Exponential": "exponential",
    "HeavyTail": "heavy_tail",
    "Bursts": "bursts",
    "Pauses": "pauses",
    "UnevenWork": "uneven_work",
    "Drawn": "drawn",
    "Interference": "interference",
    "Recorded": "recorded",
    "LinkPersistent": "persistent links",
    "LinkJitter": "jitter links",
    "LinkBursts": "bursts links",
    "LinkOutages": "outages",
    "LinkRecorded": "recorded links",
    "Steady": "steady",
    "Periodic": "periodic",
    "OnOff": "on_off",
    "Imported": "imported",
    "Lost": "lost",
    "Sync": "sync",
    "Fusion": "fusion",
    "Torus": "torus",
    "ParameterServer": "parameter_server",
    "NaiveAllGather": "naive_ag",
    "HiTopK": "hitopk",
    "GTopK": "gtopk",
    "PowerSGD": "powersgd",
    "LocalSGD": "local_sgd",
    "HierarchicalSGD": "hierarchical_sgd",
}
COMMON = {"on", "ranks", "nodes", "kind", "label", "algorithm", "run_ahead_steps", "input"}  # have tables of their own
LINKS, FLOWS = {"link"}, {"from", "to", "flows"}
AVERAGING = {"warmup_steps", "phase", "synchronize", "overlap_steps"}
GRADIENT = {
    "first_bucket_size",
    "bucket_size",
    "compression",
    "parallel_optimizer",
    "shared_update",
    "updates_sent_by",
    "param_dtype",
}
SPARSE = {"density", "method", "warmup_steps"}


def settings_classes() -> dict[str, type[Settings]]:
    """Return the classes of settings of simdist from which no others are derived."""
    kinds()
    found: dict[str, type[Settings]] = {}
    todo: list[type[Settings]] = [Settings]
    while todo:
        cls = todo.pop()
        below = [each for each in cls.__subclasses__() if each.__module__.startswith("simdist.")]
        below = [
            each for each in below if not each.__module__.startswith("simdist.sweeps.")
        ]  # have a page of their own
        todo += below
        file = Path(str(sys.modules[cls.__module__].__file__)) if cls.__module__ in sys.modules else Path()
        made = cls.__name__.startswith("_")  # at run time, to word a message
        is_base = made or inspect.isabstract(cls)  # of classes of users
        if not below and file.is_relative_to(ROOT / "simdist") and "[" not in cls.__name__ and not is_base:
            found[cls.__name__] = cls
    return found


@functools.cache
def sections() -> dict[str, str]:
    text = (ROOT / "docs" / "reference" / "scenario.md").read_text(encoding="utf-8")
    parts = re.split(r"^#+ (.*)\n", text, flags=re.M)
    return {heading.replace("`", ""): body for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


def keys_of_section(heading: str) -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", sections()[heading], re.M))


def test_every_class_of_settings_has_a_section() -> None:
    """Schedules that somebody adds may do without."""
    added = {name for name, cls in settings_classes().items() if issubclass(cls, Schedule)} - SECTIONS.keys()
    assert set(SECTIONS) == set(settings_classes()) - added
    assert set(SECTIONS.values()) <= set(sections())


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_of_a_section_is_documented_and_no_other(name: str) -> None:
    cls = settings_classes()[name]
    keys = {field.alias or attribute for attribute, field in cls.model_fields.items()}
    documented = keys_of_section(SECTIONS[name])
    apart = COMMON | LINKS | FLOWS | AVERAGING | GRADIENT | SPARSE if "kind" in keys else set()
    assert keys - apart <= documented, f"not documented: {keys - apart - documented}"
    assert documented <= keys | {"preset", "file", "tensors_file", "transformer"}, (
        f"not in the code: {documented - keys}"
    )


def test_keys_that_several_kinds_share_are_documented() -> None:
    assert keys_of_section("disturbances") == {"kind", "on", "ranks", "nodes"}
    assert keys_of_section("Links that misbehave") == {"kind", "on", "nodes", *LINKS}
    assert keys_of_section("background") == {"kind", *FLOWS}
    assert keys_of_section("schedules") == {"kind", "label", "algorithm", "run_ahead_steps", "input"}
    assert keys_of_section("Schedules that average parameters") == AVERAGING
    assert keys_of_section("Schedules that average gradients") == GRADIENT
    assert keys_of_section("Schedules that send the largest entries") == SPARSE


def keys_of(document: object, *, without: frozenset[str] = frozenset({"settings"})) -> set[str]:
    match document:
        case dict():
            inside = (keys_of(value) for key, value in document.items() if key not in without)
            return set(document).union(*inside)
        case list():
            return set().union(*map(keys_of, document))
        case _:
            return set()


COMMANDS = [
    "init",
    "presets",
    "presets clusters ideal",
    "plan docs/examples/first.yaml",
    "compare docs/examples/first.yaml --seeds 2",
    "simulate docs/examples/first.yaml -o runs/first",
    "trace runs/first/sync --collectives",
    "whatif docs/examples/stalls.yaml --data --knobs",
    "compare docs/examples/stalls.yaml --seeds 2",
    "trace runs/first/sync --chrome sync.json --steps 0:2",
]


def test_every_key_of_json_results_is_documented(tmp_path: Path) -> None:
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/reference/data-dictionary.md").read_text(encoding="utf-8")))
    with copied(tmp_path):
        stalls = Path("docs/examples/stalls.yaml")
        text = stalls.read_text(encoding="utf-8")
        stalls.write_text(
            text.replace("3 epochs", "1 epochs").replace("samples: 6400", "samples: 2560"), encoding="utf-8"
        )
        for command in COMMANDS:
            code, out, err = run_command(f"simdist {command} --json")
            assert code == 0, err
            assert keys_of(json.loads(out)) <= documented, f"{command}: {keys_of(json.loads(out)) - documented}"


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    for command in ("init", "presets", "plan", "simulate", "compare", "validate", "trace"):
        _, out, _ = run_command(f"simdist {command} --help")
        section = text.partition(f"\n## `simdist {command}")[2].partition("\n## ")[0]
        for option in set(re.findall(r"--[a-z]+", out)) - {"--json", "--debug", "--help"}:
            assert option in section, f"{command} {option}"


# ---------------------------------------------------------------- writing


def updated(path: Path) -> str:
    """Return a page with what its commands print now."""
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, copied(Path(folder)) as player:
        for each in reversed(list(player.play(path))):
            if not each.right:
                printed = "\n".join(line.rstrip() for line in each.printed.strip("\n").splitlines())
                text = text[: each.start] + printed + "\n" + text[each.start + len(each.shown) :]
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page), encoding="utf-8")
