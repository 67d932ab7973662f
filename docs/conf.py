"""How the documentation becomes a site: `sphinx-build -W --keep-going -b html docs build/docs`.

The pages are Markdown that reads as well on a code host, so nothing in them is special to the site: links are plain
relative links, also to files outside this folder, and the index is a page of lists. `_ext` does the rest. Nothing is
fetched, neither while building nor by the pages.
"""

import gc
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE / "_ext"), str(ROOT)]

from simdist import __version__  # noqa: E402  (once the path is set)

gc.disable()  # a build ends soon; without looking for garbage it takes a quarter less time, and 1 GB of memory

project = "simdist"
author = "the simdist authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "repository_pages",
    "module_pages",
    "notebook_pages",
]
include_patterns = ["**.md"]
exclude_patterns = ["_ext", "_static", "examples"]
root_doc = "index"
source_suffix = {".md": "markdown", ".py": "module", ".ipynb": "notebook"}
highlight_language = "text"  # of blocks that name none

# Pages from elsewhere: file in the repository -> page; a `*` is a name, the same in both.
repository_pages = {
    "README.md": "readme",
    "CHANGELOG.md": "changelog",
    "experiments/README.md": "experiments/README",
    "experiments/*/README.md": "experiments/*",
    "notebooks/README.md": "notebooks/README",
    "notebooks/*.ipynb": "notebooks/*",
    "simdist/*.py": "reference/api/simdist.*",
    "simdist/*/__init__.py": "reference/api/simdist.*",
    "simdist/plan/check.py": "reference/api/simdist.plan.check",
    "simdist/plan/check_dataset.py": "reference/api/simdist.plan.check_dataset",
    "simdist/plan/group.py": "reference/api/simdist.plan.group",
    "simdist/runs/*.py": "reference/api/simdist.runs.*",
    "simdist/settings/base.py": "reference/api/simdist.settings.base",
    "simdist/settings/plugins.py": "reference/api/simdist.settings.plugins",
    "simdist/settings/units.py": "reference/api/simdist.settings.units",
    "simdist/studies/*.py": "reference/api/simdist.studies.*",
    "simdist/traces/*.py": "reference/api/simdist.traces.*",
    "simdist/engines/actors.py": "reference/api/simdist.engines.actors",
    "simdist/engines/des.py": "reference/api/simdist.engines.des",
    "simdist/engines/live.py": "reference/api/simdist.engines.live",
    "simdist/engines/observers.py": "reference/api/simdist.engines.observers",
    "simdist/engines/run.py": "reference/api/simdist.engines.run",
    "simdist/engines/vector.py": "reference/api/simdist.engines.vector",
    "simdist/scenario/presets.py": "reference/api/simdist.scenario.presets",
    "simdist/schedules/averaging.py": "reference/api/simdist.schedules.averaging",
    "simdist/schedules/parts.py": "reference/api/simdist.schedules.parts",
    "simdist/schedules/sparse.py": "reference/api/simdist.schedules.sparse",
    "real/__init__.py": "reference/api/real",
    "real/models/__init__.py": "reference/api/real.models",
    "real/execution/virtual.py": "reference/api/real.execution.virtual",
}
_SHOWN_BY_MODULE = ("engines", "runs", "settings", "studies", "traces")  # packages that export nothing
repository_pages_without = [
    "simdist/__init__.py",
    "simdist/__main__.py",
    "simdist/cli/__init__.py",
    "simdist/jobs/__init__.py",  # users find its names in simdist.sweeps
    *(f"simdist/{name}/__init__.py" for name in _SHOWN_BY_MODULE),
]
pages_of_links = ["index", "reference/python"]  # what the sidebar is made of

myst_heading_anchors = 4  # as many levels as pages link to
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "model_config, model_post_init"}  # pydantic's, not ours
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_mock_imports = [] if importlib.util.find_spec("torch") else ["torch"]
python_use_unqualified_type_names = True
maximum_signature_line_length = 96
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Columns", "params_style"), "Source"]
default_role = "py:obj"  # `name` in a docstring is code, and a link where it names something
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"simdist {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_last_updated_fmt = None  # equal sources give equal pages
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#005a8f", "color-brand-content": "#005a8f"},
    "dark_css_variables": {"color-brand-primary": "#56b4e9", "color-brand-content": "#56b4e9"},
}
