"""Each way to break the protocol of messages in shared memory is found by the simulated ranks.

The records in the ring are C, of which `tests/native` has the mutations.

A mutation replaces a piece of the real code: it stores a word too early, leaves a bell out or rings it before the word
is there, or does not look again before a thread sleeps. Then ranks read what is not there yet, write over what is still
needed, or sleep for ever.
"""

import inspect
import textwrap
from typing import NamedTuple

import pytest

from echelon.backends.shared.messages.message_region import MessageRegion
from echelon.backends.shared.messages.receiver import RingReceiver, _Parts
from echelon.backends.shared.messages.sender import RingSender
from echelon.backends.shared.messages.sender import _Parts as _SentParts
from echelon.backends.tcp.messages import TcpMessages
from echelon.backends.tcp.poller import Poller
from echelon.backends.tcp.progress import Progress
from echelon.backends.tcp.reader import Reader
from echelon.errors import EchelonError
from tests.helpers import shared_memory_scenarios
from tests.helpers.native_explorer import Race
from tests.helpers.task_host import Chance, Interruptions, Stuck

_MOST_SEEDS = 400
_FOUND_LATE = "a part freed before it is copied"
"""Mutation that takes as long as all others of the quick tests."""


class Mutation(NamedTuple):
    """Lines of a method and what they become; the scenario in which that is found."""

    what: str
    method: tuple[type, str]
    old: str
    new: str
    scenario: str
    seed: int = -1
    """Of the scenario in which a thread is stopped once, at each point in turn; below 0: orders by chance instead."""
    also_old: str = ""
    also_new: str = ""


