"""Page of one timeline, or of a planned one over a measured one: an HTML file that needs no network."""

from __future__ import annotations

from html import escape
from string import Template

from echelon.timeline.boxes import lengths, planned_first
from echelon.timeline.timeline import Timeline
from echelon.timeline.widget.data import Data, panel_of
from echelon.timeline.widget.markup import frame, resource, script, style, widget
from echelon.timeline.words import title

_MOST_STEPS = 20_000
# Pixels of a notebook's cell around the rows: tools, titles, axes and legend.
_AROUND, _MOST_HEIGHT = 300, 900


def page(timeline: Timeline, against: Timeline | None = None, padding: str = "20px 24px") -> str:
    """Returns a page with the timeline. Text of the timeline is escaped."""
    timelines = planned_first(timeline, against)
    data = Data(list(map(panel_of, timelines, lengths(timelines))))
    values = {
        "title": escape(" and ".join(dict.fromkeys(map(title, timelines)))),
        "style": style(),
        "script": script(),
        "timeline": widget(data),
        "padding": padding,
    }
    # Not str.format, to which the braces of the style would be fields.
    return Template(resource("page.html")).substitute(values)


def notebook_cell(timeline: Timeline) -> str:
    """Returns a timeline as the output of a notebook's cell. Of more than 20,000 steps it is text."""
    # A notebook keeps its outputs, so a long run would make it tens of megabytes large.
    if sum(map(len, timeline.steps)) > _MOST_STEPS:
        return f"<pre>{escape(str(timeline))}</pre>"
    num_lanes = timeline.num_ranks + sum(map(len, timeline.beside or ()))
    height = min(_MOST_HEIGHT, _AROUND + 40 * num_lanes)
    return frame(page(timeline, padding="4px"), title(timeline), height)
