"""Files with pictures: the format by the suffix, and errors before anything is drawn."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.arguments import check_path, writing
from echelon.errors import EchelonError, FileError, InvalidArgument
from echelon.timeline.palette import theme_named
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


# Hundredths of a point are a fifth of a pixel at 15 times the size of a page.
_DIGITS = re.compile(r"-?\d+\.\d{3,}")
_PLACES = re.compile(r'(?<= )(?P<name>d|x|y)="(?P<value>[^"]*)"')
# matplotlib turns every text, most of them by 0 degrees.
_NO_TURN = re.compile(r' transform="rotate\(-?0 [^()"]*\)"')
_PATHS = re.compile(r'<path d="[^"]*"(?P<style>[^>]*)/>(?:\s*<path d="[^"]*"(?P=style)/>)+')
_SHAPE = re.compile(r'(?<=<path d=")[^"]*')
# matplotlib puts each text into a group of its own, and all texts of one kind get the same id.
_TEXT = re.compile(r'<text style="(?P<style>[^"]*)"(?P<place>[^>]*)>(?P<words>[^<]*)</text>')
_GROUP = rf'<g id="(?P<id>[^"]*)">\s*{_TEXT.pattern}\s*</g>'
_TEXTS = re.compile(rf'{_GROUP}(?:\s*<g id="(?P=id)">\s*{re.sub("[?]P<[a-z]+>", "?:", _TEXT.pattern)}\s*</g>)+')
_ID = re.compile(r'(?<= id=")[^"]+')
_INDENT = re.compile(r">\n\s+<")


def compact(svg: str) -> str:
    """Returns an SVG that looks the same, with a shorter text.

    Places are in hundredths of a point, lines are relative, neighbours of one style are one path, texts of one kind are
    one group, and nothing is indented. An id that comes again gets a number, such as those of a second panel.
    """
    shorter = _NO_TURN.sub("", _PLACES.sub(_rounded, svg))
    shorter = _INDENT.sub(">\n<", _TEXTS.sub(_gathered, _PATHS.sub(_joined, shorter)))
    seen: Counter[str] = Counter()
    return _ID.sub(lambda match: _numbered(match[0], seen), shorter)


def _numbered(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name} {seen[name]}"


def _rounded(match: re.Match[str]) -> str:
    value = _DIGITS.sub(lambda number: _shortest(float(number[0])), match["value"])
    if match["name"] == "d":
        value = _straight(re.sub(r"\s*([A-Za-z])\s*", r"\1", value).strip())
    return f'{match["name"]}="{value}"'


def _straight(shape: str) -> str:
    """Returns a shape whose lines are relative, with one number in place of two where they are level or upright."""
    parts: list[str] = []
    at: tuple[float, float] | None = None
    for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", shape):
        part = command + numbers
        to = tuple(map(float, numbers.split())) if command in "ML" else ()
        if command == "L" and at and len(to) == 2:
            right, down = _shortest(to[0] - at[0]), _shortest(to[1] - at[1])
            line = f"h{right}" if down == "0" else f"v{down}" if right == "0" else f"l{right} {down}"
            part = min(line.replace(" -", "-"), part, key=len)
        parts.append(part)
        at = (to[0], to[1]) if len(to) == 2 else None
    return "".join(parts)


def _shortest(number: float) -> str:
    # + 0.0 makes 0 of -0.
    return f"{round(number, 2) + 0.0:.2f}".rstrip("0").rstrip(".")


def _joined(match: re.Match[str]) -> str:
    # Transparent shapes that overlap are darker there, and as one path they would not be.
    if "opacity" in match["style"]:
        return match[0]
    shapes = "".join(_SHAPE.findall(match[0]))
    return f'<path d="{shapes}"{match["style"]}/>'


def _gathered(match: re.Match[str]) -> str:
    # Each style is written once. No two texts overlap, so their order is free.
    styles: dict[str, list[str]] = {}
    for style, place, words in _TEXT.findall(match[0]):
        styles.setdefault(style, []).append(f"<text{place}>{words}</text>")
    groups = "".join(f'<g style="{style}">{"".join(texts)}</g>' for style, texts in styles.items())
    return f'<g id="{match["id"]}">{groups}</g>'
