"""What all tests share."""

import os
import sys

import pytest

from echelon.testing import RankPool

os.environ["ECHELON_TUNED"] = "off"  # what `echelon tune` may have written here does not matter to tests


@pytest.fixture(scope="session")
def pool():
    """Real processes as ranks, kept over the whole session."""
    with RankPool() as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def same_process_afterwards():
    """Fails a test that leaves another main module or working folder: processes started later would take them over."""
    before = sys.modules["__main__"], os.getcwd()
    yield
    assert (sys.modules["__main__"], os.getcwd()) == before
