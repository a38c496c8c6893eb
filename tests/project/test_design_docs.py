"""The map in docs/design.md names rooms, files and classes that exist."""

import re
from pathlib import Path

import pytest

import echelon

SOURCES = Path(echelon.__file__).parent
TEXT = (SOURCES.parents[1] / "docs" / "design.md").read_text()
ROWS = re.findall(r"^\| `([a-z_/]+)/`(?:, `([a-z_/]+)/`)? \| (.+?) \| (.+) \|$", TEXT, re.MULTILINE)


def test_every_room_is_in_the_table():
    rooms = {room.split("/")[0] for row in ROWS for room in row[:2] if room}
    folders = {path.name for path in SOURCES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - rooms == {"_torch_private", "bench", "cli", "doctor", "testing"}, "only tools may be left out"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_a_row_names_exists(row):
    room, _, value, files = row
    for name in re.findall(r"`([A-Z]\w+)`", value):
        assert any(
            re.search(rf"^class {name}\b", path.read_text(), re.MULTILINE) for path in SOURCES.rglob("*.py")
        ) or (value.startswith("torch's")), name
    for name in re.findall(r"`([a-z_/]+)`", files):
        path = SOURCES / room / name.rstrip("/")
        assert path.is_dir() or path.with_suffix(".py").exists(), f"{room}/{name}"


def test_paths_elsewhere_exist():
    rest = TEXT[TEXT.index("## The way of a call") : TEXT.index("## Decisions")]
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)(?:/NAME\.py)?`", rest):
        assert (SOURCES / name).is_dir() or (SOURCES / name).with_suffix(".py").exists(), name
