"""What two simulated ranks say to each other while others come in between: each scenario adds programs to a host."""

import contextlib
import random
from collections import deque

import torch

from echelon.backends.work import Work
from echelon.operation_records import KnownOperation
from echelon.simulation.scheduler import Ended
from tests.helpers.shared_memory_host import EITHER_WAY, NUM_PARTS, ONE_SLOT, tag, two_ranks, values
from tests.helpers.task_host import Interruptions

LENGTHS = (0, 1, 16, 17, 40, 128, 129, 400)
"""Numbers of float32: within a record, of one piece, of some, in a circle."""


def send(backend, number, length, tag):
    """Sends at once where that can be, as a group does; returns what is under way."""
    tensor = values(number, length)
    peer = 1 - backend.rank
    if backend.known.send(peer, tag.step, tensor):
        return []
    handle = backend.messages.prepare_send(peer, tag, tensor.shape, tensor.dtype)
    if not handle.at_once(tensor):
        return [handle.start(tensor)]
    learn(backend, tag, handle, tensor)
    return []


def receive(backend, tag, out=None):
    """Receives at once where that can be, as a group does."""
    peer = 1 - backend.rank
    tensor = backend.known.receive(peer, tag.step, out)
    if tensor is not False:
        return tensor
    handle = backend.messages.prepare_receive(peer, tag)
    message = handle.at_once(out)
    if message is None:
        return handle.start(out).wait()
    learn(backend, tag, handle, message.tensor)
    return message.tensor


def learn(backend, tag, handle, tensor):
    """Has the library make the next messages like one, once for each kind."""
    native, kind = handle.native(), (type(handle), tag.step, tensor.shape)
    if native is not None and kind not in backend.learnt:
        backend.learnt.add(kind)
        backend.known.learn_message(1 - backend.rank, tag.step, native, KnownOperation("group", 0, "message", 8))


def check(tensor, number, length):
    assert torch.equal(tensor, values(number, length)), f"message {number} of {length}: {tensor}"


def exchange(backend, seed, lengths):
    """Sends a number of messages, some early, and receives those of the other in this way and that."""
    chance = random.Random(seed)
    peer = 1 - backend.rank
    sends, kept = [], []
    for number, length in enumerate(lengths):
        ahead = number + 1 + chance.choice((0, 0, 1, len(lengths)))  # at least as far as the other may be waiting for
        for each in range(len(sends), min(ahead, len(lengths))):
            sends.append(send(backend, each, lengths[each], tag()))
        way = chance.randrange(6)
        if way == 0:
            tensor = backend.messages.irecv(peer, tag()).wait()
            if chance.random() < 0.5:
                kept.append((number, tensor))
        elif way == 1:
            tensor = backend.messages.irecv(peer, tag(), out=torch.empty(length)).wait()
        elif way == 2:
            out = torch.ones(length)
            tensor = backend.messages.irecv(peer, tag(), out=out, combine=lambda own, other: own.add_(other)).wait() - 1
        elif way == 3:
            work = backend.messages.irecv(peer, tag(), out=torch.empty(length))
            backend.messages.cancel(work)
            tensor = (backend.messages.irecv(peer, tag()) if work.exception() else work).wait()
        else:
            tensor = receive(backend, tag(), torch.empty(length) if way == 4 else None)
        check(tensor, number, length)
    for number, tensor in kept:
        check(tensor, number, lengths[number])
    for works in sends:
        for work in works:
            work.wait()


def both_ways(host, backends, seed):
    """One thread on each rank; each sends ahead, and receives in every way there is."""
    chance = random.Random(f"lengths {seed}")
    lengths = [chance.choice(LENGTHS) for _ in range(6)]
    for backend in backends:
        host.add(backend.rank, lambda backend=backend: exchange(backend, seed + backend.rank, lengths), 0)


