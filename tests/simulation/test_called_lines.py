"""Notes about collectives of equal kind, shape and dtype that ranks call in another order."""

import inspect

import pytest
import torch

import echelon

WAYS = pytest.mark.parametrize("way", ["whole", "messages"])


def count_tokens(group):
    group.all_reduce(torch.ones(1))


def mean_loss(group):
    group.all_reduce(torch.ones(1))


def send_one(group, root):
    group.broadcast(torch.ones(1), root)


def take_one(group, root):
    group.broadcast(torch.zeros(1), root)


def swapped(group, odd=1):
    for _ in range(3):
        for call in (mean_loss, count_tokens) if group.rank == odd else (count_tokens, mean_loss):
            call(group)


def swapped_in_one_half(group):
    halves = group.subgroup([0, 1]), group.subgroup([2, 3])
    for half in filter(None, halves):
        swapped(half, odd=1 if half is halves[0] else -1)


@WAYS
def test_swapped_calls_are_noted_once(way):
    first = count_tokens.__code__.co_firstlineno + 1, mean_loss.__code__.co_firstlineno + 1
    (note,) = echelon.simulate(swapped, 3, collectives=way).notes
    assert note in {
        f"#1 of group 'world' was called at {__file__}:{first[0]} on rank 0 and at {__file__}:{first[1]} on rank 1",
        f"#1 of group 'world' was called at {__file__}:{first[1]} on rank 1 and at {__file__}:{first[0]} on rank 2",
    }


@WAYS
def test_groups_are_compared_by_themselves(way):
    notes = echelon.simulate(swapped_in_one_half, 4, collectives=way).notes
    assert len(notes) == 1
    assert notes[0].endswith("on rank 1")


def at_lines_of_their_own(group):
    if group.rank == 0:
        count_tokens(group)
    else:
        mean_loss(group)
    mean_loss(group)


def in_turns_as_the_root(group):
    for root in range(group.world_size):
        if group.rank == root:
            send_one(group, root)
        else:
            take_one(group, root)


def in_turns_in_one_function(group):
    for step in range(2 * group.world_size):
        if step % group.world_size == group.rank:
            group.all_reduce(torch.ones(1))
        else:
            group.all_reduce(torch.zeros(1))


def barriers(group):
    def one():
        group.barrier()

    def other():
        group.barrier()

    for call in (one, other) if group.rank else (other, one):
        call()


@WAYS
@pytest.mark.parametrize("program", [at_lines_of_their_own, in_turns_as_the_root, in_turns_in_one_function, barriers])
def test_other_lines_on_purpose_are_not_noted(way, program):
    assert echelon.simulate(program, 3, collectives=way).notes == ()


def send_three(group):
    if group.rank == 0:
        group.send(torch.ones(3), 1)  # the send of three
    else:
        group.recv(0, out=torch.zeros(2))


def test_a_message_that_does_not_fit_is_told_with_the_line_of_its_send():
    lines, first = inspect.getsourcelines(send_three)
    line = first + next(index for index, text in enumerate(lines) if "the send of three" in text)
    with pytest.raises(echelon.SizeMismatch, match=rf"; rank 0 sends it at .*called_lines\.py:{line}\n"):
        echelon.simulate(send_three, 2)
