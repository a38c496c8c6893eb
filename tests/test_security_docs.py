"""docs/security.md: every test that it points to is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
POINTERS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())


def test_there_are_pointers():
    assert len(POINTERS) > 15


@pytest.mark.parametrize(("path", "name"), POINTERS)
def test_the_test_is_there(path, name):
    tree = ast.parse((ROOT / path).read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
