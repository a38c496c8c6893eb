"""How the tests of this folder get a default group."""

import pytest

from tests.helpers.torch_groups import as_default_group


@pytest.fixture
def in_world(pool, tmp_path):
    """Runs `function(rank, *arguments)` on so many processes, with torch's default group over Echelon."""

    def run(world_size, function, *arguments, backend="echelon", **options):
        path = str(tmp_path / f"store {function.__name__} {world_size} {backend}".replace(":", " "))
        return pool.run(as_default_group, world_size, path, backend, function, *arguments, **options)

    return run
