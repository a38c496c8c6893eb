"""Forecasts of a program with cheaper communication, played again without recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echelon.foresight.play.played import Played
from echelon.foresight.play.player import play
from echelon.foresight.report import seconds_text
from echelon.foresight.trace import Trace

_LEAST = 0.02
"""Least exposed share of a step with forecasts. Below it a change would be smaller than the error of the forecast."""
_NOTHING = 5e-4
"""Share of the step below which a change does not count."""


def what_ifs(played: Played, traces: Mapping[int, Trace]) -> list[str]:
    """Returns forecasts with less exposed communication, as sentences. Empty if little is exposed.

    Args:
        played: the step as it is.
        traces: recorded step of each role.
    """
    step = played.seconds
    if sum(played.exposed.values()) <= _LEAST * step:
        return []
    name, seconds = next(iter(played.exposed.items()))
    found = [
        f"communication of {name.group} at {name.place or 'an unknown line'} were hidden by kernels: at best "
        f"{_compared(step - seconds, step)}"
    ]
    if len(played.cluster.hosts) > 1:
        faster = replace(played.cluster, bandwidth=2 * played.cluster.bandwidth)
        again = play(traces, played.classes, played.device, faster)
        found.append(f"the network between hosts were twice as fast: {_compared(again.seconds, step)}")
    return found


def _compared(seconds: float, step: float) -> str:
    change = seconds / step - 1
    if abs(change) < _NOTHING:
        return "no change"
    return f"{seconds_text(seconds)} instead of {seconds_text(step)} ({change:+.1%})"
