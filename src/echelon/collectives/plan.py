"""A collective as data: for every rank, rounds of sends and receives of numbered chunks.

The steps of one round run at the same time; a rank starts a round when it has finished the one before. What the chunks
are is up to who runs the plan: parts of one tensor for a reduction, one tensor per rank for an all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Send(NamedTuple):
    """Sends the chunk as it was at the start of the round."""

    peer: int
    chunk: int


class Recv(NamedTuple):
    """Receives the chunk and keeps it instead of its own."""

    peer: int
    chunk: int


class Reduce(NamedTuple):
    """Receives the chunk and combines it with its own: own op received."""

    peer: int
    chunk: int


class Copy(NamedTuple):
    """Lets the rank's own chunk `source` be its chunk `chunk` as well."""

    source: int
    chunk: int


Step: TypeAlias = Send | Recv | Reduce | Copy
Round: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What each rank does, in rounds."""

    name: str
    num_chunks: int
    rounds: tuple[tuple[Round, ...], ...]
    """By rank, then by round."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rounds)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.num_ranks} ranks, {self.num_chunks} chunks"]
        for rank, rounds in enumerate(self.rounds):
            texts = (", ".join(_text(step) for step in steps) or "-" for steps in rounds)
            lines.append(f"rank {rank}: " + " | ".join(texts))
        return "\n".join(lines)


def _text(step: Step) -> str:
    if isinstance(step, Copy):
        return f"copy {step.source} as {step.chunk}"
    return f"{type(step).__name__.lower()} {step.chunk} {'to' if isinstance(step, Send) else 'from'} {step.peer}"
