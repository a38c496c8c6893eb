"""What a waiting thread watches."""

import contextlib
import os
import threading

import pytest

from echelon.backends.tcp.poller import Poller


@pytest.fixture
def poller():
    with contextlib.closing(Poller()) as poller:
        yield poller


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("spins", [False, True])
def test_what_happened_reaches_its_handler(poller, pipe, spins):
    heard = []
    poller.watch(pipe[0], heard.append)
    assert poller.wait(0.0, spins) == []
    os.write(pipe[1], b"x")
    events = poller.wait(10.0, spins)
    poller.dispatch(events)
    assert len(heard) == 1
    poller.forget(pipe[0])
    poller.dispatch(events)
    assert len(heard) == 1


@pytest.mark.parametrize("spins", [False, True])
def test_a_wait_is_ended_from_another_thread_and_only_once(poller, spins):
    thread = threading.Thread(target=poller.wake)
    thread.start()
    events = poller.wait(10.0, spins)
    thread.join()
    assert events
    poller.dispatch(events)
    assert poller.wait(0.0, spins) == []


def test_who_may_spin_sees_what_comes_without_sleeping(poller, pipe, monkeypatch):
    poller.watch(pipe[0], lambda _: None)
    looks = []

    class Epoll:
        def poll(self, seconds):
            looks.append(seconds)
            return [(pipe[0], 1)] if len(looks) == 3 else []

        def close(self):
            pass

    poller._epoll.close()
    monkeypatch.setattr(poller, "_epoll", Epoll())
    monkeypatch.setattr("echelon.backends.tcp.poller.SPIN_SECONDS", 60.0)
    assert poller.wait(10.0, spins=True) == [(pipe[0], 1)]
    assert looks == [0, 0, 0]


def test_who_has_looked_in_vain_several_times_sleeps_at_once_until_a_wait_is_short(poller, pipe, monkeypatch):
    poller.watch(pipe[0], lambda _: None)
    now, asked = [0.0], []
    comes_after = [1.0]

    class Epoll:
        """Has something to tell some time after a wait began."""

        def poll(self, seconds):
            asked.append(seconds)
            now[0] += min(seconds, comes_after[0]) if seconds else 50e-6
            return [(pipe[0], 1)] if seconds or comes_after[0] < 50e-6 else []

        def close(self):
            pass

    def waits():
        asked.clear()
        assert poller.wait(10.0, spins=True) == [(pipe[0], 1)]
        return asked.count(0)

    poller._epoll.close()
    monkeypatch.setattr(poller, "_epoll", Epoll())
    monkeypatch.setattr("echelon.backends.tcp.poller.time.monotonic", lambda: now[0])
    assert [waits() > 0 for _ in range(6)] == [True] * 4 + [False] * 2
    comes_after[0] = 40e-6
    assert waits() == 0
    assert [waits() for _ in range(2)] == [1, 1]
