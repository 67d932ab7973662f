"""The documentation becomes a site without warnings, whose links lead somewhere and which needs no network."""

import fcntl
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

import real.calibrate
import real.cli
import real.data.indexing
import simdist
import simdist.cli

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
BY_MODULE = {f"simdist.{name}" for name in ("runs", "settings", "studies", "traces")}  # packages that export nothing
APART = {
    "simdist.engines",
    "simdist.__main__",
    "simdist.cli",
    "simdist.jobs",
    "simdist.settings.precision",
}  # commands and settings have pages of their own, and simdist.sweeps has the names of simdist.jobs
KEY_PAGES = [
    "index",
    "tutorial",
    "how-to/describe-your-cluster",
    "reference/commands",
    "reference/data-dictionary",
    "reference/python",
    "background/validity",
    "experiments/hsgd_stragglers",
    "readme",
]
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
NO_LOADING = {
    "alternate",
    "author",
    "canonical",
    "copyright",
    "index",
    "license",
    "next",
    "prev",
    "search",
}  # of <link>


@dataclass
class Page(HTMLParser):
    """Contents of a page: names to link to, links, and what a browser loads with it."""

    names: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.names |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in NO_LOADING:
            self.loaded.append(found["href"])
        elif found.get(LOADED.get(tag, "")):
            self.loaded.append(found[LOADED[tag]])
        self.loaded += [each.split()[0] for each in found.get("srcset", "").split(",") if each.strip()]


