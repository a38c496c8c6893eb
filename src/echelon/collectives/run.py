"""The interpreter: runs one rank's rounds of a plan over point-to-point messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from echelon.backends.base import Backend, Tag, Work
from echelon.collectives.operators import Combine
from echelon.collectives.plan import Copy, Plan, Recv, Reduce, Send


@dataclass(frozen=True, slots=True)
class Channel:
    """How one collective of one group talks: over which backend, between whom, under which tag and note."""

    backend: Backend
    ranks: Sequence[int]
    """The backend's rank of each rank of the plan."""
    rank: int
    context: int
    sequence: int
    note: str
    deadline: float
    """In the backend's time."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the plan."""
        return len(self.ranks)

    def seconds_left(self) -> float:
        """Returns the time that is left until the deadline."""
        return max(0.0, self.deadline - self.backend.now())


def run(plan: Plan, channel: Channel, chunks: list[torch.Tensor | None], combine: Combine | None = None) -> None:
    """Runs this rank's part of a plan. Blocks until it is done.

    Args:
        plan: what to do.
        channel: whom to talk to.
        chunks: contiguous tensors by number, changed in place; None where a chunk is only received, then replaced by
        what came. combine: what Reduce does.

    Raises:
        Timeout, PeerFailed, CollectiveMismatch, SizeMismatch: the plan could not be finished.
    """
    with channel.backend.attend():
        for number, steps in enumerate(plan.rounds[channel.rank]):
            tag = Tag(channel.context, channel.sequence, number)
            receives: list[tuple[Recv | Reduce, Work[torch.Tensor]]] = []
            for step in steps:
                if isinstance(step, Copy):
                    chunks[step.chunk] = chunks[step.source]
                elif not isinstance(step, Send):
                    out = chunks[step.chunk] if isinstance(step, Recv) else None
                    src = channel.ranks[step.peer]
                    receives.append((step, channel.backend.irecv(src, tag, out=out, note=channel.note)))
            sends = [_send(step, channel, chunks, tag) for step in steps if isinstance(step, Send)]
            for step, received in receives:
                _keep(step, received.wait(channel.seconds_left()), chunks, combine)
            for sent in sends:
                sent.wait(channel.seconds_left())


def _send(step: Send, channel: Channel, chunks: Sequence[torch.Tensor | None], tag: Tag) -> Work[None]:
    chunk = chunks[step.chunk]
    assert chunk is not None, "a plan sends a chunk that this rank does not have"
    return channel.backend.isend(chunk, channel.ranks[step.peer], tag, note=channel.note)


def _keep(
    step: Recv | Reduce, tensor: torch.Tensor, chunks: list[torch.Tensor | None], combine: Combine | None
) -> None:
    if isinstance(step, Recv):
        chunks[step.chunk] = tensor
        return
    own = chunks[step.chunk]
    assert own is not None, "a plan reduces into a chunk that this rank does not have"
    assert combine is not None, "a plan with Reduce steps needs an operator"
    combine(own, tensor)
