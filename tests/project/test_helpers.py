"""tests/helpers/README.md has a line for each helper, and no helper is left that nobody imports."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
HELPERS = {path.stem for path in (TESTS / "helpers").glob("*.py")} - {"__init__"}
HELPERS |= {path.parent.name for path in (TESTS / "helpers").glob("*/__init__.py")}


def test_the_readme_lists_every_helper():
    listed = re.findall(r"^\| `(\w+)` \|", (TESTS / "helpers" / "README.md").read_text(), re.MULTILINE)
    assert listed == sorted(HELPERS)


def test_every_helper_is_used():
    texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
    for name in HELPERS:
        named = re.compile(rf"tests\.helpers(\.| import (\w+, )*){name}\b")
        assert any(named.search(text) for path, text in texts.items() if path.stem != name), name
