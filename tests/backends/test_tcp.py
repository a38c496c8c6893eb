"""What a TCP rank does with peers that are slow, silent, broken or gone, and with several threads of its own."""

import contextlib
import gc
import os
import re
import select
import signal
import socket
import struct
import threading
import time
from functools import partial

import pytest
import torch

from echelon.backends.connect.sockets import is_loopback
from echelon.backends.formats import wire
from echelon.backends.formats.wire import Tag
from echelon.backends.tcp.backend import TcpBackend
from echelon.backends.tcp.connection import Connection
from echelon.errors import Closed, PeerFailed, SizeMismatch, Timeout, UnsupportedOp
from tests.helpers.forked_ranks import run_forked
from tests.helpers.worlds import header, rank_0_and_a_bare_peer, start, tcp_world

SECONDS = 20.0


def sockets_of(backend):
    return {rank: connection.sock for rank, connection in backend.control._peers.connections.items()}


def test_one_socket_for_every_pair_and_no_delay():
    with tcp_world(3) as world:
        ends = {
            (backend.rank, peer): (sock.getsockname(), sock.getpeername())
            for backend in world
            for peer, sock in sockets_of(backend).items()
        }
        assert sorted(ends) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
        assert all(ends[low, high] == ends[high, low][::-1] for low, high in ends)
        for backend in world:
            for sock in sockets_of(backend).values():
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("::1", "::1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("127.0.0.1", "10.0.0.2", False),
    ],
)
def test_loopback_is_known_by_the_addresses(own, theirs, expected):
    assert is_loopback(own, theirs) == expected


def test_only_over_loopback_is_there_a_limit_to_what_is_on_its_way(monkeypatch):
    """Between namespaces of one machine there may be a link that holds more, and stands idle with a small buffer."""
    with tcp_world(2) as world:
        (near,) = sockets_of(world[0]).values()
        limited = near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    monkeypatch.setattr("echelon.backends.tcp.peers.is_loopback", lambda *_: False)
    with tcp_world(2) as world, socket.socket() as untouched:
        (far,) = sockets_of(world[0]).values()
        assert limited == 2 * (1 << 18)  # the kernel counts what it adds
        assert far.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= untouched.getsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF
        )
        assert far.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) != limited


@pytest.mark.parametrize(("is_near", "waking_bytes"), [(True, 1 << 18), (False, 1 << 20)])
def test_over_a_link_more_of_a_payload_is_to_have_arrived_before_it_is_read(monkeypatch, is_near, waking_bytes):
    monkeypatch.setattr("echelon.backends.tcp.peers.is_loopback", lambda *_: is_near)
    made = []

    def made_with(*of, **calls):
        made.append(of[3])
        return Connection(*of, **calls)

    monkeypatch.setattr("echelon.backends.tcp.peers.Connection", made_with)
    with tcp_world(2):
        assert made == [waking_bytes] * 2


def test_a_world_of_one_needs_no_secret_and_no_socket(monkeypatch):
    monkeypatch.delenv("ECHELON_SECRET", raising=False)
    with TcpBackend(0, 1, "no such place") as alone:
        assert sockets_of(alone) == {}
        alone.messages.barrier(SECONDS)
        assert repr(alone) == "<TcpBackend: rank 0 of 1>"
    assert repr(alone) == "<TcpBackend: rank 0 of 1, closed>"


