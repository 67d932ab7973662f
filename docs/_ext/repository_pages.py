"""Pages from elsewhere in the repository, and a sidebar that is read off the lists of links in pages.

Sphinx knows pages by their place below the folder of the sources. Here a page may stand anywhere in the repository:
the experiments' READMEs, notebooks, Python modules. As Sphinx then knows which file is which page, a relative link
from any page to any other works as it does on a code host; a link to a file that is no page becomes a copy of the file.

Some pages are lists of links under headings, such as the index. Those pages stand below them in the sidebar, by the
texts of the links; and, if no page links to them yet, the other pages of these folders.
"""

import re
from collections.abc import Iterable, Mapping
from os import PathLike
from os.path import normpath, relpath
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.project import Project

_LINK = re.compile(r"^\* \[([^\]]+)\]\(([^)\s:#]+\.(?:md|ipynb|py))\)", re.M)


class RepositoryProject(Project):
    """A project in which some pages stand outside the folder of the sources.

    Args:
        srcdir: Folder of the sources.
        source_suffix: Endings of files that are pages.
        outside: Name of a page -> its file, relative to `srcdir`.
    """

    def __init__(self, srcdir: str | PathLike[str], source_suffix: Iterable[str], outside: Mapping[str, Path]) -> None:
        super().__init__(srcdir, source_suffix)
        self._outside = dict(outside)

    def discover(self, exclude_paths: Iterable[str] = (), include_paths: Iterable[str] = ("**",)) -> set[str]:
        """Find the pages below the folder, and add the others."""
        super().discover(exclude_paths, include_paths)
        for name, path in self._outside.items():
            self.docnames.add(name)
            self._path_to_docname[path] = name
            self._docname_to_path[name] = path
        return self.docnames

    def path2doc(self, filename: str | PathLike[str]) -> str | None:
        """Return the name of the page that stands in a file; None if it is no page."""
        path = Path(relpath(normpath(Path(self.srcdir) / filename), self.srcdir))
        if path in self._path_to_docname:
            return self._path_to_docname[path]
        return str(path.with_suffix("").as_posix()) if path.suffix == ".md" else None


def find_pages(root: Path, patterns: Mapping[str, str], without: Iterable[str]) -> dict[str, Path]:
    """Return name of the page -> its file, for every file that a pattern fits.

    Args:
        root: Of the repository.
        patterns: Files, relative to `root` -> their names. A `*` in the name is what the `*` in the file stands for.
        without: Files, relative to `root`, that are no pages.
    """
    excluded = {root / name for name in without}
    pages = {}
    for pattern, name in patterns.items():
        star = re.compile(re.escape(pattern).replace(r"\*", "([^/]+)"))
        for path in sorted(set(root.glob(pattern)) - excluded):
            found = star.fullmatch(path.relative_to(root).as_posix())
            pages[name.replace("*", found[1]) if found and found.groups() else name] = path
    return pages


def contents(text: str, folder: str, pages: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Return each heading of a page of links, and below it name of a page -> text of the link to it.

    Pages that no link leads to stand below the last heading that has pages of the same folder, by their own titles: "".

    Args:
        text: Of the page.
        folder: Where it stands, relative to the folder of the sources.
        pages: File, relative to the folder of the sources -> name of the page; of all pages that there are.
    """
    sections: list[tuple[str, dict[str, str]]] = []
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        heading, _, below = part.partition("\n")
        links = [(title, normpath(f"{folder}/{file}")) for title, file in _LINK.findall(below)]
        sections.append((heading, {pages[file]: title for title, file in links if file in pages}))
    linked = {name for _, names in sections for name in names}
    for _, names in reversed(sections):
        folders = {name.rpartition("/")[0] for name in names} - {""}
        rest = sorted(name for name in set(pages.values()) - linked if name.rpartition("/")[0] in folders)
        names.update(dict.fromkeys(rest, ""))
        linked.update(rest)
    return sections


def _set_project(app: Sphinx) -> None:
    found = find_pages(Path(app.srcdir).parent, app.config.repository_pages, app.config.repository_pages_without)
    outside = {name: Path(relpath(path, app.srcdir)) for name, path in found.items()}
    app.project = app.env.project = RepositoryProject(app.srcdir, app.config.source_suffix, outside)


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    if page not in app.config.pages_of_links:
        return
    pages = {app.env.doc2path(name, base=False).as_posix(): name for name in app.env.found_docs}
    for heading, names in contents(source[0], page.rpartition("/")[0] or ".", pages):
        listed = "\n".join(f"{title} </{name}>" if title else f"/{name}" for name, title in names.items())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{listed}\n```\n"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_config_value("repository_pages", {}, "env", [dict])
    app.add_config_value("repository_pages_without", [], "env", [list])
    app.add_config_value("pages_of_links", [], "env", [list])
    app.connect("builder-inited", _set_project)
    app.connect("source-read", _add_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
