"""Samples of a batch on several ranks: all stages of a pipeline must get the same ones.

The first stage uses the inputs, the last one the target. If these are of different samples, gradients are wrong and
nothing else shows it. So the ranks compare a checksum of some values: of the target if several ranks pass one, else of
the inputs. Random transformations of the inputs may differ from rank to rank, as only the first stage uses them.
Ranks that pass nothing in common cannot compare. They go by the samplers of `echelon.data`, which note their ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from echelon.data_parallel.excerpt import NOTHING, UNKNOWN, Excerpt, checksum, excerpts, form
from echelon.errors import CollectiveMismatch, UnsupportedOp
from echelon.group.group import ProcessGroup
from echelon.pipeline.stage.nested import Value, tensors_of


class Evidence:
    """Excerpt of one rank's batch, which is compared with the excerpts of the other ranks."""

    __slots__ = ("_inputs", "_target", "is_dealt")

    def __init__(self, inputs: Value, target: Value, is_dealt: bool) -> None:
        """Copies some values.

        Args:
            inputs, target: the batch, as this rank passed it.
            is_dealt: whether a sampler dealt its samples to several ranks of the pipeline.
        """
        self._inputs, self._target = _excerpts_of(inputs), _excerpts_of(target)
        self.is_dealt = is_dealt

    @property
    def is_on_host(self) -> bool:
        """Whether the inputs can be read without waiting for a device."""
        return self._inputs is None or all(excerpt.values.is_cpu for excerpt in self._inputs)

    def inputs(self) -> int:
        """Returns the checksum of the inputs. Waits for their device."""
        return checksum(self._inputs)

    def numbers(self) -> list[float]:
        """Returns the checksums of inputs and target, and whether the samples are dealt, for `check_same_batch`."""
        return [checksum(self._inputs), checksum(self._target), self.is_dealt]


class Deals:
    """Watch on the samplers of this rank: the ranks among which they deal out samples."""

    def __init__(self, group: ProcessGroup) -> None:
        """Begins to watch.

        Args:
            group: the ranks of the pipeline.
        """
        self._group, self._seen = group, Counter(group.backend.dealt)

    def evidence(self, inputs: Value, target: Value = None) -> Evidence:
        """Returns the evidence of a batch. Its samples are all that samplers have delivered since the last call."""
        now, before = Counter(self._group.backend.dealt), self._seen
        self._seen, mine = now, set(self._group.ranks)
        ranks = [each for each, count in now.items() if count > before[each]]
        return Evidence(inputs, target, bool(ranks) and all(len(mine.intersection(each)) > 1 for each in ranks))


def check_same_batch(rows: Sequence[Sequence[float]], first: int, last: int, group: ProcessGroup) -> None:
    """Compares the batches of a step on all ranks.

    Args:
        rows: the `numbers` of each rank.
        first, last: ranks of the first and of the last stage.
        group: the ranks of the pipeline.

    Raises:
        CollectiveMismatch: the ranks got different samples.
    """
    inputs, targets = ([int(row[column]) for row in rows] for column in (0, 1))
    if UNKNOWN in inputs or UNKNOWN in targets:
        return
    other_inputs, other_target = _differing(inputs, first), _differing(targets, last)
    is_dealt = any(row[2] for row in rows)
    if other_target.is_found:
        _refuse("another target to step()", last, other_target.rank, group)
    if other_inputs.is_found and (is_dealt or not other_target.is_compared):
        _refuse("other inputs to step()", first, other_inputs.rank, group)
    if is_dealt and not (other_inputs.is_compared or other_target.is_compared):
        _refuse_dealt("step()", group)


def check_same_inputs(evidence: Evidence, mine: int, of_first: int, first: int, group: ProcessGroup) -> None:
    """Compares this rank's inputs of forward() with the inputs of the first stage.

    Args:
        evidence: this rank's batch.
        mine, of_first: checksums of this rank's inputs, and of those of the first stage.
        first: rank of the first stage.
        group: the ranks of the pipeline.

    Raises:
        CollectiveMismatch: they are of different samples.
    """
    if group.rank == first or UNKNOWN in (mine, of_first):
        return
    if not _is_comparable(mine, of_first):
        if evidence.is_dealt:
            _refuse_dealt("forward()", group)
    elif mine != of_first:
        _refuse("other inputs to forward()", first, group.rank, group)


class _Difference(NamedTuple):
    """Rank whose checksum differs from that of the owner."""

    is_compared: bool
    """Whether any other rank has a checksum of the same form."""
    rank: int | None = None

    @property
    def is_found(self) -> bool:
        return self.rank is not None


def _differing(checksums: Sequence[int], owner: int) -> _Difference:
    reference = checksums[owner]
    others = [rank for rank, each in enumerate(checksums) if rank != owner and _is_comparable(each, reference)]
    return _Difference(bool(others), next((rank for rank in others if checksums[rank] != reference), None))


def _is_comparable(one: int, other: int) -> bool:
    # Of one form: a rank may pass other arguments where they are not used.
    return form(one) > form(NOTHING) and form(one) == form(other)


def _refuse(what: str, owner: int, other: int | None, group: ProcessGroup) -> None:
    assert other is not None
    here, there = group.ranks[owner], group.ranks[other]
    raise CollectiveMismatch(
        f"rank {there} passed {what} than rank {here}, and all stages need the same batch: {_advice(group)}, or give "
        "data of your own the same seed and order on these ranks",
        rank=there,
    )


def _refuse_dealt(what: str, group: ProcessGroup) -> None:
    raise CollectiveMismatch(
        f"{what} got samples that were dealt to several ranks of this pipeline, {list(group.ranks)}, and all stages "
        f"need the same batch: {_advice(group)}"
    )


def _advice(group: ProcessGroup) -> str:
    axes = f"dp={group.backend.world_size // group.world_size}, pp={group.world_size}"
    return f'pass DataLoader(..., group=mesh["dp"]) with mesh = echelon.Mesh(group, {axes})'


def _excerpts_of(value: Value) -> list[Excerpt] | None:
    try:
        tensors = tensors_of(value)
    except UnsupportedOp:  # on a rank that does not use it, anything may be passed
        return []
    return excerpts(tensors)
