"""Agreement of a group before an engine (c10d backend) begins: all ranks have called the same operation.

Strategy. Engines carry no notes: if ranks differ, Gloo aborts and NCCL hangs. So each operation begins with an
agreement. It also brings the facts that a rank needs to allocate its result, such as numbers of rows. Ranks of one host
gather facts over shared memory, which compares notes itself. Other ranks exchange them in ceil(log2(ranks)) rounds of
small messages (dissemination): in round k a rank receives from the rank 2**k before it. A rank that gets through all
rounds has heard from all ranks, by way of others, that their notes equal its own. A rank that fails in between revokes
the group, which ends the rounds of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch

from echelon.backends.base import Backend
from echelon.backends.collective import Collective, Run, wait_and_look
from echelon.backends.formats.wire import Tag, signed
from echelon.operation_records import OperationRecord

Agreement: TypeAlias = Callable[[OperationRecord, Sequence[int]], Sequence[Sequence[int]]]
"""Function of a call and this rank's facts. Blocks until all ranks have agreed; returns each rank's facts, by rank."""


def agreement_of(backend: Backend, context: int, ranks: Sequence[int]) -> Agreement:
    """Returns the agreement of a group, of the same kind on every member.

    Args:
        backend: connects the ranks.
        context: number of the group.
        ranks: the backend's rank of each member, this rank included.
    """
    shared = backend.executor(context, ranks)
    if shared is not None:
        # The ranks compare the note of the operation that they agree on, so the collective needs none of its own.
        return partial(gather, shared.prepare(Collective("all_gather")))
    return partial(exchange, backend, context, ranks, list(ranks).index(backend.rank))


def gather(all_gather: Run, call: OperationRecord, facts: Sequence[int]) -> list[list[int]]:
    """Makes the ranks of one host agree on an operation; see `Agreement`."""
    return _unpack(all_gather(call, _pack([facts]), None))


def exchange(
    backend: Backend, context: int, ranks: Sequence[int], rank: int, call: OperationRecord, facts: Sequence[int]
) -> list[list[int]]:
    """Makes ranks of any hosts agree on an operation; see `Agreement`.

    Args:
        backend: connects the ranks.
        context: number of the group.
        ranks: the backend's rank of each member.
        rank: this rank, among the members.
        call: the operation.
        facts: facts of this rank, for the others.

    Raises:
        CollectiveMismatch: a rank has another note. PeerFailed, Timeout.
    """
    size, note = len(ranks), signed(call.operation, call.sequence, call.signature)
    known = [list(facts)]  # facts of this rank, of the rank before it, and so on
    distance, step = 1, 0
    while distance < size:
        tag = Tag(context, call.sequence, step)
        after, before = ranks[(rank + distance) % size], ranks[(rank - distance) % size]
        # This thread polls for its own messages, so the background thread need not wake.
        with backend.messages.will_wait():
            coming = backend.messages.irecv(before, tag, note=note)
            sent = backend.messages.isend(_pack(known[: size - distance]), after, tag, note=note)
            known += _unpack(wait_and_look(coming, before, call, backend.now))
            wait_and_look(sent, after, call, backend.now)
        distance, step = distance * 2, step + 1
    return [known[(rank - peer) % size] for peer in range(size)]


def _pack(known: Sequence[Sequence[int]]) -> torch.Tensor:
    numbers = [number for facts in known for number in (len(facts), *facts)]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _unpack(packed: torch.Tensor) -> list[list[int]]:
    numbers = iter(packed.tolist())
    return [[next(numbers) for _ in range(count)] for count in numbers]