MUTATIONS = [
    # the writer's pieces
    Mutation(
        "a piece counted before it is there",
        (RingSender, "_write"),
        "self._write_piece(outgoing, slot)\n",
        "words[self._news + message_layout.PIECES] = self._pieces + 1\n        self._write_piece(outgoing, slot)\n",
        "both ways",
    ),
    Mutation("no bell for a piece", (RingSender, "_write"), "self._post.wake(self._reader)\n", "pass\n", "both ways"),
    Mutation(
        "the bell for a piece rung before it is counted",
        (RingSender, "_write"),
        "words[self._news + message_layout.PIECES] = self._pieces\n        self._post.wake(self._reader)\n",
        "self._post.wake(self._reader)\n        words[self._news + message_layout.PIECES] = self._pieces\n",
        "kept parts",
    ),
    Mutation(
        "a piece where one is that was not drained",
        (RingSender, "_write"),
        "words[self._answers + message_layout.DRAINED] - outgoing.first",
        "min(words[self._answers + message_layout.DRAINED] - outgoing.first + 1, outgoing.num_written)",
        "both ways",
    ),
    # waiting for room
    Mutation(
        "a writer that does not say that it waits",
        (RingSender, "_say_whether_it_waits"),
        "self._words[self._news + message_layout.WAITING] = self._waits\n",
        "pass\n",
        "both ways",
    ),
    Mutation(
        "a writer that does not look again after it said that it waits",
        (RingSender, "flush"),
        "message_region.fence()\n        self._write_all()",
        "message_region.fence()",
        "one message",
        6,
    ),
    Mutation(
        "a writer that looks again before it says that it waits",
        (RingSender, "flush"),
        "self._say_whether_it_waits()\n        message_region.fence()\n        self._write_all()",
        "message_region.fence()\n        self._write_all()\n        self._say_whether_it_waits()",
        "one message",
        6,
    ),
    Mutation(
        "a rank that does not look at answers before it sleeps",
        (MessageRegion, "has_news"),
        "self.num_waiting > 0",
        "False",
        "both ways",
    ),
    Mutation(
        "a rank that writes nothing when there is room",
        (Reader, "on_news"),
        "link.sender.flush()",
        "pass",
        "both ways",
    ),
    # the reader
    Mutation(
        "a record taken out of the ring before it was read",
        (RingReceiver, "take_in"),
        "self._open(inlet, inbox)\n    core.release(self._address)\n",
        "self._words[self._answers + message_layout.TAKEN] = inlet.taken + inlet.record_bytes\n"
        "    self._open(inlet, inbox)\n    core.release(self._address)\n",
        "flood",
    ),
    Mutation(
        "more pieces copied than were counted",
        (RingReceiver, "_go_on"),
        "self._words[self._news + message_layout.PIECES] - arrival.first",
        "self._words[self._news + message_layout.PIECES] + 1 - arrival.first",
        "both ways",
    ),
    Mutation(
        "a piece told as drained before it is copied",
        (RingReceiver, "_go_on"),
        "arrival.copy(written)\n",
        "self._words[self._answers + message_layout.DRAINED] = arrival.num_drained + (written > 0)\n"
        "        arrival.copy(written)\n",
        "both ways",
    ),
    Mutation(
        "no bell for a piece that was drained",
        (RingReceiver, "_go_on"),
        "core.answer(self._address)",
        "pass",
        "both ways",
    ),
    Mutation(
        "the bell for a piece rung before it is told as drained",
        (RingReceiver, "_go_on"),
        "drained = self._words[self._answers + message_layout.DRAINED] = arrival.num_drained\n"
        "        core.answer(self._address)",
        "drained = arrival.num_drained\n"
        "        core.answer(self._address)\n"
        "        self._words[self._answers + message_layout.DRAINED] = drained",
        "one slot",
        6,
    ),
    # parts
    Mutation(
        "a part freed while a tensor is in it",
        (_Parts, "lend"),
        "self._lent_bytes += part.num_bytes\n",
        "self._lent_bytes += part.num_bytes\n    self.free(part.start)\n    return tensor\n",
        "both ways",
    ),
    Mutation(
        "a part freed before it is copied",
        (_Parts, "lend"),
        "finally:\n            self.free(part.start)\n",
        "finally:\n            pass\n",
        "unclaimed",
        also_old="try:\n            copy",
        also_new="try:\n            self.free(part.start)\n            copy",
    ),
    Mutation("no bell for a part that was freed", (_Parts, "free"), "core.answer(self._address)", "pass", "kept parts"),
    Mutation(
        "the bell for a part rung before it is freed",
        (_Parts, "free"),
        "core.answer(self._address)",
        "pass",
        "kept parts",
        also_old="number = next(self._numbers)\n",
        also_new="number = next(self._numbers)\n    core.answer(self._address)\n",
    ),
    Mutation(
        "a part freed without a change of the answers",
        (_Parts, "free"),
        "self._line_words[self._freed] = number + 1\n",
        "pass\n",
        "kept parts",
    ),
    Mutation(
        "a part told as freed before its word is there",
        (_Parts, "free"),
        "core.answer(self._address)",
        "pass",
        "kept parts",
        also_old="number = next(self._numbers)\n",
        also_new=(
            "number = next(self._numbers)\n"
            "    self._line_words[self._freed] = number + 1\n"
            "    core.answer(self._address)\n"
        ),
    ),
    Mutation(
        "parts taken back in an order that they were not freed in",
        (_SentParts, "_collect"),
        "self._num_freed = number + 1",
        "self._num_freed = number + 2",
        "kept parts",
    ),
    # bells and sleep
    Mutation(
        "a rank that sleeps without having looked",
        (MessageRegion, "fall_asleep"),
        "not self.has_news()",
        "True",
        "stream",
    ),
    Mutation(
        "a rank that looks before it says that it sleeps",
        (MessageRegion, "fall_asleep"),
        "self.words[self._own_asleep] = (self.words[self._own_asleep] + 1) | 1\n"
        "    fence()\n"
        "    return not self.has_news()\n",
        "found = self.has_news()\n"
        "    self.words[self._own_asleep] = (self.words[self._own_asleep] + 1) | 1\n"
        "    return not found\n",
        "stream",
    ),
    Mutation(
        "a rank that does not say that it sleeps",
        (MessageRegion, "fall_asleep"),
        "self.words[self._own_asleep] = (self.words[self._own_asleep] + 1) | 1\n",
        "pass\n",
        "stream",
    ),
    Mutation(
        "sleeps that look like the one before",
        (MessageRegion, "wake_up"),
        "(self.words[self._own_asleep] | 1) + 1",
        "self.words[self._own_asleep] & ~1 and self.words[self._own_asleep] - 1",
        "stream",
    ),
    Mutation(
        "what came while messages were taken in taken for seen",
        (Poller, "dispatch"),
        "self._memory.look():\n        self._on_news()",
        "self._memory.has_news():\n        self._on_news()\n        self._memory.look()",
        "stream",
    ),
    Mutation(
        "a rank that takes in no more than so much at once",
        (Reader, "_read_some"),
        "self._memory.look_again()",
        "pass",
        "stream",
    ),
    # the threads of a rank
    Mutation(
        "a thread asleep that is not told of what another one took in",
        (Reader, "_go_on"),
        "self._progress.wake_waiters()",
        "pass",
        "unclaimed",
    ),
    Mutation(
        "a thread asleep that is not told of what another one wrote",
        (TcpMessages, "send_frame"),
        "progress.wake_waiters()",
        "pass",
        "sends meanwhile",
    ),
    Mutation(
        "a thread that waits and is not told that nobody polls any more",
        (Progress, "_poll"),
        "self._num_waiters > own_waits",
        "self._num_waiters > 1 or (self._num_waiters and self._background_polls)",
        "glances",
    ),
    Mutation(
        "a thread in the background that is kept out for good",
        (Progress, "poll_once"),
        "self._background_wanted.notify()",
        "pass",
        "glances beside",
        1,
    ),
]


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(
            mutation,
            id=mutation.what,
            marks=() if number % 3 == 0 and mutation.what != _FOUND_LATE else pytest.mark.slow,
        )
        for number, mutation in enumerate(MUTATIONS)
    ],
)
def test_it_is_found(explored, mutation, monkeypatch):
    break_code(monkeypatch, mutation)
    found = (fails(explored, mutation.scenario, order, seed) for order, seed in orders(explored, mutation))
    assert any(found), "nothing goes wrong"


