"""All threads of a simulation are on one core, and the caller is afterwards as before."""

import os

import pytest

import echelon
from echelon.simulation.process.random_state import cores_here

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux can tell")


def where_it_runs(group):
    group.backend.lanes.start(group.backend.messages.barrier, "beside").wait()
    return cores_here(), os.sched_getscheduler(0)  # os.sched_getaffinity tells a rank the cores of the process


def test_all_ranks_share_one_core_and_hand_over_in_good_order():
    places = [core for core, _ in echelon.simulate(where_it_runs, 3).results]
    assert len(places[0]) == 1
    assert places == [places[0]] * 3
    assert {policy for _, policy in echelon.simulate(where_it_runs, 3).results} == {os.SCHED_BATCH}


def fail(group):
    raise KeyError(group.rank)


def test_the_caller_is_as_before_whatever_happens():
    before = os.sched_getaffinity(0), os.sched_getscheduler(0)
    echelon.simulate(where_it_runs, 2)
    assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == before
    with pytest.raises(KeyError):
        echelon.simulate(fail, 2)
    assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == before


def test_a_system_that_cannot_do_it_is_no_error(monkeypatch):
    def refuse(*_):
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert echelon.simulate(lambda group: group.rank, 2).results == [0, 1]
