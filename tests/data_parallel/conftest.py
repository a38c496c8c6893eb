"""What the tests of data parallelism share."""

import pytest

import echelon


@pytest.fixture(params=["simulated", "processes"])
def run(request):
    """Runs a function on a number of ranks and returns their results."""
    if request.param == "simulated":
        return lambda fn, world_size, *args: echelon.simulate(fn, world_size, args, timeout=20.0).results
    pool = request.getfixturevalue("pool")
    return lambda fn, world_size, *args: pool.run(fn, world_size, *args)
