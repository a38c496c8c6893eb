"""Contract of backends, as a check that runs against any backend, a user's own too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from echelon.backends.base import Backend
from echelon.backends.formats.wire import Tag
from echelon.backends.work import Received, Work
from echelon.errors import (
    Closed,
    CollectiveMismatch,
    InvalidRank,
    PeerFailed,
    SelfSend,
    SizeMismatch,
    Timeout,
    UnsupportedOp,
)
from echelon.group.group import ProcessGroup
from echelon.testing.ranks import Act, ContractError, RunRanks, expect, expect_error

__all__ = ["ContractError", "check_backend", "clause_names"]

SECONDS = 20.0
"""Timeout of every operation of a check."""

_LENGTHS = (4, 300_000)
"""Elements of a message that is copied whole, and of one that backends may lend or split."""


def check_backend(run_ranks: RunRanks, clauses: Sequence[str] | None = None) -> list[str]:
    """Verifies a backend against every clause of the contract, each on fresh worlds of 1 to 4 ranks.

    Args:
        run_ranks: runs a function on every rank of a fresh world: `ranks_in_threads(make_world)` for your own backend,
            `simulated_ranks()` for simulated ranks.
        clauses: names of the clauses to check; None: all of `clause_names()`.

    Returns:
        The names of the clauses checked.

    Raises:
        ContractError: the first broken clause.
    """
    names = list(clause_names() if clauses is None else clauses)
    for name in names:
        try:
            _CLAUSES[name](run_ranks)
        except ContractError as error:
            raise ContractError(f"{name}: {error}") from error
        except Exception as error:
            raise ContractError(f"{name}: {type(error).__name__}: {error}") from error
    return names


def clause_names() -> tuple[str, ...]:
    """Returns the names of all clauses, in the order of the checks."""
    return tuple(_CLAUSES)


# Filled by `_clause` while this module is imported, and not changed after that.
_CLAUSES: dict[str, Callable[[RunRanks], object]] = {}


def _clause(world_size: int) -> Callable[[Act], Act]:
    """Adds a clause: a function that each rank of a world of this size calls with its backend."""

    def add(act: Act) -> Act:
        _CLAUSES[act.__name__.strip("_")] = lambda run_ranks: run_ranks(world_size, act)
        return act

    return add


def _names_itself(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> tuple[int, int]:
        backend.messages.barrier(SECONDS)
        return backend.rank, backend.world_size

    for world_size in (1, 2, 3):
        places = list(run_ranks(world_size, act))
        expect(places == [(rank, world_size) for rank in range(world_size)], f"ranks and sizes are {places}")


_CLAUSES["names_itself"] = _names_itself


@_clause(4)
def _every_pair_talks(backend: Backend) -> None:
    others = [rank for rank in range(backend.world_size) if rank != backend.rank]
    # The sender and the receiver are in the message: a rank that gets another pair's message sees it.
    sends = [backend.messages.isend(torch.tensor([backend.rank, dst]), dst) for dst in others]
    for src in others:
        got = backend.messages.recv(src, timeout=SECONDS).tolist()
        expect(got == [src, backend.rank], f"rank {backend.rank} received {got} from rank {src}")
    for send in sends:
        send.wait(SECONDS)


@_clause(2)
def _shape_and_dtype_travel(backend: Backend) -> None:
    tensors = [
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 3, dtype=torch.int16),
        torch.arange(6, dtype=torch.bfloat16).reshape(1, 2, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j], dtype=torch.complex64),
        torch.arange(5, dtype=torch.uint8),
        # 140 kB: more than backends copy whole, and no whole number of pages.
        torch.randn(70_000, generator=torch.Generator().manual_seed(0)).half(),
    ]
    for index, tensor in enumerate(tensors):
        if backend.rank == 0:
            backend.messages.send(tensor, 1, index, timeout=SECONDS)
        else:
            got = backend.messages.recv(0, index, timeout=SECONDS)
            same = got.dtype == tensor.dtype and got.shape == tensor.shape and torch.equal(got, tensor)
            expect(same, f"sent {tensor.dtype} {list(tensor.shape)}, received {got.dtype} {list(got.shape)}")


@_clause(2)
def _writes_where_told(backend: Backend) -> None:
    if backend.rank == 0:
        for tag in (0, 1):
            backend.messages.send(torch.full((4,), 7.0), 1, tag, timeout=SECONDS)
        backend.messages.send(torch.ones(1), 1, 2, timeout=SECONDS)
        return
    place = torch.zeros(6)
    got = backend.messages.recv(0, 0, out=place[1:5], timeout=SECONDS)
    expect(place.tolist() == [0, 7, 7, 7, 7, 0], f"out= was filled as {place.tolist()}")
    expect(got.data_ptr() == place[1:].data_ptr(), "recv(out=) returned another tensor")
    backend.messages.recv(0, 2, timeout=SECONDS)  # tag 1 has arrived before it, unclaimed
    late = torch.zeros(4)
    backend.messages.recv(0, 1, out=late, timeout=SECONDS)
    expect(late.tolist() == [7.0] * 4, f"out= of a message that came early was filled as {late.tolist()}")


@_clause(2)
def _combines_where_told(backend: Backend) -> None:
    # Not a sum: it shows which operand is which, and that each element was combined once.
    def subtract(own: torch.Tensor, other: torch.Tensor) -> None:
        own.sub_(other)

    values = torch.arange(300_000.0)
    if backend.rank == 0:
        for tag in (0, 1):
            backend.messages.isend(values, 1, tag).wait(SECONDS)
        return
    for tag in (1, 0):  # the second one came unclaimed
        place = torch.full_like(values, 7.0)
        got = backend.messages.irecv(0, tag, out=place, combine=subtract).wait(SECONDS)
        expect(torch.equal(place, 7.0 - values), f"tag {tag} was not subtracted from out= once, everywhere")
        expect(got.data_ptr() == place.data_ptr(), "irecv(out=, combine=) returned another tensor")


@_clause(2)
def _what_need_not_fit_comes_nevertheless(backend: Backend) -> None:
    if backend.rank == 0:
        for tag in range(4):
            backend.messages.send(torch.full((4,), 7.0), 1, tag, timeout=SECONDS)
        return
    wrong, right = torch.zeros(3), torch.zeros(4)
    for tag, place in ((3, wrong), (1, right), (2, right.int()), (0, wrong)):  # the last one came unclaimed
        got = backend.messages.irecv(0, tag, out=place, must_fit=False).wait(SECONDS)
        expect(got.tolist() == [7.0] * 4, f"a message of 4 elements came as {got.tolist()}")
        expect((got is place) == (place is right), "a message is not where it should be")
    expect(not wrong.any(), "a message that does not fit was written nevertheless")


@_clause(2)
def _inference_mode_stays_with_its_caller(backend: Backend) -> None:
    """Received tensors are ordinary ones if either rank is in inference mode; `out` may be an inference tensor."""
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


@_clause(2)
def _tags_never_mix(backend: Backend) -> None:
    # The last one uses the highest bit of each field.
    tags: list[int | Tag] = [0, 5, Tag(1, 0, 5), Tag(1, 1, 5), Tag(2**63, 2**63, 2**31)]
    if backend.rank == 0:
        for index, tag in enumerate(tags):
            backend.messages.send(torch.tensor([index]), 1, tag, timeout=SECONDS)
        return
    # In the opposite order: a backend that ignores tags would return the oldest message.
    for index, tag in reversed(list(enumerate(tags))):
        got = backend.messages.recv(0, tag, timeout=SECONDS).item()
        expect(got == index, f"tag {tag} brought message {got} instead of {index}")


@_clause(2)
def _order_is_kept(backend: Backend) -> None:
    count = 50
    if backend.rank == 0:
        # Sizes go up and down: a small message must not overtake a large one before it.
        sends = [backend.messages.isend(torch.full((index * 37 % 4000,), index), 1) for index in range(1, count)]
        for send in sends:
            send.wait(SECONDS)
        return
    works = [backend.messages.irecv(0) for _ in range(1, count)]
    for index, work in enumerate(works, 1):
        got = work.wait(SECONDS)
        expect(bool((got == index).all()), f"message {index} of one tag brought {got[:1].tolist()}")


@_clause(2)
def _what_is_done_at_once_keeps_its_order(backend: Backend) -> None:
    """Order holds for messages and receives with and without a Work, of two shapes, some receives posted early."""
    count, tag = 60, Tag(3, 0, 1)
    if backend.rank == 0:
        for index in range(count):
            tensor = torch.full((1 + index // 7 % 2,), float(index))
            if index % 5 == 0 or not backend.messages.prepare_send(
                1, tag, tensor.shape, tensor.dtype, note="n"
            ).at_once(tensor):
                backend.messages.isend(tensor, 1, tag, note="n").wait(SECONDS)
        return
    index, receive = 0, backend.messages.prepare_receive(0, tag, note=None)
    while index < count:
        if index % 4 == 3:
            works = [backend.messages.irecv(0, tag, note="n") for _ in range(min(2, count - index))]
            message = receive.at_once()  # must not overtake the posted ones
            got = [work.wait(SECONDS) for work in works] + ([] if message is None else [message.tensor])
        else:
            place = torch.zeros(1) if index % 2 else None
            message = receive.at_once(place)
            if message is not None:
                expect(message.note == "n", f"the note of message {index} came as {message.note!r}")
                expect(place is None or message.tensor is place, f"message {index} is not where it was to be")
            got = [backend.messages.irecv(0, tag, note="n").wait(SECONDS) if message is None else message.tensor]
        for tensor in got:
            wanted = [float(index)] * (1 + index // 7 % 2)
            expect(tensor.tolist() == wanted, f"message {index} brought {tensor.tolist()}")
            index += 1


@_clause(2)
def _what_does_not_fit_is_not_received_at_once(backend: Backend) -> None:
    tag = Tag(3, 0, 1)
    if backend.rank == 0:
        for number in range(3):
            backend.messages.isend(torch.full((4,), float(number)), 1, tag, note="a").wait(SECONDS)
        for other in (torch.zeros(4, device="meta"), torch.zeros(4).to_sparse()):
            send = backend.messages.prepare_send(1, tag, other.shape, other.dtype)
            expect(not send.at_once(other), f"sent at once: {other}")
        return
    backend.messages.irecv(0, tag, note="a").wait(SECONDS)
    wrong, ints = torch.zeros(3), torch.zeros(4, dtype=torch.int32)
    for out, note in ((wrong, "a"), (ints, "a"), (None, "b")):
        receive = backend.messages.prepare_receive(0, tag, note=note)
        expect(receive.at_once(out) is None, f"received at once: {out}, {note!r}")
    expect(
        backend.messages.prepare_receive(0, Tag(3, 0, 2)).at_once() is None, "a message with another tag was received"
    )
    expect(not wrong.any() and not ints.any(), "a message that does not fit was written nevertheless")
    for number in (1, 2):
        got = backend.messages.irecv(0, tag, note="a").wait(SECONDS).tolist()
        expect(got == [float(number)] * 4, f"message {number} brought {got}")


@_clause(2)
def _send_does_not_wait_for_the_receiver(backend: Backend) -> None:
    """Both ranks send before they receive. A large message too, since both directions are independent."""
    # 12 MB is more than sockets and rings buffer.
    for numel in (1, 3_000_000):
        other = 1 - backend.rank
        backend.messages.send(torch.full((numel,), float(backend.rank)), other, timeout=SECONDS)
        got = backend.messages.recv(other, timeout=SECONDS)
        expect(bool((got == other).all()) and got.numel() == numel, f"{numel} elements did not arrive whole")


@_clause(2)
def _nothing_arrives_before_it_is_sent(backend: Backend) -> None:
    if backend.rank == 0:
        backend.messages.recv(1, 1, timeout=SECONDS)
        backend.messages.send(torch.tensor([4]), 1, timeout=SECONDS)
        return
    work = backend.messages.irecv(0)
    expect(not work.is_completed(), "a receive is done before anything was sent")
    expect_error(Timeout, work.result, "result() of an operation under way")
    expect_error(Timeout, lambda: work.wait(0.05), "waiting for a message that nobody has sent")
    backend.messages.send(torch.ones(1), 0, 1, timeout=SECONDS)
    expect(work.wait(SECONDS).item() == 4, "the message after a timeout is another")
    expect(work.is_completed() and work.exception() is None, "a finished Work does not say so")


@_clause(2)
def _a_timeout_withdraws_the_receive(backend: Backend) -> None:
    if backend.rank == 0:
        backend.messages.recv(1, 1, timeout=SECONDS)
        backend.messages.send(torch.ones(2), 1, timeout=SECONDS)
        backend.messages.send(torch.full((2,), 2.0), 1, 1, timeout=SECONDS)
        return
    # Rank 0 sends nothing before it gets the message below, so the time is up for certain.
    place = torch.zeros(2)
    expect_error(Timeout, lambda: backend.messages.recv(0, out=place, timeout=0.05), "recv with a timeout")
    backend.messages.send(torch.ones(1), 0, 1, timeout=SECONDS)
    expect(backend.messages.recv(0, 1, timeout=SECONDS).tolist() == [2.0, 2.0], "the connection is out of step")
    expect(place.tolist() == [0.0, 0.0], "a receive whose time was up wrote into its tensor later")
    expect(backend.messages.recv(0, 0, timeout=SECONDS).tolist() == [1.0, 1.0], "the message itself was lost")


@_clause(2)
def _a_mismatch_leaves_the_connection_usable(backend: Backend) -> None:
    if backend.rank == 0:
        for tag in range(4):
            backend.messages.isend(torch.ones(100), 1, tag, note="a" if tag == 3 else "").wait(SECONDS)
        backend.messages.send(torch.tensor([1.5]), 1, 9, timeout=SECONDS)
        return
    # Too small, of another shape with as many elements, and of another dtype with as many bytes.
    outs = (torch.zeros(99), torch.zeros(10, 10), torch.zeros(100, dtype=torch.int32))
    for tag, out in enumerate(outs):
        receive = partial(backend.messages.recv, 0, tag, out=out, timeout=SECONDS)
        error = expect_error(SizeMismatch, receive, "a message that does not fit")
        expect("100" in str(error), f"the message does not say what came: {error}")
        expect(not out.any(), "a message that does not fit was written nevertheless")
    work = backend.messages.irecv(0, 3, note="b")
    error = expect_error(CollectiveMismatch, lambda: work.wait(SECONDS), "different notes")
    expect("a" in str(error) and "b" in str(error), f"the message does not show both sides: {error}")
    expect(backend.messages.recv(0, 9, timeout=SECONDS).item() == 1.5, "the connection is out of step")


@_clause(2)
def _bad_arguments_are_named(backend: Backend) -> None:
    one = torch.ones(1)
    expect_error(InvalidRank, lambda: backend.messages.isend(one, 2), "a rank too high")
    expect_error(InvalidRank, lambda: backend.messages.irecv(-1), "a negative rank")
    expect_error(SelfSend, lambda: backend.messages.isend(one, backend.rank), "a send to itself")
    expect_error(SelfSend, lambda: backend.messages.irecv(backend.rank), "a receive from itself")
    expect_error(
        UnsupportedOp, lambda: backend.messages.isend(torch.ones(2, 2).t(), 1 - backend.rank), "a strided tensor"
    )
    expect_error(UnsupportedOp, lambda: backend.messages.isend(one.to("meta"), 1 - backend.rank), "a meta tensor")
    backend.messages.barrier(SECONDS)


@_clause(2)
def _what_has_no_memory_is_refused(backend: Backend) -> None:
    """The backend and a group over it refuse such tensors before anything is sent, and stay usable."""
    other = 1 - backend.rank
    group = ProcessGroup(backend, [0, 1], context=7)
    group.all_reduce(torch.ones(2))  # later calls like it take the fast path, which skips checks
    uses: tuple[Callable[[torch.Tensor], object], ...] = (
        lambda tensor: backend.messages.isend(tensor, other),
        lambda tensor: backend.messages.irecv(other, out=tensor),
        group.all_reduce,
        lambda tensor: group.send(tensor, other),
        lambda tensor: group.recv(other, out=tensor),
        lambda tensor: group.all_gather(torch.ones(1), out=tensor),
        lambda tensor: group.all_reduce_coalesced([torch.ones(2), tensor]),
    )
    for name, call in _without_memory():
        for use in uses:
            expect_error(UnsupportedOp, partial(call, use), name)
    got = group.all_reduce(torch.full((2,), float(backend.rank))).tolist()
    expect(got == [1.0, 1.0], f"after tensors were refused, an all_reduce gave {got}")


class _Dispatched(torch.Tensor):
    """Tensor subclass with `__torch_dispatch__`, as DTensor and FakeTensor are."""

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> object:
        raise AssertionError("a tensor without memory was used")


def _without_memory() -> list[tuple[str, Callable[[Callable[[torch.Tensor], object]], object]]]:
    """Returns kinds of tensors without memory: the name of each, and a function that calls another with one."""
    dispatched = torch.Tensor._make_wrapper_subclass(_Dispatched, (2,), dtype=torch.float32)
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)

    def in_vmap(call: Callable[[torch.Tensor], object]) -> object:
        return torch.func.vmap(call)(torch.ones(3, 2))

    def in_grad(call: Callable[[torch.Tensor], object]) -> object:
        return torch.func.grad(call)(torch.ones(2))

    return [
        ("a class with __torch_dispatch__", lambda call: call(dispatched)),
        ("a sparse tensor", lambda call: call(torch.ones(2).to_sparse())),
        ("a meta tensor", lambda call: call(torch.ones(2, device="meta"))),
        ("a tensor whose storage was freed", lambda call: call(freed)),
        ("a tensor inside of vmap", in_vmap),
        ("a tensor inside of torch.func.grad", in_grad),
    ]


@_clause(3)
def _a_closed_peer_is_named(backend: Backend) -> None:
    if backend.rank == 2:
        backend.messages.send(torch.tensor([8]), 0, timeout=SECONDS)
        return
    if backend.rank == 0:
        waiting = partial(backend.messages.recv, 2, 1, timeout=SECONDS)
        error = expect_error(PeerFailed, waiting, "waiting for a rank that left")
        expect(isinstance(error, PeerFailed) and error.rank == 2, f"the error names another rank: {error}")
        expect(backend.messages.recv(2, timeout=SECONDS).item() == 8, "a message sent before leaving was lost")
        expect_error(PeerFailed, lambda: backend.messages.send(torch.ones(1), 2, timeout=SECONDS), "sending to it")
    other = 1 - backend.rank
    backend.messages.isend(torch.tensor([3]), other).wait(SECONDS)
    expect(backend.messages.recv(other, timeout=SECONDS).item() == 3, "the ranks that stay cannot talk any more")


@_clause(3)
def _an_abort_is_told_to_all(backend: Backend) -> None:
    if backend.rank == 1:
        backend.abort("the dog ate it")
        return
    error = expect_error(
        PeerFailed, lambda: backend.messages.recv(1, timeout=SECONDS), "waiting for a rank that aborted"
    )
    expect("the dog ate it" in str(error) and "rank 1" in str(error), f"the reason is missing: {error}")


@_clause(2)
def _a_revoked_context_ends_its_collectives(backend: Backend) -> None:
    if backend.rank == 0:
        backend.control.revoke(7, [1], PeerFailed(2, "gone"))
        backend.messages.send(torch.ones(1), 1, Tag(7, 0, 0), timeout=SECONDS)
        return
    work = backend.messages.irecv(0, Tag(7, 5, 0))
    error = expect_error(PeerFailed, lambda: work.wait(SECONDS), "a collective of a revoked context")
    expect(isinstance(error, PeerFailed) and error.rank == 2, f"the first cause is not named: {error}")
    # Sequence 0: messages of the program pass, because only collectives need all ranks.
    backend.messages.recv(0, Tag(7, 0, 0), timeout=SECONDS)


@_clause(3)
def _receives_from_any(backend: Backend) -> None:
    """Receives from any rank take turns between senders, keep each sender's order, and match tags."""
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
    expect(order == [10, 20, 10, 10, 10, 10], f"messages from ranks 1 (five) and 2 (one) came as {order}")
    numbers = [received.tensor.item() for received in came if received.src == 10]
    expect(numbers == [0, 1, 2, 3, 4], f"the messages of one rank came as {numbers}")
    expect({received.tag for received in came} == {3}, "Received.tag is not that of the message")
    expect(not work.is_completed(), "a receive took a message with another tag")
    backend.messages.cancel(work)
    expect_error(Timeout, lambda: work.wait(SECONDS), "a receive that was withdrawn")
    expect_error(SelfSend, lambda: backend.messages.irecv_any({0: 0, 1: 1}), "a receive from itself among others")
    for dst in (1, 2):
        backend.messages.send(torch.empty(0), dst, timeout=SECONDS)


