"""Actions and their text form."""

import pytest

from echelon.errors import ScheduleError
from echelon.pipeline.plan.action import Action, Overlapped, actions_of, parse

PAIR = Overlapped(Action(2, "F", 13), Action(5, "B", 0))


@pytest.mark.parametrize("step", [Action(0, "F", 0), Action(12, "I", 3), Action(1, "W", 99), Action(7, "B", 1), PAIR])
def test_text_form_reads_back(step):
    assert parse(str(step)) == step


def test_text_form_is_torchs():
    assert str(Action(2, "F", 0)) == "2F0"
    assert str(PAIR) == "(2F13;5B0)OVERLAP_F_B"


def test_blanks_around_do_not_matter():
    assert parse(" 2F0 ") == Action(2, "F", 0)


def test_actions_of_a_step():
    assert actions_of(Action(1, "W", 2)) == (Action(1, "W", 2),)
    assert actions_of(PAIR) == (Action(2, "F", 13), Action(5, "B", 0))


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 1", "(2F0)OVERLAP_F_B", "(2B0;1F0)OVERLAP_F_B", "-1F0"])
def test_other_text_is_refused(text):
    with pytest.raises(ScheduleError, match='such as "2F0"'):
        parse(text)
