"""Messages in shared memory, with the two ranks in every order that chance finds: each may be stopped at every word.

The ends are the real ones, over a real segment, with rings and parts so small that everything happens: rings are full,
their end is passed over, messages go round in circles, parts are used again, ranks sleep. What is missing is the
processor's own order of loads and stores, of which the documents say what is relied on.
"""

import os
import random
import select
import threading

import pytest
import torch

from echelon.backends.delivery import Receive
from echelon.backends.matching import Mailbox
from echelon.backends.shared import inlet, mail, post
from echelon.backends.shared.arena import MAX_PART_BYTES, MIN_PART_BYTES, Arena
from echelon.backends.shared.line import SharedLine
from echelon.backends.shared.segment import Segment
from echelon.backends.tag import Tag
from echelon.backends.tcp.backend import message_head
from echelon.backends.tcp.line import Arrivals
from echelon.backends.work import Work

SIZES = mail.Sizes(ring_bytes=1024, inline_bytes=64, piece_bytes=128, whole_bytes=512, circle_bytes=256)
LENGTHS = (0, 1, 16, 17, 40, 128, 129, 400)
"""Numbers of float32: within a record, of one piece, of some, in a circle."""


class Stuck(AssertionError):
    """Both ranks sleep."""


class Turns:
    """Lets one of two threads run at a time, and changes at random places to the other."""

    def __init__(self, seed):
        self._chance = random.Random(seed)
        self._restless = self._chance.choice((0.02, 0.1, 0.3))
        self._changed = threading.Condition()
        self._running = 0
        self._done = [False, False]
        self.error = None

    def run(self, programs):
        threads = [
            threading.Thread(target=self._run, args=(number, program), daemon=True)
            for number, program in enumerate(programs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
            assert not thread.is_alive(), "it never ends"
        if self.error is not None:
            raise self.error

    def _run(self, number, program):
        self._number.me = number
        try:
            self._wait_for(number)
            program()
        except BaseException as error:
            self.error = self.error or error
        with self._changed:
            self._done[number] = True
            self._running = 1 - number
            self._changed.notify_all()

    _number = threading.local()

    def maybe_pass(self):
        """Called at every word."""
        if self._chance.random() < self._restless:
            self.pass_on()

    def pass_on(self):
        me = self._number.me
        if not self._done[1 - me]:
            with self._changed:
                self._running = 1 - me
                self._changed.notify_all()
            self._wait_for(me)

    def _wait_for(self, number):
        with self._changed:
            self._changed.wait_for(lambda: self._running == number or self.error is not None, 20.0)
        if self.error is not None:
            raise SystemExit

    @property
    def is_other_done(self):
        return self._done[1 - self._number.me]


class Words:
    """Words of shared memory at each of which the other rank may come in between."""

    def __init__(self, words, turns):
        self._words = words
        self._turns = turns

    def __getitem__(self, index):
        self._turns.maybe_pass()
        return self._words[index]

    def __setitem__(self, index, value):
        self._turns.maybe_pass()
        self._words[index] = value
        self._turns.maybe_pass()


class Direct(Arrivals):
    """Hands messages to a mailbox."""

    def __init__(self, mailbox):
        self._mailbox = mailbox

    def take_small(self, head, address):
        self._mailbox.take_bytes(1, head.tag, head.shape, head.dtype, head.note, address)

    def open(self, head, *, comes_whole):
        return self._mailbox.arrive(1, head.tag, head.shape, head.dtype, head.note, comes_whole)


class Rank:
    """One of the two ranks, with a driver as small as can be."""

    def __init__(self, segment, number, doorbells, turns):
        self.post = post.Post(segment, number, doorbells, SIZES)
        self.post.words = Words(self.post.words, turns)
        self.turns = turns
        self.mailbox = Mailbox()
        self.line = SharedLine(self.post, 1 - number, 1 << 30)
        self.line._outlet._arena = small_arena()
        self.doorbell = select.epoll()
        self.doorbell.register(self.post.doorbell, select.EPOLLIN | select.EPOLLET)
        self.sleeps = 0

    def send(self, tensor, tag=0):
        work = Work(None, "send")
        self.line.send(message_head(Tag(0, 0, tag), tensor.dtype, tensor.shape, ""), tensor, Tag(0, 0, tag), work)
        return work

    def receive(self, tag=0, out=None, combine=None):
        work = Work(None, "receive")
        self.mailbox.post(Receive(work, 1, Tag(0, 0, tag), out, "", combine=combine))
        return work

    def drive(self, work):
        """Polls until the work is done, as a backend does; sleeps only if nothing was heard of."""
        while True:
            if self.line.wants_to_write:
                self.line.flush()
            while self.line.take_in(Direct(self.mailbox)):
                self.turns.maybe_pass()
                delivery = self.line.delivery
                if delivery is not None and not delivery.comes_whole:
                    delivery.place()
            if work.is_completed():
                return work.result()
            if not self.post.has_news():
                self.sleep()
            self.post.look()

    def sleep(self):
        if self.post.fall_asleep():
            self.sleeps += 1
            while not self.doorbell.poll(0):
                if self.turns.is_other_done and not self.doorbell.poll(0):
                    raise Stuck("it sleeps, and nobody rings")
                self.turns.pass_on()
        self.post.wake_up()


def small_arena():
    """Returns an arena in which three parts are free."""
    arena = Arena(MAX_PART_BYTES)
    for _ in range(MAX_PART_BYTES // MIN_PART_BYTES - 3):
        arena.take(MIN_PART_BYTES)
    return arena


@pytest.fixture
def two_ranks(monkeypatch):
    """Makes pairs of ranks over a segment of their own, in which hardly anything has room."""
    monkeypatch.setattr(inlet, "_MAX_LENT_BYTES", 160)  # two parts at most
    opened = []

    def make(seed):
        turns = Turns(seed)
        first = Segment.create(2)
        segments = [first, Segment(os.dup(first.fd), 2, 1)]
        doorbells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        ranks = [Rank(segment, number, doorbells, turns) for number, segment in enumerate(segments)]
        opened.extend([*segments, ranks[0].post, *(rank.doorbell for rank in ranks)])
        return turns, ranks

    yield make
    for each in opened:
        each.close()


def values(number, length):
    return (torch.arange(length, dtype=torch.float32) * 7 + number) % 1000


def exchange(rank, seed, lengths):
    """Both ranks send a number of messages, some early, and receive those of the other in this way and that."""
    chance = random.Random(seed)
    sends, kept = [], []
    for number, length in enumerate(lengths):
        ahead = number + 1 + chance.choice((0, 0, 1, len(lengths)))  # at least as far as the other may be waiting for
        sends += [rank.send(values(each, lengths[each])) for each in range(len(sends), min(ahead, len(lengths)))]
        way = chance.randrange(4)
        if way == 0:
            tensor = rank.drive(rank.receive())
            if chance.random() < 0.5:
                kept.append((number, tensor))
        elif way == 1:
            tensor = rank.drive(rank.receive(out=torch.empty(length)))
        elif way == 2:
            out = torch.ones(length)
            tensor = rank.drive(rank.receive(out=out, combine=lambda own, other: own.add_(other))) - 1
        else:
            work = rank.receive(out=torch.empty(length))
            if not work.is_completed():
                arriving = rank.line.delivery
                rank.mailbox.withdraw(work, TimeoutError("withdrawn"), [arriving] if arriving else [])
                work = rank.receive()
            tensor = rank.drive(work)
        assert torch.equal(tensor, values(number, length)), f"message {number} of {length} in way {way}"
    for number, tensor in kept:
        assert torch.equal(tensor, values(number, lengths[number])), "a kept tensor was overwritten"
    for work in sends:
        rank.drive(work)


def play(turns, ranks, seed):
    """Has both ranks exchange the messages of a seed; returns how often they slept."""
    chance = random.Random(seed)
    lengths = [chance.choice(LENGTHS) for _ in range(12)]
    turns.run([lambda rank=rank: exchange(rank, seed + rank.post.number, lengths) for rank in ranks])
    return sum(rank.sleeps for rank in ranks)


@pytest.mark.parametrize("batch", range(4))
def test_in_every_order_of_loads_and_stores_messages_arrive_as_they_were_sent(two_ranks, batch):
    assert sum(play(*two_ranks(seed), seed) for seed in range(batch * 20, batch * 20 + 20)), "no rank ever slept"


def test_no_doorbell_is_closed_while_it_rings(two_ranks, monkeypatch):
    """Its number may be another file's a moment later."""
    turns, (own, other) = two_ranks(0)
    turns.maybe_pass = lambda: None
    assert other.post.fall_asleep()
    closing = threading.Thread(target=own.post.close)
    rung = []

    def ring(fd, value):
        closing.start()
        closing.join(0.05)
        os.fstat(fd)
        rung.append((closing.is_alive(), value))

    monkeypatch.setattr(os, "eventfd_write", ring)
    own.post.knock(1)
    closing.join()
    own.post.knock(1)
    assert rung == [(True, 1)]
