"""Stores of torch.distributed on simulated ranks: waits in virtual time, and keys of the program alone."""

import os
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore

import echelon
from echelon.errors import Timeout


def test_the_timeout_of_a_wait_is_not_prolonged_by_other_keys():
    def program(group):
        store = dist.TCPStore("localhost", 29500, 2, group.rank == 0)
        if group.rank == 0:
            with suppress(dist.DistStoreError):
                store.wait(["never"], timedelta(seconds=1))
            return group.backend.now()
        for number in range(10):
            with suppress(Timeout):
                group.recv(0, timeout=0.4)
            store.set(f"key {number}", "")
        return 1.0

    assert echelon.simulate(program, 2).results == [1.0, 1.0]


def test_a_store_has_the_keys_of_the_program_alone():
    def program(group):
        store = dist.TCPStore("localhost", 29500, 2, group.rank == 0)
        num_keys = store.num_keys()
        # Echelon counted the ranks under this key once: a rank that still waited for the other read this value.
        store.set("workers", "none")
        return num_keys, store.get("workers")

    # torch counts one key of its own. The other rank may have set its key already.
    assert set(echelon.simulate(program, 2).results) == {(1, b"none"), (2, b"none")}


def test_a_timeout_that_the_program_has_set_ends_its_waits():
    def program(group):
        store = dist.TCPStore("localhost", 29500, 2, group.rank == 0, timedelta(seconds=60))
        assert store.timeout == timedelta(seconds=60)
        store.set_timeout(timedelta(seconds=2))
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 2 s, keys: \['never'\]"):
            store.get("never")
        return group.backend.now()

    assert echelon.simulate(program, 2).results == [2.0, 2.0]


def test_a_further_client_sees_the_keys_of_the_same_server():
    """As with a store that one rank alone opens beside that of all, by another name of the host."""

    def program(group):
        store = dist.TCPStore("localhost", 29500, 2, group.rank == 0)
        store.set(f"of {group.rank}", "1")
        if group.rank == 1:
            return dist.TCPStore("127.0.0.1", 29500, is_master=False).get("of 0")
        return b"1"

    assert echelon.simulate(program, 2).results == [b"1", b"1"]


def test_a_store_chooses_its_port():
    def program(group):
        port = dist.TCPStore("localhost", 0, is_master=True).port if group.rank == 0 else 0
        port = int(group.broadcast(torch.tensor(port), src=0).item())
        store = dist.TCPStore("localhost", port, is_master=False)
        return store.port == port > 0, store.add("ranks", 1)

    assert sorted(echelon.simulate(program, 2).results) == [(True, 1), (True, 2)]


def test_values_that_are_pushed_to_a_queue_are_popped_once():
    def program(group):
        store = dist.TCPStore("localhost", 29500, 3, group.rank == 0)
        if group.rank == 0:
            for value in "ab":
                store.queue_push("queue", value)
            group.barrier()
            with pytest.raises(dist.QueueEmptyError):
                store.queue_pop("queue", block=False)
            return store.queue_len("queue")
        value = store.queue_pop("queue")
        group.barrier()
        return value

    left, *popped = echelon.simulate(program, 3).results
    assert (left, sorted(popped)) == (0, [b"a", b"b"])


def test_a_queue_to_which_nobody_pushes_is_named():
    def program():
        dist.TCPStore("localhost", 29500, 1, True).queue_pop("queue")

    with pytest.raises(echelon.DeadlockError, match=r"queue_pop of 'queue', to which no rank has pushed"):
        echelon.simulate(program, 1)


def _add_nothing(store, rank):
    store.add("came", 1)
    while store.add("came", 0) < 3:
        pass


def _get(store, rank):
    store.add("came", 1)
    while int(store.get("came")) < 3:
        pass


def _num_keys(store, rank):
    keys = {0: "a", 1: "b", 2: "c"}
    store.set(keys[rank], "")
    while store.num_keys() < 3:
        pass


def _lock(store, rank):
    while store.compare_set("lock", "", str(rank)) != str(rank).encode():
        pass
    store.add("came", 1)
    store.delete_key("lock")


def _deleted(store, rank):
    if rank == 0:
        store.set("busy", "")
        dist.recv(torch.zeros(100_000), 1)  # the others have polled so often that they wait
        store.delete_key("busy")
    else:
        store.wait(["busy"])
        if rank == 1:
            dist.send(torch.zeros(100_000), 0)
        while store.check(["busy"]):
            pass


