"""The pause of Python's garbage collector."""

import gc

import pytest

from echelon.garbage import collection_paused


def test_the_collector_is_paused_inside_alone():
    @collection_paused()
    def fail():
        raise RuntimeError(gc.isenabled())

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="False"):
        fail()
    assert gc.isenabled()


def test_a_paused_collector_stays_paused():
    with collection_paused():
        with collection_paused():
            pass
        assert not gc.isenabled()
