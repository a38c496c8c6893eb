"""Which errors end the group, and which leave it usable: the table of docs/collectives.md, row by row."""

import pytest
import torch

import echelon


def bad_argument(group):
    """Is refused on one rank before it counts as a call."""
    if group.rank == 0:
        with pytest.raises(echelon.InvalidRank):
            group.broadcast(torch.ones(1), src=5)
        with pytest.raises(echelon.UnsupportedOp):
            group.all_reduce(torch.ones(1), "average")
        with pytest.raises(echelon.SizeMismatch):
            group.all_to_all(torch.ones(2), in_splits=[1])


def out_of_another_shape(group):
    with pytest.raises(echelon.SizeMismatch):
        group.all_gather(torch.ones(1), out=torch.ones(3) if group.rank == 0 else torch.ones(5))


def message_that_does_not_fit(group):
    if group.rank == 0:
        group.send(torch.ones(3), 1)
    else:
        with pytest.raises(echelon.SizeMismatch):
            group.recv(0, out=torch.ones(2))


def message_that_comes_late(group):
    if group.rank == 1:
        with pytest.raises(echelon.Timeout):
            group.recv(0, timeout=0.02)
        group.send(torch.ones(1), 0)
        assert group.recv(0).item() == 7
    else:
        group.recv(1)
        group.send(torch.tensor(7), 1)


def operation_that_is_waited_for_twice(group):
    if group.rank == 0:
        work = group.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(echelon.Timeout):
            work.wait(0.02)
        group.send(torch.ones(1), 1)
        assert work.wait().item() == 2
    else:
        group.recv(0)
        group.all_reduce(torch.ones(1))


USABLE = [
    bad_argument,
    out_of_another_shape,
    message_that_does_not_fit,
    message_that_comes_late,
    operation_that_is_waited_for_twice,
]


def fails_but_goes_on(group, what):
    what(group)
    return group.all_reduce(torch.tensor(group.rank + 1)).item()


@pytest.mark.parametrize("what", USABLE, ids=lambda what: what.__name__)
def test_the_group_stays_usable(on_backend, what):
    assert on_backend(fails_but_goes_on, 2, what) == [3, 3]


def collective_that_takes_too_long(group):
    if group.rank == 0:
        group.barrier(timeout=0.02)
    else:
        group.recv(0, tag=9)
        group.barrier()


def collectives_that_differ(group):
    group.all_reduce(torch.ones(1 + group.rank))


def out_splits_that_differ(group):
    group.all_to_all(torch.ones(4), out_splits=[2, 2] if group.rank == 0 else [1, 3])


class Odd(torch.Tensor):
    """A tensor whose operations fail once its collective has begun, as a kernel may."""

    fails = False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if cls.fails:
            raise RuntimeError("the kernel is out of order")
        return super().__torch_function__(function, types, args, kwargs or {})


def kernel_that_fails(group):
    if group.rank == 1:
        return group.all_reduce(torch.ones(4))
    recorder = group.backend.flight_recorder
    begin = recorder.begin

    def begin_and_fail(*args, **kwargs):
        Odd.fails = True
        return begin(*args, **kwargs)

    recorder.begin = begin_and_fail
    try:
        return group.all_reduce(torch.ones(4).as_subclass(Odd))
    finally:
        recorder.begin = begin
        Odd.fails = False


ENDING = {
    collective_that_takes_too_long: ("Timeout", "PeerFailed"),
    collectives_that_differ: ("CollectiveMismatch", "CollectiveMismatch"),
    out_splits_that_differ: (None, "CollectiveMismatch"),
    kernel_that_fails: ("RuntimeError", "PeerFailed"),
}


def kind_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def fails_and_ends(group, what):
    """Returns the error, that of the next call, and what a new group of the same ranks and a message give."""
    other = group.subgroup([0, 1])
    first, text = kind_of(lambda: what(group))
    if what is collective_that_takes_too_long and group.rank == 0:
        group.send(torch.ones(1), 1, tag=9)
    again, reason = kind_of(lambda: group.all_reduce(torch.ones(1)))
    if group.rank == 0:
        group.send(torch.tensor(5), 1)
    else:
        assert group.recv(0).item() == 5
    later = group.subgroup([0, 1])
    sums = [part.all_reduce(torch.tensor(group.rank + 1)).item() for part in (other, later)]
    return first, text, again, reason, sums


@pytest.mark.parametrize("what", ENDING, ids=lambda what: what.__name__)
def test_the_group_is_ended_on_all_ranks_and_other_groups_are_not(on_backend, what):
    for rank, (first, text, again, reason, sums) in enumerate(on_backend(fails_and_ends, 2, what)):
        assert first == ENDING[what][rank], text
        assert again == ("CollectiveMismatch" if "CollectiveMismatch" in ENDING[what] else "PeerFailed"), reason
        assert sums == [3, 3]


def leave_an_error_unseen(group):
    """Nobody waits for the asynchronous operation that fails."""
    part = group.subgroup([0, 1])
    work = part.all_reduce(torch.ones(1 + group.rank), async_op=True)
    while not work.is_completed():
        pass
    kind, text = kind_of(part.close)
    seen = part.close()
    return kind, text, seen


def test_an_error_that_nobody_has_seen_is_raised_at_close(on_backend):
    for kind, text, seen in on_backend(leave_an_error_unseen, 2):
        assert kind == "CollectiveMismatch"
        assert "float32[1]" in text
        assert "float32[2]" in text
        assert seen is None


def num_frames(error):
    """Returns how many frames the tracebacks of an error and its causes hold."""
    count = 0
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            count, trace = count + 1, trace.tb_next
        error = error.__cause__ or error.__context__
    return count


def call_again_and_again(group, kind):
    """Returns the number of frames of the second error and of the 20th."""
    ones = torch.ones(3)
    calls = {
        "collective": lambda: group.all_reduce(ones),
        "asynchronous": lambda: group.all_reduce(ones, async_op=True).wait(),
        "recv": lambda: group.recv(1),
        "irecv": lambda: group.irecv(1).wait(),
    }
    group.barrier()
    if group.rank == 1:
        group.abort("enough")
        return None
    counts = []
    for _ in range(20):
        with pytest.raises(echelon.PeerFailed) as caught:
            calls[kind]()
        counts.append(num_frames(caught.value))
    return counts[1], counts[-1]


@pytest.mark.parametrize("kind", ["collective", "asynchronous", "recv", "irecv"])
def test_a_failure_that_is_raised_again_keeps_no_frames_of_earlier_calls(on_backend, kind):
    """Each frame keeps the tensors of its call alive."""
    (early, late), _ = on_backend(call_again_and_again, 2, kind)
    assert late <= early


def disagree_beside_other_calls(group):
    """Calls on while an asynchronous collective fails, and returns the types of all errors."""
    group.barrier()
    work = group.all_gather(torch.ones(2, group.rank + 1), async_op=True)
    kinds = []
    for call in (lambda: group.all_reduce(torch.ones(1)), lambda: group.barrier(), work.wait):
        try:
            call()
        except Exception as error:
            kinds.append(type(error).__name__)
    return kinds


def test_calls_after_an_asynchronous_one_that_fails_tell_its_error(on_backend):
    """Over shared memory the call after it said first that "its operation #2 was interrupted", and hid the cause."""
    assert on_backend(disagree_beside_other_calls, 3) == [["CollectiveMismatch"] * 3] * 3
