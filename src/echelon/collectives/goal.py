"""What a collective has to achieve: who has which chunks at the start, and what must be where at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from echelon.collectives.plan import Plan

Piece: TypeAlias = tuple[int, int]
"""What a rank has at the start: the rank and the number of the chunk."""


@dataclass(frozen=True)
class Goal:
    """The start and the end of a collective.

    Args:
        start: for each rank, the chunks that it has.
        end: for each rank and chunk that it must have, the pieces that must be in it, each once.
        keeps_numbers: a chunk has one number on its sender and its receiver.
        meets: every rank must have heard of every other, directly or not.
    """

    start: tuple[frozenset[int], ...]
    end: tuple[dict[int, frozenset[Piece]], ...]
    keeps_numbers: bool = True
    meets: bool = False


def goal_of(operation: str, plan: Plan, root: int = 0) -> Goal:
    """Returns what a plan must achieve to be one for `operation`, one of `algorithms.OPERATIONS`."""
    return _GOALS[operation](plan.num_ranks, plan.num_chunks, root)


def _all_reduce(num_ranks: int, num_chunks: int, _: int) -> Goal:
    chunks = range(num_chunks)
    return Goal(_everything(num_ranks, chunks), ({chunk: _sum(num_ranks, chunk) for chunk in chunks},) * num_ranks)


def _reduce(num_ranks: int, num_chunks: int, dst: int) -> Goal:
    chunks = range(num_chunks)
    end: list[dict[int, frozenset[Piece]]] = [{} for _ in range(num_ranks)]
    end[dst] = {chunk: _sum(num_ranks, chunk) for chunk in chunks}
    return Goal(_everything(num_ranks, chunks), tuple(end))


def _broadcast(num_ranks: int, num_chunks: int, src: int) -> Goal:
    chunks = range(num_chunks)
    return Goal(_only(src, num_ranks, chunks), ({chunk: frozenset({(src, chunk)}) for chunk in chunks},) * num_ranks)


def _all_gather(num_ranks: int, _: int, __: int) -> Goal:
    return Goal(_own(num_ranks), ({rank: frozenset({(rank, rank)}) for rank in range(num_ranks)},) * num_ranks)


def _reduce_scatter(num_ranks: int, _: int, __: int) -> Goal:
    end = tuple({rank: _sum(num_ranks, rank)} for rank in range(num_ranks))
    return Goal(_everything(num_ranks, range(num_ranks)), end)


def _gather(num_ranks: int, _: int, dst: int) -> Goal:
    end: list[dict[int, frozenset[Piece]]] = [{} for _ in range(num_ranks)]
    end[dst] = {rank: frozenset({(rank, rank)}) for rank in range(num_ranks)}
    return Goal(_own(num_ranks), tuple(end))


def _scatter(num_ranks: int, _: int, src: int) -> Goal:
    end = tuple({rank: frozenset({(src, rank)})} for rank in range(num_ranks))
    return Goal(_only(src, num_ranks, range(num_ranks)), end)


def _all_to_all(num_ranks: int, _: int, __: int) -> Goal:
    ranks = range(num_ranks)
    end = tuple({num_ranks + src: frozenset({(src, rank)}) for src in ranks} for rank in ranks)
    return Goal(_everything(num_ranks, ranks), end, keeps_numbers=False)


def _barrier(num_ranks: int, _: int, __: int) -> Goal:
    return Goal(_everything(num_ranks, range(0)), ({},) * num_ranks, meets=True)


_GOALS = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


def _sum(num_ranks: int, chunk: int) -> frozenset[Piece]:
    return frozenset((rank, chunk) for rank in range(num_ranks))


def _everything(num_ranks: int, chunks: range) -> tuple[frozenset[int], ...]:
    return (frozenset(chunks),) * num_ranks


def _only(root: int, num_ranks: int, chunks: range) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(chunks if rank == root else ()) for rank in range(num_ranks))


def _own(num_ranks: int) -> tuple[frozenset[int], ...]:
    return tuple(frozenset({rank}) for rank in range(num_ranks))