def stream(host, backends, seed):
    """One rank sends, small messages at once and large ones; the other receives at once, and keeps some of them."""
    chance = random.Random(f"stream {seed}")
    lengths = [chance.choice((1, 1, 1, 40, 129)) for _ in range(14)]

    def write():
        works = [work for number, length in enumerate(lengths) for work in send(backends[0], number, length, tag())]
        for work in works:
            work.wait()

    def read():
        kept = []
        for number, length in enumerate(lengths):
            kept.append((number, receive(backends[1], tag())))
            check(kept[-1][1], number, length)
            if len(kept) > chance.randrange(3):
                for each, tensor in kept:
                    check(tensor, each, lengths[each])
                kept.clear()

    host.add(0, write)
    host.add(1, read)


def two_threads_each(host, backends, seed):
    """On each rank a thread waits for messages while another sends, and waits until all are written."""
    chance = random.Random(f"threads {seed}")
    lengths = [[chance.choice((1, 16, 40, 129, 400)) for _ in range(5)] for _ in backends]

    def write(backend):
        works = [work for each in enumerate(lengths[backend.rank]) for work in send(backend, *each, tag())]
        for work in works:
            work.wait()

    def read(backend):
        for number, length in enumerate(lengths[1 - backend.rank]):
            check(receive(backend, tag()), number, length)

    for backend in backends:
        host.add(backend.rank, lambda backend=backend: write(backend), 0)
        host.add(backend.rank, lambda backend=backend: read(backend), 1)


def while_both_compute(host, backends, seed):
    """Each rank starts everything, and then computes: what is under way is for the thread in the background."""
    chance = random.Random(f"computing {seed}")
    lengths = [chance.choice((1, 16, 40, 129, 400)) for _ in range(6)]

    def program(backend):
        peer = 1 - backend.rank
        works = []
        for each, length in enumerate(lengths):
            if chance.random() < 0.5:
                works.append(backend.messages.irecv(peer, tag(each)))
                works += send(backend, each, length, tag(each))
            else:
                works += send(backend, each, length, tag(each))
                works.append(backend.messages.irecv(peer, tag(each), out=torch.empty(length)))
        compute_until(host, backend, works)
        received = [work.result() for work in works if work.result() is not None]
        for each, tensor in enumerate(received):
            check(tensor, each, lengths[each])

    for backend in backends:
        host.add(backend.rank, lambda backend=backend: program(backend), 0)


def replies(host, backends, seed):
    """One rank asks for a reply, sends, and computes until the reply is there; the other replies when it has all."""
    chance = random.Random(f"replies {seed}")
    rounds = [[chance.choice((1, 16, 40, 129, 400)) for _ in range(chance.randrange(1, 7))] for _ in range(2)]

    def ask():
        for lengths in rounds:
            reply = backends[0].messages.irecv(1, tag(1))
            host.compute()  # the thread in the background falls asleep
            for each in enumerate(lengths):
                send(backends[0], *each, tag())
            compute_until(host, backends[0], [reply])

    def answer():
        for lengths in rounds:
            for number, length in enumerate(lengths):
                check(receive(backends[1], tag()), number, length)
            send(backends[1], 0, 1, tag(1))

    host.add(0, ask)
    host.add(1, answer)


def compute_until(host, backend, works):
    """Returns when the work has ended, but waits in a way that drives nothing."""
    for work in works:
        done = Work(None, "the program computes")
        backend.messages.when_ended(work, done.complete)
        host.wait(done)


def flood(host, backends, seed):
    """One rank writes small messages whenever there is room, and never sleeps; the other may find some when it asks."""
    chance = random.Random(f"flood {seed}")
    lengths = [chance.choice((1, 1, 16)) for _ in range(20)]

    def write():
        for number, length in enumerate(lengths):
            for _ in range(100):
                tensor = values(number, length)
                if backends[0].messages.prepare_send(1, tag(), tensor.shape, tensor.dtype).at_once(tensor):
                    break
                host.give_way()
            else:
                backends[0].messages.isend(values(number, length), 1, tag()).wait()
            if chance.random() < 0.3:
                host.give_way()

    def read():
        for number, length in enumerate(lengths):
            if number % 3 == 0:
                host.give_way()
            check(receive(backends[1], tag()), number, length)

    host.add(0, write)
    host.add(1, read)


