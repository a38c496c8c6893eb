"""Critical path of a timeline as lines of a picture."""

from __future__ import annotations

from itertools import groupby, pairwise

from echelon.timeline.timeline import Timeline


def critical_lines(timeline: Timeline) -> list[tuple[float, int, float, int]]:
    """Returns the critical path as lines (start, rank, end, rank): along its spans, and from rank to rank.

    Empty if the timeline has no transfers: then the path is that of one rank, and shows nothing.
    """
    if not timeline.transfers:
        return []
    lines: list[tuple[float, int, float, int]] = []
    path = [
        (item.rank, float(item.span.start - timeline.start), float(item.span.end - timeline.start))
        for item in timeline.critical_path
    ]
    for (rank, _, end), (other, start, _) in pairwise(path):
        if rank != other:
            lines.append((end, rank, start, other))
    # Spans of one rank in a row are one line.
    for rank, spans in groupby(path, key=lambda place: place[0]):
        places = list(spans)
        lines.append((places[0][1], rank, places[-1][2], rank))
    return lines
