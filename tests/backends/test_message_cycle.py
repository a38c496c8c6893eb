"""Chains of ranks that wait for each other's messages, from answers that a test makes up."""

from types import SimpleNamespace

import pytest

from echelon.backends.message_cycle import chain
from echelon.backends.status import Standing, Status, wait_behind

SENT_BY_OWN_RANK = 4


def own_backend(answers):
    """Returns rank 0 of a world in which the rank of each question gives the next of its answers."""
    left = {rank: iter(given) for rank, given in answers.items()}

    def ask(ranks, question, timeout, until):
        (rank,) = ranks
        assert (timeout > 0, until) == (True, None)
        asked.append((rank, question))
        status = next(left.get(rank, iter(())), None)
        return {} if status is None else {rank: status}

    asked = []
    control = SimpleNamespace(ask=ask, num_sent=lambda _: SENT_BY_OWN_RANK)
    return SimpleNamespace(rank=0, control=control), asked


def waits(awaited, num_come, num_sent, number=1):
    return Status(Standing.WAITING, "receive", (awaited, num_come, num_sent, number))


GOES_ON = Status(Standing.BEFORE, "past barrier")
ONE, TWO = waits(2, num_come=7, num_sent=1), waits(0, num_come=4, num_sent=7)


def test_each_rank_is_asked_twice_about_its_messages_to_the_one_before():
    backend, asked = own_backend({1: [ONE, ONE], 2: [TWO, TWO]})
    assert chain(backend, 1) == {1: ONE, 2: TWO}
    assert asked == [(1, wait_behind(0)), (2, wait_behind(1))] * 2


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param({1: [GOES_ON] * 2}, id="the awaited rank goes on"),
        pytest.param({1: [ONE] * 2, 2: [GOES_ON] * 2}, id="a later rank goes on"),
        pytest.param({1: [ONE]}, id="a rank does not answer"),
        pytest.param({1: [ONE] * 2, 2: [waits(0, num_come=4, num_sent=8)] * 2}, id="a message to rank 1 is on its way"),
        pytest.param({1: [ONE] * 2, 2: [waits(0, num_come=3, num_sent=7)] * 2}, id="a message of rank 0 is on its way"),
        pytest.param({1: [ONE, waits(2, 7, 1, number=2)], 2: [TWO, TWO]}, id="a rank waits anew"),
        pytest.param({1: [ONE, ONE], 2: [TWO, GOES_ON]}, id="a rank goes on"),
        pytest.param({1: [waits(2, 7, 1)] * 3, 2: [waits(1, 0, 7)] * 3}, id="a cycle of others"),
    ],
)
def test_anything_else_is_no_chain(answers):
    backend, _ = own_backend(answers)
    assert chain(backend, 1) == {}
