"""Shorter text of the SVGs that matplotlib writes, for pages of several pictures."""

from __future__ import annotations

import re

# Hundredths of a point are a fifth of a pixel at 15 times the size of a page.
_DIGITS = re.compile(r"-?\d+\.\d{3,}")
_PLACES = re.compile(r'(?<= )(?P<name>d|x|y)="(?P<value>[^"]*)"')
# matplotlib turns every text, most of them by 0 degrees.
_NO_TURN = re.compile(r' transform="rotate\(-?0 [^()"]*\)"')
_PATHS = re.compile(r'<path d="[^"]*"(?P<style>[^>]*)/>(?:\s*<path d="[^"]*"(?P=style)/>)+')
_SHAPE = re.compile(r'(?<=<path d=")[^"]*')


def compact(svg: str) -> str:
    """Returns an SVG that looks the same, with shorter paths.

    Places are in hundredths of a point, level and upright lines name one of them, and neighbours of one style are one
    path.
    """
    shorter = _NO_TURN.sub("", _PLACES.sub(_rounded, svg))
    return _PATHS.sub(_joined, shorter)


def _rounded(match: re.Match[str]) -> str:
    # + 0.0 makes 0 of -0.
    value = _DIGITS.sub(
        lambda number: f"{round(float(number[0]), 2) + 0.0:.2f}".rstrip("0").rstrip("."), match["value"]
    )
    if match["name"] == "d":
        value = _straight(re.sub(r"\s*([A-Za-z])\s*", r"\1", value).strip())
    return f'{match["name"]}="{value}"'


def _straight(shape: str) -> str:
    """Returns a shape whose level and upright lines, the edges of all boxes, have one number in place of two."""
    parts, x, y = [], "", ""
    for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", shape):
        part, (new_x, _, new_y) = command + numbers, numbers.partition(" ")
        if command == "L" and new_y == y:
            part = f"H{new_x}"
        elif command == "L" and new_x == x:
            part = f"V{new_y}"
        parts.append(part)
        x, y = (new_x, new_y) if command in "ML" else ("", "")
    return "".join(parts)


def _joined(match: re.Match[str]) -> str:
    # Transparent shapes that overlap are darker there, and as one path they would not be.
    if "opacity" in match["style"]:
        return match[0]
    shapes = "".join(_SHAPE.findall(match[0]))
    return f'<path d="{shapes}"{match["style"]}/>'