# Frames that cannot be


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (header(payload=1 << 62) + struct.pack("<Q", 1 << 60), "over the limit"),
        (header(payload=2048) + struct.pack("<Q", 512), "over the limit of 1024"),
        (header(dtype=99) + struct.pack("<Q", 1), "unknown dtype code 99"),
        (header(payload=5) + struct.pack("<Q", 1), "payload of 5 bytes, but its shape needs 4"),
        (header(dims=2, payload=0) + struct.pack("<2Q", 0, 1 << 63), "do not fit 64 bits"),
        (header(kind=77), "unknown kind 77"),
        (header(dims=65), "65 dimensions"),
        (header(note=1025), "note of 1025 bytes"),
        (header(note=1) + struct.pack("<Q", 1) + b"\xff", "not UTF-8"),
    ],
)
def test_a_frame_that_cannot_be_ends_the_peer_and_nothing_is_allocated(sent, reason, monkeypatch):
    with rank_0_and_a_bare_peer(max_message_bytes=1024) as (backend, peer):
        allocated = []
        monkeypatch.setattr("echelon.backends.delivery.new_tensor", lambda *head: allocated.append(head))
        peer.sendall(sent)
        with pytest.raises(PeerFailed, match=reason) as caught:
            backend.messages.recv(1, timeout=SECONDS)
        assert caught.value.rank == 1
        assert not allocated
        with pytest.raises(PeerFailed, match=reason):
            backend.messages.isend(torch.ones(1), 1).wait(SECONDS)


def test_half_a_message_then_the_end_is_the_peers_failure():
    with rank_0_and_a_bare_peer() as (backend, peer):
        work = backend.messages.irecv(1)
        peer.sendall(header(payload=400) + struct.pack("<Q", 100) + bytes(200))
        peer.close()
        with pytest.raises(PeerFailed, match="rank 1 failed: its connection ended"):
            work.wait(SECONDS)


def test_a_receive_posted_after_the_sender_died_in_mid_message_fails_too():
    """It was given the unfinished message, and waited for the rest for ever."""
    with rank_0_and_a_bare_peer() as (backend, peer):
        peer.sendall(header(step=9, payload=0) + struct.pack("<Q", 0) + header(payload=400) + struct.pack("<Q", 100))
        backend.messages.recv(1, 9, timeout=SECONDS)
        peer.close()
        with pytest.raises(PeerFailed):
            backend.messages.recv(1, 8, timeout=SECONDS)
        with pytest.raises(PeerFailed, match="rank 1 failed: its connection ended"):
            backend.messages.recv(1, timeout=SECONDS)


def test_half_a_message_then_silence_is_a_timeout_that_names_the_peer():
    with rank_0_and_a_bare_peer() as (backend, peer):
        peer.sendall(header(payload=400) + struct.pack("<Q", 100) + bytes(200))
        with pytest.raises(Timeout, match=r"receive from rank 1, tag 0: not done after \d+\.\d s"):
            backend.messages.recv(1, timeout=0.1)


def test_a_receive_withdrawn_in_mid_message_leaves_the_message_to_the_next():
    """The message was dropped, so the next receive was given the one after it."""
    first, second = torch.arange(100.0), torch.full((100,), 7.0)
    with rank_0_and_a_bare_peer() as (backend, peer):
        data = bytes(memoryview(first.numpy()).cast("B"))
        place = torch.zeros(100)
        peer.sendall(header(payload=400) + struct.pack("<Q", 100) + data[:200])
        with pytest.raises(Timeout):
            backend.messages.recv(1, out=place, timeout=0.1)
        arrived = place.clone()
        peer.sendall(data[200:] + header(payload=400) + struct.pack("<Q", 100))
        peer.sendall(bytes(memoryview(second.numpy()).cast("B")))
        assert torch.equal(backend.messages.recv(1, timeout=SECONDS), first)
        assert torch.equal(backend.messages.recv(1, timeout=SECONDS), second)
        assert torch.equal(place, arrived), "a receive that was withdrawn was written to"


def test_a_message_without_memory_for_it_fails_alone(monkeypatch):
    with rank_0_and_a_bare_peer() as (backend, peer):
        empty = torch.empty

        def out_of_memory(shape, **options):
            if shape == (100,):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return empty(shape, **options)

        monkeypatch.setattr("torch.empty", out_of_memory)
        peer.sendall(header(payload=400) + struct.pack("<Q", 100) + bytes(400))
        peer.sendall(header(step=1) + struct.pack("<Q", 1) + struct.pack("<f", 1.5))
        assert backend.messages.recv(1, 1, timeout=SECONDS).item() == 1.5
        with pytest.raises(NotImplementedError, match="no memory for a message of 400 bytes"):
            backend.messages.recv(1, timeout=SECONDS)


