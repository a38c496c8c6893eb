"""What all tests share."""

import pytest

from echelon.testing import RankPool


@pytest.fixture(scope="session")
def pool():
    """Real processes as ranks, kept over the whole session."""
    with RankPool() as ranks:
        yield ranks
