"""Messages that a rank reads from its links in one turn."""

from echelon.backends.matching import Mailbox
from echelon.backends.tcp.inbox import Inbox
from echelon.backends.tcp.link import Link
from echelon.backends.tcp.reader import _MOST_AT_ONCE, Reader


class Endless:
    """Receiver and sender of a link on which there is always one more message."""

    delivery = None
    queue = ()

    def __init__(self):
        self.taken = 0

    def take_in(self, inbox):
        self.taken += 1
        return True


class Poller:
    def watch_memory(self, memory, doorbell, on_news):
        self.on_news = on_news


class Progress:
    num_wakes = 0

    def wake(self):
        self.num_wakes += 1


class Memory:
    looks_again = False

    def look_again(self):
        self.looks_again = True


def test_a_peer_that_never_stops_keeps_no_other_waiting():
    ends, memory, poller, progress = [Endless(), Endless()], Memory(), Poller(), Progress()
    reader = Reader(poller, progress, on_failure=None)
    links = [Link(rank, end, end) for rank, end in enumerate(ends, 1)]
    reader.links = {link: Inbox(link.rank, Mailbox()) for link in links}
    reader.watch_memory(links, memory, 5)
    poller.on_news()
    assert [end.taken for end in ends] == [_MOST_AT_ONCE] * 2
    assert memory.looks_again
    assert progress.num_wakes == 2, "a thread that sleeps in the poller does not know that more is there"
