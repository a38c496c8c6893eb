"""The clauses of the contract on receives from whichever rank sends first."""

from __future__ import annotations

from functools import partial

import torch

from echelon.backends.base import Backend
from echelon.backends.work import Received, Work
from echelon.errors import PeerFailed, SelfSend, Timeout
from echelon.testing.expect import SECONDS, expect, expect_error
from echelon.testing.ranks import RunRanks


def receives_from_any(run_ranks: RunRanks) -> None:
    """Rank 0 asks when all has arrived: what says so comes behind."""

    def act(backend: Backend) -> None:
        if backend.rank:
            for number in range(5 if backend.rank == 1 else 1):
                backend.send(torch.tensor([number]), 0, 3, timeout=SECONDS)
            backend.send(torch.empty(0), 0, timeout=SECONDS)
            backend.recv(0, timeout=SECONDS)
            return
        for src in (1, 2):
            backend.recv(src, timeout=SECONDS)
        sources = {1: 10, 2: 20}
        work = backend.irecv_any({2: 20}, 4)
        came = [backend.irecv_any(sources, 3).wait(SECONDS) for _ in range(6)]
        order = [received.src for received in came]
        expect(order == [10, 20, 10, 10, 10, 10], f"messages of ranks 1 (five) and 2 (one) came as {order}")
        numbers = [received.tensor.item() for received in came if received.src == 10]
        expect(numbers == [0, 1, 2, 3, 4], f"the messages of one rank came as {numbers}")
        expect({received.tag for received in came} == {3}, "Received.tag is not that of the message")
        expect(not work.is_completed(), "a receive took a message with another tag")
        backend.cancel(work)
        expect_error(Timeout, lambda: work.wait(SECONDS), "a receive that was withdrawn")
        expect_error(SelfSend, lambda: backend.irecv_any({0: 0, 1: 1}), "a receive from itself among others")
        for dst in (1, 2):
            backend.send(torch.empty(0), dst, timeout=SECONDS)

    run_ranks(3, act)


def receives_keep_their_order(run_ranks: RunRanks) -> None:
    """Receives from any rank and from one get what comes in the order in which they were posted."""

    def act(backend: Backend) -> None:
        if backend.rank:
            backend.recv(0, 1, timeout=SECONDS)
            for number in range(3):
                backend.send(torch.tensor([number]), 0, timeout=SECONDS)
            return
        works: list[Work[Received] | Work[torch.Tensor]]
        works = [backend.irecv_any({1: 1}), backend.irecv(1), backend.irecv_any({1: 1})]
        backend.send(torch.empty(0), 1, 1, timeout=SECONDS)
        came = [work.wait(SECONDS) for work in works]
        got = [(value.tensor if isinstance(value, Received) else value).item() for value in came]
        expect(got == [0, 1, 2], f"receives from any, from one, and from any got messages {got}")

    run_ranks(2, act)


def each_death_is_told_to_one_receive_from_any(run_ranks: RunRanks) -> None:
    """The receives after it wait for those that are left, until nobody is."""

    def act(backend: Backend) -> None:
        if backend.rank == 1:
            backend.send(torch.tensor([1]), 0, timeout=SECONDS)
            backend.abort("the dog ate it")
        if backend.rank > 1:
            backend.recv(0, timeout=SECONDS)
            backend.send(torch.tensor([backend.rank]), 0, timeout=SECONDS)
        if backend.rank:
            return
        sources = {1: 1, 2: 2, 3: 3}
        waiting = partial(backend.recv, 1, 9, timeout=SECONDS)
        expect_error(PeerFailed, waiting, "waiting for a rank that aborted")
        first = backend.irecv_any(sources).wait(SECONDS)
        expect(first.src == 1, "a message that had arrived before its sender died was lost")
        error = expect_error(PeerFailed, lambda: backend.irecv_any(sources).wait(SECONDS), "a death")
        expect("the dog ate it" in str(error), f"the reason is missing: {error}")
        for rank in (2, 3):
            work = backend.irecv_any(sources)
            backend.send(torch.empty(0), rank, timeout=SECONDS)
            expect(work.wait(SECONDS).src == rank, "the ranks that are left are not heard any more")
        error = expect_error(PeerFailed, lambda: backend.irecv_any(sources).wait(SECONDS), "all others have closed")
        expect("nobody is left" in str(error), f"the error does not say that nobody is left: {error}")

    run_ranks(4, act)
