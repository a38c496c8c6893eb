"""The order of large operations, played by a model of the ranks in every interleaving."""

import itertools

import pytest

from echelon.backends.formats.slot_order import pipeline
from echelon.errors import PlanError


class Broken(AssertionError):
    """The model found ranks that wait for each other, or one that reads what is not there."""


def explore(plan, num_ranks, num_stages):
    """Plays every interleaving; an action is begun, which needs the ticks of the peers, and ended by a tick.

    A rank that is between the two may be reading or writing, so what it reads must be there at both ends. Returns the
    number of states.
    """
    start = (0,) * num_ranks  # twice the number of actions done, plus one while in an action
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        moved = False
        for rank, at in enumerate(state):
            if at == 2 * len(plan):
                continue
            if at % 2 == 0 and any(state[peer] // 2 < plan[at // 2].needs for peer in range(num_ranks) if peer != rank):
                continue
            moved = True
            after = (*state[:rank], at + 1, *state[rank + 1 :])
            for reader in range(num_ranks):
                check(plan, after, reader, num_stages)
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if not moved and state != (2 * len(plan),) * num_ranks:
            raise Broken(f"all ranks wait at {state}")
    return len(seen)


def check(plan, state, reader, num_stages):
    """Raises Broken unless what `reader` reads now, if it does, is in the slots of all its peers."""
    if state[reader] % 2 == 0:
        return
    action = plan[state[reader] // 2]
    if action.stage == 0:
        return
    before = next(i for i, other in enumerate(plan) if other[:2] == (action.stage - 1, action.piece))
    over = [i for i, other in enumerate(plan) if other.stage == 0 and other.slot == action.slot]
    next_in_slot = min((i for i in over if plan[i].piece > action.piece), default=len(plan))
    for peer, at in enumerate(state):
        if peer == reader:
            continue
        if at // 2 <= before:
            raise Broken(f"rank {reader} reads {action} of rank {peer}, which has not done the stage before")
        if (at + 1) // 2 > next_in_slot:
            raise Broken(f"rank {reader} reads {action} of rank {peer}, which writes the next piece there")


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("num_stages", "lag", "num_slots"), [(2, 1, 2), (2, 1, 4), (2, 2, 3), (3, 1, 3), (3, 1, 4)])
def test_nothing_is_lost_and_nobody_waits_for_ever(num_ranks, num_stages, lag, num_slots):
    for num_pieces in range(1, 6 if num_ranks == 2 else 5):
        plan = pipeline(num_pieces, num_stages, lag, num_slots)
        assert explore(plan, num_ranks, num_stages) > len(plan)


@pytest.mark.parametrize(("num_stages", "lag"), [(2, 1), (2, 3), (3, 1), (3, 2)])
def test_every_stage_of_every_piece_comes_once_and_in_order(num_stages, lag):
    for num_pieces in range(1, 9):
        plan = pipeline(num_pieces, num_stages, lag, (num_stages - 1) * lag + 1)
        done = [action[:2] for action in plan]
        assert sorted(done) == sorted(itertools.product(range(num_stages), range(num_pieces)))
        for stage, piece in done:
            assert stage == 0 or done.index((stage - 1, piece)) < done.index((stage, piece))


def test_too_few_slots_are_refused():
    with pytest.raises(PlanError, match="2 slots for 3 stages with lag 1"):
        pipeline(5, 3, 1, 2)


def mutations():
    for num_stages, num_slots in ((2, 2), (3, 3)):
        plan = pipeline(4, num_stages, 1, num_slots)
        for number, action in enumerate(plan):
            if action.needs > max((before.needs for before in plan[:number]), default=0):  # else it has waited before
                yield num_stages, plan, number


@pytest.mark.parametrize(("num_stages", "plan", "number"), list(mutations()))
def test_the_model_finds_every_wait_that_is_too_short(num_stages, plan, number):
    """Each needed tick is needed: with one less, some interleaving reads what is not there."""
    shorter = plan[number]._replace(needs=plan[number].needs - 1)
    with pytest.raises(Broken, match="which"):
        explore((*plan[:number], shorter, *plan[number + 1 :]), 2, num_stages)


def test_the_model_finds_ranks_that_wait_for_each_other():
    plan = pipeline(3, 2, 1, 2)
    later = plan[1]._replace(needs=len(plan))
    with pytest.raises(Broken, match="all ranks wait"):
        explore((plan[0], later, *plan[2:]), 2, 2)