def kept_parts(host, backends, seed):
    """One rank keeps as many tensors as there are parts, and lets go of one when the other has fallen asleep."""
    length = (40, 100)[seed % 2]

    def write():
        works = [work for number in range(7) for work in send(backends[0], number, length, tag())]
        for work in works:
            work.wait()

    def read():
        kept = deque()
        for number in range(7):
            if len(kept) == NUM_PARTS:
                host.compute()
                check(kept.popleft(), number - NUM_PARTS, length)
            kept.append(receive(backends[1], tag()))
        for number, tensor in enumerate(kept, 7 - NUM_PARTS):
            check(tensor, number, length)

    host.add(0, write)
    host.add(1, read)


def sends_meanwhile(host, backends, seed):
    """A thread waits for a part to be free; when one is, another thread of its rank sends."""
    is_freed = []

    def wait_for_a_part():
        works = [backends[0].messages.isend(values(number, 40), 1, tag()) for number in range(NUM_PARTS + 1)]
        for work in works:
            work.wait()

    def send_meanwhile():
        host.compute()
        while not is_freed:
            host.give_way()
        backends[0].messages.isend(values(seed, 1), 1, tag(1)).wait()

    def read():
        kept = deque(receive(backends[1], tag()) for _ in range(NUM_PARTS))
        host.compute()
        is_freed.append(True)
        check(kept.popleft(), 0, 40)
        check(receive(backends[1], tag()), NUM_PARTS, 40)
        check(receive(backends[1], tag(1)), seed, 1)

    host.add(0, wait_for_a_part)
    host.add(0, send_meanwhile, 1)
    host.add(1, read)


def long_notes(host, backends, seed):
    """Messages with notes of which the ring has room for one."""
    note = "note " * 100
    del seed

    def write():
        for number in range(4):
            backends[0].messages.isend(values(number, 1), 1, tag(), note=note)
        compute_until(host, backends[0], [backends[0].messages.irecv(1, tag(1))])

    def read():
        for number in range(4):
            check(backends[1].messages.irecv(0, tag(), note=note).wait(), number, 1)
        send(backends[1], 0, 1, tag(1))

    host.add(0, write)
    host.add(1, read)


def two_writers(host, backends, seed):
    """Two threads of one rank send, and each waits until its messages are written; one thread receives them."""
    chance = random.Random(f"writers {seed}")
    lengths = [[chance.choice((1, 40, 129)) for _ in range(4)] for _ in range(2)]

    def write(which):
        for number, length in enumerate(lengths[which]):
            for work in send(backends[0], number, length, tag(which)):
                work.wait()

    def read():
        for number in range(4):
            for which in range(2):
                check(receive(backends[1], tag(which)), number, lengths[which][number])

    for which in range(2):
        host.add(0, lambda which=which: write(which), which)
    host.add(1, read)


def unclaimed(host, backends, seed):
    """One rank sends more than the other keeps for nobody; there two threads ask for it."""
    chance = random.Random(f"unclaimed {seed}")
    sent = [(chance.randrange(2), chance.choice((1, 1, 40, 129, 400))) for _ in range(12)]

    def write():
        works = []
        for number, (which, length) in enumerate(sent):
            works += send(backends[0], number, length, tag(which))
        for work in works:
            work.wait()

    def read(which):
        for number, (each, length) in enumerate(sent):
            if each == which:
                check(receive(backends[1], tag(which)), number, length)

    host.add(0, write)
    for which in range(2):
        host.add(1, lambda which=which: read(which), which)


def glances_beside(host, backends, seed):
    """On one rank a thread looks around at times, while another has asked for a message, and computes."""

    def read():
        message = backends[1].messages.irecv(0, tag())
        compute_until(host, backends[1], [message])
        check(message.result(), seed, 1)

    def poll_once():
        for _ in range(4):
            backends[1].control.poll()

    def write():
        host.compute()
        send(backends[0], seed, 1, tag())

    host.add(0, write)
    host.add(1, read)
    host.add(1, poll_once, 1)


