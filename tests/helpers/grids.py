"""Grids of parameters, of which the quick tests run a covering part, and `make slow` the rest.

A row that takes a path of its own through the code stays quick. The others repeat a path with another value.
"""

from collections import defaultdict
from itertools import product

import pytest

ABOVE_GROUPS = ("data_parallel", "pipeline", "checkpoint")
"""Folders of code that calls a group, whatever its backend is. Backends themselves are tested with each row."""


def covering(*columns):
    """Returns all combinations of the columns' values; the quick ones have each value of each column once or more.

    Quick row i has the value i of each column, from its first again where a column is shorter. The longest column
    decides how many there are.
    """
    columns = [list(column) for column in columns]
    quick = {tuple(i % len(column) for column in columns) for i in range(max(map(len, columns)))}
    rows = product(*(range(len(column)) for column in columns))
    return [
        pytest.param(
            *(column[i] for column, i in zip(columns, row, strict=True)),
            marks=() if row in quick else pytest.mark.slow,
        )
        for row in rows
    ]


def share_out_backends(items):
    """Marks tests of the folders above groups as slow: in the quick ones each row of a grid runs on one backend.

    The rows take the backends of the fixture `run` in turns. Each backend has a row, and a function without a grid runs
    on all.
    """
    functions = defaultdict(lambda: defaultdict(list))
    for item in items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if "run" in values and item.path.parent.name in ABOVE_GROUPS and item.get_closest_marker("slow") is None:
            # By identity: values of a grid need be neither equal nor hashable.
            row = tuple(sorted((name, id(value)) for name, value in values.items() if name != "run"))
            functions[item.path, item.originalname][row].append(item)
    for rows in functions.values():
        for number, of_row in enumerate(rows.values()):
            num_turns = min(len(rows), len(of_row))
            for turn, item in enumerate(of_row):
                if turn % num_turns != number % num_turns:
                    item.add_marker(pytest.mark.slow)
