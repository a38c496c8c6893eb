"""Contract of backends, as a check that runs against any backend, a user's own too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from echelon.backends.base import Backend
from echelon.backends.formats.wire import Tag
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
from echelon.testing.clauses import (
    SECONDS,
    ContractError,
    each_death_is_told_to_one_receive_from_any,
    expect,
    expect_error,
    inference_mode_stays_with_its_caller,
    receives_from_any,
    receives_keep_their_order,
)
from echelon.testing.ranks import RunRanks

__all__ = ["ContractError", "check_backend", "clause_names"]


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


def _names_itself(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> tuple[int, int]:
        backend.messages.barrier(SECONDS)
        return backend.rank, backend.world_size

    for world_size in (1, 2, 3):
        places = list(run_ranks(world_size, act))
        expect(places == [(rank, world_size) for rank in range(world_size)], f"ranks and sizes are {places}")


def _every_pair_talks(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
        others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        sends = [backend.messages.isend(torch.tensor([backend.rank, dst]), dst) for dst in others]
        for src in others:
            got = backend.messages.recv(src, timeout=SECONDS).tolist()
            expect(got == [src, backend.rank], f"rank {backend.rank} received {got} from rank {src}")
        for send in sends:
            send.wait(SECONDS)

    run_ranks(4, act)


def _shape_and_dtype_travel(run_ranks: RunRanks) -> None:
    tensors = [
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 3, dtype=torch.int16),
        torch.arange(6, dtype=torch.bfloat16).reshape(1, 2, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j], dtype=torch.complex64),
        torch.arange(5, dtype=torch.uint8),
        torch.randn(70_000, generator=torch.Generator().manual_seed(0)).half(),
    ]

    def act(backend: Backend) -> None:
        for index, tensor in enumerate(tensors):
            if backend.rank == 0:
                backend.messages.send(tensor, 1, index, timeout=SECONDS)
            else:
                got = backend.messages.recv(0, index, timeout=SECONDS)
                same = got.dtype == tensor.dtype and got.shape == tensor.shape and torch.equal(got, tensor)
                expect(same, f"sent {tensor.dtype} {list(tensor.shape)}, received {got.dtype} {list(got.shape)}")

    run_ranks(2, act)


def _writes_where_told(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
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

    run_ranks(2, act)


def _combines_where_told(run_ranks: RunRanks) -> None:
    def subtract(own: torch.Tensor, other: torch.Tensor) -> None:
        own.sub_(other)

    def act(backend: Backend) -> None:
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

    run_ranks(2, act)


def _what_need_not_fit_comes_nevertheless(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
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

    run_ranks(2, act)


def _tags_never_mix(run_ranks: RunRanks) -> None:
    tags: list[int | Tag] = [0, 5, Tag(1, 0, 5), Tag(1, 1, 5), Tag(2**63, 2**63, 2**31)]

    def act(backend: Backend) -> None:
        if backend.rank == 0:
            for index, tag in enumerate(tags):
                backend.messages.send(torch.tensor([index]), 1, tag, timeout=SECONDS)
            return
        for index, tag in reversed(list(enumerate(tags))):
            got = backend.messages.recv(0, tag, timeout=SECONDS).item()
            expect(got == index, f"tag {tag} brought message {got} instead of {index}")

    run_ranks(2, act)


def _order_is_kept(run_ranks: RunRanks) -> None:
    count = 50

    def act(backend: Backend) -> None:
        if backend.rank == 0:
            sends = [backend.messages.isend(torch.full((index * 37 % 4000,), index), 1) for index in range(1, count)]
            for send in sends:
                send.wait(SECONDS)
            return
        works = [backend.messages.irecv(0) for _ in range(1, count)]
        for index, work in enumerate(works, 1):
            got = work.wait(SECONDS)
            expect(bool((got == index).all()), f"message {index} of one tag brought {got[:1].tolist()}")

    run_ranks(2, act)


def _what_is_done_at_once_keeps_its_order(run_ranks: RunRanks) -> None:
    """Order holds for messages and receives with and without a Work, of two shapes, some receives posted early."""
    count, tag = 60, Tag(3, 0, 1)

    def act(backend: Backend) -> None:
        if backend.rank == 0:
            for index in range(count):
                tensor = torch.full((1 + index // 7 % 2,), float(index))
                if index % 5 == 0 or not backend.messages.send_at_once(tensor, 1, tag, note="n"):
                    backend.messages.isend(tensor, 1, tag, note="n").wait(SECONDS)
            return
        index = 0
        while index < count:
            if index % 4 == 3:
                works = [backend.messages.irecv(0, tag, note="n") for _ in range(min(2, count - index))]
                message = backend.messages.recv_at_once(0, tag, note=None)  # must not overtake the posted ones
                got = [work.wait(SECONDS) for work in works] + ([] if message is None else [message.tensor])
            else:
                place = torch.zeros(1) if index % 2 else None
                message = backend.messages.recv_at_once(0, tag, out=place, note=None)
                if message is not None:
                    expect(message.note == "n", f"the note of message {index} came as {message.note!r}")
                    expect(place is None or message.tensor is place, f"message {index} is not where it was to be")
                got = [backend.messages.irecv(0, tag, note="n").wait(SECONDS) if message is None else message.tensor]
            for tensor in got:
                wanted = [float(index)] * (1 + index // 7 % 2)
                expect(tensor.tolist() == wanted, f"message {index} brought {tensor.tolist()}")
                index += 1

    run_ranks(2, act)


def _what_does_not_fit_is_not_received_at_once(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
        tag = Tag(3, 0, 1)
        if backend.rank == 0:
            for number in range(3):
                backend.messages.isend(torch.full((4,), float(number)), 1, tag, note="a").wait(SECONDS)
            for other in (torch.zeros(4, device="meta"), torch.zeros(4).to_sparse()):
                expect(not backend.messages.send_at_once(other, 1, tag), f"sent at once: {other}")
            return
        backend.messages.irecv(0, tag, note="a").wait(SECONDS)
        wrong, ints = torch.zeros(3), torch.zeros(4, dtype=torch.int32)
        for out, note in ((wrong, "a"), (ints, "a"), (None, "b")):
            expect(
                backend.messages.recv_at_once(0, tag, out=out, note=note) is None, f"received at once: {out}, {note!r}"
            )
        expect(backend.messages.recv_at_once(0, Tag(3, 0, 2)) is None, "a message with another tag was received")
        expect(not wrong.any() and not ints.any(), "a message that does not fit was written nevertheless")
        for number in (1, 2):
            got = backend.messages.irecv(0, tag, note="a").wait(SECONDS).tolist()
            expect(got == [float(number)] * 4, f"message {number} brought {got}")

    run_ranks(2, act)


def _send_does_not_wait_for_the_receiver(run_ranks: RunRanks) -> None:
    """Both ranks send before they receive. A large message too, since both directions are independent."""

    def act(backend: Backend) -> None:
        for numel in (1, 3_000_000):
            other = 1 - backend.rank
            backend.messages.send(torch.full((numel,), float(backend.rank)), other, timeout=SECONDS)
            got = backend.messages.recv(other, timeout=SECONDS)
            expect(bool((got == other).all()) and got.numel() == numel, f"{numel} elements did not arrive whole")

    run_ranks(2, act)


def _nothing_arrives_before_it_is_sent(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
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

    run_ranks(2, act)


def _a_timeout_withdraws_the_receive(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
        if backend.rank == 0:
            backend.messages.recv(1, 1, timeout=SECONDS)
            backend.messages.send(torch.ones(2), 1, timeout=SECONDS)
            backend.messages.send(torch.full((2,), 2.0), 1, 1, timeout=SECONDS)
            return
        place = torch.zeros(2)
        expect_error(Timeout, lambda: backend.messages.recv(0, out=place, timeout=0.05), "recv with a timeout")
        backend.messages.send(torch.ones(1), 0, 1, timeout=SECONDS)
        expect(backend.messages.recv(0, 1, timeout=SECONDS).tolist() == [2.0, 2.0], "the connection is out of step")
        expect(place.tolist() == [0.0, 0.0], "a receive whose time was up wrote into its tensor later")
        expect(backend.messages.recv(0, 0, timeout=SECONDS).tolist() == [1.0, 1.0], "the message itself was lost")

    run_ranks(2, act)


def _a_mismatch_leaves_the_connection_usable(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
        if backend.rank == 0:
            for tag in range(4):
                backend.messages.isend(torch.ones(100), 1, tag, note="a" if tag == 3 else "").wait(SECONDS)
            backend.messages.send(torch.tensor([1.5]), 1, 9, timeout=SECONDS)
            return
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

    run_ranks(2, act)


def _bad_arguments_are_named(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
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

    run_ranks(2, act)


def _what_has_no_memory_is_refused(run_ranks: RunRanks) -> None:
    """The backend and a group over it refuse such tensors before anything is sent, and stay usable."""

    def act(backend: Backend) -> None:
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

    run_ranks(2, act)


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


def _a_closed_peer_is_named(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
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

    run_ranks(3, act)


def _an_abort_is_told_to_all(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
        if backend.rank == 1:
            backend.abort("the dog ate it")
            return
        error = expect_error(
            PeerFailed, lambda: backend.messages.recv(1, timeout=SECONDS), "waiting for a rank that aborted"
        )
        expect("the dog ate it" in str(error) and "rank 1" in str(error), f"the reason is missing: {error}")

    run_ranks(3, act)


def _a_revoked_context_ends_its_collectives(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
        if backend.rank == 0:
            backend.control.revoke(7, [1], PeerFailed(2, "gone"))
            backend.messages.send(torch.ones(1), 1, Tag(7, 0, 0), timeout=SECONDS)
            return
        work = backend.messages.irecv(0, Tag(7, 5, 0))
        error = expect_error(PeerFailed, lambda: work.wait(SECONDS), "a collective of a revoked context")
        expect(isinstance(error, PeerFailed) and error.rank == 2, f"the first cause is not named: {error}")
        backend.messages.recv(0, Tag(7, 0, 0), timeout=SECONDS)

    run_ranks(2, act)


def _closed_is_closed(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
        peer = 1 - backend.rank
        backend.close()
        expect_error(Closed, partial(backend.messages.isend, torch.ones(1), peer), "isend after close")
        expect_error(Closed, partial(backend.messages.irecv, peer), "irecv after close")
        expect_error(Closed, partial(backend.messages.irecv_any, {peer: peer}), "irecv_any after close")
        expect_error(Closed, partial(backend.lanes.start, bool, "nothing"), "start after close")
        backend.close()
        backend.abort("late")

    run_ranks(2, act)


def _lanes_run_beside(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
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

    run_ranks(2, act)


def _many_lanes_talk_at_once(run_ranks: RunRanks) -> None:
    def act(backend: Backend) -> None:
        works = [backend.lanes.start(partial(_talk, backend, tag), f"talk {tag}", tag) for tag in range(4)]
        _talk(backend, len(works))
        for work in works:
            work.wait(SECONDS)

    run_ranks(2, act)


def _threads_of_ones_own_talk_or_are_refused(run_ranks: RunRanks) -> None:
    """Either all threads of the program can exchange messages at once, or every one raises UnsupportedOp."""

    def act(backend: Backend) -> None:
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

    run_ranks(2, act)


def _talk(backend: Backend, tag: int) -> None:
    """Exchanges 20 messages with the other rank, under one tag."""
    other = 1 - backend.rank
    for _ in range(20):
        work = backend.messages.isend(torch.full((tag * 1000 + 1,), tag), other, tag)
        got = backend.messages.recv(other, tag, timeout=SECONDS)
        expect(bool((got == tag).all()), f"tag {tag} brought {got[:1].tolist()}")
        work.wait(SECONDS)


_CLAUSES: dict[str, Callable[[RunRanks], None]] = {
    clause.__name__.strip("_"): clause
    for clause in (
        _names_itself,
        _every_pair_talks,
        _shape_and_dtype_travel,
        _writes_where_told,
        _combines_where_told,
        _what_need_not_fit_comes_nevertheless,
        inference_mode_stays_with_its_caller,
        _tags_never_mix,
        _order_is_kept,
        _what_is_done_at_once_keeps_its_order,
        _what_does_not_fit_is_not_received_at_once,
        _send_does_not_wait_for_the_receiver,
        _nothing_arrives_before_it_is_sent,
        _a_timeout_withdraws_the_receive,
        _a_mismatch_leaves_the_connection_usable,
        _bad_arguments_are_named,
        _what_has_no_memory_is_refused,
        _a_closed_peer_is_named,
        _an_abort_is_told_to_all,
        _a_revoked_context_ends_its_collectives,
        receives_from_any,
        receives_keep_their_order,
        each_death_is_told_to_one_receive_from_any,
        _closed_is_closed,
        _lanes_run_beside,
        _many_lanes_talk_at_once,
        _threads_of_ones_own_talk_or_are_refused,
    )
}
