"""Text form of schedules, that of torch.distributed.pipelining: a line per rank, a cell per step ("2F0")."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Step, actions_of, parse

# Cells for communication and sharding, which torch adds to a schedule. torch 2.15 added the cells with WAIT_.
_ADDED_BY_TORCH = re.compile(r"\d+(?:(?:WAIT_)?SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)\d*")


class Found(NamedTuple):
    """Parsed text of a schedule."""

    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Step, ...], ...]
    forward_only: bool


def to_text(orders: Iterable[Sequence[Step]]) -> str:
    """Returns the orders as text, a line per rank."""
    return "\n".join(",".join(map(str, order)) for order in orders)


def read(text: str) -> Found:
    """Parses text with a line per rank.

    Raises:
        ScheduleError: a cell that is no step, a stage that no rank runs, or a microbatch above the number of actions.
    """
    # An empty line within the text is a rank without steps, so only those after the last rank are removed.
    lines = text.rstrip("\r\n").splitlines()
    orders = tuple(tuple(_cells(rank, line)) for rank, line in enumerate(lines))
    ranks_of: dict[int, Counter[int]] = {}
    kinds, last_microbatch = set(), -1
    for rank, order in enumerate(orders):
        for step in order:
            for stage, kind, microbatch in actions_of(step):
                ranks_of.setdefault(stage, Counter())[rank] += 1
                kinds.add(kind)
                last_microbatch = max(last_microbatch, microbatch)
    if not ranks_of:
        raise ScheduleError('the text holds no action: write a line per rank with cells such as "2F0"')
    for stage in range(max(ranks_of)):
        if stage not in ranks_of:
            raise ScheduleError(
                f"no rank runs stage {stage} of {max(ranks_of) + 1}: number the stages from 0 without gaps"
            )
    # A typing error such as 2F1000000000 would else make the checker allocate an entry for each missing microbatch.
    num_actions = sum(counter.total() for counter in ranks_of.values())
    if last_microbatch >= num_actions:
        raise ScheduleError(
            f"microbatch {last_microbatch} among {num_actions} actions: number the microbatches from 0 without gaps"
        )
    # A stage is placed on the rank that runs most of its actions, so the checker can name a stray action.
    placement = tuple(ranks_of[stage].most_common(1)[0][0] for stage in range(len(ranks_of)))
    return Found(last_microbatch + 1, placement, orders, forward_only=kinds == {"F"})


def _cells(rank: int, line: str) -> Iterable[Step]:
    for column, cell in enumerate(line.split(",")):
        # torch writes no quotes, spreadsheets may.
        cell = cell.strip().strip('"')
        if not cell or _ADDED_BY_TORCH.fullmatch(cell):
            continue
        try:
            yield parse(cell)
        except ScheduleError as error:
            raise ScheduleError(f"rank {rank}, cell {column}: {error}") from None