def test_the_default_device_does_not_matter():
    with tcp_world(2) as world, torch.device("meta"):
        send = world[1].messages.isend(torch.ones(3, device="cpu"), 0)
        assert world[0].messages.recv(1, timeout=SECONDS).tolist() == [1, 1, 1]
        send.wait(SECONDS)
        barrier = start(lambda: world[1].messages.barrier(SECONDS))
        world[0].messages.barrier(SECONDS)
        barrier()


# Size and number


def test_large_messages_in_both_directions_at_once():
    tensors = [torch.randn(1 << 24, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    with tcp_world(2) as world:

        def exchange(rank):
            send = world[rank].messages.isend(tensors[rank], 1 - rank)
            got = world[rank].messages.recv(1 - rank, timeout=SECONDS)
            send.wait(SECONDS)
            return got

        other = start(exchange, 1)
        assert torch.equal(exchange(0), tensors[1]), "64 MiB from rank 1"
        assert torch.equal(other(), tensors[0]), "64 MiB from rank 0"


def test_many_small_messages_of_many_tags():
    with tcp_world(2) as world:
        sends = [world[0].messages.isend(torch.tensor([number]), 1, number % 7) for number in range(3000)]
        for tag in range(7):
            got = [int(world[1].messages.recv(0, tag, timeout=SECONDS)) for _ in range(tag, 3000, 7)]
            assert got == list(range(tag, 3000, 7))
        for send in sends:
            send.wait(SECONDS)


# Threads


def test_threads_wait_side_by_side():
    with tcp_world(2) as world:
        waits = [start(lambda tag=tag: int(world[0].messages.recv(1, tag, timeout=SECONDS))) for tag in range(8)]
        for tag in reversed(range(8)):
            world[1].messages.send(torch.tensor([tag]), 0, tag, timeout=SECONDS)
            assert waits[tag]() == tag


def wait_until_polling(backend, peer=1):
    """Returns when a thread sleeps in the epoll, as far as one can see that from outside."""
    with contextlib.suppress(Timeout):
        backend.messages.irecv(peer, 4_000_000).wait(0.05)


@pytest.mark.parametrize("how", ["close", "revoke", "cancel"])
def test_what_one_thread_ends_wakes_another_that_polls(how):
    """The other slept in the epoll until something else happened, up to a minute."""
    with tcp_world(2) as world:
        work = world[0].messages.irecv(1, Tag(5, 1, 0))
        waiting = start(lambda: work.wait(SECONDS))
        wait_until_polling(world[0])
        begin = time.monotonic()
        if how == "close":
            world[0].close()
        elif how == "revoke":
            world[0].control.revoke(5, [1], PeerFailed(1, "for the test"))
        else:
            world[0].messages.cancel(work)
        with pytest.raises({"close": Closed, "revoke": PeerFailed, "cancel": Timeout}[how]):
            waiting()
        assert time.monotonic() - begin < 10.0


def test_a_large_send_goes_on_while_the_sender_only_computes():
    with tcp_world(2) as world:
        tensor = torch.ones(1 << 23)
        send = world[0].messages.isend(tensor, 1)
        got = world[1].messages.recv(0, timeout=SECONDS)  # another rank; nobody waits on rank 0
        assert got.numel() == 1 << 23
        assert send.exception() is None


def test_a_send_started_beside_a_wait_goes_on_after_it():
    """No thread in the background was called, since one waited; and then none did."""
    with tcp_world(2) as world:
        first = world[0].messages.irecv(1, 1)
        waiting = start(lambda: first.wait(SECONDS))
        wait_until_polling(world[0])
        world[0].messages.isend(torch.ones(1 << 23), 1, 2)
        world[1].messages.send(torch.ones(1), 0, 1, timeout=SECONDS)
        waiting()
        assert world[1].messages.recv(0, 2, timeout=SECONDS).numel() == 1 << 23


def test_what_an_attending_thread_leaves_under_way_goes_on():
    """A blocking send whose time was up was driven by nobody afterwards."""
    with tcp_world(2) as world:
        with pytest.raises(Timeout):
            world[0].messages.send(torch.ones(1 << 23), 1, timeout=0.05)
        assert world[1].messages.recv(0, timeout=SECONDS).numel() == 1 << 23


def test_a_blocked_rank_burns_no_cpu():
    with tcp_world(2) as world:
        waiting = start(lambda: world[0].messages.recv(1, timeout=SECONDS))
        wait_until_polling(world[0])
        world[1].messages.irecv(0, 1)  # and rank 1 has its background thread wait
        begin = time.process_time()
        with pytest.raises(Timeout):
            world[1].messages.recv(0, timeout=1.0)
        used = time.process_time() - begin
        world[1].messages.send(torch.ones(1), 0, timeout=SECONDS)
        waiting()
    assert used < 0.02, f"two ranks that wait used {used:.3f} s of CPU in a second"


# Leaving


def test_close_loses_nothing_that_the_peer_has_not_read():
    with tcp_world(2) as world:
        tensors = [torch.full((1 << 20,), float(number)) for number in range(8)]
        world[1].messages.isend(torch.ones(1 << 10), 0)  # what rank 0 never reads makes its close a reset
        for number, tensor in enumerate(tensors):
            world[0].messages.isend(tensor, 1, number)
        closing = start(world[0].close)
        for number, tensor in enumerate(tensors):
            assert torch.equal(world[1].messages.recv(0, number, timeout=SECONDS), tensor)
        closing()
        with pytest.raises(PeerFailed, match="it has closed its group"):
            world[1].messages.recv(0, timeout=SECONDS)


def test_close_says_what_it_could_not_send():
    """After five seconds it gave up in silence."""
    with tcp_world(2) as world:
        send = world[0].messages.isend(torch.ones(1 << 24), 1)
        with pytest.raises(Timeout, match="close of rank 0: rank 1 did not receive all messages"):
            world[0].close(timeout=0.2)
        with pytest.raises(Closed):
            send.wait(SECONDS)


def test_a_send_to_a_peer_that_left_still_lets_its_last_words_be_read():
    """The send's error was taken for the cause, and a message that had arrived was lost."""
    with rank_0_and_a_bare_peer() as (backend, peer):
        peer.sendall(header() + struct.pack("<Q", 1) + struct.pack("<f", 2.5))
        peer.sendall(wire.Frame(wire.FrameKind.FAILED, step=1, note="no coffee left").encode())
        backend.messages.isend(torch.ones(10), 1)  # what it has not read makes its close a reset
        peer.close()
        for number in range(2, 10):
            with contextlib.suppress(PeerFailed):
                backend.messages.isend(torch.ones(1), 1, number).wait(SECONDS)
        with pytest.raises(PeerFailed, match="no coffee left"):
            backend.messages.isend(torch.ones(1), 1).wait(SECONDS)
        assert backend.messages.recv(1, timeout=SECONDS).item() == 2.5


def test_a_send_to_a_peer_whose_connection_ended_is_a_peer_failure():
    """It was a KeyError."""
    with rank_0_and_a_bare_peer() as (backend, peer):
        peer.close()
        with pytest.raises(PeerFailed):
            backend.messages.recv(1, timeout=SECONDS)
        with pytest.raises(PeerFailed, match="rank 1 failed"):
            backend.messages.send(torch.ones(1), 1, timeout=SECONDS)


def test_a_handle_refuses_a_tensor_without_memory():
    with rank_0_and_a_bare_peer() as (backend, _):
        tensor = torch.ones(3, device="meta")
        handle = backend.messages.prepare_send(1, Tag(1, 0, 5), tensor.shape, tensor.dtype)
        assert not handle.at_once(tensor)
        with pytest.raises(UnsupportedOp):
            handle.start(tensor)


def test_a_note_over_the_limit_is_no_disagreement():
    note = "é" * 2000
    with tcp_world(2) as world:
        send = world[0].messages.isend(torch.ones(1), 1, note=note)
        assert world[1].messages.irecv(0, note=note).wait(SECONDS).item() == 1
        send.wait(SECONDS)


def test_a_reason_that_is_no_unicode_reaches_the_peer():
    with tcp_world(2) as world:
        world[0].abort("cannot open 'caf\udce9.txt'")
        with pytest.raises(PeerFailed, match=r"cannot open 'caf\\udce9.txt'"):
            world[1].messages.recv(0, timeout=SECONDS)


@pytest.mark.parametrize("tag", [-1, 1 << 32])
def test_a_tag_out_of_range_is_named(tag):
    with tcp_world(2) as world:
        for call in (partial(world[0].messages.isend, torch.ones(1), 1, tag), partial(world[0].messages.irecv, 1, tag)):
            with pytest.raises(SizeMismatch, match="tag from 0 to 4294967295"):
                call()


def test_a_barrier_that_timed_out_is_not_taken_for_the_next():
    """Rank 1's message of the first barrier opened the second one, to which rank 1 had not come."""
    with tcp_world(2) as world:
        with pytest.raises(Timeout):
            world[0].messages.barrier(timeout=0.05)
        world[1].messages.barrier(SECONDS)  # the first; rank 0 came to it, though it did not wait
        with pytest.raises(Timeout):
            world[0].messages.barrier(timeout=0.2)


def test_close_frees_nothing_while_another_thread_polls(monkeypatch):
    """An epoll that is closed does not wake who sleeps in it."""
    with tcp_world(2) as world:
        waiting = start(lambda: world[0].messages.recv(1, timeout=SECONDS))
        wait_until_polling(world[0])
        progress, seen = world[0].messages.progress, []
        monkeypatch.setattr(progress, "free", lambda free=progress.free: (seen.append(progress._is_polling), free()))
        deadline = time.monotonic() + SECONDS
        while not progress._is_polling:  # it wakes up and sleeps again while other ranks begin
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        world[0].close()
        assert seen == [False]
        with pytest.raises(Closed):
            waiting()


@pytest.mark.slow
def test_fifty_worlds_leave_no_thread_and_no_file_behind():
    with tcp_world(2):
        pass
    gc.collect()  # files of earlier tests are closed now, and not in between
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with tcp_world(2) as world:
            world[0].messages.irecv(1)
            world[0].lanes.start(lambda: None, "a lane").wait(SECONDS)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


# Real processes


def sleep_in_a_child(group, how):
    """Forks a child that lives on, with copies of this rank's sockets if `how` says so; returns its number."""
    copies = [os.dup(sock.fileno()) for sock in sockets_of(group.backend).values()] if how == "copies" else []
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        signal.pause()
        os._exit(len(copies))
    for copy in copies:
        os.close(copy)
    return child


def kill_rank_1(group, how):
    """Rank 0 kills rank 1 while it waits for it, and returns who failed, after how many seconds."""
    if group.rank == 1:
        child = sleep_in_a_child(group, how) if how in ("copies", "a child") else 0
        group.send(torch.tensor([os.getpid(), child]), 0)
        if how == "in mid-message":
            group.isend(torch.ones(1 << 24), 0, tag=2)
        group.recv(0, tag=9)
    pid, child = group.recv(1).tolist()
    work = group.irecv(1, tag=2 if how == "in mid-message" else 3)
    if how == "in mid-message":
        while group.backend.control._peers.deliveries() == []:
            assert not work.ends_within(0.001)  # `wait` would ask rank 1 where it is: the message would come meanwhile
    return kill_and_wait(pid, work, child)


def kill_and_wait(pid, work, child=0):
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    try:
        work.wait()
    except PeerFailed as error:
        return error.rank, time.monotonic() - begin
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["idle", "in mid-message", "a child", "copies"])
def test_the_death_of_a_process_is_noticed_at_once(how):
    """Also in mid-message, and while a child of it lives on that still holds its sockets."""
    failed, seconds = run_forked(kill_rank_1, 2, how)[0]
    assert failed == 1
    assert seconds < 5.0


class _Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return index


def load_in_a_worker_and_die(group):
    loader = iter(torch.utils.data.DataLoader(_Numbers(), num_workers=1, prefetch_factor=1))
    next(loader)
    if group.rank == 1:
        group.send(torch.tensor(os.getpid()), 0)
        group.recv(0)
    return kill_and_wait(group.recv(1).item(), group.irecv(1))


def test_a_worker_of_a_data_loader_does_not_hide_the_death_of_its_rank():
    failed, seconds = run_forked(load_in_a_worker_and_die, 2)[0]
    assert failed == 1
    assert seconds < 5.0


def stop_rank_1(group):
    if group.rank == 1:
        group.send(torch.tensor(os.getpid()), 0)
        return group.recv(0).item()
    pid = group.recv(1).item()
    os.kill(pid, signal.SIGSTOP)
    try:
        group.all_reduce(torch.ones(3), timeout=0.2)
    except Timeout as error:
        return str(error)
    finally:
        os.kill(pid, signal.SIGCONT)
        group.send(torch.tensor(7), 1)
    return None


def test_a_peer_that_was_stopped_is_a_timeout_that_names_it():
    message, got = run_forked(stop_rank_1, 2).values()
    assert re.search(r"rank 0 in all_reduce.*waited \d\.\d s for rank 1, which did not answer rank 0 within", message)
    assert got == 7


def send_and_exit(group, size):
    """Rank 1 is gone before rank 0 asks for what it sent."""
    if group.rank == 1:
        group.send(torch.tensor(os.getpid()), 0)
        group.send(torch.arange(size), 0)
        os._exit(0)
    pidfd = os.pidfd_open(group.recv(1).item())
    assert select.select([pidfd], [], [], SECONDS)[0]
    os.close(pidfd)
    return group.recv(1).sum().item()


@pytest.mark.parametrize("size", [1, pytest.param(300_000, marks=pytest.mark.slow)])
def test_what_was_sent_just_before_the_end_arrives(size):
    for _ in range(5):
        assert run_forked(send_and_exit, 2, size) == {0: sum(range(size))}


def fork_and_use_the_group(group):
    sockets = [sock.fileno() for sock in sockets_of(group.backend).values()]
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in sockets]
    reading, writing = os.pipe()
    work = group.irecv(1 - group.rank, tag=5)
    waiting = start(work.wait)  # a thread that the child will not have
    wait_until_polling(group.backend, 1 - group.rank)
    child = os.fork()
    if child == 0:
        open_ones = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                open_ones.add(os.readlink(f"/proc/self/fd/{fd}"))
        told = [_told(work.wait), _told(lambda: group.send(torch.ones(1), 1 - group.rank)), _told(group.barrier)]
        os.write(writing, f"{told} {len(open_ones & set(names))}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reading, 100).decode()
    os.close(reading)
    os.close(writing)
    group.send(torch.ones(1), 1 - group.rank, tag=5)
    waiting()
    return told, group.all_reduce(torch.ones(1)).item()


def _told(act):
    try:
        act()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_a_forked_child_holds_no_connection_and_is_told_so():
    told = "['Closed', 'Closed', 'Closed'] 0"
    assert run_forked(fork_and_use_the_group, 2) == {0: [told, 2.0], 1: [told, 2.0]}


def test_a_control_frame_waits_behind_a_full_socket_for_the_thread_that_polls():
    """To write there might end another thread's message, which that thread would not see."""
    with rank_0_and_a_bare_peer() as (backend, _):
        sending = backend.messages.isend(torch.zeros(1 << 24), 1)
        assert not sending.is_completed()
        sender = backend.control._peers.connections[1].sender
        with backend.messages.progress.lock:
            num_queued, begun = len(sender.queue), sender.queue[0].parts[0].nbytes
            backend.control._peers.tell(wire.Frame(wire.FrameKind.QUESTION, 1, 1))
            assert len(sender.queue) == num_queued + 1
            assert sender.queue[0].parts[0].nbytes == begun
