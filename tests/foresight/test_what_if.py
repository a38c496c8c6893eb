"""A step if its communication cost less."""

from dataclasses import replace

from echelon.foresight.play.player import play
from echelon.foresight.report import Report
from echelon.foresight.run import what_ifs
from tests.helpers.traces import LINKS, PLAIN, Step


def found(step, cluster=LINKS):
    traces = {0: step.trace()}
    return what_ifs(play(traces, [0] * 4, PLAIN, cluster), traces)


def test_the_longest_line_and_a_faster_network_are_tried():
    step = Step(groups=((0, 2),)).kernel(1).collective(1, 6, blocking=True).kernel(1).collective(2, 2, blocking=True)
    slow = replace(LINKS, latency=0.0, local_latency=0.0)
    (total, group), hidden = (8.0, 6.0), "communication of g0 at train.py:2 were hidden by kernels: at best "
    before = play({0: step.trace()}, [0] * 4, PLAIN, slow).seconds
    exposed = before - 2
    first, second = found(step, slow)
    assert first == f"{hidden}{before - exposed * group / total:.2f} s instead of {before:.2f} s " + (
        f"({-exposed * group / total / before:+.1%})"
    )
    assert second == (
        f"the network between hosts were twice as fast: {before - exposed / 2:.2f} s instead of {before:.2f} s "
        f"({-exposed / 2 / before:+.1%})"
    )


def test_one_host_has_no_network_and_a_hidden_line_no_hint():
    step = Step(groups=((0, 1),)).kernel(1).collective(1, 40, blocking=True)
    assert len(found(step, replace(LINKS, hosts=(4,)))) == 1
    assert found(step)[1] == "the network between hosts were twice as fast: no change"  # both ranks are on one
    hidden = Step(groups=((0, 1),)).collective(1, 4).kernel(100)
    assert found(hidden) == []


def test_the_report_shows_them():
    traces = {0: Step().kernel(1).trace()}
    report = Report(play(traces, [0] * 4, PLAIN, LINKS), what_ifs=["pigs could fly: 1 s"])
    assert "what if\n- pigs could fly: 1 s\n" in str(report)
    assert report.to_json()["what_if"] == ["pigs could fly: 1 s"]