@pytest.mark.parametrize("network", [None, "1GbE"])
@pytest.mark.parametrize("loop", [_add_nothing, _get, _num_keys, _lock, _deleted])
def test_a_loop_that_polls_a_store_lets_the_others_run(loop, network):
    """Only `check` of a missing key did. The others polled for ever, and no error ended it."""

    def program():
        dist.init_process_group("gloo")
        loop(dist.TCPStore("localhost", 29600, 3, dist.get_rank() == 0), dist.get_rank())
        return dist.get_rank()

    assert echelon.simulate(program, 3, network=network).results == [0, 1, 2]


def test_a_loop_that_polls_a_store_for_ever_is_a_deadlock():
    """Ranks that poll by adding 0 must not take it for a change, and wake each other."""

    def program():
        dist.init_process_group("gloo")
        store = dist.TCPStore("localhost", 29600, 2, dist.get_rank() == 0)
        while store.add("never", 0) == 0:
            pass

    with pytest.raises(echelon.DeadlockError, match=r"in a loop over Store.add\('never', 0\)"):
        echelon.simulate(program, 2)


def test_looks_between_other_acts_are_no_loop():
    """The hundredth look of a rank at one instant blocked, though the other rank waited for its next act."""

    def program():
        dist.init_process_group("gloo")
        store = dist.TCPStore("localhost", 29600, 2, dist.get_rank() == 0)
        for number in range(150):
            if dist.get_rank() == 0:
                store.check([f"from 1, {number}"])
                store.set(f"from 0, {number}", "")
                store.wait([f"from 1, {number}"])
            else:
                store.wait([f"from 0, {number}"])
                store.set(f"from 1, {number}", "")
        if dist.get_rank() == 0:
            for number in range(150):
                store.get("from 0, 0")
                store.set(f"more {number}", "")
        else:
            store.wait(["more 149"])
        return number

    assert echelon.simulate(program, 2).results == [149, 149]


def test_a_store_of_a_name_that_was_imported_before_is_simulated():
    """It was torch's own, and blocked the turn of its rank for ever."""

    def program():
        rank = int(os.environ["RANK"])
        store = TCPStore("localhost", 29600, 2, rank == 0)
        store.set(f"of {rank}", "1")
        path = FileStore("file of keys", 2)
        path.add("ranks", 1)
        return store.get(f"of {1 - rank}"), isinstance(store, TCPStore), isinstance(path, dist.FileStore)

    assert echelon.simulate(program, 2).results == [(b"1", True, True)] * 2
    own = TCPStore("127.0.0.1", 0, is_master=True)
    own.set("key", "1")
    assert own.get("key") == b"1"


def test_the_class_of_a_store_stays_a_class():
    """It was a function: `isinstance` and annotations raised a TypeError that processes do not have."""

    def program():
        def key_of(store: dist.TCPStore | None) -> bytes:
            return store.get("key")

        store = dist.TCPStore("localhost", 29600, 1, True)
        store.set("key", "1")
        with pytest.raises(TypeError, match="incompatible constructor arguments"):
            dist.TCPStore("localhost", 29600, no_such=1)
        with pytest.raises(echelon.errors.UnsupportedOp, match="Mine, which derives from TCPStore"):
            type("Mine", (dist.TCPStore,), {})("localhost", 29600)
        return key_of(store.clone()), isinstance(store.clone(), dist.TCPStore)

    assert echelon.simulate(program, 1).results == [(b"1", True)]


@pytest.mark.parametrize("waits", [False, True])
def test_a_store_that_no_rank_serves_is_told(waits):
    """torch tries to connect until its timeout. Such ranks went on with a store of their own."""

    def program():
        store = dist.TCPStore("localhost", 29600, is_master=False)
        if waits:
            store.wait(["key"])

    place = (
        r"rank \d opened TCPStore\('localhost', 29600\) at .*test_stores.py:\d+.*, which no rank serves: open it with"
    )
    with pytest.raises(echelon.DeadlockError, match=place):
        echelon.simulate(program, 2)


def test_a_client_may_be_the_first_to_open_a_store():
    def program(group):
        if group.rank == 0:
            group.recv(1)  # the client is first
        else:
            group.isend(torch.ones(1), 0)
        store = dist.TCPStore("localhost", 29600, is_master=group.rank == 0, wait_for_workers=False)
        store.set(str(group.rank), "here")
        return store.get(str(1 - group.rank))

    assert echelon.simulate(program, 2, seed=3).results == [b"here", b"here"]
