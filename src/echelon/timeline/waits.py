"""Causes of waits in a timeline: the transfers that its spans needed, the gaps between them, and the critical path."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from echelon.timeline.timeline import Critical, Gap, Idle, Span, Time, Timeline, Transfer

_ROUNDING = 1e-9
"""Share of a gap that is no idle time of its own."""


class Waits:
    """Causes of the waits in a timeline: the transfers that its spans needed, by the span that needed them."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._incoming: dict[tuple[int, int], list[Transfer]] = {}
        for transfer in timeline.transfers:
            self._incoming.setdefault((transfer.target_rank, transfer.target), []).append(transfer)

    def awaited(self, rank: int, index: int) -> Transfer | None:
        """Returns the last transfer that a span waited for. None if its rank was still busy when it arrived."""
        awaited = max(self._incoming.get((rank, index), ()), key=_arrival, default=None)
        if awaited is None or (index > 0 and _arrival(awaited) <= self._timeline.ends[rank][index - 1]):
            return None
        return awaited

    def critical_path(self) -> tuple[Critical, ...]:
        """Walks back from the last span to end. Each span waited either for a transfer or for the step before it."""
        path: list[Critical] = []
        run = self._timeline
        ends = {rank: ends[-1] for rank, ends in enumerate(run.ends) if ends}
        rank = max(ends, key=lambda rank: ends[rank], default=-1)
        index = len(run.ends[rank]) - 1 if ends else -1
        while index >= 0:
            transfer = self.awaited(rank, index)
            # Not from `spans`, which would make one for each step of a long run.
            span = Span(run.steps[rank][index], run.starts[rank][index], run.ends[rank][index])
            path.append(Critical(rank, index, span, transfer))
            if transfer is None:
                index -= 1
            else:
                rank, index = transfer.source_rank, transfer.source
        return tuple(reversed(path))

    def gaps(self, rank: int) -> Iterator[Gap]:
        """Yields the idle time of a rank, cut by its causes. None of it is empty."""
        return (gap for gap in self._gaps(rank) if gap.end > gap.start)

    def _gaps(self, rank: int) -> Iterator[Gap]:
        run = self._timeline
        starts, ends = run.starts[rank], run.ends[rank]
        if not starts:
            yield Gap(run.start, run.end, "warm_up")
            return
        yield Gap(run.start, starts[0], "warm_up")
        for index in range(1, len(starts)):
            free, start = ends[index - 1], starts[index]
            if start <= free:
                continue
            awaited = self.awaited(rank, index)
            if awaited is None:
                yield from self._known(rank, free, start)
                continue
            # The gap from `free` to `start` is cut at two points, both clamped to it: measured times of two ranks may
            # contradict each other by the error of their clocks.
            made = min(max(free, awaited.start), start)
            arrived = start if awaited.end is None else min(max(made, awaited.end), start)
            yield Gap(free, made, "other_ranks")
            yield Gap(made, arrived, "transfer")
            yield Gap(arrived, start, "overhead")
        yield Gap(ends[-1], run.end, "drain")

    def _known(self, rank: int, start: Time, end: Time) -> Iterator[Gap]:
        """Yields a gap that no transfer explains, cut by the causes that the timeline knows."""
        causes: Sequence[Gap] = self._timeline.causes[rank] if self._timeline.causes else ()
        for index in range(bisect_right(causes, start, key=_end), len(causes)):
            known = causes[index]
            if known.start >= end:
                break
            # Ends and starts of neighbours differ by rounding.
            begin = known.start if known.start - start > _ROUNDING * (end - start) else start
            yield Gap(start, begin, "overhead")
            start = min(known.end, end)
            yield Gap(begin, start, known.cause)
        yield Gap(start, end, "overhead")


def total(gaps: Iterable[Gap], zero: Time) -> Idle:
    """Returns the idle time by its cause. `zero` has the type of the times, so that exact times stay exact."""
    times = dict.fromkeys(Idle._fields, zero)
    for start, end, cause in gaps:
        times[cause] += end - start
    return Idle(**times)


def _end(gap: Gap) -> Time:
    return gap.end


def _arrival(transfer: Transfer) -> Time:
    """Returns the arrival of a transfer. Its start if the run did not measure arrivals."""
    return transfer.start if transfer.end is None else transfer.end
