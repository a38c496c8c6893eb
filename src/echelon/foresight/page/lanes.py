"""Lanes of a role's step for a picture, in which neighbouring kernels are joined into blocks that name lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from echelon.foresight.play.played import CommunicationSpan, PlayedRole, group_text
from echelon.foresight.report import seconds_text
from echelon.foresight.trace import DEFAULT_STREAM, Communication, Copy, Kernel, Trace
from echelon.timeline.palette import tone_of
from echelon.timeline.widget.data import Lane as Row
from echelon.timeline.widget.data import Part, Piece, Words

# A repeated block of a model, such as "layers.3" of "layers.3.attention.wq".
_REPEATED = re.compile(r"(.*?\.\d+)(?:\.|$)")
_SEEN = 1e-2
"""Share of the step that a stream must compute to have a lane. With less the lane would look empty."""

_LONGEST = 200
"""Most characters of a text, since a page has thousands of texts."""


@dataclass(frozen=True)
class Block:
    """Kernels or communication in a row.

    Args:
        start: Seconds since the start of the step.
        end: Seconds since the start of the step.
        hue: Phase of kernels, kind of communication, or "exposed".
        parts: (name with line, seconds) of each kernel or communication.
        first: Module of the first kernel, up to its number.
        last: Module of the last kernel, up to its number.
    """

    start: float
    end: float
    hue: str
    parts: tuple[tuple[str, float], ...]
    first: str = ""
    last: str = ""

    @property
    def width(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start

    @property
    def short(self) -> str:
        """Text in the block: its module if it has one, else its hue."""
        return self.first if self.first and self.first == self.last else self.hue

    @property
    def text(self) -> str:
        """Description: hue, modules, duration, and the longest part."""
        modules = self.first if self.first == self.last else f"{self.first or '-'} to {self.last or '-'}"
        name, seconds = max(self.parts, key=lambda part: part[1])
        rest = f": {name}"
        if len(self.parts) > 1:
            rest = f", {len(self.parts)} in a row, the longest {seconds_text(seconds)}: {name}"
        text = f"{' '.join(filter(None, (self.hue, modules)))}, {seconds_text(self.width)}{rest}"
        return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


class Lane(NamedTuple):
    """Row of a picture."""

    name: str
    blocks: tuple[Block, ...]
    """Blocks to draw."""
    parts: tuple[Block, ...]
    """The same blocks joined into fewer, each with a text."""

    def for_browsers(self, seconds: float, head: str) -> Row:
        """Returns the row of a page whose axis shows `seconds`. `head` stands above it."""
        scale = 1 / (seconds or 1.0)
        return Row(
            title=self.name,
            pieces=[
                Piece(block.start * scale, block.end * scale, tone_of(block.hue), Words(block.hue, block.short))
                for block in self.blocks
            ],
            is_lane=self.name != "compute",
            head=head,
            parts=[Part(part.start * scale, part.end * scale, part.text) for part in self.parts],
        )


def lanes_of(role: PlayedRole, most: int, most_parts: int) -> list[Lane]:
    """Returns the lanes of a role: its streams, its groups, and exposed communication.

    Args:
        role: the step.
        most: most blocks of a lane. Neighbours are joined until there are so few.
        most_parts: most parts of a lane.
    """
    rows = [
        ("compute" if stream == DEFAULT_STREAM else f"stream {stream}", blocks)
        for stream, blocks in sorted(_kernels(role).items())
        # The default stream has a lane even if it computes nothing.
        if stream == DEFAULT_STREAM or sum(block.width for block in blocks) > _SEEN * role.seconds
    ]
    rows += _copies(role).items()
    rows += _communication(role).items()
    if exposed := list(_exposed(role)):
        rows.append(("exposed", exposed))
    lanes = []
    for name, blocks in rows:
        drawn = joined(blocks, most)
        lanes.append(Lane(name, tuple(drawn), tuple(joined(drawn, most_parts))))
    return lanes


def joined(blocks: Sequence[Block], most: int) -> list[Block]:
    """Returns at most `most` blocks in order, with neighbours joined.

    Neighbours of one hue and module are joined first, then short neighbours of one hue, then any short ones.
    """
    found = _join(blocks, lambda one, two: one.hue == two.hue and one.last == two.first and two.start <= one.end)
    # A pixel of a wide picture.
    least = blocks[-1].end / 4096 if blocks else 0.0
    while len(found) > most:
        found = _join(found, lambda one, two, least=least: _is_short(one, two, least) and one.hue == two.hue)  # type: ignore[misc]
        if len(found) > most:
            found = _join(found, lambda one, two, least=least: two.end - one.start < least)  # type: ignore[misc]
        least *= 2
    return found


def _is_short(one: Block, two: Block, least: float) -> bool:
    return two.start - one.end < least and min(one.width, two.width) < least


def _join(blocks: Sequence[Block], belongs: Callable[[Block, Block], bool]) -> list[Block]:
    rows: list[list[Block]] = []
    for block in blocks:
        if rows and belongs(_around(rows[-1]), block):
            rows[-1].append(block)
        else:
            rows.append([block])
    return [_merged(row) for row in rows]


def _around(row: list[Block]) -> Block:
    """Returns a block for a row, without its parts."""
    return row[0] if len(row) == 1 else Block(row[0].start, row[-1].end, row[0].hue, (), row[0].first, row[-1].last)


def _merged(row: list[Block]) -> Block:
    if len(row) == 1:
        return row[0]
    widths: dict[str, float] = {}
    # The phase or kind that takes most of the time gives the color.
    for block in row:
        widths[block.hue] = widths.get(block.hue, 0.0) + block.width
    hue = max(widths, key=widths.__getitem__)
    parts = tuple(part for block in row for part in block.parts)
    return Block(row[0].start, row[-1].end, hue, parts, row[0].first, row[-1].last)


def _kernels(role: PlayedRole) -> dict[int, list[Block]]:
    trace = role.program.trace
    streams: dict[int, list[Block]] = {}
    for index, stream, start, end in role.kernel_times():
        kernel = trace.kernel(index)
        part = f"{kernel.name}{_where(trace, kernel)}", end - start
        module = _repeated(trace, kernel.module)
        streams.setdefault(stream, []).append(Block(start, end, kernel.phase, (part,), module, module))
    return streams


def _copies(role: PlayedRole) -> dict[str, list[Block]]:
    """Returns the copies between the host and its GPU by direction, if they take enough time to be seen."""
    trace = role.program.trace
    named: dict[str, list[Block]] = {}
    for span in role.copies:
        copy = trace.copy(span.entry)
        name, hue = ("copies to the GPU", "receive") if copy.to_gpu else ("copies to the CPU", "send")
        part = f"copy of {copy.num_bytes / (1 << 20):,.1f} MiB{_where(trace, copy)}", span.end - span.start
        named.setdefault(name, []).append(Block(span.start, span.end, hue, (part,)))
    return {name: blocks for name, blocks in named.items() if sum(each.width for each in blocks) > _SEEN * role.seconds}


def _communication(role: PlayedRole) -> dict[str, list[Block]]:
    """Returns the communication of each group, on a lane for each level of overlap."""
    trace = role.program.trace
    named: dict[str, list[Block]] = {}
    for (group, level), spans in role.lanes().items():
        name = group_text(trace, group)
        name = f"{name} ({level + 1})" if level else name
        # Groups of the same ranks and name differ by their number alone.
        while name in named:
            name += "'"
        named[name] = [_call_of(trace, span) for span in spans]
    return named


def _call_of(trace: Trace, span: CommunicationSpan) -> Block:
    entry = trace.communication(span.entry)
    how = ", ".join(filter(None, (span.algorithm, span.protocol)))
    size = f"{entry.num_bytes / (1 << 20):,.1f} MiB of {entry.dtype}{how and f' by {how}'}"
    part = f"{size}{_where(trace, entry)}", span.end - span.start
    return Block(span.start, span.end, entry.kind, (part,))


def _exposed(role: PlayedRole) -> Iterator[Block]:
    """Yields the time in which communication runs and no kernel does."""
    for part in role.exposed_parts:
        call = _call_of(role.program.trace, part.span)
        text = f"{call.hue} of {call.parts[0][0]}"
        yield Block(part.start, part.end, "exposed", ((text, part.end - part.start),))


def _where(trace: Trace, entry: Kernel | Communication | Copy) -> str:
    return (" at " if entry.place >= 0 else "") + trace.where(entry, "")


def _repeated(trace: Trace, module: int) -> str:
    if module < 0:
        return ""
    name = trace.modules[module]
    found = _REPEATED.match(name)
    return found[1] if found else name
