"""Watch over the processes of the ranks on this machine: a rank whose process ends has failed (pidfd).

Even while children of that process still hold its sockets. Called with the lock of `Progress` held.
"""

from __future__ import annotations

import errno
import os
import time

from echelon.backends.connect.members import Member
from echelon.backends.tcp.peers import Peers
from echelon.backends.tcp.reader import MAX_LAST_WORDS_SECONDS
from echelon.errors import PeerFailed

_LAST_WORDS_SECONDS = 0.05
"""Seconds that the last bytes of a dead process may still be in flight."""


class ProcessWatch:
    """The processes that are watched, by rank."""

    def __init__(self, peers: Peers) -> None:
        """Watches nothing yet. `peers` fail when their processes end."""
        self._peers = peers
        self._pidfds: dict[int, int] = {}
        self._ended_at: dict[int, float] = {}
        peers.on_end.append(self._forget)

    def watch(self, member: Member) -> None:
        """Fails the rank of a process on this machine when the process ends."""
        try:
            pidfd = os.pidfd_open(member.pid)
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.EINVAL):  # EINVAL: the number of a thread, before Linux 6.9
                raise
            self._peers.fail(member.rank, _ended(member))
            return
        self._pidfds[member.rank] = pidfd
        self._peers.poller.watch(pidfd, lambda _: self.on_end(member))

    def on_end(self, member: Member) -> None:
        """Fails a rank whose process has ended, once its last bytes have arrived or are overdue."""
        # The pidfd stays readable, so the poller calls this again and again until the rank has failed.
        if connection := self._peers.connections.get(member.rank):
            now = time.monotonic()
            ended_at = self._ended_at.setdefault(member.rank, now)
            is_overdue = now > ended_at + MAX_LAST_WORDS_SECONDS
            if not is_overdue and (self._peers.reader.drain(connection) or now < ended_at + _LAST_WORDS_SECONDS):
                return
        self._peers.fail(member.rank, _ended(member))

    def _forget(self, rank: int) -> None:
        if (pidfd := self._pidfds.pop(rank, None)) is not None:
            self._peers.poller.forget(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Closes all pidfds."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()


def _ended(member: Member) -> PeerFailed:
    return PeerFailed(member.rank, f"its process {member.pid} has ended")
