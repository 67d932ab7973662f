"""Training by other tools, in the way of their users, does what the tool or a loop by hand does."""

import re
from pathlib import Path

import framework_scripts
import pytest
from processes import run


@pytest.mark.parametrize("tool", framework_scripts.OF_TOOL)
def test_scripts_of_other_tools_compute_what_they_should(tool: str, tmp_path: Path) -> None:
    for ending in run(framework_scripts.run_all, 2, tool, tmp_path).values():
        assert re.findall("^passed: (.*)$", ending.output, re.MULTILINE) == [*framework_scripts.OF_TOOL[tool]], (
            ending.output
        )
        assert ending.code == 0, ending.output
