"""Training by other tools, in the way of their users, does what the tool or a loop by hand does."""

import re

import framework_scripts
import pytest
from processes import Ending, run


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Ending]]:
    """How two ranks ended that ran all scripts of a tool, by tool."""
    return {
        tool: run(framework_scripts.run_all, 2, tool, tmp_path_factory.mktemp(tool))
        for tool in framework_scripts.OF_TOOL
    }


@pytest.mark.parametrize(
    ("tool", "script"),
    [
        (tool, script)
        for tool, scripts in framework_scripts.OF_TOOL.items()
        for script in scripts
        if script != "without callback"
    ],
)
def test_scripts_of_other_tools_compute_what_they_should(
    endings: dict[str, dict[int, Ending]], tool: str, script: str
) -> None:
    for ending in endings[tool].values():
        printed = re.search(rf"^--- {script}\n(.*?)(?=^--- |\Z)", ending.output, re.DOTALL | re.MULTILINE)
        assert printed, ending.output
        assert printed[1].splitlines()[-1:] == ["equal"], ending.output


def test_passes_that_lightning_accumulates_without_a_word_are_refused_with_the_remedy(
    endings: dict[str, dict[int, Ending]],
) -> None:
    for ending in endings["lightning"].values():
        printed = ending.output.partition("--- without callback")[2]
        assert "To accumulate gradients, do all passes but a step's last in `with worker.no_sync():`" in printed
