"""Progress bar of rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from echelon.group.group import ProcessGroup, check_group
from echelon.launch.init import current_group

_Item = TypeVar("_Item")


def progress(
    items: Iterable[_Item],
    description: str = "",
    group: ProcessGroup | None = None,
    total: float | None = None,
    console: Console | None = None,
) -> Iterator[_Item]:
    """Yields the items, with a progress bar on rank 0 if standard error is a terminal.

    Args:
        items: items to go through, such as the batches of a loader.
        description: text before the bar.
        group: the ranks. None: those of `echelon.init()`, or of the simulated rank.
        total: number of items. None: their length, if they have one.
        console: rich's console that shows the bar. None: standard error.

    Raises:
        InvalidArgument: `group` is no group.
    """
    found = current_group() if group is None else check_group(group)
    shown = Console(stderr=True) if console is None else console
    if (found is not None and found.rank != 0) or not shown.is_terminal:
        yield from items
        return
    count = total if total is not None else float(len(items)) if isinstance(items, Sized) else None
    yield from track(items, description, count, console=shown, transient=True)
