"""What a rank takes in of its lines, and when it stops."""

from echelon.backends.matching import Mailbox
from echelon.backends.tcp.link_table import _MOST_AT_ONCE, LinkTable, UnclaimedLimit


class Endless:
    """A line on which there is always one more message."""

    delivery = None
    wants_to_write = False

    def __init__(self):
        self.taken = 0

    def take_in(self, arrivals):
        self.taken += 1
        return True


class Memory:
    looks_again = False

    def look_again(self):
        self.looks_again = True


def test_a_peer_that_never_stops_keeps_no_other_waiting():
    lines = LinkTable({1: None, 2: None}, UnclaimedLimit(Mailbox(), 1 << 20), on_failure=None)
    first, second, memory = Endless(), Endless(), Memory()
    lines.use({1: first, 2: second}, memory)
    lines.take_in()
    assert first.taken == second.taken == _MOST_AT_ONCE
    assert memory.looks_again
