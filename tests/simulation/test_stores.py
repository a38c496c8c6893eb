"""Stores of torch.distributed on simulated ranks: waits in virtual time, and keys of the program alone."""

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

import echelon
from echelon.errors import Timeout


def test_the_timeout_of_a_wait_is_not_prolonged_by_other_keys():
    def program(group):
        store = dist.TCPStore("localhost", 29500, 2)
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
    def program():
        store = dist.TCPStore("localhost", 29500, 2)
        num_keys = store.num_keys()
        # Echelon counted the ranks under this key once: a rank that still waited for the other read this value.
        store.set("workers", "none")
        return num_keys, store.get("workers")

    assert {keys for _, keys in echelon.simulate(program, 2).results} == {b"none"}
