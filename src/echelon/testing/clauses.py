"""Helpers of contract checks, and the clauses on inference mode and on receives from any rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from echelon.backends.base import Backend
from echelon.backends.work import Received, Work
from echelon.errors import PeerFailed, SelfSend, Timeout
from echelon.testing.ranks import RunRanks

_LENGTHS = (4, 300_000)
"""Elements of a message that is copied whole, and of one that backends may lend or split."""


def inference_mode_stays_with_its_caller(run_ranks: RunRanks) -> None:
    """Received tensors are ordinary ones if either rank is in inference mode; `out` may be an inference tensor."""

    def act(backend: Backend) -> None:
        for length in _LENGTHS:
            for is_sender_inside, is_receiver_inside in ((True, False), (False, True)):
                if backend.rank == 0:
                    with torch.inference_mode() if is_sender_inside else nullcontext():
                        sent = [torch.full((length,), 7.0) for _ in range(3)]
                        works = [backend.messages.isend(tensor, 1, tag) for tag, tensor in enumerate(sent)]
                    for work in works:
                        work.wait(SECONDS)
                    continue
                with torch.inference_mode():
                    places = [torch.zeros(length) for _ in range(2)]
                with torch.inference_mode() if is_receiver_inside else nullcontext():
                    got = backend.messages.recv(0, 1, timeout=SECONDS)  # tag 0 has arrived before it, unclaimed
                    backend.messages.recv(0, 0, out=places[0], timeout=SECONDS)
                    backend.messages.recv(0, 2, out=places[1], timeout=SECONDS)
                expect(not got.is_inference(), "a received tensor is one of inference mode")
                for tensor in (got.mul_(1.0), *places):
                    expect(bool((tensor == 7.0).all()), f"{length} times 7 came as {tensor[:4].tolist()} and so on")

    run_ranks(2, act)


SECONDS = 20.0
"""Timeout of every operation of a check."""


class ContractError(AssertionError):
    """Violation of the contract by a backend. The message names the clause and the difference."""


def expect(condition: bool, message: str) -> None:
    """Raises ContractError with `message` unless the condition holds."""
    if not condition:
        raise ContractError(message)


def expect_error(kind: type[BaseException], act: Callable[[], object], when: str) -> BaseException:
    """Returns the error of type `kind` that `act` raises. Raises ContractError if it raises none."""
    try:
        act()
    except kind as error:
        return error
    except Exception as error:
        raise ContractError(f"{when}: {kind.__name__} expected, got {type(error).__name__}: {error}") from error
    raise ContractError(f"{when}: {kind.__name__} expected, nothing was raised")


def receives_from_any(run_ranks: RunRanks) -> None:
    """Receives from any rank take turns between senders, keep each sender's order, and match tags."""

    def act(backend: Backend) -> None:
        if backend.rank:
            for number in range(5 if backend.rank == 1 else 1):
                backend.messages.send(torch.tensor([number]), 0, 3, timeout=SECONDS)
            backend.messages.send(torch.empty(0), 0, timeout=SECONDS)
            backend.messages.recv(0, timeout=SECONDS)
            return
        for src in (1, 2):  # sent last: all other messages have arrived
            backend.messages.recv(src, timeout=SECONDS)
        sources = {1: 10, 2: 20}
        work = backend.messages.irecv_any({2: 20}, 4)
        came = [backend.messages.irecv_any(sources, 3).wait(SECONDS) for _ in range(6)]
        order = [received.src for received in came]
        expect(order == [10, 20, 10, 10, 10, 10], f"messages of ranks 1 (five) and 2 (one) came as {order}")
        numbers = [received.tensor.item() for received in came if received.src == 10]
        expect(numbers == [0, 1, 2, 3, 4], f"the messages of one rank came as {numbers}")
        expect({received.tag for received in came} == {3}, "Received.tag is not that of the message")
        expect(not work.is_completed(), "a receive took a message with another tag")
        backend.messages.cancel(work)
        expect_error(Timeout, lambda: work.wait(SECONDS), "a receive that was withdrawn")
        expect_error(SelfSend, lambda: backend.messages.irecv_any({0: 0, 1: 1}), "a receive from itself among others")
        for dst in (1, 2):
            backend.messages.send(torch.empty(0), dst, timeout=SECONDS)

    run_ranks(3, act)


def receives_keep_their_order(run_ranks: RunRanks) -> None:
    """Receives from any rank and from one match messages in the order in which they were posted."""

    def act(backend: Backend) -> None:
        if backend.rank:
            backend.messages.recv(0, 1, timeout=SECONDS)
            for number in range(3):
                backend.messages.send(torch.tensor([number]), 0, timeout=SECONDS)
            return
        works: list[Work[Received] | Work[torch.Tensor]]
        works = [backend.messages.irecv_any({1: 1}), backend.messages.irecv(1), backend.messages.irecv_any({1: 1})]
        backend.messages.send(torch.empty(0), 1, 1, timeout=SECONDS)
        came = [work.wait(SECONDS) for work in works]
        got = [(value.tensor if isinstance(value, Received) else value).item() for value in came]
        expect(got == [0, 1, 2], f"receives from any, from one, and from any got messages {got}")

    run_ranks(2, act)


def each_death_is_told_to_one_receive_from_any(run_ranks: RunRanks) -> None:
    """A death fails one receive from any rank. Later ones wait for the remaining ranks, and fail if none is left."""

    def act(backend: Backend) -> None:
        if backend.rank == 1:
            backend.messages.send(torch.tensor([1]), 0, timeout=SECONDS)
            backend.abort("the dog ate it")
        if backend.rank > 1:
            backend.messages.recv(0, timeout=SECONDS)
            backend.messages.send(torch.tensor([backend.rank]), 0, timeout=SECONDS)
        if backend.rank:
            return
        sources = {1: 1, 2: 2, 3: 3}
        waiting = partial(backend.messages.recv, 1, 9, timeout=SECONDS)
        expect_error(PeerFailed, waiting, "waiting for a rank that aborted")
        first = backend.messages.irecv_any(sources).wait(SECONDS)
        expect(first.src == 1, "a message that had arrived before its sender died was lost")
        error = expect_error(PeerFailed, lambda: backend.messages.irecv_any(sources).wait(SECONDS), "a death")
        expect("the dog ate it" in str(error), f"the reason is missing: {error}")
        for rank in (2, 3):
            work = backend.messages.irecv_any(sources)
            backend.messages.send(torch.empty(0), rank, timeout=SECONDS)
            expect(work.wait(SECONDS).src == rank, "the ranks that are left are not heard any more")
        error = expect_error(
            PeerFailed, lambda: backend.messages.irecv_any(sources).wait(SECONDS), "all others have closed"
        )
        expect("nobody is left" in str(error), f"the error does not say that nobody is left: {error}")

    run_ranks(4, act)