def glances(host, backends, seed):
    """On one rank a thread waits for messages, while another, which waits for something else, looks around at times."""
    chance = random.Random(f"glances {seed}")
    lengths = [chance.choice((1, 40, 129)) for _ in range(5)]

    def write():
        for number, length in enumerate(lengths):
            for work in send(backends[0], number, length, tag()):
                work.wait()

    def read():
        for number, length in enumerate(lengths):
            check(receive(backends[1], tag()), number, length)

    def poll_once():
        for _ in range(4):
            backends[1].control.poll()

    host.add(0, write)
    host.add(1, read)
    host.add(1, poll_once, 1)


def one_message(host, backends, seed):
    """A message from a rank that computes to one that waits, and the answer to it."""
    length = LENGTHS[seed % len(LENGTHS)]

    def ask():
        reply = backends[0].messages.irecv(1, tag(1))
        host.compute()
        send(backends[0], 0, length, tag())
        compute_until(host, backends[0], [reply])

    def answer():
        check(receive(backends[1], tag()), 0, length)
        send(backends[1], 0, 1, tag(1))

    host.add(0, ask)
    host.add(1, answer)


def ahead(host, backends, _seed):
    """One rank sends before the other receives. Messages that find no room in the ring get a part, so none waits."""
    count, sent = NUM_PARTS + 2, []

    def write():
        for number in range(count):
            assert all(work.has_ended for work in send(backends[0], number, 40, tag())), f"message {number} waits"
        sent.append(True)
        check(receive(backends[0], tag(1)), 0, 1)

    def read():
        while not sent:
            host.compute()
        for number in range(count):
            check(receive(backends[1], tag()), number, 40)
        send(backends[1], 0, 1, tag(1))

    host.add(0, write)
    host.add(1, read)


ALL = {
    "one message": (one_message, {}),
    "both ways": (both_ways, {}),
    "both ways, with cores": (both_ways, {"has_cores": True}),
    "stream": (stream, {}),
    "stream, with cores": (stream, {"has_cores": True}),
    "two threads each": (two_threads_each, {}),
    "while both compute": (while_both_compute, {}),
    "replies": (replies, {}),
    "flood": (flood, {}),
    "kept parts": (kept_parts, {"max_lent_bytes": 10_000}),
    "one slot": (one_message, {"sizes": ONE_SLOT}),
    "both ways, ring or part": (both_ways, {"sizes": EITHER_WAY}),
    "stream, ring or part": (stream, {"sizes": EITHER_WAY}),
    "ahead": (ahead, {"sizes": EITHER_WAY}),
    "long notes": (long_notes, {}),
    "sends meanwhile": (sends_meanwhile, {"max_lent_bytes": 10_000}),
    "two writers": (two_writers, {}),
    "unclaimed": (unclaimed, {"max_unclaimed_bytes": 4000}),
    "glances": (glances, {}),
    "glances beside": (glances_beside, {}),
}


def play(path, name, order, seed):
    """Plays a scenario, with loads that are stale by chance. Returns the explorer."""
    scenario, settings = ALL[name]
    chance = random.Random(f"stale {seed}")
    staleness = chance.choice((0.0, 0.2, 0.7))

    def stale(count):
        return chance.randrange(count) if count > 1 and chance.random() < staleness else 0

    with two_ranks(path, order, stale=stale, **settings) as (explorer, backends):
        scenario(explorer.host, backends, seed)
        try:
            explorer.host.run()
        finally:
            if not isinstance(explorer.error, Ended):  # of a thread in the background that was still in the library
                explorer.check()
    return explorer


def num_points(path, name, seed):
    """Returns at how many points threads can be stopped in a scenario. It is deterministic up to the first of them."""
    order = Interruptions(())
    with contextlib.suppress(Exception):  # what goes wrong without being stopped goes wrong soon
        play(path, name, order, seed)
    return order.num_points