@dataclass(frozen=True)
class Site:
    """A site that was built, its pages, and the warnings of the build."""

    folder: Path
    pages: dict[Path, Page]
    warnings: str

    def text(self, page: str) -> str:
        return (self.folder / f"{page}.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    for needed in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(needed, reason=f"the site is built with {needed}: make test installs it")
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first worker builds it for all
        ended = shared / "site-ended"
        if not ended.exists():
            ended.write_text(build(shared / "site"), encoding="utf-8")
    pages = {}
    for path in sorted((shared / "site").rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return Site(shared / "site", pages, ended.read_text(encoding="utf-8"))


def build(folder: Path) -> str:
    """Build as `make docs` does; return what went wrong."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", f"{folder}-doctrees"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, str(ROOT / "docs"), str(folder)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return ended.stderr or (f"exit code {ended.returncode}" if ended.returncode else "")


def public_modules() -> list[str]:
    """Return the packages below simdist, or the modules of those that export nothing, and real."""
    names = []
    for found in pkgutil.iter_modules(simdist.__path__, "simdist."):
        if found.name in BY_MODULE:
            names += [
                each.name for each in pkgutil.iter_modules([str(ROOT / found.name.replace(".", "/"))], f"{found.name}.")
            ]
        else:
            names.append(found.name)
    return [*sorted(set(names) - APART), "real"]


# ---------------------------------------------------------------- the site


def test_site_is_built_without_warnings(site: Site) -> None:
    assert site.warnings == ""


def test_site_has_its_key_pages(site: Site) -> None:
    assert {page for page in KEY_PAGES if "</h1>" not in site.text(page)} == set()


def test_every_markdown_page_and_notebook_is_in_the_sidebar(site: Site) -> None:
    index = site.pages[site.folder / "index.html"]
    docs = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    outside = [path.parent.relative_to(ROOT) for path in ROOT.glob("experiments/*/README.md")]
    notebooks = [path.relative_to(ROOT) for path in ROOT.glob("notebooks/*.ipynb")]
    wanted = {str(path.with_suffix(".html")) for path in [*docs, *outside, *notebooks]} - {"index.html"}
    assert wanted <= set(index.links)


def test_links_lead_to_pages_and_anchors_that_exist(site: Site) -> None:
    broken = []
    for path, page in site.pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                broken.append(f"{path.name}: {link}: there is no such file")
            elif parts.fragment and target in site.pages and unquote(parts.fragment) not in site.pages[target].names:
                broken.append(f"{path.name}: {link}: there is no such anchor")
    assert not broken


def test_links_that_work_on_a_code_host_lead_to_pages_of_the_site(site: Site) -> None:
    assert "experiments/hsgd_stragglers.html" in site.pages[site.folder / "readme.html"].links
    assert "background/validity.html" in site.pages[site.folder / "readme.html"].links
    assert "../reference/scenario.html" in site.pages[site.folder / "how-to/describe-your-cluster.html"].links
    assert "api/simdist.studies.comparison.html" in site.pages[site.folder / "reference/python.html"].links


def test_pages_and_styles_load_nothing_from_elsewhere(site: Site) -> None:
    for path, page in site.pages.items():
        for url in page.loaded:
            parts = urlsplit(url)
            assert not parts.netloc, f"{path.name}: {url}"
            assert parts.scheme == "data" or (path.parent / unquote(parts.path)).is_file(), f"{path.name}: {url}"
    for style in site.folder.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.findall(r"url\(\s*['\"]?(?:https?:)?//|@import\s", text), style.name


def test_search_needs_no_server(site: Site) -> None:
    assert "Search.setIndex" in (site.folder / "searchindex.js").read_text(encoding="utf-8")
    assert "searchindex.js" in site.pages[site.folder / "search.html"].loaded


def test_pages_do_not_say_where_or_when_they_were_built(site: Site) -> None:
    for path in site.pages:
        assert str(ROOT) not in path.read_text(encoding="utf-8"), path.name


# ---------------------------------------------------------------- reference


@pytest.mark.parametrize("module", public_modules())
def test_every_public_name_of_a_module_is_described(module: str, site: Site) -> None:
    folder = site.folder / "reference" / "api"
    page = site.pages[folder / f"{module}.html"]
    for name in vars(importlib.import_module(module)).get("__all__", ()):
        wanted = f"{module}.{name}"
        assert wanted in page.names or (folder / f"{wanted}.html").exists(), wanted


def test_arguments_have_types_meanings_and_links(site: Site) -> None:
    text = site.text("reference/api/simdist.studies.comparison")
    of_arrays = site.text("reference/api/simdist.studies.measuring")
    assert "NDArray" in of_arrays
    assert "ndarray[" not in re.sub(r"<[^>]*>", "", of_arrays)
    assert re.search(r"<strong>n_seeds</strong>\s*–\s*Number of seeds, see", text)
    assert 'href="simdist.scenario.html#simdist.scenario.Scenario"' in text


Run = Callable[[list[str]], int]


def names_of(group: click.Group) -> Iterator[list[str]]:
    """Yield the names of all commands, those of a group within after its own."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        within = names_of(command) if isinstance(command, click.Group) else [[]]
        yield from ([name, *names] for names in within)


PROGRAMS: dict[str, tuple[Run, list[str]]] = {
    **{" ".join(["simdist", *names]): (simdist.cli.main, names) for names in names_of(simdist.cli.cli)},
    "python -m real": (real.cli.main, []),
    "python -m real.calibrate": (real.calibrate.main, []),
    "python -m real.data.indexing": (real.data.indexing.main, []),
}
EVERYWHERE = {"--json", "--debug", "--help"}  # described once, above the first command


def described(program: str) -> str:
    """Return what the documentation says of a program."""
    if program == "python -m real.calibrate":
        return (ROOT / "docs" / "how-to" / "calibrate.md").read_text(encoding="utf-8")
    return COMMANDS.read_text(encoding="utf-8").partition(f"\n## `{program}`\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_and_option_is_described(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    main, arguments = PROGRAMS[program]
    assert main([*arguments, "--help"]) == 0
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))
    text = described(program)
    assert text, f"docs/reference/commands.md has no section `{program}`"
    assert {option for option in options - EVERYWHERE if option not in text} == set()


def test_options_of_every_command_are_described_once() -> None:
    above = COMMANDS.read_text(encoding="utf-8").partition("\n## `")[0]
    assert {option for option in EVERYWHERE if option not in above} == set()
