"""Chrome traces keep to the Trace Event format, and say what the timeline says."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from fractions import Fraction

import pytest

from echelon.errors import EchelonError
from echelon.pipeline import Costs, schedules
from echelon.timeline.timeline import Timeline, Transfer

REQUIRED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


def events_of(timeline: Timeline, path, **options) -> dict[str, list[dict]]:
    """Writes, reads and checks a trace; the events by phase."""
    timeline.to_chrome(path, **options)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        assert REQUIRED[event["ph"]] <= set(event)
        assert all(isinstance(event[key], (int, float)) and event[key] >= 0 for key in ("ts", "dur") if key in event)
        found[event["ph"]].append(event)
    return found


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "dualpipe-v"])
def test_spans_and_arrows_are_those_of_the_timeline(name, tmp_path):
    timeline = schedules.build(name, 4, 8, 1 if name == "1f1b" else 2).simulate(Costs(transfer=0.1))
    events = events_of(timeline, tmp_path / "trace.json")
    spans = [(rank, span.name) for rank, spans in enumerate(timeline.spans) for span in spans]
    assert [(event["pid"], event["name"]) for event in events["X"]] == spans
    assert Counter(
        (event["pid"], event["args"]["name"]) for event in events["M"] if event["name"] == "process_name"
    ) == {(rank, f"rank {rank}"): 1 for rank in range(4)}
    spans_by_rank = defaultdict(list)
    for event in events["X"]:
        spans_by_rank[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    ends = {event["id"]: event for event in events["f"]}
    assert len(events["s"]) == len(ends) == len(timeline.transfers) > 0
    for start, transfer in zip(events["s"], timeline.transfers, strict=True):
        source = spans_by_rank[transfer.source_rank][transfer.source]
        target = spans_by_rank[transfer.target_rank][transfer.target]
        end = ends[start["id"]]
        assert (start["pid"], end["pid"]) == (transfer.source_rank, transfer.target_rank)
        assert source[0] <= start["ts"] < source[1], "inside, where viewers look for the span"
        assert end["ts"] == target[0]
        assert start["ts"] < end["ts"]


def test_times_are_microseconds_since_the_start(tmp_path):
    timeline = Timeline((("a",), ("b",)), ((7.5,), (8,)), ((8.25,), (8.5,)), (Transfer(0, 0, 1, 0, 8.25, None),))
    first, second = events_of(timeline, tmp_path / "trace.json")["X"]
    assert (first["ts"], first["dur"], second["ts"], second["dur"]) == (0, 750_000, 500_000, 500_000)
    first, _ = events_of(timeline, tmp_path / "trace.json", seconds=1e-3)["X"]
    assert first["dur"] == 750


def test_steps_in_a_row_do_not_overlap_by_rounding(tmp_path):
    timeline = Timeline((tuple("abcdefgh"),), (tuple(n / 3 for n in range(8)),), (tuple(n / 3 for n in range(1, 9)),))
    events = events_of(timeline, tmp_path / "trace.json")["X"]
    for event, following in itertools.pairwise(events):
        assert round(1000 * event["ts"]) + round(1000 * event["dur"]) == round(1000 * following["ts"])


@pytest.mark.parametrize(
    "timeline",
    [
        Timeline((), (), ()),
        Timeline(((),), ((),), ((),)),
        Timeline((('say "hi" \\ ü',), ("0",)), ((0,), (0,)), ((0,), (Fraction(1, 3),)), (Transfer(0, 0, 1, 0, 0, 0),)),
    ],
)
def test_anything_can_be_written(timeline, tmp_path):
    events = events_of(timeline, tmp_path / "trace.json")
    assert [event["name"] for event in events["X"]] == [span.name for spans in timeline.spans for span in spans]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_unit_of_time_that_cannot_be(seconds, tmp_path):
    with pytest.raises(EchelonError, match=r"give how long a unit of time is, such as 1\.0 or 1e-3"):
        Timeline((), (), ()).to_chrome(tmp_path / "trace.json", seconds=seconds)
