"""The rooms of the reader of traces are layered: files -> events -> steps of a rank -> one job -> estimates."""

import re
from pathlib import Path

import pytest

import simdist.profiles

FOLDER = Path(simdist.profiles.__file__).parent
ROOMS = ("kineto", "steps", "job", "estimates", "")  # the last: modules in none of them


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_module_imports_from_its_own_room_and_those_below_it(path: Path) -> None:
    room = "" if path.parent == FOLDER else path.parent.name
    for used in re.findall(
        r"^ *from simdist\.profiles(?:\.(\w+)(?=\.))?", path.read_text(encoding="utf-8"), re.MULTILINE
    ):
        assert ROOMS.index(used) <= ROOMS.index(room), f"{path}: {room} imports {used or 'a module above'}"
