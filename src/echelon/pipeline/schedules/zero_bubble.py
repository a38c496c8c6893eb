"""Zero-bubble schedules: the backward is split, and weight gradients fill idle time (Qi et al., 2024)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from echelon.pipeline.plan.action import Action, loop, vee
from echelon.pipeline.plan.schedule import Schedule


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the ZB-H1 schedule: 1F1B with the backward split; weight gradients fill the drain (section 2.2).

    Every rank holds num_ranks microbatches, as 1F1B's first rank does. 3 ranks, 4 microbatches:

        rank 0  0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1      1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    return _split_1f1b("zb-h1", num_ranks, num_microbatches, per_hop=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the ZB-H2 schedule: twice the warm-up closes the gap before the first backward (section 2.3).

    Every rank holds 2 num_ranks - 1 microbatches. 3 ranks, 6 microbatches:

        rank 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
        rank 1      1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
        rank 2          2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5
    """
    return _split_1f1b("zb-h2", num_ranks, num_microbatches, per_hop=2)


def _split_1f1b(name: str, num_ranks: int, num_microbatches: int, per_hop: int) -> Schedule:
    """Returns a 1F1B schedule with the backward split into I and W.

    A rank runs `per_hop` forwards ahead for each rank after it, and its W's lag `per_hop` behind its I's for each rank
    before it. So all ranks hold per_hop (num_ranks - 1) + 1 microbatches.
    """
    orders = (
        tuple(_order(rank, num_microbatches, per_hop * (num_ranks - 1 - rank), per_hop * rank))
        for rank in range(num_ranks)
    )
    return Schedule(name, num_microbatches, placement=loop(num_ranks), orders=tuple(orders))


def _order(rank: int, num_microbatches: int, ahead: int, lag: int) -> Iterator[Action]:
    # A W needs ahead + lag turns after its F. A few turns at the end may be empty; they add nothing.
    for turn in range(num_microbatches + max(ahead, lag) + ahead):
        if turn < num_microbatches:
            yield Action(rank, "F", turn)
        if 0 <= turn - ahead < num_microbatches:
            yield Action(rank, "I", turn - ahead)
        if 0 <= turn - ahead - lag < num_microbatches:
            yield Action(rank, "W", turn - ahead - lag)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the ZB-V schedule: no bubble, and no more memory than 1F1B, if F, I and W take equally long.

    Every rank holds 2 num_ranks chunks, as much as num_ranks microbatches of both. 2 ranks, 4 microbatches:

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 0I2 3W3 0W2 0I3 0W3
        rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3
    """
    return Schedule(
        name="zb-v",
        num_microbatches=num_microbatches,
        placement=vee(num_ranks),
        orders=tuple(tuple(_v_order(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)),
    )


def _v_order(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yields the skeleton with each W right after its I. In the drain, W's start once both stages had their turns."""
    skeleton = _skeleton(rank, num_ranks, num_microbatches)
    last_forward = max(index for index, action in enumerate(skeleton) if action.kind == "F")
    after_turns = last_forward + 2 * (rank + 1)
    weights: deque[Action] = deque()
    for index, action in enumerate(skeleton):
        yield action
        if action.kind == "I":
            weights.append(action._replace(kind="W"))
        # Early ranks wait longest for the remaining gradients, so they have time for two W.
        both = index == after_turns < len(skeleton) - 1 and 2 * rank < num_ranks
        if weights and (index < last_forward or index >= after_turns):
            yield weights.popleft()
            if both and weights:
                yield weights.popleft()
    yield from weights


def _skeleton(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Returns the order of forwards and input gradients."""
    later, last_stage = num_ranks - 1 - rank, 2 * num_ranks - 1
    down, up = Action(rank, "F", 0), Action(last_stage - rank, "F", 0)
    down_back, up_back = down._replace(kind="I"), up._replace(kind="I")
    turns = [down] * (2 * later + 1) + [up, down] * rank + [up, up_back] * (later + 1)
    turns += [down, down_back, up, up_back] * (num_microbatches - num_ranks)
    turns += [down_back, up_back] * rank + [down_back] * num_microbatches
    # The n-th turn of a stage is for its microbatch n. With few microbatches some turns have none and are left out.
    counts = {turn: count() for turn in set(turns)}
    actions = [turn._replace(microbatch=next(counts[turn])) for turn in turns]
    return [action for action in actions if action.microbatch < num_microbatches]
