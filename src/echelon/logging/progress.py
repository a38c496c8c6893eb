"""Progress bar of rank 0."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, track

from echelon.arguments import is_iterable, named, refuse_others
from echelon.errors import InvalidArgument
from echelon.group.group import ProcessGroup, check_group
from echelon.launch import status_line
from echelon.launch.init import current_group

_Item = TypeVar("_Item")


@refuse_others(desc="description", iterable="items")
def progress(
    items: Iterable[_Item],
    description: str = "",
    group: ProcessGroup | None = None,
    total: float | None = None,
    console: Console | None = None,
) -> Iterator[_Item]:
    """Yields the items, with a progress bar on rank 0 if standard error is a terminal, or that of `echelon run`.

    Args:
        items: items to go through, such as the batches of a loader.
        description: text before the bar.
        group: the ranks. None: those of `echelon.init()`, or of the simulated rank.
        total: number of items. None: their length, if they have one.
        console: rich's console that shows the bar. None: standard error.

    Raises:
        InvalidArgument: `items` cannot be gone through, or `group` is no group.
    """
    if not is_iterable(items):
        raise InvalidArgument(f"items is {named(items)}: give items to go through, such as range(5) or a loader")
    if group is not None:
        check_group(group)
    return _shown(items, description, group, total, console)


def _shown(
    items: Iterable[_Item],
    description: str,
    group: ProcessGroup | None,
    total: float | None,
    console: Console | None,
) -> Iterator[_Item]:
    group = current_group() if group is None else group
    # A kernel sets FORCE_COLOR, by which rich takes even a pipe for a terminal.
    forced = False if status_line.in_notebook() else None
    shown = Console(stderr=True, force_terminal=forced) if console is None else console
    columns = _columns_of_launcher() if console is None else None
    if (group is not None and group.rank != 0) or not (shown.is_terminal or columns):
        yield from items
        return
    count = total if total is not None else float(len(items)) if isinstance(items, Sized) else None
    if columns:
        yield from _through_launcher(items, description, count, columns)
    else:
        yield from track(items, description, count, console=shown, transient=True)


def _columns_of_launcher() -> int | None:
    """Returns the columns of the terminal to which `echelon run` copies this standard error. None: there is none."""
    text = os.environ.get(status_line.VARIABLE, "")
    try:
        # The program may have sent it to a file.
        is_pipe = stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # a stream of the program's own
        return None
    return int(text) if is_pipe and text.isdecimal() else None


_SECONDS = 0.2
"""Least time between two updates of a bar through a pipe."""


def _through_launcher(items: Iterable[_Item], description: str, count: float | None, columns: int) -> Iterator[_Item]:
    # rich draws on terminals alone, by moving the cursor. So it only makes the text here.
    console = Console(force_terminal=True, width=columns)
    bars = Progress(*Progress.get_default_columns(), console=console, auto_refresh=False)
    task = bars.add_task(description, total=count)
    stderr, drawn = sys.stderr, float("-inf")
    try:
        for item in items:
            if time.monotonic() - drawn >= _SECONDS:
                drawn = time.monotonic()
                with console.capture() as text:
                    console.print(bars.get_renderable(), end="")
                stderr.write(status_line.bar(text.get().partition("\n")[0]))
                stderr.flush()
            yield item
            bars.advance(task)
    finally:
        stderr.write(status_line.bar(""))
        stderr.flush()
