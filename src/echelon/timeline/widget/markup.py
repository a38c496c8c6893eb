"""Elements of the timeline for browsers: its tools, panels, legend, style and script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib.resources import files

from echelon.timeline.palette import COLORS, NAMES, THEMES, Theme
from echelon.timeline.widget.data import Data, Panel
from echelon.timeline.words import cause_words

_HINT = (
    "Zoom: + and -, Ctrl and wheel, or double click. Move: drag, arrow keys, or Shift and wheel. 0: all. "
    "/: search, Enter: next."
)


def resource(name: str) -> str:
    """Returns a file of this folder as text."""
    return files("echelon.timeline.widget").joinpath(name).read_text("utf-8")


def script() -> str:
    """Returns the script, which runs once at the end of a page, for all timelines on it."""
    return resource("widget.js")


def style() -> str:
    """Returns the style, with the colours of both themes."""
    light, dark = (_colors(THEMES[name]) for name in ("light", "dark"))
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{resource('widget.css')}"
    )


def _colors(theme: Theme) -> str:
    named = {name: getattr(theme, name) for name in ("page", "ink", "faint", "line", "memory")}
    named |= {f"idle-{cause}": fill for cause, fill in theme.idle.items()}
    named |= {f"hatch-{cause}": line for cause, line in theme.hatch.items()}
    return " ".join(f"--{name}: {value};" for name, value in named.items())


def widget(data: Data) -> str:
    """Returns a timeline as HTML. The page needs `style` and, at its end, `script`."""
    path = '<label><input type="checkbox" checked>critical path</label>' if _has_path(data) else ""
    return (
        '<div class="timeline"><div class="tools" role="group" aria-label="tools of the timeline">'
        '<input type="search" placeholder="search steps" aria-label="search steps">'
        '<span class="found" aria-live="polite"></span>'
        '<button class="out" type="button" aria-label="zoom out">&minus;</button>'
        '<button class="in" type="button" aria-label="zoom in">+</button>'
        f'<button class="fit" type="button">all</button>{path}</div>'
        f"{''.join(map(_panel, data.panels))}"
        f'<div class="swatches">{"".join(_legend(data))}</div>'
        f'<output aria-live="polite">Point at a step, or tap it.</output><p class="hint">{_HINT}</p>'
        '<div class="tip" hidden></div>'
        f'<script type="application/json">{data.to_json()}</script></div>'
    )


def frame(page: str, title: str, height: int) -> str:
    """Returns a page as the output of a notebook's cell, `height` pixels high."""
    # A frame of its own: its style does not reach the notebook, the notebook's does not reach it, and neither does its
    # script. Bytes that are no text would keep the notebook from being saved.
    text = escape(page.encode("utf-8", "replace").decode("utf-8"))
    return (
        f'<iframe srcdoc="{text}" sandbox="allow-scripts" loading="lazy" title="{escape(title)}" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


def _has_path(data: Data) -> bool:
    return any(panel.critical for panel in data.panels)


def _panel(panel: Panel) -> str:
    head = f"<h3>{escape(panel.title)}</h3>" if panel.title else ""
    text = f'<p class="figures">{escape(panel.figures)}</p>' if panel.figures else ""
    label = escape(f"Timeline: {panel.title} {panel.figures}".strip())
    return f'{head}{text}<canvas tabindex="0" role="img" aria-label="{label}"></canvas>'


def _legend(data: Data) -> Iterator[str]:
    for tone in data.tones:
        yield f'<span><i style="background: {COLORS[tone]}"></i>{NAMES[tone]}</span>'
    for words in dict.fromkeys(panel.chunk_words for panel in data.panels if panel.chunk_words):
        yield f'<span><i class="chunk" style="background: {COLORS["F"]}"></i>{words}</span>'
    for cause, words in cause_words(data.causes):
        colors = f"background-color: var(--idle-{cause}); --hatch: var(--hatch-{cause})"
        yield f'<span><i class="idle {cause}" style="{colors}"></i>{words}</span>'
    if _has_path(data):
        yield '<span><i class="line"></i>critical path</span>'
    for words in dict.fromkeys(panel.memory_words for panel in data.panels if panel.memory_words):
        yield f'<span><i style="background: var(--memory)"></i>{words}</span>'
