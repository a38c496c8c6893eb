"""Layouts, which each rank plans without communication: gradients in buckets, and the optimizer's state in shards.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from echelon.errors import InvalidArgument

MEBIBYTE = 1024 * 1024

FIRST_BUCKET_MB = 1.0
"""Size of the first bucket: small, so that communication starts soon after backward does. About the size of the last
bucket as well, because no computation is left to overlap with it."""
_GROWTH = 2
"""Ratio of a bucket's size to the next one's, near the end. Over a link that carries twice as many bytes as backward
computes, a bucket has been sent when the next one is full."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are reduced in one collective, in memory order."""

    kind: str
    """Their common properties, such as dtype and device."""
    members: tuple[int, ...]
    """Numbers of the parameters, in the model's order."""
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.kind} {self.num_bytes} B: {' '.join(map(str, self.members))}"


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets, in launch order. Every parameter is in exactly one."""

    buckets: tuple[Bucket, ...]

    def homes(self) -> tuple[tuple[int, int], ...]:
        """Returns, for each parameter, the number of its bucket and its place among the bucket's members."""
        where = {
            member: (number, place)
            for number, bucket in enumerate(self.buckets)
            for place, member in enumerate(bucket.members)
        }
        return tuple(where[member] for member in range(len(where)))

    def __str__(self) -> str:
        return "\n".join(map(str, self.buckets))


def bucket_layout(
    sizes: Sequence[int],
    kinds: Sequence[str],
    bucket_mb: float,
    first_bucket_mb: float = FIRST_BUCKET_MB,
    order: Sequence[int] | None = None,
    *,
    tapers: bool = True,
) -> Layout:
    """Returns the layout for parameters of these sizes.

    Parameters are taken in the order in which backward computes their gradients: `order`, or in reverse, which is about
    the same. Each joins the open bucket of its kind, which is closed once it is full. So a bucket exceeds its size by
    less than its last parameter, and the small bias after a large weight makes no bucket of its own. With `tapers`,
    buckets become smaller towards the end, by half each time, down to the size of the first: bytes that are unsent when
    the last gradient is complete cannot be overlapped. No bucket smaller than the first is cut off for that. Buckets
    are launched in the order of their last parameters, because a bucket is complete when its last parameter is.

    With sizes 1 1 2 2 3 3 4 4 2 MiB of one kind, buckets of 8 MiB and a first bucket of 2 MiB:

        parameter   8   7   6   5   4   3   2   1   0
        MiB         2   4   4   3   3   2   2   1   1
        bucket      0   1   1   2   2   3   3   4   4

    Args:
        sizes: bytes of each parameter, in the model's order.
        kinds: kind of each parameter, such as dtype and device. Parameters of one kind may share a bucket.
        bucket_mb: size at which a bucket is full, in mebibytes (2**20 bytes).
        first_bucket_mb: size of the bucket that is opened first, at most `bucket_mb`.
        order: the numbers of all parameters, in the order in which their gradients come.
        tapers: whether buckets become smaller towards the end.

    Raises:
        InvalidArgument: a size is not above 0.
    """
    if not (bucket_mb > 0 and first_bucket_mb > 0):
        raise InvalidArgument(
            f"bucket_mb={bucket_mb}, first_bucket_mb={first_bucket_mb}: use a size in mebibytes above 0, such as 25"
        )
    limit = bucket_mb * MEBIBYTE
    capacity = small = min(first_bucket_mb * MEBIBYTE, limit)
    opened: dict[str, _Open] = {}
    closed: list[_Open] = []
    order = list(reversed(range(len(sizes)))) if order is None else order
    begins = _begins_near_the_end(sizes, kinds, order, small, limit) if tapers else set()
    for index in order:
        kind = kinds[index]
        if index in begins and kind in opened and opened[kind].num_bytes >= small:
            closed.append(opened.pop(kind))
        if kind not in opened:
            opened[kind], capacity = _Open(kind, capacity), limit
        bucket = opened[kind]
        bucket.members.append(index)
        bucket.num_bytes += sizes[index]
        # Closed when full, not before it would be: a large weight that closed the bucket before it left its bias in a
        # bucket of its own, which doubled the collectives of models with large layers.
        if bucket.num_bytes >= bucket.capacity:
            closed.append(opened.pop(kind))
    closed.extend(opened.values())
    position = {index: when for when, index in enumerate(order)}
    closed.sort(key=lambda bucket: position[bucket.members[-1]])
    return Layout(tuple(Bucket(bucket.kind, tuple(bucket.members), bucket.num_bytes) for bucket in closed))


def _begins_near_the_end(
    sizes: Sequence[int], kinds: Sequence[str], order: Sequence[int], smallest: float, limit: float
) -> set[int]:
    """Returns the first parameters of the tapered buckets at the end. The last bucket has about `smallest` bytes."""
    begins: set[int] = set()
    capacity, num_bytes = smallest, 0
    for index in reversed(order):
        if capacity >= limit:
            break
        if kinds[index] == kinds[order[-1]]:
            num_bytes += sizes[index]
            if num_bytes >= capacity:
                begins.add(index)
                capacity, num_bytes = _GROWTH * capacity, 0
    return begins


@dataclass(slots=True)
class _Open:
    """Bucket that may still grow."""

    kind: str
    capacity: float
    members: list[int] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of one parameter, in memory order."""

    parameter: int
    """The parameter's number."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def shard_layout(sizes: Sequence[int], num_shards: int) -> tuple[tuple[Piece, ...], ...]:
    """Cuts a row of parameters into shards of equal size, give or take one element.

    The cuts fall anywhere, within parameters too, so no shard is larger because of one large parameter. Sizes 5 and 3
    in two shards:

        parameter   0 0 0 0 0 1 1 1
        shard       0 0 0 0 1 1 1 1

    Args:
        sizes: elements of each parameter.
        num_shards: number of shards, at least 1.

    Returns:
        The pieces of each shard, in order. A shard can be empty; no piece is.
    """
    total = sum(sizes)
    # Rounded per bound, not per shard, so that sizes differ by at most 1 and add up to the total.
    bounds = [total * shard // num_shards for shard in range(num_shards + 1)]
    return tuple(pieces_between(sizes, first, last) for first, last in pairwise(bounds))


def pieces_between(sizes: Sequence[int], first: int, last: int) -> tuple[Piece, ...]:
    """Returns the pieces that make up elements `first` to `last` of the row of parameters."""
    pieces = []
    begin = 0
    for parameter, size in enumerate(sizes):
        start, stop = max(first - begin, 0), min(last - begin, size)
        if start < stop:
            pieces.append(Piece(parameter, start, stop))
        begin += size
    return tuple(pieces)
