"""Shorter text of the SVGs that matplotlib writes, for pages of several pictures."""

from __future__ import annotations

import re
from collections import Counter

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
