"""Text form of faults on the command line."""

import math

import pytest

from echelon.cli.fault_text import FORMS, IN_WORDS, parse
from echelon.errors import LaunchError
from echelon.simulation.faults import Delay, Kill, NetworkPartition, Pause, Slow, fault_text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:2@op=17", Kill(2, at_op=17)),
        ("kill:2@t=0.5", Kill(2, at=0.5)),
        ("kill:2@t=1e-3", Kill(2, at=0.001)),
        ("delay:0-1:0.5", Delay(0.5, src=0, dst=1)),
        ("delay:*-1:0.5", Delay(0.5, dst=1)),
        ("delay:0-*:.5@1-2", Delay(0.5, src=0, start=1.0, end=2.0)),
        ("delay:*-*:1e-3@1e-2-", Delay(0.001, start=0.01)),
        ("slow:1x3", Slow(1, 3.0)),
        ("slow:1x0.5", Slow(1, 0.5)),
        ("partition:0,1|2,3", NetworkPartition({0, 1}, {2, 3})),
        ("partition:0-2,5|3@0.5-1.5", NetworkPartition({0, 1, 2, 5}, {3}, 0.5, 1.5)),
        ("pause:1@0.5-1.0", Pause(1, 0.5, 1.0)),
        ("pause:1@0.5-", Pause(1, 0.5, math.inf)),
    ],
)
def test_a_text_is_a_fault(text, fault):
    assert parse([text], 6) == [fault]


@pytest.mark.parametrize(
    "text",
    [
        "kill:2@op=17",
        "kill:2@t=0.5",
        "kill:2@t=1e-05",
        "delay:0-1:0.5",
        "delay:*-1:2@0-3",
        "slow:1x3",
        "partition:0,1|2,3",
        "partition:0|3@0.5-",
        "pause:1@0-",
    ],
)
def test_a_fault_has_the_text_that_made_it(text):
    assert [fault_text(fault) for fault in parse([text], 6)] == [text]


def test_several_are_separated_by_commas_or_given_one_by_one():
    expected = [Kill(2, at_op=17), NetworkPartition({0, 1}, {2, 3}), Slow(1, 3.0)]
    assert parse(["kill:2@op=17, partition:0,1|2,3", "slow:1x3"], 4) == expected
    assert parse([], 4) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kill:2", "write it as kill:2@op=17"),
        ("kill:2@op=x", "write it as kill:2@op=17"),
        ("kill:-1@op=2", "write it as kill:2@op=17"),
        ("kill:2@op=0", "messages are counted from 1"),
        ("kil:2@op=2", "did you mean kill?"),
        ("", "use one of"),
        ("delay:0-1", "write it as delay:0-1:0.5"),
        ("delay:0-1:0", "give seconds above 0"),
        ("slow:1x0", "give a factor above 0"),
        ("slow:1", "write it as slow:1x3"),
        ("partition:0,1", "write it as partition:0,1|2,3"),
        ("partition:0|0", "without a common one"),
        ("partition:3-1|0", "3-1 are no ranks"),
        ("partition:1-2-3|0", "1-2-3 are no ranks"),
        ("pause:1", "write it as pause:1@0.5-1.0"),
        ("pause:1@2-1", "the end must come after the start"),
        ("kill:6@op=1", "6 is not one of 6 ranks: use 0 to 5"),
        ("delay:0-7:1", "7 is not one of 6 ranks"),
        ("kill:1@op=2,", "write it as kill:2@op=17"),
    ],
)
def test_a_text_that_is_no_fault_is_told_in_one_line(text, told):
    with pytest.raises(LaunchError) as caught:
        parse([text], 6)
    assert str(caught.value).startswith(f"--faults {text}: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_kind_has_an_example_that_is_one():
    for kind, form in FORMS.items():
        (fault,) = parse([form.split(" ")[0]], 4)
        assert form.startswith(f"{kind}:")
        assert form in IN_WORDS, fault
