"""The memory itself: who gets it, what is believed of it, and words in it to wait on."""

import errno
import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import torch

import echelon
from echelon.arguments import MAX_LOCAL_WORLD_SIZE
from echelon.backends.collective import Collective
from echelon.backends.formats import memory_layout
from echelon.backends.lanes import InOrder
from echelon.backends.shared import backend
from echelon.backends.shared.collectives.executor import SharedMemoryExecutor
from echelon.backends.shared.collectives.sync_block import SyncBlock
from echelon.backends.shared.memory import fd_passing, support
from echelon.backends.shared.memory.segment import Segment
from echelon.backends.shared.memory.waiting import SpinThenSleep
from echelon.errors import CollectiveMismatch, PeerFailed
from tests.helpers.collective_calls import call_of
from tests.helpers.worlds import tcp_world

SECONDS = 20.0


@pytest.fixture
def segment():
    made = Segment.create(2)
    yield made
    made.close()


def test_parts_are_given_out_once_and_seen_by_all_who_map_them(segment):
    first, second = segment.allocate(5000), segment.allocate(1)
    assert second - first == 8192
    segment.map(first, 5000).data[4999] = 7
    assert segment.map(first, 5000).data[4999] == 7
    assert segment.map(second, 1).data[0] == 0


@pytest.mark.parametrize("offset", [-4096, 1, 2 << 50])
def test_what_is_outside_is_not_mapped(segment, offset):
    with pytest.raises(echelon.ConnectError, match="are outside a shared memory of"):
        segment.map(offset, 4096)


def test_a_part_that_ends_outside_is_not_mapped(segment):
    last_page = (2 << 50) - 4096
    assert len(segment.map(last_page, 4096).data) == 4096
    with pytest.raises(echelon.ConnectError, match="are outside a shared memory of"):
        segment.map(last_page, 4097)


def test_as_many_ranks_as_a_host_may_start_share_a_file():
    Segment.create(MAX_LOCAL_WORLD_SIZE).close()


def test_the_file_cannot_be_changed_in_size(segment):
    for size in (0, 4096, 4 << 50):
        with pytest.raises(OSError):
            os.ftruncate(segment.fd, size)