@_clause(2)
def _receives_keep_their_order(backend: Backend) -> None:
    """Receives from any rank and from one match messages in the order in which they were posted."""
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


@_clause(4)
def _each_death_is_told_to_one_receive_from_any(backend: Backend) -> None:
    """A death fails one receive from any rank. Later ones wait for the remaining ranks, and fail if none is left."""
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
    expect("no rank is left" in str(error), f"the error does not say that no rank is left: {error}")


@_clause(2)
def _closed_is_closed(backend: Backend) -> None:
    peer = 1 - backend.rank
    backend.close()
    expect_error(Closed, partial(backend.messages.isend, torch.ones(1), peer), "isend after close")
    expect_error(Closed, partial(backend.messages.irecv, peer), "irecv after close")
    expect_error(Closed, partial(backend.messages.irecv_any, {peer: peer}), "irecv_any after close")
    expect_error(Closed, partial(backend.lanes.start, bool, "nothing"), "start after close")
    # Twice, and an abort after it: `with` blocks and exit handlers end what may have ended already.
    backend.close()
    backend.abort("late")


@_clause(2)
def _lanes_run_beside(backend: Backend) -> None:
    other = 1 - backend.rank

    def exchange(tag: int) -> int:
        backend.messages.send(torch.tensor([tag]), other, tag, timeout=SECONDS)
        return int(backend.messages.recv(other, tag, timeout=SECONDS).item())

    order = (0, 1) if backend.rank == 0 else (1, 0)  # a deadlock if both were in one lane
    works = {lane: backend.lanes.start(partial(exchange, lane), f"lane {lane}", lane) for lane in order}
    for lane, work in works.items():
        expect(work.wait(SECONDS) == lane, f"lane {lane} returned {work.result()}")
    failing = backend.lanes.start(lambda: 1 // 0, "division", 0)
    expect_error(ZeroDivisionError, lambda: failing.wait(SECONDS), "an error in a lane")


@_clause(2)
def _many_lanes_talk_at_once(backend: Backend) -> None:
    works = [backend.lanes.start(partial(_talk, backend, tag), f"talk {tag}", tag) for tag in range(4)]
    _talk(backend, len(works))
    for work in works:
        work.wait(SECONDS)


@_clause(2)
def _threads_of_ones_own_talk_or_are_refused(backend: Backend) -> None:
    """Either all threads of the program can exchange messages at once, or every one raises UnsupportedOp."""
    errors: list[BaseException] = []

    def run(tag: int) -> None:
        try:
            _talk(backend, tag)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(tag,), daemon=True) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    refused = [error for error in errors if isinstance(error, UnsupportedOp)]
    if errors and len(refused) < len(threads):
        raise next((error for error in errors if error not in refused), ContractError("only some are refused"))


def _talk(backend: Backend, tag: int) -> None:
    """Exchanges 20 messages with the other rank, under one tag."""
    other = 1 - backend.rank
    for _ in range(20):
        # Lengths and values differ by tag, so that mixed messages are seen.
        work = backend.messages.isend(torch.full((tag * 1000 + 1,), tag), other, tag)
        got = backend.messages.recv(other, tag, timeout=SECONDS)
        expect(bool((got == tag).all()), f"tag {tag} brought {got[:1].tolist()}")
        work.wait(SECONDS)