EXPLORED = sorted({(each.scenario, each.seed) for each in MUTATIONS if each.seed >= 0})


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "seed"), EXPLORED)
def test_without_a_mutation_all_goes_well(explored, scenario, seed):
    for at in range(1, shared_memory_scenarios.num_points(explored, scenario, seed) + 1):
        shared_memory_scenarios.play(explored, scenario, Interruptions((at,)), seed)


def break_code(monkeypatch, mutation):
    owner, name = mutation.method
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in ((mutation.old, mutation.new), (mutation.also_old, mutation.also_new)):
        assert not old or source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {name}"
        source = source.replace(old, new) if old else source
    names = {}
    exec(compile(source, f"<{name}>", "exec"), function.__globals__, names)
    monkeypatch.setattr(owner, name, names[name])


def orders(path, mutation):
    """Yields orders to try, and a seed for what is said in them."""
    if mutation.seed < 0:
        for seed in range(_MOST_SEEDS):
            yield Chance(seed), seed
        return
    most = shared_memory_scenarios.num_points(path, mutation.scenario, mutation.seed)
    for at in range(1, most + 1):
        yield Interruptions((at,)), mutation.seed


def fails(path, scenario, order, seed):
    """Says whether ranks sleep for ever, or get what was not sent. Any other error is one of the test."""
    try:
        shared_memory_scenarios.play(path, scenario, order, seed)
    except (Race, Stuck, AssertionError, EchelonError):
        return True
    return False