@pytest.mark.parametrize("kind", ["memfd that is not sealed", "file", "of another number of ranks"])
def test_another_file_is_refused_and_closed(kind, tmp_path):
    if kind == "file":
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    elif kind == "memfd that is not sealed":
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    else:
        other = Segment.create(3)
        fd = os.dup(other.fd)
    with pytest.raises(echelon.ConnectError, match="shared memory"):
        Segment(fd, 2, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_the_file_goes_only_to_who_is_expected_and_knows_the_token(segment):
    giver = fd_passing.FdServer([segment.fd], 1)
    impostor = fd_passing.dial(giver.name, bytes(fd_passing.TOKEN_BYTES), os.getpid(), SECONDS)
    friend = fd_passing.dial(giver.name, giver.token, os.getpid(), SECONDS)
    giver.give([os.getpid()], SECONDS)
    giver.close()
    with pytest.raises(echelon.ConnectError, match="was closed before the shared memory came"):
        fd_passing.take(impostor, 1)
    (fd,) = fd_passing.take(friend, 1)
    assert os.path.sameopenfile(fd, segment.fd)
    os.close(fd)


def test_files_that_came_before_a_failure_are_closed(segment):
    giver = fd_passing.FdServer([segment.fd], 1)
    connection = fd_passing.dial(giver.name, giver.token, os.getpid(), SECONDS)
    giver.give([os.getpid()], SECONDS)
    giver.close()
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(echelon.ConnectError):
        fd_passing.take(connection, 2)  # one is sent
    assert len(os.listdir("/proc/self/fd")) == num_open - 1  # without the connection


def test_files_wait_while_too_many_are_on_their_way(segment, monkeypatch):
    giver = fd_passing.FdServer([segment.fd], 1)
    connection = fd_passing.dial(giver.name, giver.token, os.getpid(), SECONDS)
    send, refusals = socket.send_fds, [OSError(errno.ETOOMANYREFS, "too many")] * 2

    def refuse_twice(*arguments):
        if refusals:
            raise refusals.pop()
        return send(*arguments)

    monkeypatch.setattr(socket, "send_fds", refuse_twice)
    giver.give([os.getpid()], SECONDS)
    giver.close()
    os.close(*fd_passing.take(connection, 1))


def test_another_process_than_the_giver_is_not_trusted(segment):
    giver = fd_passing.FdServer([segment.fd], 1)
    with pytest.raises(echelon.AuthenticationError, match="another process, not 1, listens"):
        fd_passing.dial(giver.name, giver.token, 1, SECONDS)
    with pytest.raises(echelon.ConnectError, match="did not fetch the shared memory"):
        giver.give([os.getpid()], 0.05)
    giver.close()


def share_all(world, required):
    def share(tcp):
        try:
            return backend.share(tcp, required=required, timeout=SECONDS)
        except echelon.LaunchError as error:
            return error

    with ThreadPoolExecutor(len(world)) as threads:
        return list(threads.map(share, world))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_where_one_rank_cannot_share_memory_none_does(monkeypatch, caplog, failing):
    """Each in its own way: the system, the giving, the taking."""
    if failing == 0:
        monkeypatch.setattr(support, "obstacle", lambda: "it rains")
    elif failing == 1:
        monkeypatch.setattr(fd_passing.FdServer, "give", lambda *_: (_ for _ in ()).throw(OSError("it rains")))
    else:
        monkeypatch.setattr(fd_passing, "take", refuse_to_take)
    with tcp_world(3) as world, caplog.at_level(logging.WARNING, "echelon"):
        assert share_all(world, required=False) == world
        assert caplog.text.count("no shared memory, so all goes over TCP: rank") == len(caplog.records) == 1
        assert "it rains" in caplog.text or "Broken pipe" in caplog.text  # as the giver sees who does not take
        for tcp in world:
            tcp.messages.isend(torch.ones(1), (tcp.rank + 1) % 3).wait(SECONDS)
    with tcp_world(2) as world:
        for error in share_all(world, required=True):
            assert "backend='shm' cannot be used here" in str(error)


def refuse_to_take(connection, _):
    connection.close()
    raise OSError("it rains")


def test_ticks_pass_what_a_futex_compares(segment):
    """The words that ranks sleep on are the low 32 bits of their ticks."""
    window = segment.map(segment.allocate(2 * memory_layout.ROOM_BYTES), 2 * memory_layout.ROOM_BYTES)
    words = memoryview(window.memory).cast("Q")
    for rank in range(2):
        words[(rank * memory_layout.ROOM_BYTES + memory_layout.TICK) // 8] = (1 << 32) - 20

    def run(rank):
        board = SyncBlock(window, (0, 1), rank, SpinThenSleep(1000), lambda *_: None)
        for number in range(1, 60):
            call = call_of(number, f"operation {number}")
            board.meet(call, [number * 10 + rank])
            assert board.word(1 - rank, 0) == number * 10 + 1 - rank
            board.tick()
            board.wait_for_all(1, call)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    del words


def test_a_result_is_that_of_the_operation_that_all_are_in(segment):
    """What one rank has combined for the others where cores are short is found in that operation, and in none after."""
    window = segment.map(segment.allocate(2 * memory_layout.ROOM_BYTES), 2 * memory_layout.ROOM_BYTES)

    def run(rank):
        board = SyncBlock(window, (0, 1), rank, SpinThenSleep(1000), lambda *_: None)
        found = []
        for number in range(1, 40):
            tensor = torch.tensor([float(number), rank])
            assert board.all_reduce(call_of(number), 0, tensor.nbytes, tensor)
            found.append(tensor.tolist())
        return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == [[[2.0 * number, 1.0] for number in range(1, 40)]] * 2


def give_up(*_):
    raise InterruptedError("this rank announces an operation and waits for nobody")


class WithdrawnAfter:
    """The words of a board on which a peer withdraws what it announced, behind so many looks at that."""

    def __init__(self, words, mark, looks):
        self.words, self.mark, self.looks = words, mark, looks

    def __getitem__(self, index):
        if index == self.mark:
            self.looks -= 1
            if self.looks < 0:
                return 0
        return self.words[index]


@pytest.mark.parametrize("theirs", ["all_reduce", "barrier"])
def test_a_peer_that_gives_up_whenever_it_does_so_disagrees_in_nothing_else(segment, theirs):
    """Whoever looks finds what the peer announced or that it gave up, and nothing between them."""
    window = segment.map(segment.allocate(2 * memory_layout.ROOM_BYTES), 2 * memory_layout.ROOM_BYTES)
    boards = [SyncBlock(window, (0, 1), rank, SpinThenSleep(1000), give_up) for rank in range(2)]
    with pytest.raises(InterruptedError):
        boards[0].meet(call_of(6, "all_reduce"))
    with suppress(CollectiveMismatch):
        boards[1].meet(call_of(6, theirs))
    words, mark = boards[0]._words, (memory_layout.ROOM_BYTES + memory_layout.words_at(6)) // memory_layout.WORD_BYTES
    for looks in range(5):
        boards[0]._words = WithdrawnAfter(words, mark, looks)
        found = boards[0].disagreement()
        if looks and theirs == "barrier":
            assert "rank 1 is in barrier, #6, this rank in all_reduce, #6" in str(found)
        else:
            assert found is None
    boards[0]._words = words


class Host:
    """Services of a backend whose news is that rank 1 has closed its group, with the rank's last tick or without."""

    def __init__(self, segment, window, *, has_come):
        self.segment = segment
        self.waiter = SpinThenSleep(1000)
        self._window = window
        self._peer = SyncBlock(window, (0, 1), 1, self.waiter, give_up) if has_come else None

    def check_liveness(self, call, *_):
        if self._peer is not None:
            self._peer.meet(call_of(call.sequence, call.operation))
        raise PeerFailed(1, "it has closed its group", has_closed=True)

    def now(self):
        return 0.0

    def map_region(self, *_):
        return self._window


@pytest.mark.parametrize("has_come", [True, False])
def test_a_peer_that_ticks_and_closes_between_two_looks_has_done_its_part(segment, has_come):
    """The waiter reads the word before it polls, so the tick and the news of the end can both come in between."""
    window = segment.map(segment.allocate(2 * memory_layout.ROOM_BYTES), 2 * memory_layout.ROOM_BYTES)
    host = Host(segment, window, has_come=has_come)
    executor = SharedMemoryExecutor(host, lambda _: None, 1, (0, 1), 0)
    barrier = executor.prepare(Collective("barrier"))
    with nullcontext() if has_come else pytest.raises(PeerFailed, match="rank 1 failed: it has closed its group"):
        barrier(call_of(1, "barrier"), None, None)


def test_operations_pass_in_their_order():
    turnstile, passed = InOrder(), []

    def go(number):
        turnstile.enter(number, lambda: None)
        passed.append(number)
        turnstile.leave(number)

    threads = [threading.Thread(target=go, args=(number,)) for number in (4, 3, 2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert passed == [1, 2, 3, 4]
