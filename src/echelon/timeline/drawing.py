"""Files with pictures: the format by the suffix, and errors before anything is drawn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.arguments import check_path, writing
from echelon.errors import EchelonError, FileError, InvalidArgument
from echelon.timeline.palette import theme_named
from echelon.timeline.svg import compact
from echelon.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAGE = ".html"
# Metadata to leave out of each format: with it, two files of one picture would differ.
_METADATA: Mapping[str, Mapping[str, None]] = {
    ".svg": {"Date": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
}
# Dots per inch of a PNG: 1.5 of what a page of documents shows, for screens with fine pixels.
_DPI = 144


def draw(timeline: Timeline, path: str | os.PathLike[str], against: Timeline | None, theme: str) -> None:
    """Draws a timeline into a file; see `Timeline.draw`.

    Raises:
        EchelonError: matplotlib is not installed, or the suffix names no format.
        InvalidArgument: there is no such theme, or `against` is no timeline.
        FileError: the file cannot be written.
    """
    if against is not None and not isinstance(against, Timeline):
        raise InvalidArgument(f"against is of type {type(against).__name__}: give a Timeline")
    colors = theme_named(theme)
    for each in (timeline, against):
        if each is not None and any(each.steps) and not each.makespan:
            warnings.warn(
                "the steps of this timeline take no time, as in a simulation without costs: give echelon simulate "
                '--costs measured, or costs="measured" in Python',
                stacklevel=4,  # the caller of Timeline.draw, which checks its arguments in a function of its own
            )
    if _suffix(path, (*_METADATA, _PAGE)) == _PAGE:
        from echelon.timeline.page import page

        # replace: a name that was made of a file's bytes may be no text.
        with writing(path):
            Path(path).write_text(page(timeline, against), encoding="utf-8", errors="replace")
        return

    def make() -> Figure:
        from echelon.timeline.figure import figure_of

        return figure_of(timeline, against, colors)

    save(make, path, others=(_PAGE,))


def save(make: Callable[[], Figure], path: str | os.PathLike[str], others: tuple[str, ...] = ()) -> None:
    """Writes a figure into a file, the same bytes in every run. `make` is called with the default style.

    Args:
        make: Function that returns the figure.
        path: File to write.
        others: Suffixes that the caller writes itself, for error texts.

    Raises:
        EchelonError: matplotlib is not installed, or the suffix names no format.
        FileError: the file cannot be written.
    """
    suffix = _suffix(path, (*_METADATA, *others))
    try:
        from matplotlib import style
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        without = "".join(f"; {other} needs no package" for other in others)
        raise EchelonError(f"drawing {suffix} needs matplotlib: pip install matplotlib{without}") from None
    # Starts from the default style, so a style that the program has set for its own figures changes nothing here. Text
    # kept as text can be searched and keeps the file small. The salt makes the ids in an SVG the same in every run.
    own = {"svg.fonttype": "none", "svg.hashsalt": "echelon", "pdf.fonttype": 42}
    # An SVG lists all these fonts at every text.
    own |= {"font.sans-serif": ["DejaVu Sans"], "font.monospace": ["DejaVu Sans Mono"]}
    with style.context(["default", own]):
        figure = make()
        with writing(path):
            if suffix == ".svg":
                text = StringIO()
                figure.savefig(text, format="svg", dpi=_DPI, metadata=_METADATA[suffix])
                Path(path).write_text(compact(text.getvalue()), encoding="utf-8")
            else:
                figure.savefig(path, format=suffix[1:], dpi=_DPI, metadata=_METADATA[suffix])


def _suffix(path: str | os.PathLike[str], known: tuple[str, ...]) -> str:
    """Returns the suffix of a path in lower case, if the file can be written.

    Raises:
        EchelonError: the suffix names no format.
        FileError: the folder is missing.
    """
    name = check_path(path)
    suffix = Path(name).suffix.lower()
    if suffix not in known:
        names = f"{', '.join(known[:-1])} or {known[-1]}"
        raise EchelonError(f"cannot draw into {name!r}: give a name that ends in {names}")
    # Before anything is drawn: a picture of many ranks takes seconds.
    folder = os.path.dirname(name)
    if folder and not os.path.isdir(folder):
        raise FileError(f"cannot write {name}: the folder {folder} does not exist; make it first: mkdir -p {folder}")
    return suffix
