"""Bugs that people met end at once on simulated ranks, with who waits where and which calls differ."""

import inspect
import re
import time

import pytest

import echelon
from tests.helpers import field_bugs
from tests.helpers.field_bugs import BUGS

DEADLOCKS = {
    "skipped_barrier",
    "gathered_on_rank_0",
    "skipped_batch_statistics",
    "early_stopping",
    "monitored_barrier",
    "seed_never_set",
    "destroyed_early",
    "groups_in_other_order",
    "groups_counted_apart",
    "gathered_in_the_wrong_group",
    "batch_without_its_send",
    "receive_before_send",
    "uneven_batches",
}


def places_in(program):
    """Returns the marked lines of a program, each with the ranks that are there."""
    lines, first = inspect.getsourcelines(program)
    found = {number: re.search("# at: ([0-9 ]+)", line) for number, line in enumerate(lines, first)}
    return {number: list(map(int, match[1].split())) for number, match in found.items() if match}


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of a name that torch replaced in 2.13
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a __del__ that fails
def test_a_bug_is_explained_with_the_lines_of_the_program(name):
    bug = BUGS[name]
    began = time.monotonic()
    with pytest.raises(echelon.EchelonError) as caught:
        echelon.simulate(lambda _: bug.program(), bug.ranks)
    assert time.monotonic() - began < 20
    error, places = caught.value, places_in(bug.program)
    assert places
    assert isinstance(error, echelon.DeadlockError) == (name in DEADLOCKS)
    said = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert "site-packages" not in said
    for number, ranks in places.items():
        place = re.escape(f"{field_bugs.__file__}:{number}")
        if name in DEADLOCKS:
            assert all(re.search(rf"rank {rank}\b.* at {place}\b", said) for rank in ranks), said
        else:
            assert re.search(rf"{place}\b", said), said
            assert any(f"rank {rank}" in said for rank in ranks), said


def test_each_bug_names_a_thread_and_says_what_is_wrong():
    threads = [bug.thread for bug in BUGS.values()]
    assert len(threads) == len(set(threads)) >= 22
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in threads)
    assert all(bug.what.endswith(".") for bug in BUGS.values())
